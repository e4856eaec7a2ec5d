"""Command line over environment over default, and which values are refused."""

import dataclasses
import operator
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.adapters.host import process
from mig_manager.agent import agent_settings
from mig_manager.cli import gpu_settings, registry
from mig_manager.cli.toolkit import parser
from mig_manager.core.node import policies
from mig_manager.core.settings import options

AGENT = {"NODE_NAME": "n1"}
NEEDED = {
    "agent": {"node-name": "n1"},
    "partitioner": {
        "base-layout": "all-1g.5gb",
        "longest-wait-s": "100",
        "merge-back-after-s": "60",
    },
    "rollout": {"selector": "a=b", "layout": "all-1g.5gb"},
}
"""Without these a command has no settings."""
SIMULATED = {"simulate": "1xA30"}
ADDED = {"fresh": SIMULATED, "advertise-simulated": SIMULATED}
"""Without these an option is refused."""
INSTEAD = {"prepare-for-s": {"longest-wait-s": "100"}}
"""What a command needs for an option that does not go with all of ``NEEDED``."""
EXAMPLES = {
    "BOOL": "true",
    "MAP": "a=b,*=c",
    "NAMESPACE/NAME": "a/b",
    "NUMBER": "6",
    "PORT": "9465",
    "PROFILE=COUNT": "1g.5gb=2",
    options.FILE: "/x",
    options.FOLDER: "/x",
    options.LAYOUT: "all-7g.40gb",
    options.SECONDS: "45.5",
    options.SPEC: "2xA30",
}


def agent(environ: dict[str, str] | None = None, **parsed: object) -> agent_settings.AgentSettings:
    return agent_settings.AgentSettings.read(parsed, AGENT | (environ or {}))


def command(
    name: str = "apply", environ: dict[str, str] | None = None, **parsed: object
) -> gpu_settings.GpuSettings:
    gpu_settings_of_command = registry.PROGRAM.settings({"command": name} | parsed, environ or {})
    assert isinstance(gpu_settings_of_command, gpu_settings.GpuSettings)
    return gpu_settings_of_command


def options_with_variables() -> Iterator[tuple[str, options.Option]]:
    listed: list[options.Option] = []
    for name in registry.PROGRAM.commands:
        for option in registry.PROGRAM.options_of(name):
            # What several commands share is declared and tested once.
            if option.variables and not option.is_operand and option not in listed:
                listed.append(option)
                yield name, option


def read(name: str, argv: list[str], environ: Mapping[str, str]) -> Any:
    parsed = parser.parse(registry.PROGRAM, [name, *argv])
    of_command = registry.PROGRAM.settings(parsed, {"HOME": "/h", **environ})
    # A flag of doctor also demands that there is a cluster.
    if name == "support-bundle":
        doctor = dataclasses.replace(of_command.doctor, has_cluster=False)
        return dataclasses.replace(of_command, doctor=doctor)
    return dataclasses.replace(of_command, has_cluster=False) if name == "doctor" else of_command


def needed_for(name: str, option: options.Option) -> list[str]:
    """Return the arguments that a command needs beside an option."""
    arguments = NEEDED.get(name, {}) | ADDED.get(option.name, {})
    return [
        value if key == "layout" else f"--{key}={value}"
        for key, value in INSTEAD.get(option.name, arguments).items()
        if key != option.name
    ]


def example_of(option: options.Option) -> str:
    """Return a value of an option, as a variable has it."""
    if not option.metavar:
        return str(option.const).lower()
    return option.words[-1] if option.words else EXAMPLES.get(option.metavar, "x")


@pytest.mark.parametrize(
    ("name", "option"),
    [pytest.param(*each, id=f"{each[0]} {each[1].name}") for each in options_with_variables()],
)
def test_an_option_is_set_by_its_flags_and_by_its_variables(
    name: str, option: options.Option
) -> None:
    needed, example = needed_for(name, option), example_of(option)
    value = [example] if option.metavar else []
    wrong = dict.fromkeys(option.variables, "0.5")

    every_settings = [
        *(read(name, [*needed, flag, *value], wrong) for flag in option.flags),
        *(read(name, needed, {variable: example}) for variable in option.variables),
    ]

    assert all(each == every_settings[0] for each in every_settings)
    if option.name not in {"gpu-reset", *NEEDED.get(name, {})}:
        changes_nothing = every_settings[0] == read(name, needed, {})
        assert changes_nothing == (example == option.shown_default)


