"""systemd over a real D-Bus: who runs, stopping, starting, rebooting, and all that goes wrong."""

import contextlib
import pathlib
import socket
import threading
import time
from collections.abc import Iterator

import hypothesis
import pytest
import structlog.testing
from hypothesis import strategies as st

from mig_manager import errors
from mig_manager.adapters.host import systemd
from mig_manager.core import host_files
from mig_manager.errors import Reason
from tests.adapters import systemd_rig
from tests.adapters.systemd_rig import Act, Unit

DCGM, NVSM, OTHER = "nvidia-dcgm.service", "nvsm.service", "other.service"
NO_LIMIT_US = 2**64 - 1
EXPORTER, SOCKET = "dcgm-exporter.service", "nvsm.socket"


@pytest.fixture
def daemon(tmp_path: pathlib.Path) -> Iterator[systemd_rig.DBusDaemon]:
    with systemd_rig.a_bus(tmp_path) as bus:
        yield bus


def services(
    daemon: systemd_rig.DBusDaemon, *, stop_timeout_s: float = 10.0, start_timeout_s: float = 10.0
) -> systemd.Systemd:
    return systemd.Systemd(
        daemon.address, stop_timeout_s=stop_timeout_s, start_timeout_s=start_timeout_s
    )


@contextlib.contextmanager
def fails(reason: Reason, why: str) -> Iterator[None]:
    with pytest.raises(errors.HostError, match=why) as caught:
        yield
    assert caught.value.reason is reason


# -- who runs ---------------------------------------------------------------------------------


def test_active_and_starting_units_are_running_in_stop_order(
    daemon: systemd_rig.DBusDaemon,
) -> None:
    states = ["inactive", "active", "reloading", "activating", "failed", "deactivating"]
    units = {f"{state}.service": Unit(state=state) for state in states}

    with systemd_rig.standing_in(daemon, units):
        found = services(daemon).running([*reversed(units), "unknown.service"])

    assert found == ("activating.service", "reloading.service", "active.service")


def test_a_masked_unit_does_not_count_as_running(
    daemon: systemd_rig.DBusDaemon,
) -> None:
    with systemd_rig.standing_in(daemon, {NVSM: Unit(load="masked")}):
        assert services(daemon).running([NVSM]) == ()


@pytest.mark.parametrize(("job", "is_up"), [("restart", True), ("start", True), ("stop", False)])
def test_a_unit_in_the_middle_of_a_restart_runs(
    daemon: systemd_rig.DBusDaemon, job: str, *, is_up: bool
) -> None:
    with systemd_rig.standing_in(daemon, {NVSM: Unit(state="deactivating", job_type=job)}):
        assert services(daemon).running([NVSM]) == ((NVSM,) if is_up else ())


def test_no_names_cause_no_call() -> None:
    nowhere = systemd.Systemd("unix:path=/nowhere", stop_timeout_s=1, start_timeout_s=1)

    assert nowhere.running([]) == ()


# -- stopping and starting --------------------------------------------------------------------


def test_running_units_are_stopped_in_order_and_started_in_reverse(
    daemon: systemd_rig.DBusDaemon,
) -> None:
    units = {NVSM: Unit(), OTHER: Unit(state="inactive"), DCGM: Unit()}

    with systemd_rig.standing_in(daemon, units) as played:
        host = services(daemon)
        ran = host.running([NVSM, OTHER, DCGM])
        for name in ran:
            host.stop(name)
        stopped = {name: unit.state for name, unit in units.items()}
        for name in reversed(ran):
            host.start(name)

    assert stopped == {NVSM: "inactive", OTHER: "inactive", DCGM: "inactive"}
    assert units[OTHER].state == "inactive"
    assert played.calls == [
        f"StopUnit {NVSM} replace",
        f"StopUnit {DCGM} replace",
        f"StartUnit {DCGM} replace",
        f"StartUnit {NVSM} replace",
    ]


def stop_and_start(host: systemd.Systemd, *names: str) -> tuple[str, ...]:
    """Stop what runs of these units as a change does, and start it again; return what ran."""
    ran = host.running(names)
    for name in ran:
        host.stop(name)
    for name in host_files.start_order(ran):
        host.start(name)
    return ran


