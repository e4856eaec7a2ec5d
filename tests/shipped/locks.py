"""Reads the lock files of release/, strictly: what this cannot read has no place in them."""

import pathlib
import re
from typing import NamedTuple

import packaging.markers
import packaging.utils

FOLDER = pathlib.Path(__file__).parents[2] / "release"
NAMES = ("image", "demo", "build", "tools", "go")

_PIN = re.compile(
    r"(?P<name>[\w.-]+)==(?P<version>[\w.+]+)(?: ; (?P<marker>.+?))?"
    r"(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})*)"
)


class Pin(NamedTuple):
    name: packaging.utils.NormalizedName
    version: str
    marker: str | None
    hashes: tuple[str, ...]

    @property
    def is_for_here(self) -> bool:
        """Whether this Python on this platform gets it."""
        return self.marker is None or packaging.markers.Marker(self.marker).evaluate()


def read(name: str) -> dict[packaging.utils.NormalizedName, Pin]:
    """Return what a lock file has, by name.

    Raises:
        ValueError: A line is neither a pin nor a comment, or locks a package again.
    """
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").replace(" \\\n", "")
    pins: dict[packaging.utils.NormalizedName, Pin] = {}
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        match = _PIN.fullmatch(re.sub(" +", " ", line))
        if match is None:
            raise ValueError(f"{name}.txt: {line[:80]!r} is no pin")
        pin = Pin(
            name=packaging.utils.canonicalize_name(match["name"]),
            version=match["version"],
            marker=match["marker"],
            hashes=tuple(match["hashes"].replace(" --hash=", " ").split()),
        )
        if pin.name in pins:
            raise ValueError(f"{name}.txt has {pin.name} twice")
        pins[pin.name] = pin
    return pins
