"""A Debian with its systemd as PID 1, in namespaces; it boots, runs commands and reboots.

Nothing of the machine is changed but the folder. The guest has no network.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator

from tests.rigs import programs, waiting
from tests.shipped import building

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
CACHE /= "mig-manager-guests"
_BOOT = pathlib.Path(__file__).with_name("guest-boot")
_PACKAGES = "dbus,python3,systemd,systemd-sysv"
_MACHINE_STATE = ("/dev", "/proc", "/run", "/sys", "/tmp", "/var/log/journal", "/var/tmp")  # noqa: S108 - the guest's
_REBOOTED = 128 + signal.SIGHUP
"""What a PID namespace ends with when its first process asks the kernel to reboot."""


def missing() -> str:
    """Return what keeps this machine from running a guest; empty if nothing does."""
    if os.geteuid() != 0:
        return "only root can boot a guest"
    needed = ("chroot", "mmdebstrap", "nsenter", "setpriv", "tar", "unshare")
    absent = [name for name in needed if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return "" if programs.run("unshare", "--mount", "true").returncode == 0 else "no namespaces"


def unpack(suite: str, root: pathlib.Path) -> None:
    """Write a release of Debian into a folder; it is downloaded once and kept."""
    archive = CACHE / f"{suite}.tar"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        part = archive.with_suffix(".part.tar")
        options = ("--variant=minbase", "--mode=root", "--quiet", f"--include={_PACKAGES}")
        building.run("mmdebstrap", *options, suite, part, cwd=CACHE)
        part.rename(archive)
    root.mkdir()
    programs.output("tar", "--directory", root, "--extract", "--file", archive)
    # Debian's timers write files at midnight.
    (root / "etc/systemd/system/timers.target").symlink_to("/dev/null")


class Guest:
    """A guest that was booted once, and may have ended since."""

    def __init__(self, root: pathlib.Path, log: pathlib.Path) -> None:
        self.root = root
        self._log = log
        self._start()

    def run(self, *command: str, status: int = 0) -> str:
        """Run a command as a person at a shell does, and return its output."""
        namespaces = ("nsenter", "--all", f"--target={self._pid}")
        done = programs.run(*namespaces, "--", "/usr/bin/env", *command, HOME="/root")
        output = done.stdout + done.stderr
        assert done.returncode == status, f"{command}: {output}"
        return output

    def state_of(self, unit: str, what: str = "ActiveState") -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", f"--property={what}", "--value", unit).strip()

    def shut_down(self) -> None:
        """Have systemd stop everything, as for a reboot."""
        self.run("systemctl", "reboot")
        assert self._process.wait(120) == _REBOOTED, self._log.read_text(errors="replace")

    def reboot(self) -> None:
        """Boot again after ``shut_down``."""
        self._start()

    def end(self) -> None:
        """End every process of the guest."""
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(self._pid, signal.SIGKILL)
        self._process.wait(60)

    def files(self) -> set[str]:
        """Return the files and folders that outlive a reboot."""
        every = (path.relative_to(self.root) for path in self.root.rglob("*"))
        return {f"/{path}" for path in every if not f"/{path}".startswith(_MACHINE_STATE)}

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the tests' own
                [
                    *(programs.path_or_skip("setpriv"), "--pdeathsig", "KILL"),
                    *("unshare", "--mount", str(_BOOT), str(self.root)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        waiting.until(self._is_up, f"the start of systemd: {self._log}")
        state = programs.run(
            *("nsenter", "--all", f"--target={self._pid}", "--"),
            *("/usr/bin/systemctl", "is-system-running", "--wait"),
        )
        assert state.stdout.strip() in {"running", "degraded"}, state.stderr

    @property
    def _pid(self) -> int:
        """PID 1 of the guest: boot's unshare's child."""
        pid = self._process.pid
        for _ in range(2):
            children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
            pid = int(children.split()[0])
        return pid

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self._log.read_text(errors="replace")
        with contextlib.suppress(IndexError, OSError):
            if pathlib.Path(f"/proc/{self._pid}/comm").read_text() == "systemd\n":
                return pathlib.Path(f"/proc/{self._pid}/root/run/systemd/private").is_socket()
        return False


@contextlib.contextmanager
def boot(suite: str) -> Iterator[Guest]:
    """Boot a release of Debian, and end it."""
    # Not below pytest's folder: it keeps those of earlier runs, and this one is large.
    with tempfile.TemporaryDirectory(prefix="mig-manager-guest-") as folder:
        root = pathlib.Path(folder, "root")
        unpack(suite, root)
        guest = Guest(root, pathlib.Path(folder, "log"))
        try:
            yield guest
        finally:
            guest.end()