def test_defaults_allow_only_the_eviction_of_affected_pods() -> None:
    defaults = agent()

    assert defaults.policy == policies.Policy()
    assert defaults.policy.drain is policies.DrainPolicy.AFFECTED
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
NOT_SECONDS = ("soon", "-1", "nan", "inf", "1e999", "1e300", "1_0", "٨٠")


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        *(("MAX_CONCURRENT_NODES", text, "is not a whole number") for text in NOT_COUNTS),
        *(("HEALTH_PORT", text, "is not a port") for text in NOT_PORTS),
        *(("HEAL_DRIFT", text, "is neither true nor false") for text in NOT_SWITCHES),
        *(("DRAIN_TIMEOUT_S", text, "is not a number of seconds from 0") for text in NOT_SECONDS),
        ("POLL_INTERVAL_S", "0", "is not a number of seconds from 0.001"),
        ("SERVICE_STOP_TIMEOUT_S", "0", "is not a number of seconds from 0.1"),
        ("STARTUP_TAINT", "a/b/c", "is not the key of a taint"),
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
    value = [text] if variable == "STARTUP_TAINT" else text
    with pytest.raises(errors.UsageError, match=rf"^{flag}: {re.escape(repr(text))} {message}"):
        agent_settings.AgentSettings.read({"node_name": "n1", variable.lower(): value}, {})


def test_repeatable_option_is_a_list_with_commas_in_its_variable() -> None:
    both = frozenset({"a.b/c", "d"})
    variable = {"MIG_MANAGER_STARTUP_TAINT": "a.b/c, d"}
    parsed = parser.parse(
        registry.PROGRAM, ["agent", "--startup-taint", "a.b/c", "--startup-taint=d"]
    )

    assert agent(variable).policy.startup_taints == both
    assert agent_settings.AgentSettings.read(parsed, AGENT).policy.startup_taints == both
    assert agent(variable, startup_taint=["e"]).policy.startup_taints == {"e"}


def test_each_simulated_node_has_files_of_its_own() -> None:
    simulated = {"MIG_MANAGER_SIMULATE": "1xA30", "MIG_MANAGER_SIMULATE_STATE": "/s/a.json"}
    real, simulated_node = command(), command(environ=simulated)
    explicit = command(environ=simulated | {"MIG_MANAGER_JOURNAL_FILE": "/j"}, lock_file="/l")

    assert real.journal_file == pathlib.Path("/var/lib/mig-manager/journal.json")
    assert simulated_node.journal_file == pathlib.Path("/s/a.json.journal")
    assert simulated_node.lock_file == pathlib.Path("/s/a.json.manager.lock")
    assert simulated_node.verified_layout_file == pathlib.Path("/s/a.json.verified-layout")
    assert (explicit.journal_file, explicit.lock_file) == (pathlib.Path("/j"), pathlib.Path("/l"))


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
    roots = agent(environ).host.roots
    paths = (roots.host_here, roots.driver, roots.driver_here, roots.dev, roots.dev_here)
    assert tuple(map(str, paths)) == expected


def test_bus_of_a_mounted_host_precedes_the_own_one(tmp_path: pathlib.Path) -> None:
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


@pytest.mark.parametrize(
    ("name", "parsed", "message"),
    [
        ("agent", {"node_name": ""}, "--node-name or set NODE_NAME"),
        (
            "agent",
            {"drain_policy": "none", "force_drain": True},
            "contradicts --drain-policy none",
        ),
        ("agent", {"in_use_timeout_s": "120"}, "must be less than --gpu-timeout-s 120"),
        ("agent", {"advertise_simulated": True}, "needs --simulate"),
        ("apply", {"gpu_timeout_s": "5"}, "less than --gpu-timeout-s 5"),
        ("apply", {"simulate": "1xA30"}, "--simulate-state"),
        ("apply", {"layout": "a", "selected_config": "b"}, "name one"),
    ],
)
def test_settings_that_contradict_each_other_or_lack_one_are_refused(
    name: str, parsed: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.UsageError, match=re.escape(message)):
        (agent if name == "agent" else command)(**parsed)


VARIABLE = {"MIG_PARTED_SELECTED_CONFIG": "v"}
JSON = {"MIG_PARTED_OUTPUT_FORMAT": "json"}
NO_RESET = {"MIG_MANAGER_GPU_RESET": "false"}
FALLBACK = {"DEFAULT_CONFIG_FILE": "/f"}
UNUSED = {"HOST_NVIDIA_DIR": "/n", "WITH_REBOOT": "false"}
DRIVER = {"NVIDIA_DRIVER_ROOT": "/run/nvidia/driver", "DRIVER_ROOT_CTR_PATH": "/driver-root"}
MOUNT = {"HOST_ROOT_MOUNT": "/mnt"}
XDG = {"XDG_STATE_HOME": "/x"}
STATES = "/h/.local/state/mig-manager/sim-"
TWO_KINDS = "4xA100-SXM4-80GB+2xA30"


