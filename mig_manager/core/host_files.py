"""Parse the owner's files about the host: hooks, and host services to stop during a change.

Both are in the formats of NVIDIA's tools. The GPU operator's list of services:

    version: v1
    systemd-services:
    - nvsm.service
    - nvidia-dcgm      # means nvidia-dcgm.service

Kubelet is stopped only if the list names it. NVIDIA's agent stops it for each change of MIG mode;
without kubelet, the agent's own pod would not be restarted.
"""

import dataclasses
import enum
import re
from collections.abc import Iterator, Mapping, Sequence

from mig_manager import errors
from mig_manager.core import fields, yaml_tree

VERSION = "v1"


class Point(enum.Enum):
    """When hooks run."""

    APPLY_START = "apply-start"  # first, even if the layout is already active
    PRE_APPLY_MODE = "pre-apply-mode"  # before MIG mode changes
    PRE_APPLY_CONFIG = "pre-apply-config"  # before instances are destroyed and created
    APPLY_EXIT = "apply-exit"
    """Last, even after a failure, unless a hook of ``apply-start`` failed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A program that runs before, during or after a change."""

    command: str
    args: tuple[str, ...]
    envs: Mapping[str, str]  # its environment, without the variables about the change
    workdir: str  # empty: where we are
    timeout_s: float | None  # None: the default for all hooks
    location: errors.Location  # of its command


Table = Mapping[Point, tuple[Hook, ...]]  # only points that have hooks

MOST_TIMEOUT_S = 86400.0  # A day


def parse_hooks(text: str, *, source: str) -> Table:
    """Parse a hooks file; ConfigError with location and correction if it is invalid."""
    root = yaml_tree.parse(text, source=source)
    if root is None or yaml_tree.is_null(root):
        return {}
    what = f"a mapping with 'version: {VERSION}' and 'hooks'"
    top = _members(root, ("version", "hooks"), what)
    # mig-parted ignores it, so a file may lack it.
    if "version" in top:
        fields.check_version(top["version"], VERSION)
    points = top.get("hooks")
    if points is None or yaml_tree.is_null(points):
        return {}
    points = fields.mapping(points, "hooks must be a mapping of points")
    fields.check_keys(points, [point.value for point in Point])
    hooks = {
        Point(entry.key): tuple(map(_hook, fields.items(entry.value, "the hooks of a point")))
        for entry in points.entries
    }
    return {point: listed for point, listed in hooks.items() if listed}


def _members(node: yaml_tree.Node, known: Sequence[str], what: str) -> dict[str, yaml_tree.Node]:
    """Return the members of a mapping, whose keys mig-parted takes in any case."""
    entries = fields.mapping(node, f"expected {what}").entries
    lowered = [dataclasses.replace(entry, key=entry.key.lower()) for entry in entries]
    members: dict[str, yaml_tree.Node] = {}
    for entry in lowered:
        if entry.key in members:
            problem = f"key '{entry.key}' is given twice"
            raise errors.ConfigError(problem, location=entry.location)
        members[entry.key] = entry.value
    fields.check_keys(yaml_tree.Mapping(entries=tuple(lowered), location=node.location), known)
    return members


def _hook(item: yaml_tree.Node) -> Hook:
    known = ("command", "args", "envs", "workdir", "timeout-s")
    members = _members(item, known, "a mapping with 'command'")
    command = members.get("command")
    if command is None:
        fields.fail(item, "'command' is missing; write, for example, 'command: /bin/true'")
    program = _text(command, "command")
    if not program:
        fields.fail(command, "command must name a program")
    workdir = members.get("workdir")
    return Hook(
        command=program,
        args=tuple(
            _text(each, "an argument") for each in fields.items(members.get("args"), "args")
        ),
        envs=dict(_envs(members.get("envs"))),
        workdir=_text(workdir, "workdir") if workdir is not None else "",
        timeout_s=_timeout_s(members.get("timeout-s")),
        location=command.location,
    )


