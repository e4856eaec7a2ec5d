"""Command line over environment over default, and what is refused."""

import pathlib

import pytest

from mig_manager import errors
from mig_manager.agent import settings
from mig_manager.cli import command_settings, parser
from mig_manager.core.node import policy

AGENT = {"NODE_NAME": "n1"}


def agent(environ: dict[str, str] | None = None, **options: object) -> settings.AgentSettings:
    return settings.agent_settings(options, AGENT | (environ or {}))


def command(
    name: str = "apply", environ: dict[str, str] | None = None, **options: object
) -> command_settings.CommandSettings:
    return command_settings.command_settings({"command": name} | options, environ or {})


def test_an_agent_needs_to_know_its_node() -> None:
    with pytest.raises(errors.UsageError, match="--node-name or set NODE_NAME"):
        settings.agent_settings({}, {})


def test_the_defaults_of_the_agent_are_as_documented() -> None:
    given = agent()

    assert given.config_file == settings.packaged_config()
    assert given.kubeconfig is None
    assert given.pod_resources_socket == pathlib.Path(
        "/var/lib/kubelet/pod-resources/kubelet.sock"
    )
    assert (given.drain_timeout_s, given.plugin_timeout_s) == (300, 300)
    assert (given.in_use_timeout_s, given.gpu_timeout_s) == (30, 120)
    assert given.poll_interval_s == 1
    assert given.gpus == settings.GpuAccess(driver_roots=("/",))
    assert not given.gpus.is_simulated


def test_by_default_only_affected_pods_leave_and_never_by_force() -> None:
    given = agent()

    assert given.policy == policy.Policy()
    assert given.policy.drain is policy.Drain.AFFECTED
    assert given.extra_clients_file is None
    assert given.monitor_timeout_s == 60


def test_the_owners_decisions_are_options_and_variables() -> None:
    given = agent(
        {"MIG_MANAGER_DRAIN_POLICY": "node", "MIG_MANAGER_FORCE_DRAIN": "true"},
        plugin_configs="a=b",
        extra_clients_file="/x",
    )

    assert given.policy == policy.Policy(
        drain=policy.Drain.NODE, is_forced=True, plugin_configs={"a": "b"}
    )
    assert given.extra_clients_file == pathlib.Path("/x")


def test_the_owners_decisions_can_be_given_on_the_command_line() -> None:
    line = ["agent", "-n", "n1", "--force-drain", "--drain-policy", "node"]
    line += ["--plugin-configs", "a=b,*=c", "--monitor-timeout-s", "7"]

    given = settings.agent_settings(parser.parse(line), {})

    assert given.policy.is_forced
    assert given.policy.plugin_config("other") == "c"
    assert given.monitor_timeout_s == 7


def test_any_number_of_nodes_may_be_under_change_unless_there_is_a_budget() -> None:
    assert agent().max_concurrent_nodes == 0

    given = agent({"MIG_MANAGER_MAX_CONCURRENT_NODES": "10", "POD_NAMESPACE": "gpus"})
    assert (given.max_concurrent_nodes, given.slots_namespace) == (10, "gpus")
    given = agent(max_concurrent_nodes="3", slots_namespace="here")
    assert (given.max_concurrent_nodes, given.slots_namespace) == (3, "here")


@pytest.mark.parametrize("text", ["ten", "-1", "1.5", "100000", "²", "9" * 10_000])
def test_a_budget_that_is_no_number_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(errors.UsageError, match="not a whole number"):
        agent(max_concurrent_nodes=text)


def test_force_where_nobody_is_sent_away_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="contradicts --drain-policy none"):
        agent(drain_policy="none", force_drain=True)


def test_nvidias_variables_of_the_agent_keep_working() -> None:
    given = agent({"CONFIG_FILE": "/c/config.yaml", "KUBECONFIG": "/k"})

    assert given.node_name == "n1"
    assert given.config_file == pathlib.Path("/c/config.yaml")
    assert given.kubeconfig == pathlib.Path("/k")


def test_an_option_outdoes_its_variable() -> None:
    assert agent({"CONFIG_FILE": "/c"}, config_file="/d").config_file == pathlib.Path("/d")
    assert agent(node_name="n2").node_name == "n2"


def test_our_own_options_have_variables_too() -> None:
    given = agent({"MIG_MANAGER_DRAIN_TIMEOUT_S": "5", "MIG_MANAGER_LOG_FORMAT": "console"})

    assert given.drain_timeout_s == 5
    assert given.log_format is settings.LogFormat.CONSOLE


def test_the_operators_fallback_config_serves_when_no_other_is_named() -> None:
    assert agent({"DEFAULT_CONFIG_FILE": "/f"}).config_file == pathlib.Path("/f")
    assert agent({"DEFAULT_CONFIG_FILE": "/f", "CONFIG_FILE": "/c"}).config_file == pathlib.Path(
        "/c"
    )


