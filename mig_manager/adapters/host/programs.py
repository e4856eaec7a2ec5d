"""Programs of the machine or of its driver: find them below several roots, and run them.

A root is this machine's, the host's in our container, or a driver container's; programs run with
their root. An interpreter of ours calls ``chroot(2)``: an image may lack ``chroot``, and code
between fork and exec is not safe beside threads (``subprocess``, ``preexec_fn``).
"""

import dataclasses
import pathlib
import stat
import sys
import time
from collections.abc import Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.adapters.host import nvml_libraries, root_paths, subprocesses
from mig_manager.core import messages
from mig_manager.core.settings import host_settings

MAX_OUTPUT_BYTES = 64 * 1024
"""How much of a program's output is kept if the caller does not need all of it."""

_TOP = pathlib.Path("/")
_MAX_LINE = 300
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    # Its messages are for logs, and some of them are recognised.
    "LC_ALL": "C",
}
_CHROOT = """\
import os, sys
root, count = sys.argv[1], int(sys.argv[2])
extra, line = sys.argv[3:3 + count], sys.argv[3 + count:]
try:
    os.chroot(root)
    os.chdir("/")
    os.execve(line[0], line, {**os.environ, **dict(each.split("=", 1) for each in extra)})
except OSError as error:
    sys.exit(f"cannot run {line[0]} below {root}: {error.strerror}")
"""