def test_a_socket_listed_before_or_after_its_service_is_up_again_with_it(
    daemon: systemd_rig.DBusDaemon,
) -> None:
    for listed in ((SOCKET, NVSM), (NVSM, SOCKET)):
        units = {SOCKET: Unit(triggers=NVSM), NVSM: Unit()}
        with systemd_rig.standing_in(daemon, units) as played:
            stop_and_start(services(daemon), *listed)

        assert [unit.state for unit in units.values()] == ["active", "active"]
        assert played.calls == [
            f"StopUnit {SOCKET} replace",
            f"StopUnit {NVSM} replace",
            f"StartUnit {SOCKET} replace",
            f"StartUnit {NVSM} replace",
        ]


def test_units_stopped_along_with_a_unit_run_again_afterwards(
    daemon: systemd_rig.DBusDaemon,
) -> None:
    units = {
        DCGM: Unit(required_by=(EXPORTER, "idle.service", "gpu.target")),
        EXPORTER: Unit(parts=("scrape.timer",)),
        "scrape.timer": Unit(),
        "idle.service": Unit(state="inactive"),
        "gpu.target": Unit(parts=(OTHER,)),
        OTHER: Unit(),
        NVSM: Unit(),
    }
    up = {name for name, unit in units.items() if unit.state == "active"}

    with systemd_rig.standing_in(daemon, units):
        ran = stop_and_start(services(daemon), DCGM)

    assert set(ran) == {DCGM, EXPORTER, "scrape.timer", OTHER}
    assert ran.index("scrape.timer") < ran.index(EXPORTER) < ran.index(DCGM)
    # A target of its own has nothing that could use a GPU.
    assert {name for name, unit in units.items() if unit.state == "active"} == up - {"gpu.target"}


@pytest.mark.parametrize(
    ("name", "may"),
    [
        (DCGM, True),
        (EXPORTER, True),
        ("scrape.timer", True),
        (OTHER, True),
        (NVSM, False),
        ("debug-shell.service", False),
        ("gpu.target", False),
        ("dbus.service", False),
        ("../x.service", False),
        ("", False),
    ],
)
def test_only_what_is_listed_or_stops_along_with_it_may_have_been_stopped(
    daemon: systemd_rig.DBusDaemon, name: str, *, may: bool
) -> None:
    units = {
        DCGM: Unit(state="inactive", required_by=(EXPORTER, "gpu.target", "dbus.service")),
        EXPORTER: Unit(state="inactive", parts=("scrape.timer",)),
        "scrape.timer": Unit(state="inactive"),
        "gpu.target": Unit(parts=(OTHER,)),
        OTHER: Unit(),
        NVSM: Unit(),
        "dbus.service": Unit(),
        "debug-shell.service": Unit(),
    }
    with systemd_rig.standing_in(daemon, units):
        assert services(daemon).may_have_stopped(name, [DCGM]) is may


@pytest.mark.parametrize("name", ["mig-manager.service", "dbus.service"])
def test_a_unit_that_would_take_the_agent_or_the_bus_along_is_not_stopped(
    daemon: systemd_rig.DBusDaemon, name: str
) -> None:
    units = {DCGM: Unit(required_by=(name,)), name: Unit()}

    with (
        systemd_rig.standing_in(daemon, units) as played,
        fails(Reason.HOST_SERVICE_FAILED, f"systemd would also stop {name}"),
    ):
        services(daemon).running([DCGM])

    assert played.calls == []


@pytest.mark.parametrize("name", [NVSM, SOCKET])
def test_a_unit_has_systemds_own_stop_time_out(daemon: systemd_rig.DBusDaemon, name: str) -> None:
    unit = Unit(stops=Act("inactive", takes_s=0.6), stop_timeout_us=700_000)

    with systemd_rig.standing_in(daemon, {name: unit}):
        services(daemon, stop_timeout_s=0.1).stop(name)

    assert unit.state == "inactive"


@pytest.mark.parametrize(("state", "was_down"), [("active", False), ("inactive", True)])
def test_whether_a_unit_was_down_before_its_start_is_returned(
    daemon: systemd_rig.DBusDaemon, state: str, *, was_down: bool
) -> None:
    with systemd_rig.standing_in(daemon, {NVSM: Unit(state=state)}):
        assert services(daemon).start(NVSM) is was_down


def test_a_slow_unit_is_waited_for(daemon: systemd_rig.DBusDaemon) -> None:
    unit = Unit(stops=Act("inactive", takes_s=0.3), starts=Act("active", takes_s=0.3))

    with systemd_rig.standing_in(daemon, {NVSM: unit}):
        services(daemon).stop(NVSM)
        after_stop = unit.state
        services(daemon).start(NVSM)

    assert (after_stop, unit.state) == ("inactive", "active")


