"""Services, reboots and hooks of the host, and their fakes: the same tests for both."""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors, reasons
from mig_manager.adapters.host import hooks, logind
from mig_manager.core import ports
from mig_manager.core.files import hook_files
from tests.rigs.host import systemd_rig
from tests.rigs.host.systemd_rig import NVSM, Act, Unit
from tests.rigs.node import fake_host, node_rig
from tests.rigs.programs import write_script

SOCKET, OFF, BROKEN = "nvsm.socket", "off.service", "broken.service"


@contextlib.contextmanager
def services_of_systemd(folder: pathlib.Path) -> Iterator[ports.HostServices]:
    refusal = Act("active", error=(f"{systemd_rig.SYSTEMD}.UnitMasked", "it says no."))
    units = {
        NVSM: Unit(),
        SOCKET: Unit(),
        OFF: Unit(state="inactive"),
        BROKEN: Unit(stops=refusal, starts=refusal),
    }
    with systemd_rig.a_bus(folder) as bus, systemd_rig.fake_systemd(bus, units):
        yield systemd_rig.services(bus)


@contextlib.contextmanager
def services_in_memory(_folder: pathlib.Path) -> Iterator[ports.HostServices]:
    rig = node_rig.NodeRig(gpus=())
    rig.host.services |= {NVSM: True, SOCKET: True, OFF: False, BROKEN: True}
    rig.host.broken_services = {BROKEN}
    yield fake_host.FakeHost(rig)


@pytest.fixture(params=[services_in_memory, services_of_systemd], ids=["fake", "adapter"])
def services(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> Iterator[ports.HostServices]:
    with request.param(tmp_path) as made:
        yield made


def test_running_services_are_listed_in_stop_order(services: ports.HostServices) -> None:
    assert services.running([NVSM, OFF, SOCKET, "unknown.service"]) == (SOCKET, NVSM)


def test_stopped_service_runs_again_once_started(services: ports.HostServices) -> None:
    services.stop(NVSM)
    assert services.running([NVSM]) == ()

    assert services.start(NVSM)

    assert services.running([NVSM]) == (NVSM,)
    assert not services.start(NVSM)


def test_service_that_does_not_run_may_be_stopped(services: ports.HostServices) -> None:
    services.stop(OFF)

    assert services.running([OFF]) == ()


def test_service_that_fails_to_stop_or_start_is_named(services: ports.HostServices) -> None:
    for act in (services.stop, services.start):
        with pytest.raises(errors.HostError, match=BROKEN) as caught:
            act(BROKEN)
        assert caught.value.reason is reasons.Reason.HOST_SERVICE_FAILED


def test_only_a_listed_service_may_have_stopped(services: ports.HostServices) -> None:
    assert services.may_have_stopped(NVSM, [OFF, NVSM])
    assert not services.may_have_stopped(NVSM, [OFF])


# -- reboots ----------------------------------------------------------------------------------


@contextlib.contextmanager
def reboot_of_logind(folder: pathlib.Path, *, is_refused: bool) -> Iterator[ports.Reboot]:
    with systemd_rig.a_bus(folder) as bus, systemd_rig.fake_systemd(bus) as program:
        if is_refused:
            program.can_reboot = "no"
            program.refusals["Reboot"] = (systemd_rig.DENIED, "it says no.")
        yield logind.Reboot(bus.address)


@contextlib.contextmanager
def reboot_in_memory(_folder: pathlib.Path, *, is_refused: bool) -> Iterator[ports.Reboot]:
    rig = node_rig.NodeRig(gpus=())
    if is_refused:
        error = errors.HostError("it says no", reason=reasons.Reason.REBOOT_REQUIRED)
        rig.failures.add_all({"reboot.check": error, "reboot.request": error})
    yield fake_host.FakeHost(rig)


REBOOTS = pytest.mark.parametrize(
    "reboot_of", [reboot_in_memory, reboot_of_logind], ids=["fake", "adapter"]
)
RebootOf = Callable[..., contextlib.AbstractContextManager[ports.Reboot]]


@REBOOTS
def test_an_allowed_reboot_is_requested(reboot_of: RebootOf, tmp_path: pathlib.Path) -> None:
    with reboot_of(tmp_path, is_refused=False) as reboot:
        reboot.check()
        reboot.request("test")


@REBOOTS
def test_a_refused_reboot_is_an_error_before_and_at_its_request(
    reboot_of: RebootOf, tmp_path: pathlib.Path
) -> None:
    with reboot_of(tmp_path, is_refused=True) as reboot:
        for act in (reboot.check, lambda: reboot.request("test")):
            with pytest.raises(errors.HostError) as caught:
                act()
            assert caught.value.reason is reasons.Reason.REBOOT_REQUIRED


# -- hooks ------------------------------------------------------------------------------------


POINT = hook_files.Point.PRE_APPLY_CONFIG
PROGRAMS = WELL, FAILING, ABSENT = ("well", "failing", "absent")
TEXT = json.dumps({"hooks": {POINT.value: [{"command": command} for command in PROGRAMS]}})


def hooks_on_disk(folder: pathlib.Path) -> ports.Hooks:
    for name, script in ((WELL, "sleep 0.1"), (FAILING, "exit 3")):
        write_script(folder / name, script)
    file = folder / "hooks.yaml"
    file.write_text(TEXT, encoding="utf-8")
    return hooks.HookPrograms(file, variables={}, search_path=str(folder), timeout_s=60.0)


def hooks_in_memory(_folder: pathlib.Path) -> ports.Hooks:
    rig = node_rig.NodeRig(gpus=())
    rig.hooks.text = TEXT
    rig.hooks.broken, rig.hooks.missing = {FAILING}, {ABSENT}
    return fake_host.FakeHooks(rig)


@pytest.fixture(params=[hooks_in_memory, hooks_on_disk], ids=["fake", "adapter"])
def programs(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> ports.Hooks:
    made: ports.Hooks = request.param(tmp_path)
    return made


def hook_named(programs: ports.Hooks, command: str) -> hook_files.Hook:
    (hook,) = (hook for hook in programs.read()[POINT] if hook.command == command)
    return hook


def test_hooks_are_read_in_the_order_of_the_file(programs: ports.Hooks) -> None:
    assert [hook.command for hook in programs.read()[POINT]] == [*PROGRAMS]
    assert programs.variables["MIG_PARTED_HOOKS_FILE"].endswith("hooks.yaml")


def test_only_the_missing_program_is_reported(programs: ports.Hooks) -> None:
    reports = [programs.missing(hook) for hook in programs.read()[POINT]]

    assert reports[:2] == ["", ""]
    assert reports[2].endswith(f": program {ABSENT} is not found")


@pytest.mark.parametrize("command", [FAILING, ABSENT])
def test_hook_that_fails_or_cannot_run_is_named(programs: ports.Hooks, command: str) -> None:
    with pytest.raises(errors.HostError, match=command) as caught:
        programs.run(POINT, hook_named(programs, command), {}, check=lambda: None)

    assert caught.value.reason is reasons.Reason.HOOK_FAILED


def test_hook_ends_by_itself_or_by_an_error_of_its_check(programs: ports.Hooks) -> None:
    hook = hook_named(programs, WELL)

    def end() -> None:
        raise errors.Superseded("test", errors.SupersededBy.STOP)

    programs.run(POINT, hook, {"PATH": "/bin"}, check=lambda: None)
    with pytest.raises(errors.Superseded):
        programs.run(POINT, hook, {"PATH": "/bin"}, check=end)
