"""Command line over environment over default, and which values are refused."""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.agent import settings
from mig_manager.cli import command_settings, parser, rollout_settings
from mig_manager.core import options
from mig_manager.core.node import policy

AGENT = {"NODE_NAME": "n1"}
NEEDED = {
    "agent": {"node-name": "n1"},
    "rollout": {"selector": "a=b", "selected-config": "all-1g.5gb"},
}
"""Without these a command has no settings."""
READERS: Mapping[str, Callable[[Mapping[str, object], Mapping[str, str]], Any]] = {
    "agent": settings.agent_settings,
    "demo": command_settings.demo_settings,
    "doctor": command_settings.doctor_settings,
    "rollout": rollout_settings.rollout_settings,
}
EXAMPLES = {
    "BOOL": "true",
    "MAP": "a=b,*=c",
    "NAMESPACE/NAME": "a/b",
    "NUMBER": "3",
    "PORT": "9465",
    options.FILE: "/x",
    options.FOLDER: "/x",
    options.LAYOUT: "all-7g.40gb",
    options.SECONDS: "45.5",
    options.SPEC: "2xA30",
}


def agent(environ: dict[str, str] | None = None, **parsed: object) -> settings.AgentSettings:
    return settings.agent_settings(parsed, AGENT | (environ or {}))


def command(
    name: str = "apply", environ: dict[str, str] | None = None, **parsed: object
) -> command_settings.CommandSettings:
    return command_settings.command_settings({"command": name} | parsed, environ or {})


def declared() -> Iterator[Any]:
    seen: list[options.Option] = []
    for name in parser.COMMANDS:
        for option in parser.options_of(name):
            # What several commands share is declared and tested once.
            if option.variables and not option.is_operand and option not in seen:
                seen.append(option)
                yield pytest.param(name, option, id=f"{name} {option.name}")


def read(name: str, argv: list[str], environ: Mapping[str, str]) -> Any:
    parsed = parser.parse([name, *argv])
    found = READERS.get(name, command_settings.command_settings)(parsed, {"HOME": "/h", **environ})
    # A flag of doctor also demands that there is a cluster.
    return dataclasses.replace(found, has_cluster=False) if name == "doctor" else found


@pytest.mark.parametrize(("name", "option"), list(declared()))
def test_every_option_is_set_by_its_flags_and_by_its_variables(
    name: str, option: options.Option
) -> None:
    others = {key: value for key, value in NEEDED.get(name, {}).items() if key != option.name}
    if option.name in {"fresh", "advertise-simulated"}:
        others["simulate"] = "1xA30"
    needed = [f"--{key}={value}" for key, value in others.items()]
    example = option.words[-1] if option.words else EXAMPLES.get(option.metavar, "x")
    value = [example] if option.metavar else []
    text = example if option.metavar else str(option.const).lower()
    wrong = dict.fromkeys(option.variables, "0.5")

    found = [
        *(read(name, [*needed, flag, *value], wrong) for flag in option.flags),
        *(read(name, needed, {variable: text}) for variable in option.variables),
    ]

    assert all(each == found[0] for each in found)
    if option.name not in {"gpu-reset", *NEEDED.get(name, {})}:
        assert (found[0] == read(name, needed, {})) == (example == option.shown_default)


def test_the_defaults_of_the_agent_allow_nothing_beyond_draining_affected_pods() -> None:
    defaults = agent()

    assert defaults.policy == policy.Policy()
    assert defaults.policy.drain is policy.Drain.AFFECTED
    assert not any(
        (
            defaults.allows_foreign_managers,
            defaults.heals_drift,
            defaults.host.with_reboot,
            defaults.host.shuts_host_clients,
            defaults.gpus.is_simulated,
        )
    )


