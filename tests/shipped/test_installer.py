"""The installer of the units: the files on disk, and what an administrator made of them."""

import fcntl
import os
import pathlib
import shutil
import stat
import subprocess
import sys

import pytest

import mig_manager
from tests.rigs import programs
from tests.rigs.programs import run, write_script
from tests.rigs.shipped.unit_files import BOOT, MANUAL, SYSTEMD, UNITS

SETTINGS = {"mig-manager.env", "config.yaml"}


class InstalledMachine:
    """The root of a machine's files, and the installer that writes below it."""

    def __init__(self, root: pathlib.Path, wheel: pathlib.Path, systemd: pathlib.Path) -> None:
        self.root = root
        self.wheel = wheel
        self.systemd = systemd

    def install(self, **environ: str) -> subprocess.CompletedProcess[str]:
        folders = {
            "DESTDIR": str(self.root),
            "PYTHON": sys.executable,
            # The libraries are those of the tests; pip then needs no network.
            "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1",
        }
        return run(self.systemd / "install", self.wheel, cwd=None, **folders | environ)

    def uninstall(self, **environ: str) -> subprocess.CompletedProcess[str]:
        program = self.path("usr/local/share/mig-manager/uninstall")
        return run(
            "env", f"DESTDIR={self.root}", *(f"{k}={v}" for k, v in environ.items()), program
        )

    def path(self, name: str) -> pathlib.Path:
        return self.root / name

    def files(self) -> dict[str, bytes]:
        """Return what is there, but for the interpreter's own."""
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file() and self.path("usr/local/lib/mig-manager") not in path.parents
        }


@pytest.fixture
def machine(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> InstalledMachine:
    systemd = tmp_path / "systemd"
    shutil.copytree(SYSTEMD, systemd)
    # The others are refused before the file is opened.
    is_slow = request.node.get_closest_marker("slow") is not None
    wheel = request.getfixturevalue("wheel") if is_slow else systemd / "install"
    made = InstalledMachine(tmp_path / "root", wheel, systemd)
    made.root.mkdir()
    return made


@pytest.mark.slow
def test_install_and_uninstall_change_nothing_while_a_manager_works(
    machine: InstalledMachine,
) -> None:
    uninstall = machine.path("usr/local/share/mig-manager/uninstall")
    lock = machine.path("run/mig-manager/lock")
    for folder in (uninstall.parent, lock.parent):
        folder.mkdir(parents=True)
    for name in ("uninstall", "paths.sh"):
        shutil.copy(machine.systemd / name, uninstall.parent)
    lock.with_name("lock.owner").write_text("mig-manager apply all-1g.5gb")
    before = machine.files()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        for act, done in ((machine.install, "installed"), (machine.uninstall, "removed")):
            refused = act(LOCK_WAIT_S="0")

            assert refused.returncode == 1
            assert f"nothing was {done}: mig-manager apply all-1g.5gb\n" in refused.stderr

    assert machine.files().keys() == {*before, "run/mig-manager/lock"}
    assert machine.uninstall(LOCK_WAIT_S="0").returncode == 0


PREFIX = "usr/local"
LAUNCHER = f"{PREFIX}/bin/mig-manager"
LIBRARY = f"{PREFIX}/lib/mig-manager"
UNIT_FOLDER = f"{PREFIX}/lib/systemd/system"
FILES = {
    LAUNCHER,
    *(f"{UNIT_FOLDER}/{unit}" for unit in UNITS),
    f"{PREFIX}/lib/tmpfiles.d/mig-manager.conf",
    *(f"{PREFIX}/share/mig-manager/{name}" for name in ("uninstall", "paths.sh", *SETTINGS)),
    *(f"{PREFIX}/share/man/man1/{page}" for page in MANUAL),
    *(f"etc/mig-manager/{name}" for name in SETTINGS),
}
LIBRARIES = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))


def assert_runs(machine: InstalledMachine) -> None:
    """Check that the library has its own interpreter, and runs with the libraries of the tests."""
    programs_folder = machine.path(LIBRARY) / "bin"
    version = run(
        *(programs_folder / "python", "-P", "-m", "mig_manager", "--version"),
        PYTHONPATH=LIBRARIES,
    )
    assert version.stdout == f"mig-manager {mig_manager.__version__}\n", version.stderr
    names = {path.name for path in programs_folder.iterdir()}
    assert names <= {"python", "python3", f"python3.{sys.version_info.minor}"}


