"""Parse the owner's hooks: programs around a change, in mig-parted's format."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence

from mig_manager import errors
from mig_manager.core.files import yaml_fields, yaml_text, yaml_tree

_VERSION = "v1"


class Point(enum.Enum):
    """When hooks run."""

    APPLY_START = "apply-start"  # first, even if the layout is already active
    PRE_APPLY_MODE = "pre-apply-mode"  # before MIG mode changes
    PRE_APPLY_CONFIG = "pre-apply-config"  # before instances are destroyed and created
    APPLY_EXIT = "apply-exit"  # last, even after a failure


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A program that runs before, during or after a change."""

    command: str
    args: tuple[str, ...]
    envs: Mapping[str, str]  # its environment, without the variables about the change
    workdir: str  # empty: where we are
    timeout_s: float | None  # None: the default for all hooks
    location: errors.Location  # where its command is


Table = Mapping[Point, tuple[Hook, ...]]  # only points that have hooks

MAX_TIMEOUT_S = 86400.0  # a day


def parse(text: str, *, source: str) -> Table:
    """Parse a hooks file; ConfigError with location and correction if it is invalid."""
    root = yaml_text.parse(text, source=source)
    if root is None or yaml_tree.is_null(root):
        return {}
    what = f"a mapping with 'version: {_VERSION}' and 'hooks'"
    top = _members(root, ("version", "hooks"), what)
    # mig-parted ignores it, so a file may lack it.
    if "version" in top:
        yaml_fields.check_version(top["version"], _VERSION)
    points = top.get("hooks")
    if points is None or yaml_tree.is_null(points):
        return {}
    points = yaml_fields.mapping(points, "hooks must be a mapping of points")
    yaml_fields.check_keys(points, [point.value for point in Point])
    hooks = {
        Point(entry.key): tuple(map(_hook, yaml_fields.items(entry.value, "the hooks of a point")))
        for entry in points.entries
    }
    return {point: listed for point, listed in hooks.items() if listed}


def _members(node: yaml_tree.Node, keys: Sequence[str], what: str) -> dict[str, yaml_tree.Node]:
    """Return the members of a mapping, whose keys mig-parted takes in any case."""
    entries = yaml_fields.mapping(node, f"expected {what}").entries
    lowered = [dataclasses.replace(entry, key=entry.key.lower()) for entry in entries]
    members: dict[str, yaml_tree.Node] = {}
    for entry in lowered:
        if entry.key in members:
            problem = f"key '{entry.key}' is given twice"
            raise errors.ConfigError(problem, location=entry.location)
        members[entry.key] = entry.value
    yaml_fields.check_keys(yaml_tree.Mapping(entries=tuple(lowered), location=node.location), keys)
    return members


def _hook(item: yaml_tree.Node) -> Hook:
    keys = ("command", "args", "envs", "workdir", "timeout-s")
    members = _members(item, keys, "a mapping with 'command'")
    command = members.get("command")
    if command is None:
        yaml_fields.fail(item, "'command' is missing; write, for example, 'command: /bin/true'")
    program = _text(command, "command")
    if not program:
        yaml_fields.fail(command, "command must name a program")
    workdir = members.get("workdir")
    return Hook(
        command=program,
        args=tuple(
            _text(each, "an argument") for each in yaml_fields.items(members.get("args"), "args")
        ),
        envs=dict(_envs(members.get("envs"))),
        workdir=_text(workdir, "workdir") if workdir is not None else "",
        timeout_s=_timeout_s(members.get("timeout-s")),
        location=command.location,
    )


def _envs(node: yaml_tree.Node | None) -> Iterator[tuple[str, str]]:
    if node is None or yaml_tree.is_null(node):
        return
    for entry in yaml_fields.mapping(node, "envs must be a mapping").entries:
        if not entry.key or "=" in entry.key or not _is_passable(entry.key):
            raise errors.ConfigError(
                f"{entry.key[:60]!r} cannot be the name of a variable", location=entry.location
            )
        yield entry.key, _text(entry.value, f"variable {entry.key[:60]!r}")


def _text(node: yaml_tree.Node, what: str) -> str:
    """Return a scalar as the text that mig-parted makes of it: ``1`` as "1", ``yes`` as "true"."""
    if not isinstance(node, yaml_tree.Scalar):
        yaml_fields.fail(node, f"{what} must be a text, not {yaml_fields.shown(node)}")
    text = node.key or ""
    if not _is_passable(text):
        yaml_fields.fail(node, f"{what} has a character that no program can receive")
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
    if not is_number or not 0 < float(value or 0) <= MAX_TIMEOUT_S:
        yaml_fields.fail(
            node,
            f"timeout-s must be a number of seconds, more than 0 and {MAX_TIMEOUT_S:g} at most, "
            f"not {yaml_fields.shown(node)}",
        )
    return float(value or 0)
