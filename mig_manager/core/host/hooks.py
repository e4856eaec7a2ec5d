"""Parse the hooks file: programs that run before, during and after a change."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence

from mig_manager import errors
from mig_manager.core import fields, yaml_tree


class Point(enum.Enum):
    """When hooks run."""

    APPLY_START = "apply-start"
    """First of all, also when nothing is going to change."""
    PRE_APPLY_MODE = "pre-apply-mode"
    """Before MIG mode changes."""
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
    """Its environment, without the variables about the change."""
    workdir: str
    """Empty: where we are."""
    timeout_s: float | None
    """None: the default for all hooks."""
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


VERSION = "v1"
MOST_TIMEOUT_S = 86400.0
"""A day."""

_KEYS = ("version", "hooks")
_HOOK_KEYS = ("command", "args", "envs", "workdir", "timeout-s")


def parse(text: str, *, source: str) -> Table:
    """Parse a hooks file; an empty one has no hooks.

    Raises:
        ConfigError: It breaks the format; the message says where and what is right.
    """
    root = yaml_tree.parse(text, source=source)
    if root is None or fields.is_null(root):
        return Table()
    top = _Fields(root, _KEYS, f"a mapping with 'version: {VERSION}' and 'hooks'")
    version = top.get("version")
    # mig-parted does not look at it, so a file may well lack it.
    if version is not None and not (
        isinstance(version, yaml_tree.Scalar) and version.value == VERSION
    ):
        fields.fail(version, f"version must be the text {VERSION}, not {fields.shown(version)}")
    points = top.get("hooks")
    if points is None or fields.is_null(points):
        return Table()
    if not isinstance(points, yaml_tree.Mapping):
        fields.fail(points, f"hooks must be a mapping of points, not {fields.shown(points)}")
    fields.check_keys(points, [point.value for point in Point])
    return Table(points={Point(entry.key): tuple(_hooks(entry.value)) for entry in points.entries})


class _Fields:
    """A mapping whose keys may be written in any case, as mig-parted reads them."""

    def __init__(self, node: yaml_tree.Node, known: Sequence[str], what: str) -> None:
        if not isinstance(node, yaml_tree.Mapping):
            fields.fail(node, f"expected {what}, not {fields.shown(node)}")
        self.node = node
        self._entries: dict[str, yaml_tree.Node] = {}
        for entry in node.entries:
            key = entry.key.lower()
            if key in self._entries:
                raise errors.ConfigError(f"key '{key}' is given twice", location=entry.location)
            self._entries[key] = entry.value
        lowered = tuple(
            dataclasses.replace(entry, key=entry.key.lower()) for entry in node.entries
        )
        fields.check_keys(dataclasses.replace(node, entries=lowered), known)

    def get(self, key: str) -> yaml_tree.Node | None:
        """Return the value of a key; None when it is not there."""
        return self._entries.get(key)


def _hooks(node: yaml_tree.Node) -> Iterator[Hook]:
    if fields.is_null(node):
        return
    if not isinstance(node, yaml_tree.Sequence):
        fields.fail(node, f"the hooks of a point must be a list, not {fields.shown(node)}")
    for item in node.items:
        yield _hook(item)


def _hook(node: yaml_tree.Node) -> Hook:
    entries = _Fields(node, _HOOK_KEYS, "a mapping with 'command'")
    command = entries.get("command")
    if command is None:
        fields.fail(node, "'command' is missing; write, for example, 'command: /bin/true'")
    program = _text(command, "command")
    if not program:
        fields.fail(command, "command must name a program")
    workdir = entries.get("workdir")
    return Hook(
        command=program,
        args=tuple(_args(entries.get("args"))),
        envs=dict(_envs(entries.get("envs"))),
        workdir=_text(workdir, "workdir") if workdir is not None else "",
        timeout_s=_timeout_s(entries.get("timeout-s")),
        location=command.location,
    )


def _args(node: yaml_tree.Node | None) -> Iterator[str]:
    if node is None or fields.is_null(node):
        return
    if not isinstance(node, yaml_tree.Sequence):
        fields.fail(node, f"args must be a list, not {fields.shown(node)}")
    for item in node.items:
        yield _text(item, "an argument")


def _envs(node: yaml_tree.Node | None) -> Iterator[tuple[str, str]]:
    if node is None or fields.is_null(node):
        return
    if not isinstance(node, yaml_tree.Mapping):
        fields.fail(node, f"envs must be a mapping, not {fields.shown(node)}")
    for entry in node.entries:
        if not entry.key or "=" in entry.key or not _is_passable(entry.key):
            raise errors.ConfigError(
                f"{entry.key[:60]!r} cannot be the name of a variable", location=entry.location
            )
        yield entry.key, _text(entry.value, f"variable {entry.key[:60]!r}")


def _text(node: yaml_tree.Node, what: str) -> str:
    """Return a scalar as the text that mig-parted makes of it: ``1`` as "1", ``yes`` as "true"."""
    if not isinstance(node, yaml_tree.Scalar):
        fields.fail(node, f"{what} must be a text, not {fields.shown(node)}")
    text = node.key or ""
    if not _is_passable(text):
        fields.fail(node, f"{what} has a character that no program can be given")
    return text


def _is_passable(text: str) -> bool:
    """Return whether a text can be handed to a program: no NUL, and it has an encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _timeout_s(node: yaml_tree.Node | None) -> float | None:
    if node is None or fields.is_null(node):
        return None
    value = node.value if isinstance(node, yaml_tree.Scalar) else None
    # To Python, true is a number.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value <= MOST_TIMEOUT_S
    ):
        fields.fail(
            node,
            f"timeout-s must be a number of seconds, more than 0 and {MOST_TIMEOUT_S:g} at most, "
            f"not {fields.shown(node)}",
        )
    return float(value)
