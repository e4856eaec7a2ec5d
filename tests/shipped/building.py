"""How release files are built: with the package index, and without the checkout's environment."""

import os
import pathlib
import shutil
import subprocess
import sys

from tests.rigs import programs

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 600
EPOCH = "1700000000"
_KEPT = ("PATH", "SSL_CERT_", "UV_", "http_proxy", "https_proxy")
"""Of the environment only what leads to programs and to the package index."""


def run(
    *command: str | pathlib.Path, cwd: pathlib.Path, fails: bool = False, **environ: str
) -> str:
    """Run a command that knows of no checkout and no environment but by its arguments."""
    kept = {name: text for name, text in os.environ.items() if name.startswith(_KEPT)}
    done = subprocess.run(  # noqa: S603 - the arguments are this file's own
        [str(word) for word in command],
        cwd=cwd,
        env=kept | {"HOME": str(cwd), "UV_CACHE_DIR": str(cache())} | environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(source: pathlib.Path, target: str, to: pathlib.Path, **environ: str) -> pathlib.Path:
    """Build a distribution of the source."""
    command = (sys.executable, "-B", "-m", "hatchling", "build", "-t", target, "-d", to)
    programs.output(*command, cwd=source, **environ)
    (built,) = to.iterdir()
    return built


def packages(wheel: pathlib.Path, folder: pathlib.Path, **environ: str) -> None:
    """Let release/packages build packages of a wheel into a folder."""
    uv()
    programs.path_or_skip("nfpm")
    shutil.copy(wheel, folder)
    settings = {"SOURCE_DATE_EPOCH": EPOCH} | environ
    run(ROOT / "release" / "packages", folder, cwd=folder, fails=False, **settings)


def cache() -> pathlib.Path:
    """Return where uv keeps what it has downloaded, so that nothing is downloaded twice."""
    output = subprocess.run(  # noqa: S603 - the arguments are this file's own
        (uv(), "cache", "dir", "--color", "never"), capture_output=True, text=True, check=True
    )
    return pathlib.Path(output.stdout.strip())


def uv() -> str:
    return programs.path_or_skip("uv")
