"""Parse the hooks file: programs that run before, during and after a change."""

import dataclasses
import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from mig_manager import errors
from mig_manager.core import yaml_tree


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


def parse_hooks(text: str, *, source: str) -> Table:
    """Parse a hooks file; an empty one has no hooks.

    Raises:
        ConfigError: It breaks the format; the message says where and what is right.
    """
    root = yaml_tree.parse(text, source=source)
    if root is None or yaml_tree.is_null(root):
        return Table()
    top = _Fields(root, _KEYS, f"a mapping with 'version: {VERSION}' and 'hooks'")
    version = top.get("version")
    # mig-parted does not look at it, so a file may well lack it.
    if version is not None and not (
        isinstance(version, yaml_tree.Scalar) and version.value == VERSION
    ):
        yaml_tree.fail(
            version, f"version must be the text {VERSION}, not {yaml_tree.shown(version)}"
        )
    points = top.get("hooks")
    if points is None or yaml_tree.is_null(points):
        return Table()
    if not isinstance(points, yaml_tree.Mapping):
        yaml_tree.fail(points, f"hooks must be a mapping of points, not {yaml_tree.shown(points)}")
    yaml_tree.check_keys(points, [point.value for point in Point])
    return Table(points={Point(entry.key): tuple(_hooks(entry.value)) for entry in points.entries})


class _Fields:
    """A mapping whose keys may be written in any case, as mig-parted reads them."""

    def __init__(self, node: yaml_tree.Node, known: Sequence[str], what: str) -> None:
        if not isinstance(node, yaml_tree.Mapping):
            yaml_tree.fail(node, f"expected {what}, not {yaml_tree.shown(node)}")
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
        yaml_tree.check_keys(dataclasses.replace(node, entries=lowered), known)

    def get(self, key: str) -> yaml_tree.Node | None:
        """Return the value of a key; None when it is not there."""
        return self._entries.get(key)


def _hooks(node: yaml_tree.Node) -> Iterator[Hook]:
    if yaml_tree.is_null(node):
        return
    if not isinstance(node, yaml_tree.Sequence):
        yaml_tree.fail(node, f"the hooks of a point must be a list, not {yaml_tree.shown(node)}")
    for item in node.items:
        yield _hook(item)


def _hook(node: yaml_tree.Node) -> Hook:
    entries = _Fields(node, _HOOK_KEYS, "a mapping with 'command'")
    command = entries.get("command")
    if command is None:
        yaml_tree.fail(node, "'command' is missing; write, for example, 'command: /bin/true'")
    program = _text(command, "command")
    if not program:
        yaml_tree.fail(command, "command must name a program")
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
    if node is None or yaml_tree.is_null(node):
        return
    if not isinstance(node, yaml_tree.Sequence):
        yaml_tree.fail(node, f"args must be a list, not {yaml_tree.shown(node)}")
    for item in node.items:
        yield _text(item, "an argument")


def _envs(node: yaml_tree.Node | None) -> Iterator[tuple[str, str]]:
    if node is None or yaml_tree.is_null(node):
        return
    if not isinstance(node, yaml_tree.Mapping):
        yaml_tree.fail(node, f"envs must be a mapping, not {yaml_tree.shown(node)}")
    for entry in node.entries:
        if not entry.key or "=" in entry.key or not _is_passable(entry.key):
            raise errors.ConfigError(
                f"{entry.key[:60]!r} cannot be the name of a variable", location=entry.location
            )
        yield entry.key, _text(entry.value, f"variable {entry.key[:60]!r}")


def _text(node: yaml_tree.Node, what: str) -> str:
    """Return a scalar as the text that mig-parted makes of it: ``1`` as "1", ``yes`` as "true"."""
    if not isinstance(node, yaml_tree.Scalar):
        yaml_tree.fail(node, f"{what} must be a text, not {yaml_tree.shown(node)}")
    text = node.key or ""
    if not _is_passable(text):
        yaml_tree.fail(node, f"{what} has a character that no program can be given")
    return text


