"""The owner's hooks: programs that run before, within and after a change.

How they are read is in ``hookfile``, so that whoever only knows of them needs no YAML.
"""

import dataclasses
import enum
from collections.abc import Mapping

from mig_manager import errors


class Point(enum.Enum):
    """When hooks run."""

    APPLY_START = "apply-start"
    """First of all, also when nothing is going to change."""
    PRE_APPLY_MODE = "pre-apply-mode"
    """Before MIG mode is switched."""
    PRE_APPLY_CONFIG = "pre-apply-config"
    """Before instances are destroyed and created."""
    APPLY_EXIT = "apply-exit"
    """Last of all, also after a failure, unless it was that of a hook of the first point."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One program and how it is run."""

    command: str
    args: tuple[str, ...]
    envs: Mapping[str, str]
    """Its whole environment but for what tells it of the change."""
    workdir: str
    """Empty: where we are."""
    timeout_s: float | None
    """None: what the node's owner says for all of them."""
    location: errors.Location
    """Of its command."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The hooks of each point, in their order."""

    points: Mapping[Point, tuple[Hook, ...]] = dataclasses.field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there is no hook at all."""
        return not any(self.points.values())

    def at(self, point: Point) -> tuple[Hook, ...]:
        """Return the hooks of a point."""
        return self.points.get(point, ())