def test_what_nvidias_agent_takes_and_ours_does_not_need_is_noted() -> None:
    given = agent({"HOST_NVIDIA_DIR": "/n", "WITH_REBOOT": "false"}, reconfigure_script="/s")

    assert given.not_needed == ("reconfigure-script", "host-nvidia-dir")


def test_nothing_is_done_to_the_machine_unless_it_is_allowed() -> None:
    given = agent()

    assert not given.host.with_reboot
    assert not given.host.shuts_host_clients
    assert not given.host.cdi_enabled
    assert given.host.gpu_clients_file is None
    assert given.host.gpu_reset
    assert (given.host.service_stop_timeout_s, given.host.service_start_timeout_s) == (30, 120)
    assert given.host.reboot_timeout_s == 600


def test_what_may_be_done_to_the_machine_is_told_by_nvidias_variables() -> None:
    given = agent(
        {
            "WITH_REBOOT": "true",
            "WITH_SHUTDOWN_HOST_GPU_CLIENTS": "1",
            "GPU_CLIENTS_FILE": "/g",
            "CDI_ENABLED": "t",
            "NVIDIA_CDI_HOOK_PATH": "/hook",
        }
    )

    assert given.host.with_reboot
    assert given.host.shuts_host_clients
    assert given.host.cdi_enabled
    assert given.host.gpu_clients_file == pathlib.Path("/g")
    assert given.host.roots.cdi_hook == pathlib.Path("/hook")
    assert given.not_needed == ()


def test_a_reset_can_be_forbidden_and_allowed_again_on_the_command_line() -> None:
    line = ["agent", "-n", "n1"]

    assert not settings.agent_settings(parser.parse([*line, "--no-gpu-reset"]), {}).host.gpu_reset
    assert not agent({"MIG_MANAGER_GPU_RESET": "false"}).host.gpu_reset
    both = settings.agent_settings(
        parser.parse([*line, "--gpu-reset"]), {"MIG_MANAGER_GPU_RESET": "false"}
    )
    assert both.host.gpu_reset


def test_patience_with_the_machine_can_be_given_on_the_command_line() -> None:
    line = ["agent", "-n", "n1", "--service-stop-timeout-s", "1", "--service-start-timeout-s", "2"]
    line += ["--reboot-timeout-s", "3", "--dbus-address", "unix:path=/b", "--proven-file", "/p"]

    given = settings.agent_settings(parser.parse(line), {})

    assert (given.host.service_stop_timeout_s, given.host.service_start_timeout_s) == (1, 2)
    assert given.host.reboot_timeout_s == 3
    assert given.host.dbus_address == "unix:path=/b"
    assert given.proven_file == pathlib.Path("/p")


def test_no_patience_at_all_with_a_service_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="--service-stop-timeout-s"):
        agent(service_stop_timeout_s="0")


def roots(environ: dict[str, str]) -> tuple[str, ...]:
    found = agent(environ).host.roots
    here = (found.host_here, found.driver, found.driver_here, found.dev, found.dev_here)
    return tuple(str(path) for path in here)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({"HOST_ROOT_MOUNT": "/"}, ("/", "/", "/", "/", "/"), id="no-container"),
        pytest.param(
            {"HOST_ROOT_MOUNT": "/host"}, ("/host", "/", "/host", "/", "/host"), id="mount"
        ),
        pytest.param(
            {"HOST_ROOT_MOUNT": "/host", "DRIVER_ROOT_CTR_PATH": "/host/run/nvidia/driver"},
            (
                "/host",
                "/run/nvidia/driver",
                "/host/run/nvidia/driver",
                "/run/nvidia/driver",
                "/host/run/nvidia/driver",
            ),
            id="as-seen-here-tells-the-host's",
        ),
        pytest.param(
            {"HOST_ROOT_MOUNT": "/host", "DRIVER_ROOT": "/d", "NVIDIA_DEV_ROOT": "/"},
            ("/host", "/d", "/host/d", "/", "/host"),
            id="on-the-host-tells-as-seen-here",
        ),
        pytest.param(
            {
                "HOST_ROOT_MOUNT": "/host",
                "NVIDIA_DRIVER_ROOT": "/run/nvidia/driver",
                "DRIVER_ROOT_CTR_PATH": "/driver-root",
                "NVIDIA_DEV_ROOT": "/run/nvidia/driver",
                "DEV_ROOT_CTR_PATH": "/driver-root",
            },
            (
                "/host",
                "/run/nvidia/driver",
                "/driver-root",
                "/run/nvidia/driver",
                "/driver-root",
            ),
            id="operator",
        ),
    ],
)
def test_driver_and_devices_are_known_on_the_host_and_from_here(
    environ: dict[str, str], expected: tuple[str, ...]
) -> None:
    assert roots(environ) == expected


