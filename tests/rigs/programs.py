"""Programs that some tests need, how they are run, and scripts in place of others."""

import os
import pathlib
import shutil
import subprocess

import pytest


def path_or_skip(name: str) -> str:
    """Return the file of a program; a machine without it skips the test, which fails in CI."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def write_script(path: pathlib.Path, body: str) -> pathlib.Path:
    """Write a shell script where a program is looked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def run(
    *command: str | pathlib.Path, cwd: pathlib.Path | None = None, stdin: str = "", **environ: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, with nothing of our environment but PATH."""
    return subprocess.run(  # noqa: S603 - the arguments are the tests' own
        [str(part) for part in command],
        cwd=cwd,
        input=stdin,
        env={"PATH": os.environ["PATH"], "HOME": str(cwd or "/nonexistent")} | environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def output(*command: str | pathlib.Path, cwd: pathlib.Path | None = None, **environ: str) -> str:
    """Run a command that must succeed; return its standard output."""
    done = run(*command, cwd=cwd, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def unpack(archive: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Unpack an archive into a folder, and return this.

    ``tarfile`` has its filters from Python 3.11.4 on, and Debian 12 has 3.11.2.
    """
    folder.mkdir(exist_ok=True)
    output("tar", "--extract", "--no-same-owner", f"--file={archive}", f"--directory={folder}")
    return folder