_PROGRAM_FOLDERS = (
    "usr/bin",
    "usr/sbin",
    "bin",
    "sbin",
    "usr/local/bin",
    # Where the GPU operator's toolkit container puts its own on the host.
    "usr/local/nvidia/toolkit",
    f"{nvml_libraries.GKE_FOLDER}/bin",
    # NixOS, and Windows Subsystem for Linux.
    "run/current-system/sw/bin",
    "usr/lib/wsl/lib",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A file system to look for programs in, and to run them in."""

    path: pathlib.Path = _TOP  # its path as we see it; programs run with it as their root
    driver: str = "/"
    """The driver's folder in it: ``/run/nvidia/driver`` on a host with a driver container, whose
    programs then run with the host's libraries but for NVML's."""

    @property
    def driver_here(self) -> pathlib.Path:
        """The driver's root as we see it; its links stay within."""
        return self.path / self.driver.lstrip("/")

    @property
    def is_at_top(self) -> bool:
        """Whether the driver is at the top of the root."""
        return self.driver_here == self.path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that can be run."""

    path: str  # as seen from its root
    root: pathlib.Path  # its root as we see it
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further variables of its environment."""

    def __str__(self) -> str:
        return self.path if self.root == _TOP else f"{self.path} below {self.root}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a program ended; the caller decides whether that is a failure."""

    line: str
    status: int  # negative for a signal
    stdout: str
    is_cut: bool
    stderr: str

    @property
    def output(self) -> str:
        """Its stdout, then its stderr."""
        return f"{self.stdout}\n{self.stderr}"

    def failure(self, reason: reasons.Reason) -> errors.HostError:
        """Return an error with how it ended and its last line of output."""
        # nvidia-smi writes errors to stdout.
        output = last_line(self.stderr) or last_line(self.stdout)
        how = subprocesses.ending(self.status)
        return errors.HostError(
            f"{self.line} {how}{f': {output}' if output else ''}", reason=reason
        )


@dataclasses.dataclass(eq=False, repr=False, match_args=False)
class Programs:
    """Finds programs; for any thread."""

    roots: Sequence[Root] = (Root(),)  # the roots to search, best first
    _: dataclasses.KW_ONLY
    search_path: str = ""  # folders of this machine to search last, as in ``PATH``
    loader_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The environment of programs in ``search_path``."""

    def find(self, name: str) -> Program | None:
        """Return the first program with this file name, or None."""
        for root in self.roots:
            for folder in _PROGRAM_FOLDERS:
                path = pathlib.PurePosixPath("/", folder, name)
                local_path = root_paths.resolve(root.driver_here, path)
                if local_path is not None and _is_program(local_path):
                    path = path if root.is_at_top else _in_root(root, local_path)
                    variables = _variables(root, folder)
                    return Program(path=str(path), root=root.path, variables=variables)
        for folder in self.search_path.split(":"):
            local_path = pathlib.Path(folder, name)
            # A relative folder would depend on where we are started.
            if local_path.is_absolute() and _is_program(local_path):
                return Program(path=str(local_path), root=_TOP, variables=self.loader_variables)
        return None


def run(
    program: Program,
    arguments: Sequence[str] = (),
    *,
    timeout_s: float,
    reason: reasons.Reason,
    max_output_bytes: int = MAX_OUTPUT_BYTES,
    stdin: str = "",
) -> Finished:
    """Run a program; HostError with ``reason`` if it cannot be started or takes too long."""
    line = " ".join((str(program), *arguments))
    command: tuple[str, ...] = (program.path, *arguments)
    environment = {**_ENVIRONMENT, **program.variables}
    if program.root != _TOP:
        # The variables are for the program: our interpreter cannot preload its library.
        extra = [f"{name}={value}" for name, value in program.variables.items()]
        python = (sys.executable, "-I", "-S", "-c", _CHROOT)
        command = (*python, str(program.root), str(len(extra)), *extra, *command)
        environment = _ENVIRONMENT
    deadline_s = time.monotonic() + timeout_s
    try:
        outcome = subprocesses.run(
            command,
            environment=environment,
            folder="/",
            stdin=stdin,
            is_late=lambda: time.monotonic() >= deadline_s,
            keep=subprocesses.Keep(max_output_bytes, stderr_bytes=MAX_OUTPUT_BYTES),
        )
    except OSError as error:
        why = error.strerror or error
        raise errors.HostError(f"{line} cannot be run: {why}", reason=reason) from error
    if outcome.status is None:
        output = last_line(outcome.stderr)
        raise errors.HostError(
            f"{line} did not end within {timeout_s:g} s and was killed"
            f"{f': {output}' if output else ''}",
            reason=reason,
        )
    return Finished(
        line=line,
        status=outcome.status,
        stdout=outcome.stdout,
        is_cut=outcome.is_cut,
        stderr=outcome.stderr,
    )


def roots(host: host_settings.HostRoots) -> tuple[Root, ...]:
    """Return the roots that may have the driver's programs, best first.

    Our own root comes first: NVIDIA's container toolkit puts them there. A driver container that
    has the device nodes is the next root; otherwise the host, which has them, comes before it.
    """
    at_driver = Root(path=host.driver_here)
    at_host = Root(path=host.host_here, driver=str(host.driver))
    order = (at_driver, at_host) if host.dev_here == host.driver_here else (at_host, at_driver)
    return tuple(dict.fromkeys((Root(), *order, Root(path=host.host_here))))


def last_line(text: str) -> str:
    """Return the last line that is not blank, without control characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return messages.printable(lines[-1][:_MAX_LINE] if lines else "")


def _is_program(path: pathlib.Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) and bool(mode & 0o111)


def _variables(root: Root, folder: str) -> Mapping[str, str]:
    """Return the variables with which a driver's program loads the NVML library.

    That library alone, as in NVIDIA's own manager: its folder may have another distribution's
    libc.
    """
    if root.is_at_top and not folder.startswith(nvml_libraries.GKE_FOLDER):
        return {}
    library = next(nvml_libraries.find(root.driver_here), None)
    return {"LD_PRELOAD": str(_in_root(root, library))} if library else {}


def _in_root(root: Root, local_path: pathlib.Path) -> pathlib.PurePosixPath:
    """Return a path of ours as a process with that root sees it."""
    return pathlib.PurePosixPath("/", local_path.relative_to(root.path))