def _envs(node: yaml_tree.Node | None) -> Iterator[tuple[str, str]]:
    if node is None or yaml_tree.is_null(node):
        return
    for entry in fields.mapping(node, "envs must be a mapping").entries:
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
        fields.fail(node, f"{what} has a character that no program can receive")
    return text


def _is_passable(text: str) -> bool:
    """Return whether a program can receive a text: no NUL, and it has an encoding."""
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
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < float(value or 0) <= MOST_TIMEOUT_S:
        fields.fail(
            node,
            f"timeout-s must be a number of seconds, more than 0 and {MOST_TIMEOUT_S:g} at most, "
            f"not {fields.shown(node)}",
        )
    return float(value or 0)


# -- services ------------------------------------------------------------------------------------

MOST_SERVICES = 64  # the journal, in an annotation of the node, lists them before they are stopped

_TRIGGERS = (".socket", ".timer", ".path")  # kinds of units that start a service themselves
_KINDS = (".service", *_TRIGGERS)
"""Kinds that can be stopped and started alone; a target or a slice would take others with it."""
_OTHER_KINDS = (".automount", ".device", ".mount", ".scope", ".slice", ".swap", ".target")
_NAME = re.compile(r"[A-Za-z0-9:_.\\-]+(@[A-Za-z0-9:_.\\-]+)?")
"""``systemd.unit(5)``: a prefix and, of a template, an instance."""
_LONGEST_NAME = 255
_OWN = frozenset({"mig-manager", "mig-manager-boot"})
_PROTECTED = re.compile(r"(dbus|dbus-broker|systemd-.*)(@.*)?")
"""We reach systemd through D-Bus; the others are parts of systemd."""


def parse_services(text: str, *, source: str) -> tuple[str, ...]:
    """Parse a list of systemd units, in the order in which to stop them; it may be empty.

    ConfigError: the format is broken, or a unit is named twice or must not be stopped.
    """
    section = "systemd-services"
    root = fields.document(text, source=source, section=section, version=VERSION)
    services = root.get(section) if root else None
    listed = fields.items(services, section)
    if services is not None and len(listed) > MOST_SERVICES:
        fields.fail(services, f"there are {len(listed)} services; {MOST_SERVICES} at most")
    nodes: dict[str, yaml_tree.Node] = {}
    for node in listed:
        name = _unit(node)
        if name in nodes:
            line = nodes[name].location.line
            fields.fail(node, f"'{name}' is named twice; first in line {line}")
        nodes[name] = node
    return stop_order(tuple(nodes))


def stop_order(names: Sequence[str]) -> tuple[str, ...]:
    """Return units in the order in which to stop them: sockets, timers and paths come first.

    A socket that still listens would restart its service.
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
    return can_be_restarted(name) and _is_unit(name) and not is_protected(name)


def is_protected(name: str) -> bool:
    """Return whether the agent could not start a unit again once it is stopped."""
    stem = name.rpartition(".")[0]
    return stem in _OWN or _PROTECTED.fullmatch(stem) is not None


def _is_unit(name: str) -> bool:
    return _NAME.fullmatch(name.rpartition(".")[0]) is not None and len(name) <= _LONGEST_NAME


def _unit(node: yaml_tree.Node) -> str:
    """Return the name of a unit, with its suffix."""
    shown = fields.shown(node)
    if not (isinstance(node, yaml_tree.Scalar) and isinstance(node.value, str)):
        fields.fail(node, f"a service is a name such as nvsm.service, not {shown}")
    name = node.value if node.value.endswith(_KINDS) else f"{node.value}.service"
    why = ""
    if node.value.endswith(_OTHER_KINDS):
        why = f"only units of the kinds {', '.join(_KINDS)} can be stopped for a change"
    elif not _is_unit(name):
        why = "it is not the name of a unit; patterns and templates are not supported"
    elif name.rpartition(".")[0] in _OWN:
        why = "it is the agent itself"
    elif is_protected(name):
        why = "the agent could not start it again"
    if why:
        fields.fail(node, f"cannot stop {shown}: {why}")
    return name