def test_a_unit_that_fails_while_stopping_has_stopped(daemon: systemd_rig.DBusDaemon) -> None:
    with systemd_rig.standing_in(daemon, {NVSM: Unit(stops=Act("failed", "failed"))}):
        services(daemon).stop(NVSM)


def test_an_unknown_unit_has_stopped(daemon: systemd_rig.DBusDaemon) -> None:
    with systemd_rig.standing_in(daemon) as played:
        services(daemon).stop(NVSM)

    assert played.calls == []


def test_the_end_of_a_job_is_detected_without_its_signal(daemon: systemd_rig.DBusDaemon) -> None:
    unit = Unit(
        stops=Act("inactive", is_sent=False),
        starts=Act("active", takes_s=0.1, is_sent=False),
    )

    with systemd_rig.standing_in(daemon, {NVSM: unit}):
        services(daemon).stop(NVSM)
        services(daemon).start(NVSM)

    assert unit.state == "active"


def test_a_unit_that_does_not_stop_in_time_is_reported_with_its_state(
    daemon: systemd_rig.DBusDaemon,
) -> None:
    unit = Unit(stops=Act("inactive", takes_s=60.0), stop_timeout_us=NO_LIMIT_US)

    with (
        systemd_rig.standing_in(daemon, {NVSM: unit}),
        fails(Reason.HOST_SERVICE_FAILED, r"nvsm\.service did not stop within 0\.2 s.*deactiv"),
    ):
        services(daemon, stop_timeout_s=0.2).stop(NVSM)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (Act("active"), "something else starts it"),
        (Act("active", "canceled"), "another request replaced"),
        (Act("active", "timeout"), "did not stop: timeout"),
    ],
)
def test_a_unit_that_is_up_again_after_its_stop_is_an_error(
    daemon: systemd_rig.DBusDaemon, act: Act, why: str
) -> None:
    with (
        systemd_rig.standing_in(daemon, {NVSM: Unit(stops=act)}),
        fails(Reason.HOST_SERVICE_FAILED, why),
    ):
        services(daemon).stop(NVSM)


def test_a_unit_that_does_not_start_in_time_is_reported_with_its_state(
    daemon: systemd_rig.DBusDaemon,
) -> None:
    unit = Unit(state="inactive", starts=Act("active", takes_s=60.0))

    with (
        systemd_rig.standing_in(daemon, {NVSM: unit}),
        fails(Reason.HOST_SERVICE_FAILED, r"did not start within 0\.2 s; it is activating"),
    ):
        services(daemon, start_timeout_s=0.2).start(NVSM)


@pytest.mark.parametrize(
    ("unit", "why"),
    [
        (
            Unit(starts=Act("failed", "failed"), service_result="exit-code", status=3),
            "did not start: exit-code, status 3; it is failed",
        ),
        (
            Unit(starts=Act("failed"), service_result="signal", status=9),
            "did not start: signal, status 9; it is failed",
        ),
        (Unit(starts=Act("failed", "timeout")), "longer than systemd allows"),
        (Unit(starts=Act("inactive", "dependency")), "a unit that it needs failed"),
        (Unit(starts=Act("inactive", "canceled")), "another request replaced"),
        (
            Unit(starts=Act("activating"), sub="auto-restart", service_result="core-dump"),
            "did not start: core-dump",
        ),
    ],
)
def test_a_unit_that_does_not_start_is_reported_with_systemds_words(
    daemon: systemd_rig.DBusDaemon, unit: Unit, why: str
) -> None:
    with (
        systemd_rig.standing_in(daemon, {NVSM: unit}),
        fails(Reason.HOST_SERVICE_FAILED, rf"nvsm\.service .*{why}"),
    ):
        services(daemon).start(NVSM)


def test_a_unit_that_ran_to_its_end_has_started(daemon: systemd_rig.DBusDaemon) -> None:
    with systemd_rig.standing_in(daemon, {NVSM: Unit(starts=Act("inactive"), sub="dead")}):
        services(daemon).start(NVSM)


def test_a_missing_unit_is_reported_at_start(daemon: systemd_rig.DBusDaemon) -> None:
    with (
        systemd_rig.standing_in(daemon),
        fails(Reason.HOST_SERVICE_FAILED, r"starting nvsm\.service: Unit nvsm.* not found"),
    ):
        services(daemon).start(NVSM)


