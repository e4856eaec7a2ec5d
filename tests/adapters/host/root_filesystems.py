"""Root file systems of hosts and containers, with a shell that runs test programs."""

import pathlib
import shutil

from mig_manager.core.settings import host_settings
from tests.rigs import programs

_PROGRAMS = ("sh", "cat", "sleep", "env")


def host_roots(
    host_here: pathlib.Path,
    *,
    driver: str = "/",
    driver_here: pathlib.Path | None = None,
    dev_here: pathlib.Path | None = None,
    cdi_hook: pathlib.Path | None = None,
) -> host_settings.HostRoots:
    """Return a host's roots; driver and devices are the host's own unless given."""
    return host_settings.HostRoots(
        host_here=host_here,
        driver=pathlib.Path(driver),
        driver_here=driver_here or host_here,
        dev=pathlib.Path("/"),
        dev_here=dev_here or host_here,
        cdi_hook=cdi_hook,
    )


def filesystem(root: pathlib.Path) -> pathlib.Path:
    """Make a file system with a shell and what it needs, as a container image would have them."""
    for folder in ("bin", "etc", "dev", "proc"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in _PROGRAMS:
        program = shutil.which(name, path="/usr/bin:/bin")
        assert program is not None
        _bring(root, pathlib.Path(program), root / "bin" / name)
    return root


def library(path: pathlib.Path) -> None:
    """Put some shared library there, which a loader takes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(_libraries(pathlib.Path("/bin/sh"))[0], path)


def _bring(root: pathlib.Path, program: pathlib.Path, place: pathlib.Path) -> None:
    shutil.copy(program.resolve(), place)
    for each in _libraries(program):
        target = root / each.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(each.resolve(), target)


def _libraries(program: pathlib.Path) -> list[pathlib.Path]:
    """Return the shared libraries that a program needs, its loader last."""
    output = programs.output("/usr/bin/ldd", program)
    words = [line.split() for line in output.splitlines()]
    paths = [word for line in words for word in line if word.startswith("/")]
    return [pathlib.Path(path) for path in paths]
