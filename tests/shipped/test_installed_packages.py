"""The .deb on machines with systemd: installed, rebooted, upgraded, removed, purged."""

import pathlib
import shutil
from collections.abc import Iterator

import pytest

import mig_manager
from mig_manager.sandbox.driver import state_file
from tests.rigs import waiting
from tests.rigs.shipped.unit_files import BOOT, SYSTEMD, UNITS
from tests.shipped import guest

pytestmark = pytest.mark.release

AGENT = "mig-manager.service"
GPUS = "1xA100-SXM4-40GB+1xH100-SXM5-80GB"
STATE = "/var/lib/mig-manager/gpus.json"
LIBRARIES = "/usr/lib/mig-manager/lib/python3/site-packages"
LOCK = "/run/mig-manager/lock"
PACKAGE = "/root/mig-manager.deb"
SETTINGS = "/etc/mig-manager/mig-manager.env"
SIMULATED = f"""\
MIG_MANAGER_SIMULATE={GPUS}
MIG_MANAGER_SIMULATE_STATE={STATE}
MIG_MANAGER_REPAIR=reset
"""
DROP_IN = f"/etc/systemd/system/{AGENT}.d/override.conf"


@pytest.fixture
def machine(packages: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[guest.Guest]:
    """A machine that has the package's file, and a checkout's installer: a Debian 12, or other."""
    if missing := guest.missing():
        pytest.skip(missing)
    with guest.boot(getattr(request, "param", "bookworm")) as booted:
        (package,) = packages.glob("*_amd64.deb")
        shutil.copy(package, f"{booted.root}{PACKAGE}")
        shutil.copytree(SYSTEMD, booted.root / "root" / "systemd")
        yield booted


def write(machine: guest.Guest, path: str, text: str) -> None:
    file = machine.root / path.removeprefix("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def checkpoint(machine: guest.Guest) -> str:
    """Return the MIG mode and all instances, with their placements."""
    machine.run("mig-manager", "checkpoint", "-f", "/run/now", "--simulate-state", STATE)
    return machine.run("cat", "/run/now")


def reboot(machine: guest.Guest) -> None:
    """Reboot machine and GPUs: instances are lost, and from Hopper on the MIG mode.

    Then both GPUs have a fault: one needs a reset, one another reboot.
    """
    gpus = state_file.SharedState(machine.root / STATE.removeprefix("/"))
    machine.shut_down()
    gpus.reboot()
    assert [gpu.instances for gpu in gpus.read().gpus] == [(), ()]
    assert [gpu.is_enabled for gpu in gpus.read().gpus] == [True, False]
    gpus.fail_gpu(0, action=1)
    gpus.fail_gpu(1, action=2)
    machine.reboot()


def assert_installed(machine: guest.Guest) -> None:
    """Check the program, and that the units are disabled, valid and documented."""
    assert machine.run("mig-manager", "version") == f"mig-manager {mig_manager.__version__}\n"
    assert machine.run("systemd-analyze", "verify", "--man=no", *UNITS) == ""
    for unit in UNITS:
        assert machine.run("systemctl", "is-enabled", unit, status=1) == "disabled\n"
        # The guest has no program man, as most servers.
        page = machine.run("systemctl", "show", "--property=Documentation", "--value", unit)
        name = page.strip('"\n').removeprefix("man:").removesuffix("(1)")
        assert machine.run("gzip", "--test", f"/usr/share/man/man1/{name}.1.gz") == ""


def apply_and_reboot(machine: guest.Guest) -> str:
    """Reboot with a layout and the unit for the boot; return the checkpoint before."""
    machine.run("systemctl", "enable", BOOT)
    simulated = ("--simulate", GPUS, "--simulate-state", STATE)
    machine.run("mig-manager", "apply", "all-balanced", *simulated)
    applied = checkpoint(machine)
    reboot(machine)
    return applied


def assert_restored(machine: guest.Guest, applied: str) -> None:
    """Check that the boot has restored the layout, and repaired the GPU that it could."""
    assert machine.state_of(BOOT) == "active", machine.run("journalctl", "-u", BOOT)
    assert checkpoint(machine) == applied
    gpus = state_file.SharedState(machine.root / STATE.removeprefix("/")).read().gpus
    assert [gpu.recovery_action for gpu in gpus] == [0, 2]
    assert "needs a reboot of the node" in machine.run("journalctl", "-u", BOOT)


def start_agent(machine: guest.Guest) -> str:
    """Start what runs in the agent's place where no cluster is; return its PID."""
    write(machine, DROP_IN, "[Service]\nExecStart=\nExecStart=/bin/sleep infinity\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "enable", "--now", AGENT)
    return machine.state_of(AGENT, "MainPID")


def make_links(machine: guest.Guest) -> None:
    """Make what ``systemctl edit --full`` and docs/migration.md leave on a machine."""
    machine.run("cp", f"/usr/lib/systemd/system/{BOOT}", "/etc/systemd/system")
    machine.run("ln", "-s", "/usr/bin/mig-manager", "/usr/local/bin/nvidia-mig-parted")


@pytest.mark.parametrize("machine", ["bookworm", "trixie"], indirect=True)
def test_package_restores_the_layout_at_boot_and_purges_itself(machine: guest.Guest) -> None:
    before = machine.files() | {"/var/log/dpkg.log"}

    machine.run("dpkg", "-i", PACKAGE)
    assert_installed(machine)

    write(machine, SETTINGS, SIMULATED)
    applied = apply_and_reboot(machine)
    assert_restored(machine, applied)

    agent = start_agent(machine)
    make_links(machine)
    machine.run("dpkg", "-i", PACKAGE)
    assert machine.state_of(AGENT) == "active"
    assert machine.state_of(AGENT, "MainPID") != agent
    assert machine.run("cat", SETTINGS) == SIMULATED
    assert checkpoint(machine) == applied

    machine.run("dpkg", "--remove", "mig-manager")
    assert machine.state_of(AGENT) == machine.state_of(BOOT) == "inactive"
    files = {path for path in machine.files() - before if "mig" in path}
    assert not [path for path in files if path.startswith(("/usr", "/etc/systemd/system/multi"))]
    assert SETTINGS in files

    machine.run("dpkg", "--purge", "mig-manager")
    assert machine.files() == before
    assert machine.run("ls", "/run/mig-manager", status=2)


def test_the_agent_restarts_after_a_signal_and_dpkg_waits_for_an_apply(
    machine: guest.Guest,
) -> None:
    machine.run("dpkg", "-i", PACKAGE)
    machine.run("systemctl", "start", AGENT)
    waiting.until(lambda: machine.state_of(AGENT) == "failed", "the failure of the unit")
    restarts, status = (machine.state_of(AGENT, name) for name in ("NRestarts", "ExecMainStatus"))
    assert (restarts, status) == ("0", "2"), "it has no kubeconfig"

    write(machine, DROP_IN, "[Service]\nExecStart=\nExecStart=/bin/sleep infinity\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", AGENT)
    machine.run("systemctl", "kill", "--signal=HUP", AGENT)
    waiting.until(lambda: machine.state_of(AGENT, "NRestarts") == "1", "the restart of the unit")
    waiting.until(lambda: machine.state_of(AGENT) == "active", "the unit")

    machine.run("systemd-run", "--unit=apply", "flock", LOCK, "sleep", "infinity")
    waiting.until(lambda: "FLOCK" in machine.run("cat", "/proc/locks"), "the lock")
    for action in (("-i", PACKAGE), ("--remove", "mig-manager")):
        machine.run("env", "LOCK_WAIT_S=1", "dpkg", *action, status=1)
    machine.run("mig-manager", "version")
    machine.run("systemctl", "stop", "apply")
    machine.run("dpkg", "--remove", "mig-manager")


def test_package_refuses_the_installer_and_keeps_a_lock_in_use(machine: guest.Guest) -> None:
    uninstall = "/usr/local/share/mig-manager/uninstall"
    write(machine, uninstall, "")
    refused = machine.run("dpkg", "-i", PACKAGE, status=1)
    assert f"installed without a package; first run {uninstall}" in refused
    assert not (machine.root / "usr/bin/mig-manager").exists()
    (machine.root / uninstall.removeprefix("/")).unlink()

    machine.run("dpkg", "-i", PACKAGE)
    # As an upgrade of Python does.
    machine.run("find", LIBRARIES, "-name", "__pycache__", "-exec", "rm", "-r", "{}", "+")
    machine.run("dpkg-trigger", "--by-package=mig-manager", "/usr/bin/python3")
    machine.run("dpkg", "--triggers-only", "--pending")
    machine.run("test", "-d", f"{LIBRARIES}/mig_manager/__pycache__")

    before = machine.files()
    refused = machine.run("/root/systemd/install", status=1)
    assert "the package mig-manager is installed: upgrade it, or first remove it" in refused
    refused = machine.run("env", "PREFIX=/usr", "/root/systemd/uninstall", status=1)
    assert "/usr/bin/mig-manager is not ours; nothing was removed" in refused
    assert machine.files() == before

    # As a container with the folder of the lock does.
    machine.run("mkdir", "/run/container")
    machine.run("mount", "--bind", "/run/mig-manager", "/run/container")
    output = machine.run("dpkg", "--purge", "mig-manager")
    assert "kept, because a container uses them: /run/mig-manager, /var/lib/mig-manager" in output
    machine.run("test", "-d", "/run/mig-manager", "-a", "-d", "/var/lib/mig-manager")
