"""Pictures of the programs: each is run, and what it writes is drawn."""

import collections
import html
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from docs.generator import terminal

_TIME = re.compile(r"\d+\.\d\d s")
_POD_SUFFIX = re.compile(r"(daemonset)-[0-9a-z]{5}\b")
_ALIKE = "8xA100-SXM4-40GB"
_MIXED = "4xA100-SXM4-40GB+2xA30"


def _run(*arguments: str, home: str) -> list[str]:
    done = subprocess.run(  # noqa: S603 - our own program and our own arguments
        [sys.executable, "-m", "mig_manager", *arguments],
        env={
            "HOME": home,
            "PATH": os.defpath,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONUTF8": "1",
        },
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"mig-manager {' '.join(arguments)}: {done.stderr}")
    return done.stdout.rstrip("\n").split("\n")


def _prompt(command: str) -> str:
    return f"\x1b[2m$\x1b[0m \x1b[1m{command}\x1b[0m"


def status() -> str:
    """Return the picture of ``status`` on a simulated node."""
    with tempfile.TemporaryDirectory() as home:
        simulated = ("--simulate", _MIXED, "--color", "always")
        _run("apply", "all-balanced", *simulated, home=home)
        lines = _run("status", *simulated, home=home)
    return terminal.draw(
        [_prompt("mig-manager status"), *lines],
        title="mig-manager status: the slices of each GPU to scale, with their instances",
    )


def plan() -> str:
    """Return the picture of ``plan`` on a simulated node."""
    with tempfile.TemporaryDirectory() as home:
        simulated = ("--simulate", _ALIKE, "--color", "always")
        _run("apply", "all-balanced", *simulated, home=home)
        lines = _run("plan", "all-1g.5gb", *simulated, home=home)
    return terminal.draw(
        [_prompt("mig-manager plan all-1g.5gb"), *lines],
        title="mig-manager plan: which instances are destroyed, created and kept",
    )


def demo_lines() -> list[str]:
    """Run the demonstration; return its timeline, which takes as long as it takes."""
    with tempfile.TemporaryDirectory() as home:
        return timeline(_run("demo", "--color", "always", home=home))


def timeline(lines: Sequence[str]) -> list[str]:
    """Return the timeline of what a demonstration has written."""
    return [line for line in lines if re.match(r" *\d+\.\d\d s  ", terminal.plain(line))]


def demo(lines: Sequence[str]) -> str:
    """Return the picture of a timeline."""
    return terminal.draw(
        [_prompt("mig-manager demo"), *lines],
        title="mig-manager demo: from the label to success, line by line with its time",
    )


def differences(picture: str, lines: Sequence[str]) -> list[str]:
    """Return the lines that only one of a picture and a timeline has.

    Times do not count, nor does the order: threads of the simulated node write as they get to it,
    and how fast that is, is this machine's affair.
    """
    drawn, printed = _masked(_description(picture)), _masked("\n".join(map(terminal.plain, lines)))
    return sorted([*(drawn - printed).elements(), *(printed - drawn).elements()])


def _description(picture: str) -> str:
    (text,) = re.findall(r"<desc>[^\n]*\n(.*?)</desc>", picture, re.DOTALL)
    return html.unescape(text)


def _masked(text: str) -> collections.Counter[str]:
    masked = _POD_SUFFIX.sub(r"\1-N", _TIME.sub("T", text))
    return collections.Counter(" ".join(line.split()) for line in masked.splitlines())