@pytest.mark.parametrize(
    ("line", "environ", "attribute", "expected"),
    [
        ("agent --debug --log-level error", {}, "log_level", "debug"),
        ("agent --in-use-timeout-s 120 --gpu-timeout-s 180", {}, "in_use_timeout_s", "120.0"),
        ("apply --in-use-timeout-s 7", {}, "in_use_timeout_s", "7.0"),
        ("plan", {}, "in_use_timeout_s", "0.0"),
        ("agent", FALLBACK, "config_file", "/f"),
        ("agent", {**FALLBACK, "CONFIG_FILE": "/c"}, "config_file", "/c"),
        ("agent", {}, "host.gpu_reset", "True"),
        ("agent", NO_RESET, "host.gpu_reset", "False"),
        ("agent --no-gpu-reset", {}, "host.gpu_reset", "False"),
        ("agent --gpu-reset", NO_RESET, "host.gpu_reset", "True"),
        # Options of NVIDIA's agent that change nothing.
        (
            "agent --reconfigure-script /s",
            UNUSED,
            "not_needed",
            "('reconfigure-script', 'host-nvidia-dir')",
        ),
        ("agent", DRIVER, "not_needed", "()"),
        # The driver is looked for where the container sees it before where the host does.
        ("agent", {}, "gpus.driver_roots", "('/',)"),
        ("agent", DRIVER, "gpus.driver_roots", "('/driver-root', '/run/nvidia/driver')"),
        ("agent -a /", {"NVIDIA_DRIVER_ROOT": "/"}, "gpus.driver_roots", "('/',)"),
        ("agent", MOUNT, "gpus.driver_roots", "('/mnt', '/')"),
        ("agent", {"LD_LIBRARY_PATH": "/n"}, "gpus.loader_variables", "{'LD_LIBRARY_PATH': '/n'}"),
        # Only a change compares its retries with the deadline of an operation.
        ("status --gpu-timeout-s 5", {}, "gpu_timeout_s", "5.0"),
        # Simulated GPUs are kept where the user keeps state.
        ("apply --simulate 1xA30", {}, "gpus.simulate_state", f"{STATES}1xA30.json"),
        ("apply --simulate a30", {}, "gpus.simulate_state", f"{STATES}1xA30.json"),
        ("apply --simulate A30+2xa30", {}, "gpus.simulate_state", f"{STATES}3xA30.json"),
        ("agent --simulate nvidia_a30", {}, "gpus.simulate_state", f"{STATES}1xA30.json"),
        ("doctor --simulate 2Xa100", {}, "gpus.simulate_state", f"{STATES}2xA100-SXM4-40GB.json"),
        ("apply --simulate ../../x", {}, "gpus.simulate_state", f"{STATES}.._.._x.json"),
        (
            *(f"apply --simulate {TWO_KINDS}", XDG, "gpus.simulate_state"),
            f"/x/mig-manager/sim-{TWO_KINDS}.json",
        ),
        ("apply --simulate 1xA30 --simulate-state /s", {}, "gpus.simulate_state", "/s"),
        # A layout is named once: by position, by option or by variable.
        ("apply", VARIABLE, "layouts", "('v',)"),
        ("apply -s c", VARIABLE, "layouts", "('c',)"),
        ("apply p", VARIABLE, "layouts", "('p',)"),
        ("apply a --selected-config a", {}, "layouts", "('a',)"),
        ("validate a b", {}, "layouts", "('a', 'b')"),
        # Export alone reads the variable of its format.
        ("export", {}, "output_format", "yaml"),
        ("export", JSON, "output_format", "json"),
        ("status", JSON, "output_format", "text"),
        ("apply", {}, "colour", "auto"),
        ("apply", {"NO_COLOR": "1"}, "colour", "never"),
        ("apply", {"TERM": "dumb"}, "colour", "never"),
        ("apply --color always", {"NO_COLOR": "1"}, "colour", "always"),
    ],
)
def test_a_command_line_and_its_variables_choose(
    line: str, environ: dict[str, str], attribute: str, expected: str
) -> None:
    name, *argv = line.split()

    value = operator.attrgetter(attribute)(read(name, argv, AGENT | environ))

    assert str(getattr(value, "value", value)) == expected


def test_captures_of_the_same_name_are_simulated_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    states = {}
    for folder, spec in [
        (first, "x.json"),
        (second, "x.json"),
        (second, "../first/x.json"),
        (second, str(first / "x.json")),
    ]:
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        simulated = command(environ={"HOME": "/h"}, simulate=spec)
        states[folder.name, spec] = str(simulated.gpus.simulate_state)

    of_first, of_second, *others = states.values()
    assert of_first != of_second
    assert {*others} == {of_first}
    assert all(re.fullmatch(STATES + r"x-[0-9a-f]{8}\.json", each) for each in states.values())


@pytest.mark.parametrize(
    ("environ", "file", "is_default"),
    [
        ({"CONFIG_FILE": "/own"}, "/own", False),
        ({"DEFAULT_CONFIG_FILE": "/default"}, "/default", True),
        ({"CONFIG_FILE": "/own", "DEFAULT_CONFIG_FILE": "/default"}, "/own", False),
        (
            {
                "CONFIG_FILE": "/own",
                "DEFAULT_CONFIG_FILE": "/default",
                "MIG_MANAGER_GENERATED_LAYOUTS": "only",
            },
            "/default",
            True,
        ),
        ({}, str(process.packaged_config()), True),
    ],
)
def test_generated_layouts_precede_every_file_but_the_owners(
    environ: dict[str, str], file: str, *, is_default: bool
) -> None:
    of_agent = agent_settings.AgentSettings.read({}, environ | {"NODE_NAME": "n"})

    assert (str(of_agent.config_file), of_agent.has_default_layouts) == (
        file,
        is_default,
    )
