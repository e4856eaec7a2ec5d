"""Parse the GPU operator's list of host services to stop during a change.

    version: v1
    systemd-services:
    - nvsm.service
    - nvidia-dcgm      # means nvidia-dcgm.service

Kubelet is stopped only if the list names it. NVIDIA's agent stops it for each change of MIG mode;
without kubelet, the agent's own pod would not be restarted.
"""

import re
from collections.abc import Sequence
from typing import NoReturn

from mig_manager.core import fields, yaml_tree

VERSION = "v1"
MOST_SERVICES = 64
"""They are written down in an annotation of the node before they are stopped."""

_KEYS = ("version", "systemd-services")
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


def parse(text: str, *, source: str) -> tuple[str, ...]:
    """Parse a list of systemd units to stop, in this order; an empty one has no services.

    Raises:
        ConfigError: The list breaks the format, names a unit twice, or one that must not be
            stopped; the message says where and what is right.
    """
    root = yaml_tree.parse(text, source=source)
    if root is None or fields.is_null(root):
        return ()
    if not isinstance(root, yaml_tree.Mapping):
        fields.fail(root, f"expected a mapping with 'version: {VERSION}' and 'systemd-services'")
    fields.check_keys(root, _KEYS)
    version = fields.required(root, "version", example=VERSION)
    if not (isinstance(version, yaml_tree.Scalar) and version.value == VERSION):
        fields.fail(version, f"version must be the text {VERSION}, not {fields.shown(version)}")
    services = root.get("systemd-services")
    if services is None or fields.is_null(services):
        return ()
    if not isinstance(services, yaml_tree.Sequence):
        fields.fail(services, f"systemd-services must be a list, not {fields.shown(services)}")
    return _units(services)


def _units(services: yaml_tree.Sequence) -> tuple[str, ...]:
    if len(services.items) > MOST_SERVICES:
        fields.fail(services, f"there are {len(services.items)} services; {MOST_SERVICES} at most")
    nodes: dict[str, yaml_tree.Node] = {}
    for node in services.items:
        name = _unit(node)
        if name in nodes:
            fields.fail(
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
        fields.fail(node, f"a service is a name such as nvsm.service, not {fields.shown(node)}")
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
    fields.fail(node, f"cannot stop {fields.shown(node)}: {why}")