@pytest.mark.parametrize(
    ("name", "reason", "why"),
    [
        (f"{systemd_rig.SYSTEMD}.OnlyByDependency", Reason.HOST_SERVICE_FAILED, "it says no"),
        (f"{systemd_rig.SYSTEMD}.UnitMasked", Reason.HOST_SERVICE_FAILED, "it says no"),
        (systemd_rig.DENIED, Reason.NO_PERMISSION, "it says no .*as the host's root"),
    ],
)
def test_a_refusal_is_quoted(
    daemon: systemd_rig.DBusDaemon, name: str, reason: Reason, why: str
) -> None:
    refusal = (name, "it says no.")
    unit = Unit(stops=Act("active", error=refusal), starts=Act("active", error=refusal))

    with systemd_rig.standing_in(daemon, {NVSM: unit}):
        with fails(reason, rf"^stopping nvsm\.service: {why}"):
            services(daemon).stop(NVSM)
        with fails(reason, rf"^starting nvsm\.service: {why}"):
            services(daemon).start(NVSM)


def test_a_refusal_by_the_bus_is_no_permission(tmp_path: pathlib.Path) -> None:
    forbidden = '<deny send_interface="org.freedesktop.systemd1.Manager" send_member="StopUnit"/>'

    with (
        systemd_rig.a_bus(tmp_path, denied=forbidden) as daemon,
        systemd_rig.standing_in(daemon, {NVSM: Unit()}),
        fails(Reason.NO_PERMISSION, r"^stopping nvsm\.service: .*as the host's root"),
    ):
        services(daemon).stop(NVSM)


# -- the bus ----------------------------------------------------------------------------------


def test_a_bus_that_dies_in_the_middle_is_an_error_at_once(daemon: systemd_rig.DBusDaemon) -> None:
    unit = Unit(stops=Act("inactive", takes_s=60.0), stop_timeout_us=NO_LIMIT_US)
    with systemd_rig.standing_in(daemon, {NVSM: unit}) as played:
        played.on_call = lambda method: daemon.kill() if method == "StopUnit" else None
        began = time.monotonic()
        with fails(Reason.HOST_SERVICE_FAILED, "D-Bus is unreachable"):
            services(daemon).stop(NVSM)

    assert time.monotonic() - began < 5


def test_a_bus_that_dies_while_a_unit_stops_is_an_error_at_once(
    daemon: systemd_rig.DBusDaemon,
) -> None:
    unit = Unit(stops=Act("inactive", takes_s=60.0), stop_timeout_us=NO_LIMIT_US)
    with systemd_rig.standing_in(daemon, {NVSM: unit}) as played:
        # Asked for when the job's end has not been signalled for a while.
        played.on_call = lambda method: (
            daemon.kill() if method == "Get" and unit.state == "deactivating" else None
        )
        with fails(Reason.HOST_SERVICE_FAILED, "D-Bus is unreachable"):
            services(daemon).stop(NVSM)


def test_without_systemd_on_the_bus_running_services_are_unknown(
    daemon: systemd_rig.DBusDaemon,
) -> None:
    with fails(Reason.HOST_SERVICE_FAILED, "^asking systemd what runs: .*ServiceUnknown"):
        services(daemon).running([NVSM])


def test_a_user_rejected_by_the_bus_is_no_permission(
    tmp_path: pathlib.Path,
) -> None:
    with (
        # As for a process of another user namespace, the one proof that we have is refused.
        systemd_rig.a_bus(tmp_path, mechanism="ANONYMOUS") as daemon,
        fails(Reason.NO_PERMISSION, "in a user namespace"),
    ):
        services(daemon).running([NVSM])


@pytest.mark.parametrize(
    "address", ["", "nonsense", "tcp:host=localhost", "unix:path=/nowhere/bus", "unix:runtime=yes"]
)
def test_an_address_without_a_bus_is_an_error(address: str) -> None:
    host = systemd.Systemd(address, stop_timeout_s=1, start_timeout_s=1)

    with fails(Reason.HOST_SERVICE_FAILED, "^stopping nvsm"):
        host.stop(NVSM)
    with fails(Reason.REBOOT_REQUIRED, "^asking systemd-logind for a reboot"):
        systemd.Reboot(address).request("test")


@contextlib.contextmanager
def impostor(path: pathlib.Path, says: tuple[bytes, ...], *, hangs: bool) -> Iterator[str]:
    """Have a socket that says these things, each after something was data to it."""
    done = threading.Event()

    def serve(listener: socket.socket) -> None:
        conversation, _ = listener.accept()
        with conversation:
            for words in says:
                conversation.recv(4096)
                conversation.sendall(words)
            if hangs:
                done.wait(timeout=10.0)

    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield f"unix:path={path}"
        finally:
            done.set()
            thread.join(timeout=10.0)
            assert not thread.is_alive()


