"""The units: what systemd makes of them, and the commands that it runs."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping

import pytest

from mig_manager.agent import agent_settings
from mig_manager.cli import registry
from mig_manager.cli.commands import boot
from mig_manager.cli.toolkit import parser
from tests.rigs.programs import run
from tests.rigs.shipped.unit_files import (
    BOOT,
    ROOT,
    SYSTEMD,
    UNITS,
    RecordedEnvironment,
    directives,
    example_environ,
    longest_stop_s,
    settings_of_agent,
    unit_command_line,
    unit_environ,
)

EXPOSURE = 40  # from 0, nothing to fear, to 100
NO_SYSTEMD = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here"
)


def boot_settings(environ: Mapping[str, str]) -> boot.Settings:
    parsed = parser.parse(registry.PROGRAM, unit_command_line(BOOT))
    assert parsed["command"] == "boot"
    return boot.Settings.read(parsed, environ)


# -- the units --------------------------------------------------------------------------------


@NO_SYSTEMD
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_unit_and_its_exposure(unit: str) -> None:
    # The pages of a program that is not installed are not there; packages are tested for theirs.
    verified = run("systemd-analyze", "verify", "--man=no", SYSTEMD / unit)
    options = ("--offline=true", "--no-pager", f"--threshold={EXPOSURE}")
    judged = run("systemd-analyze", "security", *options, SYSTEMD / unit)

    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    assert judged.returncode == 0, judged.stdout


CHECK = """
import json
from mig_manager.adapters.host import device_users, procfs
pids = [each.pid for each in device_users.find_users(procfs.ROOT)]
print(json.dumps([pids, device_users.describe_hidden(procfs.ROOT)]))
"""


@pytest.mark.skipif(
    shutil.which("setpriv") is None or os.geteuid() != 0, reason="only root can drop capabilities"
)
@pytest.mark.parametrize("unit", UNITS)
def test_unit_sees_every_process_that_has_a_gpu_open(unit: str, tmp_path: pathlib.Path) -> None:
    # No simulated node has it: tests beside this one look for users of theirs in the same /proc.
    device = tmp_path / "dev" / "nvidia97"
    device.parent.mkdir()
    device.touch()
    tmp_path.chmod(0o755)
    (capabilities,) = directives(unit)["CapabilityBoundingSet"]
    added = [f"+{each.removeprefix('CAP_').lower()}" for each in capabilities.split()]
    with device.open() as opened, contextlib.ExitStack() as stack:
        own_process, other_process = (
            stack.enter_context(subprocess.Popen(["/bin/sleep", "60"], stdin=opened, user=user))
            for user in (None, 65534)
        )
        bounded = ("setpriv", "--bounding-set", ",".join(["-all", *added]))
        looked = run(*bounded, sys.executable, "-c", CHECK, PYTHONPATH=str(ROOT))
        for process in (own_process, other_process):
            process.kill()

    pids, hidden = json.loads(looked.stdout)
    # Other tests may have the like open.
    assert {os.getpid(), own_process.pid, other_process.pid} <= set(pids)
    assert hidden == ""


@pytest.mark.parametrize("unit", UNITS)
def test_the_lock_outlives_the_unit_and_only_its_main_process_is_stopped(unit: str) -> None:
    section = directives(unit)
    (running,), (state,) = section["RuntimeDirectory"], section["StateDirectory"]
    at_a_shell = boot.Settings.read({"command": "boot"}, {})

    # Everything else is read-only to the unit, and what goes with it would be another's lock.
    assert section["ProtectSystem"] == ["strict"]
    assert section["RuntimeDirectoryPreserve"] == ["yes"]
    # A change is finished first.
    assert section["KillMode"] == ["mixed"]
    assert pathlib.Path("/run", running) == at_a_shell.lock_file.parent
    assert pathlib.Path("/var/lib", state) == at_a_shell.journal_file.parent
    assert pathlib.Path("/var/lib", state) == at_a_shell.verified_layout_file.parent


@pytest.mark.parametrize("unit", UNITS)
def test_unit_reaches_every_device_of_the_driver(unit: str) -> None:
    # Each of them denies all devices but its own; ProtectClock does before systemd 253.
    denying = {"DeviceAllow", "DevicePolicy", "PrivateDevices", "ProtectClock"}

    assert denying.isdisjoint(directives(unit))


@pytest.mark.slow
def test_the_agents_unit_restarts_unless_its_input_is_unusable(tmp_path: pathlib.Path) -> None:
    section = directives(UNITS[0])
    command = (sys.executable, "-m", "mig_manager", *unit_command_line())
    simulated = ("--simulate", "1xA100-SXM4-40GB", "--simulate-state", tmp_path / "gpus.json")
    variables = unit_environ() | {"KUBECONFIG": str(tmp_path / "missing")}

    done = run(
        "env", *(f"{name}={value}" for name, value in variables.items()), *command, *simulated
    )

    assert "no credentials for a Kubernetes API" in done.stderr
    assert section["RestartPreventExitStatus"] == [str(done.returncode)]
    assert section["Restart"] == ["always"]


def test_agent_apply_and_boot_share_lock_and_kept_layout() -> None:
    agent = settings_of_agent(unit_command_line(), unit_environ())
    settings = boot_settings({})

    assert agent.lock_file == settings.lock_file
    assert agent.verified_layout_file == settings.verified_layout_file
    assert directives(BOOT)["EnvironmentFile"] == directives(UNITS[0])["EnvironmentFile"]


def test_boot_runs_after_the_driver_and_before_gpu_users() -> None:
    section = directives(BOOT)
    before = " ".join(section["Before"]).split()
    after = " ".join(section["After"]).split()

    others = [
        "kubelet",
        "k3s",
        "k0sworker",
        "snap.microk8s.daemon-kubelite",
        "containerd",
        "docker",
        "nvidia-dcgm",
        "slurmd",
        "mig-manager",
    ]
    assert {*(f"{name}.service" for name in others), "nvidia-gpu-reset.target"} <= set(before)
    assert {"nvidia-persistenced.service", "modprobe@nvidia.service"} <= set(after)
    assert not set(before) & set(after)
    assert BOOT in " ".join(directives(UNITS[0])["After"]).split()


def test_systemd_gives_boot_and_agent_the_time_to_finish_or_undo_a_change() -> None:
    agent = settings_of_agent(unit_command_line(), unit_environ())
    section, parsed = directives(BOOT), boot_settings({})
    timeouts = {
        key: float(section[key][0].removesuffix("s")) for key in section if "Timeout" in key
    }
    (agents,) = directives(UNITS[0])["TimeoutStopSec"]

    # Observe, change, and roll back.
    needs = parsed.driver_timeout_s + parsed.lock_timeout_s + 3 * parsed.gpu_timeout_s
    assert timeouts["TimeoutStartSec"] > needs
    assert timeouts["TimeoutStopSec"] > 2 * parsed.gpu_timeout_s
    assert float(agents.removesuffix("s")) > longest_stop_s(agent)
    assert (section["Type"], section["RemainAfterExit"]) == (["oneshot"], ["yes"])


def test_unit_takes_files_below_etc_and_variables_of_its_file() -> None:
    parsed = settings_of_agent(unit_command_line(), unit_environ())
    other = {"NODE_NAME": "node-2", "CONFIG_FILE": "/c", "KUBECONFIG": "/k"}
    changed = settings_of_agent(unit_command_line(), unit_environ() | other)

    def names_of(each: agent_settings.AgentSettings) -> tuple[str, ...]:
        return each.node_name, str(each.config_file), str(each.kubeconfig)

    etc = "/etc/mig-manager"
    assert names_of(parsed) == ("node-1", f"{etc}/config.yaml", f"{etc}/kubeconfig")
    assert names_of(changed) == ("node-2", "/c", "/k")
    assert directives("mig-manager.service")["EnvironmentFile"] == [f"-{etc}/mig-manager.env"]


def test_example_environment_shows_the_defaults() -> None:
    for_agent, for_boot = (
        RecordedEnvironment(example_environ()),
        RecordedEnvironment(example_environ()),
    )

    assert settings_of_agent(unit_command_line(), for_agent) == settings_of_agent(
        unit_command_line(), unit_environ()
    )
    assert boot_settings(for_boot) == boot_settings({})
    assert for_agent.keys() <= for_agent.names | for_boot.names