def assert_launches_as_mig_parted(machine: InstalledMachine) -> None:
    """Check that the launcher says so under another name, and has no path of the machine."""
    launcher = machine.path(LAUNCHER)
    assert stat.S_IMODE(launcher.stat().st_mode) == 0o755
    text = launcher.read_text(encoding="utf-8")
    assert str(machine.root) not in text
    mig_parted = machine.path("nvidia-mig-parted")
    # Here it looks for its library where it was put.
    mig_parted.write_text(text.replace("'/usr", f"'{machine.root}/usr"))
    mig_parted.chmod(0o755)
    assert run(mig_parted, "assert", "-f", "/no/file", PYTHONPATH=LIBRARIES).returncode == 1
    mig_parted.unlink()


@pytest.mark.slow
def test_installation_is_repeatable_and_removed_as_a_whole(machine: InstalledMachine) -> None:
    first = machine.install()
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("installing the program and its libraries in /usr/local/lib/")
    once = machine.files()
    assert machine.install().returncode == 0
    assert machine.files() == once
    assert set(once) == FILES
    assert b"ExecStart=/usr/local/bin/mig-manager boot" in once[f"{UNIT_FOLDER}/{BOOT}"]
    assert_runs(machine)
    assert_launches_as_mig_parted(machine)

    gone = machine.uninstall()
    assert (gone.returncode, gone.stdout) == (0, ""), gone.stderr
    assert machine.files() == {}
    assert not machine.path(LIBRARY).exists()


def test_an_uninstallation_leaves_no_failed_unit_and_no_link(
    machine: InstalledMachine, tmp_path: pathlib.Path
) -> None:
    systemctl, log = tmp_path / "bin" / "systemctl", tmp_path / "log"
    write_script(systemctl, f'echo "$@" >>{log}\necho active')
    bin_folder = machine.path("usr/local/bin")
    bin_folder.mkdir(parents=True)
    link, other = bin_folder / "nvidia-mig-parted", machine.path("usr/bin/nvidia-mig-parted")
    other.parent.mkdir(parents=True)
    link.symlink_to("/usr/local/bin/mig-manager")
    other.symlink_to("/opt/nvidia/nvidia-mig-parted")
    # As on a machine with systemd, but below the root of the test.
    paths = machine.systemd / "paths.sh"
    text = paths.read_text(encoding="utf-8")
    start = text.index("is_here() {")
    paths.write_text(f"{text[:start]}is_here() {{ :; }}\n", encoding="utf-8")

    path = f"PATH={systemctl.parent}:{os.environ['PATH']}"
    settings = (f"DESTDIR={machine.root}", path, "LOCK_WAIT_S=0")
    line = ("env", *settings, machine.systemd / "uninstall")
    lock = machine.path("run/mig-manager/lock")
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused = programs.run(*line)
        refused_calls = log.read_text(encoding="utf-8").splitlines()
    programs.output(*line)
    calls = log.read_text(encoding="utf-8").splitlines()

    assert "nothing was removed" in refused.stderr
    assert [call.split()[0] for call in refused_calls] == ["is-active", "stop", "start"]
    assert not link.is_symlink()
    assert other.is_symlink()
    for unit in UNITS:
        assert calls.index(f"disable --now --quiet {unit}") < calls.index(f"reset-failed {unit}")