def test_the_bus_of_a_mounted_host_comes_before_ones_own(tmp_path: pathlib.Path) -> None:
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
    told = agent(environ | {"DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/b"})
    assert told.host.dbus_address == "unix:path=/b"


def test_a_mount_that_cannot_be_is_passed_over() -> None:
    given = agent({"HOST_ROOT_MOUNT": "/" + "x" * 5000})

    assert given.host.dbus_address == "unix:path=/run/dbus/system_bus_socket"


def test_the_proven_layout_of_simulated_gpus_is_beside_them() -> None:
    simulated = agent(simulate="1xA30", simulate_state="/s/a.json")

    assert agent().proven_file == pathlib.Path("/var/lib/mig-manager/proven.json")
    assert simulated.proven_file == pathlib.Path("/s/a.json.proven")


@pytest.mark.parametrize("text", ["yes", "on", "2", "tRUE"])
def test_a_switch_that_is_neither_true_nor_false_is_refused(text: str) -> None:
    with pytest.raises(errors.UsageError, match=r"MIG_PARTED_SKIP_RESET.*neither true nor false"):
        command(environ={"MIG_PARTED_SKIP_RESET": text})


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "1e999"])
def test_a_duration_that_is_none_is_refused_with_its_origin(text: str) -> None:
    with pytest.raises(errors.UsageError, match="--drain-timeout-s"):
        agent(drain_timeout_s=text)


def test_a_duration_beyond_what_can_be_waited_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="--retry-max-s"):
        agent(retry_max_s="1e300")


def test_patience_with_gpus_in_use_must_end_before_the_worker_is_killed() -> None:
    with pytest.raises(errors.UsageError, match="--in-use-timeout-s"):
        agent(in_use_timeout_s="120")

    assert agent(in_use_timeout_s="120", gpu_timeout_s="180").in_use_timeout_s == 120.0


def test_a_home_that_nobody_has_is_refused_with_its_origin() -> None:
    with pytest.raises(errors.UsageError, match=r"--simulate-state.*~no-such-user"):
        command(simulate_state="~no-such-user/state.json")


def test_a_pause_of_nothing_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="--poll-interval-s"):
        agent(poll_interval_s="0")


def test_a_choice_that_is_none_is_refused_with_the_choices() -> None:
    with pytest.raises(errors.UsageError, match="one of debug, info, warning, error"):
        agent(log_level="loud")


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


def test_only_simulated_gpus_are_advertised_by_the_agent() -> None:
    variable = {"MIG_MANAGER_ADVERTISE_SIMULATED": "true"}

    with pytest.raises(errors.UsageError, match="goes with --simulate alone"):
        agent(variable)

    simulated = agent(variable, simulate="1xA30", simulate_state="/s")
    assert simulated.advertises_simulated
    assert not agent(simulate="1xA30", simulate_state="/s").advertises_simulated


def test_debug_outdoes_the_log_level() -> None:
    assert agent(debug=True, log_level="error").log_level is settings.LogLevel.DEBUG


def test_simulated_gpus_are_kept_where_the_user_keeps_state() -> None:
    spec = "4xA100-SXM4-80GB+2xA30"
    by_xdg = command(environ={"XDG_STATE_HOME": "/x"}, simulate=spec).gpus
    by_home = command(environ={"HOME": "/h"}, simulate=spec).gpus

    assert by_xdg.simulate_state == pathlib.Path(f"/x/mig-manager/sim-{spec}.json")
    assert by_home.simulate_state == pathlib.Path(f"/h/.local/state/mig-manager/sim-{spec}.json")


def test_a_spec_cannot_lead_the_state_file_elsewhere() -> None:
    state = command(environ={"HOME": "/h"}, simulate="../../etc/x").gpus.simulate_state

    assert state is not None
    assert state.parent == pathlib.Path("/h/.local/state/mig-manager")


def test_without_a_home_the_state_file_must_be_named() -> None:
    with pytest.raises(errors.UsageError, match="--simulate-state"):
        command(simulate="1xA30")

    assert command(simulate="1xA30", simulate_state="/s").gpus.simulate_state == pathlib.Path("/s")


def test_a_layout_is_named_by_position_by_option_or_by_variable() -> None:
    by_variable = {"MIG_PARTED_SELECTED_CONFIG": "v"}

    assert command(environ=by_variable).layouts == ("v",)
    assert command(environ=by_variable, selected_config="c").layouts == ("c",)
    assert command(environ=by_variable, layout="p").layouts == ("p",)
    assert command(environ=by_variable, selected_config="").layouts == ()
    assert command("validate", layout=["a", "b"]).layouts == ("a", "b")


def test_two_names_for_the_layout_are_refused() -> None:
    with pytest.raises(errors.UsageError, match="name one"):
        command(layout="a", selected_config="b")

    assert command(layout="a", selected_config="a").layouts == ("a",)