NOT_COUNTS = ("ten", "-1", "1.5", "100000", "²", "9" * 10_000)
NOT_PORTS = ("-1", "65536", "http", "9465 ", "0x50", "٨٠", "9" * 5000)
NOT_SWITCHES = ("yes", "on", "2", "tRUE")
NOT_SECONDS = ("soon", "-1", "nan", "inf", "1e999", "1e300")


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        *(("MAX_CONCURRENT_NODES", text, "is not a whole number") for text in NOT_COUNTS),
        *(("HEALTH_PORT", text, "is not a port") for text in NOT_PORTS),
        *(("HEAL_DRIFT", text, "is neither true nor false") for text in NOT_SWITCHES),
        *(("DRAIN_TIMEOUT_S", text, "is not a number of seconds from 0") for text in NOT_SECONDS),
        ("POLL_INTERVAL_S", "0", "is not a number of seconds from 0.001"),
        ("SERVICE_STOP_TIMEOUT_S", "0", "is not a number of seconds from 0.1"),
        ("LOG_LEVEL", "loud", "is not one of debug, info, warning, error"),
        ("SIMULATE_STATE", "~no-such-user/state.json", "names no home directory"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_origin(
    variable: str, text: str, message: str
) -> None:
    name = f"MIG_MANAGER_{variable}"

    with pytest.raises(errors.UsageError, match=rf"^{name}: {re.escape(repr(text))} {message}"):
        agent({name: text})
    flag = "--" + variable.lower().replace("_", "-")
    with pytest.raises(errors.UsageError, match=rf"^{flag}: {re.escape(repr(text))} {message}"):
        settings.agent_settings({"node_name": "n1", variable.lower(): text}, {})


@pytest.mark.parametrize(
    ("parsed", "message"),
    [
        ({"node_name": ""}, "--node-name or set NODE_NAME"),
        ({"drain_policy": "none", "force_drain": True}, "contradicts --drain-policy none"),
        ({"in_use_timeout_s": "120"}, "must be less than --gpu-timeout-s 120"),
        ({"advertise_simulated": True}, "goes with --simulate alone"),
    ],
)
def test_an_agent_refuses_settings_that_contradict_each_other(
    parsed: Mapping[str, object], message: str
) -> None:
    with pytest.raises(errors.UsageError, match=re.escape(message)):
        settings.agent_settings({"node_name": "n1", **parsed}, {})


def test_only_a_change_compares_its_retries_with_the_deadline_of_an_operation() -> None:
    assert agent(in_use_timeout_s="120", gpu_timeout_s="180").in_use_timeout_s == 120
    assert command("status", gpu_timeout_s="5").gpu_timeout_s == 5
    with pytest.raises(errors.UsageError, match="less than --gpu-timeout-s 5"):
        command("apply", gpu_timeout_s="5")


def test_each_simulated_node_has_files_of_its_own() -> None:
    simulated = {"MIG_MANAGER_SIMULATE": "1xA30", "MIG_MANAGER_SIMULATE_STATE": "/s/a.json"}
    real, own = command(), command(environ=simulated)
    explicit = command(environ=simulated | {"MIG_MANAGER_JOURNAL_FILE": "/j"}, lock_file="/l")

    assert real.journal_file == pathlib.Path("/var/lib/mig-manager/journal.json")
    assert own.journal_file == pathlib.Path("/s/a.json.journal")
    assert own.lock_file == pathlib.Path("/s/a.json.manager.lock")
    assert own.verified_layout_file == pathlib.Path("/s/a.json.verified-layout")
    assert (explicit.journal_file, explicit.lock_file) == (pathlib.Path("/j"), pathlib.Path("/l"))


@pytest.mark.parametrize(("named", "config"), [({}, "/f"), ({"CONFIG_FILE": "/c"}, "/c")])
def test_the_operators_fallback_config_serves_when_no_other_is_named(
    named: dict[str, str], config: str
) -> None:
    assert agent({"DEFAULT_CONFIG_FILE": "/f", **named}).config_file == pathlib.Path(config)


def test_options_of_nvidias_agent_that_change_nothing_are_listed() -> None:
    chosen = agent({"HOST_NVIDIA_DIR": "/n", "WITH_REBOOT": "false"}, reconfigure_script="/s")

    assert chosen.not_needed == ("reconfigure-script", "host-nvidia-dir")


def test_a_reset_can_be_forbidden_and_allowed_again_on_the_command_line() -> None:
    forbidden = {"MIG_MANAGER_GPU_RESET": "false"}
    line = ["agent", "-n", "n1"]
    cases = [([], {}), ([], forbidden), (["--no-gpu-reset"], {}), (["--gpu-reset"], forbidden)]

    found = [
        settings.agent_settings(parser.parse([*line, *flags]), environ).host.gpu_reset
        for flags, environ in cases
    ]

    assert found == [True, False, False, True]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({"HOST_ROOT_MOUNT": "/"}, ("/", "/", "/", "/", "/"), id="no-container"),
        pytest.param(
            {"HOST_ROOT_MOUNT": "/host"}, ("/host", "/", "/host", "/", "/host"), id="mount"
        ),
        pytest.param(
            {"HOST_ROOT_MOUNT": "/host", "DRIVER_ROOT_CTR_PATH": "/host/run/nvidia/driver"},
            ("/host", *("/run/nvidia/driver", "/host/run/nvidia/driver") * 2),
            id="the-host's-from-as-seen-here",
        ),
        pytest.param(
            {"HOST_ROOT_MOUNT": "/host", "DRIVER_ROOT": "/d", "NVIDIA_DEV_ROOT": "/"},
            ("/host", "/d", "/host/d", "/", "/host"),
            id="as-seen-here-from-the-host's",
        ),
        pytest.param(
            {
                "HOST_ROOT_MOUNT": "/host",
                "NVIDIA_DRIVER_ROOT": "/run/nvidia/driver",
                "DRIVER_ROOT_CTR_PATH": "/driver-root",
                "NVIDIA_DEV_ROOT": "/run/nvidia/driver",
                "DEV_ROOT_CTR_PATH": "/driver-root",
            },
            ("/host", *("/run/nvidia/driver", "/driver-root") * 2),
            id="operator",
        ),
    ],
)
def test_driver_and_devices_are_known_on_the_host_and_from_here(
    environ: dict[str, str], expected: tuple[str, ...]
) -> None:
    found = agent(environ).host.roots
    here = (found.host_here, found.driver, found.driver_here, found.dev, found.dev_here)
    assert tuple(map(str, here)) == expected