@pytest.mark.slow
def test_own_files_outlive_upgrade_and_uninstallation(machine: InstalledMachine) -> None:
    machine.install()
    edited = machine.path("etc/mig-manager/mig-manager.env")
    edited.write_text("NODE_NAME=mine\n", encoding="utf-8")
    drop_in = machine.path(f"etc/systemd/system/{BOOT}.d/override.conf")
    journal = machine.path("var/lib/mig-manager/journal.json")
    kubeconfig = machine.path("etc/mig-manager/kubeconfig")
    for made in (drop_in, journal, kubeconfig):
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text("x", encoding="utf-8")
    kept = machine.path("var/lib/mig-manager/verified-layout.json")
    kept.write_text("y", encoding="utf-8")
    for name in ("mig-manager.env", BOOT):
        with (machine.systemd / name).open("a", encoding="utf-8") as newer:
            newer.write("# A newer version.\n")

    upgraded = machine.install()

    assert "kept as it is: /etc/mig-manager/mig-manager.env (the one of" in upgraded.stdout
    assert edited.read_text(encoding="utf-8") == "NODE_NAME=mine\n"
    unit = machine.path(f"usr/local/lib/systemd/system/{BOOT}").read_text(encoding="utf-8")
    assert unit.endswith("# A newer version.\n")

    gone = machine.uninstall()

    expected = {
        str(path.relative_to(machine.root)) for path in (edited, drop_in, journal, kubeconfig)
    }
    assert set(machine.files()) == expected
    assert set(gone.stdout.splitlines()) == {f"kept: /{name}" for name in expected}
    assert not kept.exists()


@pytest.mark.slow
def test_unchanged_example_follows_an_upgrade_that_succeeds(machine: InstalledMachine) -> None:
    machine.install()
    with (machine.systemd / "mig-manager.env").open("a", encoding="utf-8") as newer:
        newer.write("# A newer version.\n")
    assert machine.install().returncode == 0
    text = machine.path("etc/mig-manager/mig-manager.env").read_text(encoding="utf-8")
    assert text.endswith("# A newer version.\n")

    before = machine.files()
    machine.wheel = machine.systemd / "no.whl"
    machine.wheel.write_text("no wheel", encoding="utf-8")

    assert machine.install().returncode != 0

    assert machine.files() == before
    assert machine.path("usr/local/lib/mig-manager/bin/python").exists()


def test_a_program_of_the_same_name_is_neither_replaced_nor_removed(
    machine: InstalledMachine,
) -> None:
    other = machine.path("usr/local/bin/mig-manager")
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\n", encoding="utf-8")

    refused = machine.install()

    assert refused.returncode == 1
    assert "exists and is not mig-manager's" in refused.stderr
    assert run(machine.systemd / "uninstall", DESTDIR=str(machine.root)).returncode == 1
    assert set(machine.files()) == {"usr/local/bin/mig-manager"}


def test_the_installer_refuses_where_the_package_is_installed(machine: InstalledMachine) -> None:
    package = machine.path("usr/bin/mig-manager")
    package.parent.mkdir(parents=True)
    package.write_text("#!/bin/sh\n# Made by mig-manager's package.\n")

    refused = machine.install()

    assert refused.returncode == 1
    assert "the package mig-manager is installed: upgrade it, or first remove it" in refused.stderr
    assert set(machine.files()) == {"usr/bin/mig-manager"}


@pytest.mark.slow
def test_another_prefix_is_known_to_units_and_uninstaller(machine: InstalledMachine) -> None:
    machine.install(PREFIX="/opt/mig", SYSCONFDIR="/opt/mig/etc")
    unit = machine.path(f"etc/systemd/system/{BOOT}").read_text(encoding="utf-8")

    assert "ExecStart=/opt/mig/bin/mig-manager boot\n" in unit
    assert "EnvironmentFile=-/opt/mig/etc/mig-manager/mig-manager.env\n" in unit
    gone = run(machine.path("opt/mig/share/mig-manager/uninstall"), DESTDIR=str(machine.root))
    assert (gone.returncode, gone.stdout) == (0, ""), gone.stderr
    assert machine.files() == {}


def test_interpreter_that_is_too_old_is_refused(machine: InstalledMachine) -> None:
    refused = machine.install(PYTHON="/bin/false")

    assert refused.returncode == 1
    assert "/bin/false is not Python 3.11 or newer" in refused.stderr
    assert machine.files() == {}


def test_folder_that_cannot_be_written_is_refused(machine: InstalledMachine) -> None:
    refused = machine.install(DESTDIR="/proc")

    assert refused.returncode == 1
    assert refused.stderr == "install: cannot write to /proc/usr/local/lib; run as root\n"