@pytest.mark.parametrize("says", [(), (b"OK 1234\r\n",), (b"no line end",)])
def test_a_silent_bus_times_out(tmp_path: pathlib.Path, says: tuple[bytes, ...]) -> None:
    with impostor(tmp_path / "bus", says, hangs=True) as address:
        host = systemd.Systemd(address, stop_timeout_s=1, start_timeout_s=1, call_timeout_s=0.2)
        with fails(Reason.HOST_SERVICE_FAILED, "no answer over D-Bus in time"):
            host.running([NVSM])


def test_a_server_without_the_dbus_handshake_is_an_error(tmp_path: pathlib.Path) -> None:
    with impostor(tmp_path / "bus", (b"SSH-2.0-OpenSSH\r\n",), hangs=False) as address:
        host = systemd.Systemd(address, stop_timeout_s=1, start_timeout_s=1)
        # It may hang up before it has heard us out.
        with fails(Reason.HOST_SERVICE_FAILED, "D-Bus"):
            host.running([NVSM])


HEADER = b"l\x02\x00\x01\x00\x00\x00\x00\x01\x00\x00\x00"


@hypothesis.given(data=st.binary(min_size=1) | st.binary().map(lambda tail: HEADER + tail))
@hypothesis.settings(max_examples=50, deadline=None)
def test_any_data_on_the_bus_is_at_worst_a_host_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "impostor"

    with impostor(path, (b"OK 1234\r\n", data), hangs=False) as address:
        host = systemd.Systemd(address, stop_timeout_s=1, start_timeout_s=1, call_timeout_s=2)
        with pytest.raises(errors.HostError):
            host.running([NVSM])


def open_files() -> int:
    return sum(1 for _ in pathlib.Path("/proc/self/fd").iterdir())


def test_no_connection_is_open_between_two_operations(daemon: systemd_rig.DBusDaemon) -> None:
    with systemd_rig.standing_in(daemon, {NVSM: Unit()}):
        host = services(daemon)
        before = open_files()
        host.running([NVSM])
        host.stop(NVSM)
        host.start(NVSM)
        with contextlib.suppress(errors.HostError):
            host.start(OTHER)

        assert open_files() == before


# -- rebooting --------------------------------------------------------------------------------


def test_a_reboot_is_requested_from_logind_once_and_non_interactively(
    daemon: systemd_rig.DBusDaemon,
) -> None:
    with systemd_rig.standing_in(daemon) as played, structlog.testing.capture_logs() as log:
        systemd.Reboot(daemon.address).request("GPU 0 waits for MIG mode")

    assert played.calls == ["Reboot False"]
    assert log == [
        {
            "event": "reboot_requested",
            "log_level": "warning",
            "by": "systemd-logind",
            "why": "GPU 0 waits for MIG mode",
        }
    ]


@pytest.mark.parametrize(
    "name",
    [
        systemd_rig.DENIED,
        "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired",
        f"{systemd_rig.LOGIND}.BlockedByInhibitorLock",
        f"{systemd_rig.LOGIND}.OperationInProgress",
    ],
)
def test_a_refused_reboot_names_the_program_and_is_not_requested_elsewhere(
    daemon: systemd_rig.DBusDaemon, name: str
) -> None:
    with systemd_rig.standing_in(daemon) as played:
        played.refusals["Reboot"] = (name, "Not now.")
        with fails(Reason.REBOOT_REQUIRED, "^asking systemd-logind for a reboot: Not now"):
            systemd.Reboot(daemon.address).request("test")

    assert played.calls == ["Reboot False"]


def test_without_logind_systemd_starts_the_reboot_target(
    daemon: systemd_rig.DBusDaemon,
) -> None:
    with systemd_rig.standing_in(daemon, has_logind=False) as played:
        systemd.Reboot(daemon.address).request("test")

    assert played.calls == ["StartUnit reboot.target replace-irreversibly"]


def test_a_masked_logind_counts_as_missing(daemon: systemd_rig.DBusDaemon) -> None:
    with systemd_rig.standing_in(daemon) as played:
        played.refusals["Reboot"] = (f"{systemd_rig.SYSTEMD}.UnitMasked", "Masked.")
        systemd.Reboot(daemon.address).request("test")

    assert played.calls[-1] == "StartUnit reboot.target replace-irreversibly"


def test_without_logind_and_systemd_a_reboot_fails(daemon: systemd_rig.DBusDaemon) -> None:
    with fails(Reason.REBOOT_REQUIRED, "^asking systemd for a reboot: .*ServiceUnknown"):
        systemd.Reboot(daemon.address).request("test")