def test_export_writes_yaml_unless_told_otherwise() -> None:
    assert command("export").output_format is command_settings.OutputFormat.YAML
    assert (
        command("export", {"MIG_PARTED_OUTPUT_FORMAT": "json"}).output_format
        is command_settings.OutputFormat.JSON
    )
    assert (
        command("status", {"MIG_PARTED_OUTPUT_FORMAT": "json"}).output_format
        is command_settings.OutputFormat.TEXT
    )


def test_export_has_no_format_for_people() -> None:
    with pytest.raises(errors.UsageError, match=r"--output-format.*one of yaml, json"):
        command("export", output_format="text")


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_wants_no_colour_gets_none_unless_asked(environ: dict[str, str]) -> None:
    assert command(environ=environ).colour is settings.Colour.NEVER
    assert command(environ=environ, color="always").colour is settings.Colour.ALWAYS
    assert command().colour is settings.Colour.AUTO


def test_the_config_document_that_comes_with_the_program_exists() -> None:
    assert settings.packaged_config().is_file()


def test_health_and_metrics_are_served_only_where_a_port_is_given() -> None:
    assert agent().health_port == 0
    given = agent({"MIG_MANAGER_HEALTH_PORT": "9465"}, health_address="127.0.0.1")

    assert (given.health_address, given.health_port) == ("127.0.0.1", 9465)


@pytest.mark.parametrize("text", ["-1", "65536", "http", "9465 ", "0x50", "٨٠", "9" * 5000])
def test_a_port_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(errors.UsageError, match=r"^MIG_MANAGER_HEALTH_PORT: .* is not a port"):
        agent({"MIG_MANAGER_HEALTH_PORT": text})


def test_an_agent_excludes_other_managers_and_looks_for_drift_by_default() -> None:
    given = agent()

    assert given.lock_file == pathlib.Path("/run/mig-manager/lock")
    assert (given.lock_timeout_s, given.drift_check_interval_s) == (30, 300)
    assert not given.allows_foreign_managers
    assert not given.heals_drift
    assert not given.watches_gpu_events
    assert given.own_pod_uid is None


def test_what_an_agent_does_about_others_can_be_given_on_the_command_line() -> None:
    line = ["agent", "-n", "n1", "--lock-file", "/l", "--lock-timeout-s", "0"]
    line += ["--drift-check-interval-s", "0", "--heal-drift", "--watch-gpu-events"]
    line += ["--allow-foreign-managers"]

    given = settings.agent_settings(parser.parse(line), {})

    assert given.lock_file == pathlib.Path("/l")
    assert (given.lock_timeout_s, given.drift_check_interval_s) == (0, 0)
    assert given.allows_foreign_managers
    assert given.heals_drift
    assert given.watches_gpu_events


def test_what_an_agent_does_about_others_has_variables_too() -> None:
    given = agent({"MIG_MANAGER_HEAL_DRIFT": "true", "POD_UID": "u-1"})

    assert given.heals_drift
    assert given.own_pod_uid == "u-1"


def test_each_simulated_node_has_a_lock_of_its_own() -> None:
    own = agent(simulate="1xA30", simulate_state="/s/a.json")
    told = agent(simulate="1xA30", simulate_state="/s/a.json", lock_file="/l")

    assert own.lock_file == pathlib.Path("/s/a.json.manager.lock")
    assert told.lock_file == pathlib.Path("/l")


def test_apply_keeps_lock_and_journal_where_the_system_keeps_such_files() -> None:
    given = command()

    assert given.lock_file == pathlib.Path("/run/mig-manager/lock")
    assert given.journal_file == pathlib.Path("/var/lib/mig-manager/journal.json")
    assert (given.lock_timeout_s, given.gpu_timeout_s) == (30, 120)


def test_each_simulated_node_has_a_journal_of_its_own() -> None:
    own = command(simulate="1xA30", simulate_state="/s/a.json")
    told = command(
        environ={"MIG_MANAGER_JOURNAL_FILE": "/j"}, simulate="1xA30", simulate_state="/s/a.json"
    )

    assert own.journal_file == pathlib.Path("/s/a.json.journal")
    assert own.lock_file == pathlib.Path("/s/a.json.manager.lock")
    assert told.journal_file == pathlib.Path("/j")


def test_only_apply_compares_its_patience_with_the_deadline_of_an_operation() -> None:
    assert command("status", gpu_timeout_s="5").gpu_timeout_s == 5
    with pytest.raises(errors.UsageError, match="less than --gpu-timeout-s 5"):
        command("apply", gpu_timeout_s="5")
    with pytest.raises(errors.UsageError, match="--gpu-timeout-s: '0'"):
        command("status", gpu_timeout_s="0")