def test_the_bus_of_a_mounted_host_comes_before_ones_own_if_the_mount_is_possible(
    tmp_path: pathlib.Path,
) -> None:
    host = tmp_path / "a host"
    environ = {"HOST_ROOT_MOUNT": str(host)}
    without = agent(environ).host.dbus_address
    socket = host / "run/dbus/system_bus_socket"
    socket.parent.mkdir(parents=True)
    socket.touch()

    assert without == "unix:path=/run/dbus/system_bus_socket"
    assert agent(environ).host.dbus_address == (
        f"unix:path={tmp_path}/a%20host/run/dbus/system_bus_socket"
    )
    impossible = agent({"HOST_ROOT_MOUNT": "/" + "x" * 5000})
    assert impossible.host.dbus_address == without
    explicit = agent(environ | {"DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/b"})
    assert explicit.host.dbus_address == "unix:path=/b"


def test_kubelets_socket_is_found_below_a_mount_of_the_hosts_root(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "var/lib/kubelet/pod-resources"
    host = {"HOST_ROOT_MOUNT": str(tmp_path)}

    without_folder = agent(host).pod_resources_socket
    folder.mkdir(parents=True)

    assert without_folder == pathlib.Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    assert agent(host).pod_resources_socket == folder / "kubelet.sock"
    assert agent(host, pod_resources_socket="/s").pod_resources_socket == pathlib.Path("/s")


def test_the_driver_is_looked_for_where_the_container_sees_it_before_where_the_host_does() -> None:
    both = {"NVIDIA_DRIVER_ROOT": "/run/nvidia/driver", "DRIVER_ROOT_CTR_PATH": "/driver-root"}

    assert agent(both).gpus.driver_roots == ("/driver-root", "/run/nvidia/driver")
    assert agent({"NVIDIA_DRIVER_ROOT": "/"}, driver_root_ctr_path="/").gpus.driver_roots == ("/",)
    assert agent().gpus.driver_roots == ("/",)
    assert agent({"HOST_ROOT_MOUNT": "/mnt"}).gpus.driver_roots == ("/mnt", "/")
    assert agent({"LD_LIBRARY_PATH": "/nv"}).gpus.loader_variables == {"LD_LIBRARY_PATH": "/nv"}
    assert agent(both).not_needed == ()


def test_debug_overrides_the_log_level() -> None:
    assert agent(debug=True, log_level="error").log_level is settings.LogLevel.DEBUG


@pytest.mark.parametrize(
    ("environ", "spec", "state"),
    [
        (
            {"XDG_STATE_HOME": "/x"},
            "4xA100-SXM4-80GB+2xA30",
            "/x/mig-manager/sim-4xA100-SXM4-80GB+2xA30.json",
        ),
        ({"HOME": "/h"}, "1xA30", "/h/.local/state/mig-manager/sim-1xA30.json"),
        ({"HOME": "/h"}, "../../x", "/h/.local/state/mig-manager/sim-.._.._x.json"),
    ],
)
def test_simulated_gpus_are_kept_where_the_user_keeps_state_whatever_the_spec(
    environ: dict[str, str], spec: str, state: str
) -> None:
    assert command(environ=environ, simulate=spec).gpus.simulate_state == pathlib.Path(state)


def test_without_a_home_the_state_file_must_be_named() -> None:
    with pytest.raises(errors.UsageError, match="--simulate-state"):
        command(simulate="1xA30")

    assert command(simulate="1xA30", simulate_state="/s").gpus.simulate_state == pathlib.Path("/s")


def test_a_layout_is_named_once_by_position_by_option_or_by_variable() -> None:
    by_variable = {"MIG_PARTED_SELECTED_CONFIG": "v"}

    assert command(environ=by_variable).layouts == ("v",)
    assert command(environ=by_variable, selected_config="c").layouts == ("c",)
    assert command(environ=by_variable, layout="p").layouts == ("p",)
    assert command(environ=by_variable, selected_config="").layouts == ()
    assert command("validate", layout=["a", "b"]).layouts == ("a", "b")
    assert command(layout="a", selected_config="a").layouts == ("a",)
    with pytest.raises(errors.UsageError, match="name one"):
        command(layout="a", selected_config="b")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [("export", "", "yaml"), ("export", "json", "json"), ("status", "json", "text")],
)
def test_export_alone_reads_the_variable_of_its_format_and_writes_yaml_by_default(
    name: str, text: str, expected: str
) -> None:
    environ = {"MIG_PARTED_OUTPUT_FORMAT": text} if text else {}

    assert command(name, environ).output_format.value == expected


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_without_colour_gets_none_unless_requested(environ: dict[str, str]) -> None:
    assert command(environ=environ).colour is settings.Colour.NEVER
    assert command(environ=environ, color="always").colour is settings.Colour.ALWAYS
    assert command().colour is settings.Colour.AUTO


def test_the_config_document_that_comes_with_the_program_exists() -> None:
    assert settings.packaged_config().is_file()