def _is_passable(text: str) -> bool:
    """Return whether a text can be handed to a program: no NUL, and it has an encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _timeout_s(node: yaml_tree.Node | None) -> float | None:
    if node is None or yaml_tree.is_null(node):
        return None
    value = node.value if isinstance(node, yaml_tree.Scalar) else None
    # To Python, true is a number.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value <= MOST_TIMEOUT_S
    ):
        yaml_tree.fail(
            node,
            f"timeout-s must be a number of seconds, more than 0 and {MOST_TIMEOUT_S:g} at most, "
            f"not {yaml_tree.shown(node)}",
        )
    return float(value)


MOST_SERVICES = 64
"""They are written down in an annotation of the node before they are stopped."""

_HOST_SERVICES_KEYS = ("version", "systemd-services")
_TRIGGERS = (".socket", ".timer", ".path")
"""Each of these units starts a service of its own accord."""
_KINDS = (".service", *_TRIGGERS)
"""What can be stopped and started alone; a target or a slice would take others with it."""
_OTHER_KINDS = (".automount", ".device", ".mount", ".scope", ".slice", ".swap", ".target")
_NAME = re.compile(r"[A-Za-z0-9:_.\\-]+(@[A-Za-z0-9:_.\\-]+)?")
"""``systemd.unit(5)``: a prefix and, of a template, an instance."""
_LONGEST_NAME = 255
_OWN = frozenset({"mig-manager", "mig-manager-boot"})
_PROTECTED = re.compile(r"(dbus|dbus-broker|systemd-.*)(@.*)?")
"""We reach systemd through the one; the others are parts of it."""


def parse_services(text: str, *, source: str) -> tuple[str, ...]:
    """Parse a list of systemd units to stop, in this order; an empty one has no services.

    Raises:
        ConfigError: The list breaks the format, names a unit twice, or one that must not be
            stopped; the message says where and what is right.
    """
    root = yaml_tree.parse(text, source=source)
    if root is None or yaml_tree.is_null(root):
        return ()
    if not isinstance(root, yaml_tree.Mapping):
        yaml_tree.fail(
            root, f"expected a mapping with 'version: {VERSION}' and 'systemd-services'"
        )
    yaml_tree.check_keys(root, _HOST_SERVICES_KEYS)
    version = yaml_tree.required(root, "version", example=VERSION)
    if not (isinstance(version, yaml_tree.Scalar) and version.value == VERSION):
        yaml_tree.fail(
            version, f"version must be the text {VERSION}, not {yaml_tree.shown(version)}"
        )
    services = root.get("systemd-services")
    if services is None or yaml_tree.is_null(services):
        return ()
    if not isinstance(services, yaml_tree.Sequence):
        yaml_tree.fail(
            services, f"systemd-services must be a list, not {yaml_tree.shown(services)}"
        )
    return _units(services)


def _units(services: yaml_tree.Sequence) -> tuple[str, ...]:
    if len(services.items) > MOST_SERVICES:
        yaml_tree.fail(
            services, f"there are {len(services.items)} services; {MOST_SERVICES} at most"
        )
    nodes: dict[str, yaml_tree.Node] = {}
    for node in services.items:
        name = _unit(node)
        if name in nodes:
            yaml_tree.fail(
                node, f"'{name}' is named twice; first in line {nodes[name].location.line}"
            )
        nodes[name] = node
    return stop_order(tuple(nodes))


def stop_order(names: Sequence[str]) -> tuple[str, ...]:
    """Return units in the order in which to stop them: sockets, timers and paths come first.

    A socket that still listens would start the service again that was just stopped.
    """
    return tuple(sorted(names, key=lambda name: not name.endswith(_TRIGGERS)))


def start_order(stopped: Sequence[str]) -> tuple[str, ...]:
    """Return stopped units in the order in which to start them: services in reverse, then others.

    systemd refuses to start a socket while its service runs ("Socket service already active").
    """
    return stop_order(tuple(reversed(stopped)))


def can_be_restarted(name: str) -> bool:
    """Return whether a unit is of a kind that can be stopped and started again alone."""
    return name.endswith(_KINDS)


def is_stoppable(name: str) -> bool:
    """Return whether a unit may be stopped, by name or because it stops with another."""
    stem = name.rpartition(".")[0]
    return (
        can_be_restarted(name)
        and len(name) <= _LONGEST_NAME
        and _NAME.fullmatch(stem) is not None
        and not is_protected(name)
    )


def is_protected(name: str) -> bool:
    """Return whether the agent could not start a unit again once it is stopped."""
    stem = name.rpartition(".")[0]
    return stem in _OWN or _PROTECTED.fullmatch(stem) is not None


def _unit(node: yaml_tree.Node) -> str:
    """Return the name of a unit, with its suffix."""
    if not (isinstance(node, yaml_tree.Scalar) and isinstance(node.value, str)):
        yaml_tree.fail(
            node, f"a service is a name such as nvsm.service, not {yaml_tree.shown(node)}"
        )
    written = node.value
    if written.endswith(_OTHER_KINDS):
        _refuse(node, f"only units of the kinds {', '.join(_KINDS)} can be stopped for a change")
    name = written if written.endswith(_KINDS) else f"{written}.service"
    stem = name.rpartition(".")[0]
    if not _NAME.fullmatch(stem) or len(name) > _LONGEST_NAME:
        _refuse(node, "that is no name of a unit; patterns and templates are not taken")
    if stem in _OWN:
        _refuse(node, "that is the agent itself")
    if _PROTECTED.fullmatch(stem):
        _refuse(node, "the agent could not start it again")
    return name


def _refuse(node: yaml_tree.Node, why: str) -> NoReturn:
    yaml_tree.fail(node, f"cannot stop {yaml_tree.shown(node)}: {why}")
