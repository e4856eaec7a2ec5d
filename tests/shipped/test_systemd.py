"""The units and their installer: the commands that systemd runs, and the files on disk."""

import contextlib
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping

import pytest

import mig_manager
from mig_manager.agent import settings
from mig_manager.cli import command_settings, parser
from tests import programs
from tests.shipped.unit_files import (
    ROOT,
    Asked,
    agent_settings,
    directives,
    example_environ,
    longest_stop_s,
    unit_command_line,
    unit_environ,
)

SYSTEMD = ROOT / "systemd"
UNITS = ["mig-manager.service", "mig-manager-boot.service"]
BOOT = "mig-manager-boot.service"
EXPOSURE = 40
"""From 0, nothing to fear, to 100."""
SETTINGS = {"mig-manager.env", "config.yaml"}
NO_SYSTEMD = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here"
)


def boot_settings(environ: Mapping[str, str]) -> command_settings.CommandSettings:
    parsed = parser.parse(unit_command_line(BOOT))
    assert parsed["command"] == "boot"
    return command_settings.command_settings(parsed, environ)


def run(*command: str | pathlib.Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - the arguments are this file's own
        [str(part) for part in command],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"} | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


# -- the units ----------------------------------------------------------------------------------


@NO_SYSTEMD
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_unit_which_gives_up_most_of_what_a_service_could_do(
    unit: str,
) -> None:
    verified = run("systemd-analyze", "verify", SYSTEMD / unit)
    options = ("--offline=true", "--no-pager", f"--threshold={EXPOSURE}")
    judged = run("systemd-analyze", "security", *options, SYSTEMD / unit)

    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    assert judged.returncode == 0, judged.stdout


CHECK = """
import json
from mig_manager.adapters.host import procfs
pids = [each.pid for each in procfs.gpu_processes(procfs.ROOT)]
print(json.dumps([pids, procfs.hidden(procfs.ROOT)]))
"""


@pytest.mark.skipif(
    shutil.which("setpriv") is None or os.geteuid() != 0, reason="only root can drop capabilities"
)
@pytest.mark.parametrize("unit", UNITS)
def test_with_the_units_capabilities_every_process_that_has_a_gpu_open_is_seen(
    unit: str, tmp_path: pathlib.Path
) -> None:
    # No simulated node has it: tests beside this one look for users of theirs in the same /proc.
    device = tmp_path / "dev" / "nvidia97"
    device.parent.mkdir()
    device.touch()
    tmp_path.chmod(0o755)
    (capabilities,) = directives(unit)["CapabilityBoundingSet"]
    added = [f"+{each.removeprefix('CAP_').lower()}" for each in capabilities.split()]
    with device.open() as opened, contextlib.ExitStack() as stack:
        ours, theirs = (
            stack.enter_context(subprocess.Popen(["/bin/sleep", "60"], stdin=opened, user=user))
            for user in (None, 65534)
        )
        bounded = ("setpriv", "--bounding-set", ",".join(["-all", *added]))
        looked = run(*bounded, sys.executable, "-c", CHECK, PYTHONPATH=str(ROOT))
        for process in (ours, theirs):
            process.kill()

    seen, hidden = json.loads(looked.stdout)
    # Other tests may have the like open.
    assert {os.getpid(), ours.pid, theirs.pid} <= set(seen)
    assert hidden == ""


@pytest.mark.parametrize("unit", UNITS)
def test_the_lock_outlives_the_unit_and_only_its_main_process_is_stopped(unit: str) -> None:
    section = directives(unit)
    (running,), (state,) = section["RuntimeDirectory"], section["StateDirectory"]
    at_a_shell = command_settings.command_settings({}, {})

    # Everything else is read-only to the unit, and what goes with it would be another's lock.
    assert section["ProtectSystem"] == ["strict"]
    assert section["RuntimeDirectoryPreserve"] == ["yes"]
    # A change is finished first.
    assert section["KillMode"] == ["mixed"]
    assert pathlib.Path("/run", running) == at_a_shell.lock_file.parent
    assert pathlib.Path("/var/lib", state) == at_a_shell.journal_file.parent
    assert pathlib.Path("/var/lib", state) == at_a_shell.verified_layout_file.parent


def test_agent_apply_and_boot_share_lock_and_kept_layout() -> None:
    agent = agent_settings(unit_command_line(), unit_environ())
    boot = boot_settings({})

    assert (agent.lock_file, agent.verified_layout_file) == (
        boot.lock_file,
        boot.verified_layout_file,
    )
    assert directives(BOOT)["EnvironmentFile"] == directives(UNITS[0])["EnvironmentFile"]


def test_the_boot_is_over_before_anybody_can_hold_a_gpu_and_once_the_driver_is_there() -> None:
    section = directives(BOOT)
    before = " ".join(section["Before"]).split()
    after = " ".join(section["After"]).split()

    assert {
        "kubelet.service",
        "k3s.service",
        "containerd.service",
        "docker.service",
        "nvidia-dcgm.service",
        "nvidia-gpu-reset.target",
        "slurmd.service",
        "mig-manager.service",
    } <= set(before)
    assert {"nvidia-persistenced.service", "modprobe@nvidia.service"} <= set(after)
    assert not set(before) & set(after)
    assert BOOT in " ".join(directives(UNITS[0])["After"]).split()


def test_systemd_gives_the_boot_the_time_it_gives_itself() -> None:
    section = directives(BOOT)
    parsed = boot_settings({})
    timeouts = {
        key: float(section[key][0].removesuffix("s")) for key in section if "Timeout" in key
    }

    # Observe, change, and roll back.
    needs = parsed.driver_timeout_s + parsed.lock_timeout_s + 3 * parsed.gpu_timeout_s
    assert timeouts["TimeoutStartSec"] > needs
    assert timeouts["TimeoutStopSec"] > 2 * parsed.gpu_timeout_s
    assert (section["Type"], section["RemainAfterExit"]) == (["oneshot"], ["yes"])


def test_the_unit_starts_the_agent_with_files_below_etc_and_takes_variables_from_its_file() -> (
    None
):  # fmt: skip
    parsed = agent_settings(unit_command_line(), unit_environ())
    other = {"NODE_NAME": "node-2", "CONFIG_FILE": "/c", "KUBECONFIG": "/k"}
    changed = agent_settings(unit_command_line(), unit_environ() | other)

    def chosen(each: settings.AgentSettings) -> tuple[str, ...]:
        return each.node_name, str(each.config_file), str(each.kubeconfig)

    etc = "/etc/mig-manager"
    assert chosen(parsed) == ("node-1", f"{etc}/config.yaml", f"{etc}/kubeconfig")
    assert chosen(changed) == ("node-2", "/c", "/k")
    assert directives("mig-manager.service")["EnvironmentFile"] == [f"-{etc}/mig-manager.env"]


def test_the_example_of_the_units_environment_shows_variables_that_count_with_their_defaults() -> (
    None
):  # fmt: skip
    for_agent, for_boot = Asked(example_environ()), Asked(example_environ())

    assert agent_settings(unit_command_line(), for_agent) == agent_settings(
        unit_command_line(), unit_environ()
    )
    assert boot_settings(for_boot) == boot_settings({})
    assert for_agent.keys() <= for_agent.names | for_boot.names


def test_systemd_leaves_the_agent_the_time_to_finish_or_undo_a_change() -> None:
    (timeouts,) = directives("mig-manager.service")["TimeoutStopSec"]
    parsed = agent_settings(unit_command_line(), unit_environ())

    assert float(timeouts.removesuffix("s")) > longest_stop_s(parsed)


# -- the installer ------------------------------------------------------------------------------


class Machine:
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
        return run(self.systemd / "install", self.wheel, **folders | environ)

    def uninstall(self) -> subprocess.CompletedProcess[str]:
        return run(self.path("usr/local/share/mig-manager/uninstall"), DESTDIR=str(self.root))

    def path(self, name: str) -> pathlib.Path:
        return self.root / name

    def files(self) -> dict[str, bytes]:
        """Return what is there, but for the interpreter's own."""
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file() and self.path("usr/local/lib/mig-manager") not in path.parents
        }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(  # noqa: S603 - the arguments are this file's own
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (built,) = folder.iterdir()
    return built


@pytest.fixture
def machine(tmp_path: pathlib.Path, wheel: pathlib.Path) -> Machine:
    systemd = tmp_path / "systemd"
    shutil.copytree(SYSTEMD, systemd)
    made = Machine(tmp_path / "root", wheel, systemd)
    made.root.mkdir()
    return made


@pytest.mark.slow
def test_an_installation_is_the_same_the_second_time_and_gone_after_the_uninstallation(
    machine: Machine,
) -> None:
    first = machine.install()
    assert first.returncode == 0, first.stderr
    once = machine.files()
    assert machine.install().returncode == 0
    assert machine.files() == once

    prefix = "usr/local"
    assert set(once) == {
        f"{prefix}/bin/mig-manager",
        *(f"{prefix}/lib/systemd/system/{unit}" for unit in UNITS),
        f"{prefix}/lib/tmpfiles.d/mig-manager.conf",
        *(f"{prefix}/share/mig-manager/{name}" for name in ("uninstall", "paths.sh", *SETTINGS)),
        *(f"etc/mig-manager/{name}" for name in SETTINGS),
    }
    assert (
        b"ExecStart=/usr/local/bin/mig-manager boot" in once[f"{prefix}/lib/systemd/system/{BOOT}"]
    )
    launcher = machine.path(f"{prefix}/bin/mig-manager")
    assert stat.S_IMODE(launcher.stat().st_mode) == 0o755
    assert str(machine.root) not in launcher.read_text(encoding="utf-8")

    library = machine.path(f"{prefix}/lib/mig-manager")
    libraries = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    version = run(
        *(library / "bin" / "python", "-P", "-m", "mig_manager", "--version"),
        PYTHONPATH=libraries,
    )
    assert version.stdout == f"mig-manager {mig_manager.__version__}\n", version.stderr

    # Under another name the launcher says so; here it looks for its library where it was put.
    mig_parted = machine.path("nvidia-mig-parted")
    mig_parted.write_text(
        launcher.read_text(encoding="utf-8").replace("'/usr", f"'{machine.root}/usr")
    )
    mig_parted.chmod(0o755)
    assert run(mig_parted, "assert", "-f", "/no/file", PYTHONPATH=libraries).returncode == 1
    mig_parted.unlink()
    assert {path.name for path in (library / "bin").iterdir()} <= {
        "python",
        "python3",
        f"python3.{sys.version_info.minor}",
    }

    gone = machine.uninstall()
    assert (gone.returncode, gone.stdout) == (0, ""), gone.stderr
    assert machine.files() == {}
    assert not library.exists()


class FakeSystemctl:
    """A ``systemctl`` on PATH that writes down what it is asked."""

    def __init__(self, folder: pathlib.Path) -> None:
        folder.mkdir()
        self.path = f"{folder}:{os.environ['PATH']}"
        self._log = folder / "log"
        self._log.touch()
        program = folder / "systemctl"
        program.write_text(f'#!/bin/sh\necho "$@" >>{self._log}\n', encoding="utf-8")
        program.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._log.read_text(encoding="utf-8").splitlines()


def test_an_uninstallation_leaves_no_failed_unit_and_no_link_of_ours(
    machine: Machine, tmp_path: pathlib.Path
) -> None:
    systemctl = FakeSystemctl(tmp_path / "bin")
    bin_folder = machine.path("usr/local/bin")
    bin_folder.mkdir(parents=True)
    ours, other = bin_folder / "nvidia-mig-parted", machine.path("usr/bin/nvidia-mig-parted")
    other.parent.mkdir(parents=True)
    ours.symlink_to("/usr/local/bin/mig-manager")
    other.symlink_to("/opt/nvidia/nvidia-mig-parted")
    # As on a machine with systemd, but below the root of the test.
    paths = machine.systemd / "paths.sh"
    text = paths.read_text(encoding="utf-8")
    start = text.index("is_here() {")
    paths.write_text(f"{text[:start]}is_here() {{ :; }}\n", encoding="utf-8")

    gone = run(machine.systemd / "uninstall", DESTDIR=str(machine.root), PATH=systemctl.path)

    assert gone.returncode == 0, gone.stderr
    assert not ours.is_symlink()
    assert other.is_symlink()
    for unit in UNITS:
        assert systemctl.calls.index(f"disable --now --quiet {unit}") < systemctl.calls.index(
            f"reset-failed {unit}"
        )


@pytest.mark.slow
def test_what_an_administrator_has_made_outlives_upgrade_and_uninstallation(
    machine: Machine,
) -> None:
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
    assert set(gone.stdout.splitlines()) == {f"left: /{name}" for name in expected}
    assert not kept.exists()


@pytest.mark.slow
def test_an_unchanged_example_follows_the_version_and_a_failed_upgrade_changes_nothing(
    machine: Machine,
) -> None:
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


def test_a_program_of_the_same_name_is_neither_replaced_nor_removed(machine: Machine) -> None:
    other = machine.path("usr/local/bin/mig-manager")
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\n", encoding="utf-8")

    refused = machine.install()

    assert refused.returncode == 1
    assert "is there and not ours" in refused.stderr
    assert run(machine.systemd / "uninstall", DESTDIR=str(machine.root)).returncode == 1
    assert set(machine.files()) == {"usr/local/bin/mig-manager"}


@pytest.mark.slow
def test_another_prefix_and_other_settings_are_found_by_units_and_uninstaller(
    machine: Machine,
) -> None:
    machine.install(PREFIX="/opt/mig", SYSCONFDIR="/opt/mig/etc")
    unit = machine.path(f"etc/systemd/system/{BOOT}").read_text(encoding="utf-8")

    assert "ExecStart=/opt/mig/bin/mig-manager boot\n" in unit
    assert "EnvironmentFile=-/opt/mig/etc/mig-manager/mig-manager.env\n" in unit
    gone = run(machine.path("opt/mig/share/mig-manager/uninstall"), DESTDIR=str(machine.root))
    assert (gone.returncode, gone.stdout) == (0, ""), gone.stderr
    assert machine.files() == {}


def test_an_interpreter_that_is_too_old_is_named_before_anything_is_written(
    machine: Machine,
) -> None:
    refused = machine.install(PYTHON="/bin/false")

    assert refused.returncode == 1
    assert "/bin/false is not Python 3.11 or newer" in refused.stderr
    assert machine.files() == {}


def test_the_scripts_are_clean() -> None:
    names = ("install", "uninstall", "paths.sh")
    checked = run(programs.needed("shellcheck"), "-x", *(SYSTEMD / name for name in names))

    assert checked.returncode == 0, checked.stdout


# -- pages -----------------------------------------------------------------------


def test_the_guide_names_files_and_times_as_they_are() -> None:
    page = (ROOT / "docs" / "bare-metal.md").read_text(encoding="utf-8")
    parsed = boot_settings({})

    assert f"`{parsed.verified_layout_file}`" in page
    assert f"`{parsed.lock_file}`" in page
    assert f"{parsed.driver_timeout_s:g} s at most (`--driver-timeout-s`)" in page
    assert f"mig_manager-{mig_manager.__version__}-py3-none-any.whl" in page
    assert [unit for unit in UNITS if f"`{unit}`" not in page] == []
