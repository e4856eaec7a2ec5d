"""Programs of the machine or of its driver: found below one of several roots, and run to an end.

In a container the driver's programs lie below the root of a driver container or of the host, and
need the libraries that lie there with them; they are run with that root as theirs.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence

from mig_manager import errors
from mig_manager.adapters.host import driver_files, subprocesses
from mig_manager.core import messages
from mig_manager.core.host import host_settings

MAX_OUTPUT_BYTES = 64 * 1024
"""How much of what a program says is kept where the caller does not need all of it."""

_TOP = pathlib.Path("/")
_MAX_SAID = 300


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A file system to look for programs in, and to run them in."""

    path: pathlib.Path = _TOP
    """Where we see it; programs run with it as their root."""
    driver: str = "/"
    """Where in it the driver lies, if not at the top: ``/run/nvidia/driver`` on a host with a
    driver container. Its programs then run with the host's libraries but for NVML's."""

    @property
    def driver_here(self) -> pathlib.Path:
        """Where we see the driver's root, within which its links lead."""
        return self.path / self.driver.lstrip("/")

    @property
    def is_at_top(self) -> bool:
        """Whether the driver lies at the top of the root."""
        return self.driver_here == self.path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that can be run."""

    path: str
    """As seen from its root."""
    root: pathlib.Path
    """Where we see its root."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What its environment has beside the usual."""

    def __str__(self) -> str:
        return self.path if self.root == _TOP else f"{self.path} below {self.root}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a program ended; whether that is good is for the caller to say."""

    line: str
    """The program and its arguments, for people."""
    status: int
    """Its exit status; negative for a signal."""
    stdout: str
    is_cut: bool
    """Whether ``stdout`` is only the beginning of what it wrote."""
    stderr: str
    """The end of what it wrote there."""

    def refused(self, reason: errors.Reason) -> errors.HostError:
        """Return an error that says how it ended and what it said last."""
        how = f"status {self.status}" if self.status >= 0 else f"signal {-self.status}"
        # nvidia-smi tells what is wrong on stdout.
        said = last_line(self.stderr) or last_line(self.stdout)
        return errors.HostError(
            f"{self.line} ended with {how}{f': {said}' if said else ''}", reason=reason
        )


class Programs:
    """Finds and runs programs; for any thread.

    Args:
        roots: Where to look, best first.
        folders: Where in a root programs are, best first.
        search_path: Folders of this machine to look in last, as in ``PATH``; empty: none.
        loader_variables: What a program that is found there has in its environment.
        monotonic: Seconds from some fixed point.
    """

    def __init__(
        self,
        roots: Sequence[Root] = (Root(),),
        *,
        folders: Sequence[str] = driver_files.PROGRAM_FOLDERS,
        search_path: str = "",
        loader_variables: Mapping[str, str] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roots = tuple(roots)
        self._folders = tuple(folders)
        self._search_path = search_path
        self._loader_variables = loader_variables or {}
        self._monotonic = monotonic

    def find(self, name: str) -> Program | None:
        """Return the first program of that name, or None when there is none.

        Args:
            name: A file name, not a path.
        """
        found = (program for root in self._roots if (program := self._in(root, name)))
        return next(found, None) or self._on_path(name)

    def run(
        self,
        program: Program,
        arguments: Sequence[str] = (),
        *,
        timeout_s: float,
        reason: errors.Reason,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        given: str = "",
    ) -> Finished:
        """Run a program to its end; nothing of its process group is left afterwards.

        Args:
            program: What ``find`` returned.
            arguments: Passed as they are; there is no shell.
            timeout_s: How long it may take before it is killed.
            reason: The reason of the error when it cannot be run or takes too long.
            max_output_bytes: How much of its stdout to keep.
            given: What it reads from stdin.

        Raises:
            HostError: With ``reason``: it could not be started, or was killed for its time.
        """
        line = " ".join((str(program), *arguments))
        try:
            process = subprocesses.start(
                (program.path, *arguments),
                root=program.root,
                variables=program.variables,
                given=given,
            )
        except OSError as error:
            why = error.strerror or error
            raise errors.HostError(f"{line} cannot be run: {why}", reason=reason) from error
        with contextlib.ExitStack() as stack:
            stack.callback(subprocesses.end, process, line)
            stdout = subprocesses.Kept(process.stdout, max_output_bytes)
            stderr = subprocesses.Kept(process.stderr, MAX_OUTPUT_BYTES, is_end=True)
            deadline_s = self._monotonic() + timeout_s
            is_done = subprocesses.attend(
                process.pid, (stdout, stderr), lambda: self._monotonic() >= deadline_s
            )
        if not is_done:
            said = last_line(stderr.text())
            raise errors.HostError(
                f"{line} did not end within {timeout_s:g} s and was killed"
                f"{f': {said}' if said else ''}",
                reason=reason,
            )
        return Finished(
            line=line,
            status=process.returncode,
            stdout=stdout.text(),
            is_cut=stdout.is_cut,
            stderr=stderr.text(),
        )

    def _in(self, root: Root, name: str) -> Program | None:
        for folder in self._folders:
            path = pathlib.PurePosixPath("/", folder, name)
            place = driver_files.inside(root.driver_here, path)
            if place is not None and _is_program(place):
                if not root.is_at_top:
                    path = _as_seen(root, place)
                return Program(path=str(path), root=root.path, variables=_variables(root, folder))
        return None

    def _on_path(self, name: str) -> Program | None:
        # A relative folder would be another one wherever we are started.
        folders = [each for each in self._search_path.split(":") if each.startswith("/")]
        path = shutil.which(name, path=":".join(folders)) if folders else None
        if path is None:
            return None
        return Program(path=path, root=_TOP, variables=self._loader_variables)


def roots(host: host_settings.HostRoots, *, here: pathlib.Path = _TOP) -> tuple[Root, ...]:
    """Return where the driver's programs may be, best first.

    Our own root comes first: NVIDIA's container toolkit puts them there. A driver that has its
    device nodes with it is run as it is; otherwise the host, which has them, is its root.

    Args:
        host: Where driver and devices are.
        here: Our own root.
    """
    at_driver = Root(path=host.driver_here)
    at_host = Root(path=host.host_here, driver=str(host.driver))
    order = (at_driver, at_host) if host.dev_here == host.driver_here else (at_host, at_driver)
    return tuple(dict.fromkeys((Root(path=here), *order, Root(path=host.host_here))))


def last_line(text: str) -> str:
    """Return the last line that says something, without what a terminal would act on."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = lines[-1][:_MAX_SAID] if lines else ""
    return messages.printable(said)


def _is_program(path: pathlib.Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) and bool(mode & 0o111)


def _variables(root: Root, folder: str) -> Mapping[str, str]:
    """Return the variables with which a driver's program finds the NVML library.

    That library alone, as NVIDIA's own manager does it: beside it there may be the C library of
    another distribution, with which no program of this root would start.
    """
    if root.is_at_top and not folder.startswith(driver_files.GKE):
        return {}
    library = next(driver_files.libraries(root.driver_here), None)
    return {"LD_PRELOAD": str(_as_seen(root, library))} if library else {}


def _as_seen(root: Root, place: pathlib.Path) -> pathlib.PurePosixPath:
    """Return a path of ours as a process with that root sees it."""
    return pathlib.PurePosixPath("/", place.relative_to(root.path))
