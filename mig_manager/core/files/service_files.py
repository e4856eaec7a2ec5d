"""Parse the owner's list of host services to stop during a change, in the GPU operator's format.

    version: v1
    systemd-services:
    - nvsm.service
    - nvidia-dcgm      # means nvidia-dcgm.service

Kubelet is stopped only if the list names it. NVIDIA's agent stops it for each change of MIG mode;
without kubelet, the agent's own pod would not be restarted.
"""

import re
from collections.abc import Sequence

from mig_manager.core.files import yaml_fields, yaml_tree

_VERSION = "v1"
MAX_SERVICES = 64  # the journal, in an annotation of the node, lists them before they are stopped

_TRIGGERS = (".socket", ".timer", ".path")  # kinds of units that start a service themselves
_KINDS = (".service", *_TRIGGERS)
"""Kinds that can be stopped and started alone; a target or a slice would take others with it."""
_OTHER_KINDS = (".automount", ".device", ".mount", ".scope", ".slice", ".swap", ".target")
_NAME = re.compile(r"[A-Za-z0-9:_.\\-]+(@[A-Za-z0-9:_.\\-]+)?")
"""``systemd.unit(5)``: a prefix and, of a template, an instance."""
_MAX_NAME = 255
_OUR_UNITS = frozenset({"mig-manager", "mig-manager-boot"})
_PROTECTED = re.compile(r"(dbus|dbus-broker|systemd-.*)(@.*)?")
"""We reach systemd through D-Bus; the others are parts of systemd."""


def parse(text: str, *, source: str) -> tuple[str, ...]:
    """Parse a list of systemd units, in the order in which to stop them; it may be empty.

    Raises:
        ConfigError: The format is broken, or a unit is named twice or must not be stopped.
    """
    section = "systemd-services"
    root = yaml_fields.document(text, source=source, section=section, version=_VERSION)
    services = root.get(section) if root else None
    listed = yaml_fields.items(services, section)
    if services is not None and len(listed) > MAX_SERVICES:
        yaml_fields.fail(services, f"there are {len(listed)} services; {MAX_SERVICES} at most")
    nodes: dict[str, yaml_tree.Node] = {}
    for node in listed:
        name = _unit(node)
        if name in nodes:
            line = nodes[name].location.line
            yaml_fields.fail(node, f"'{name}' is named twice; first in line {line}")
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
    return stem in _OUR_UNITS or _PROTECTED.fullmatch(stem) is not None


def _is_unit(name: str) -> bool:
    return _NAME.fullmatch(name.rpartition(".")[0]) is not None and len(name) <= _MAX_NAME


def _unit(node: yaml_tree.Node) -> str:
    """Return the name of a unit, with its suffix."""
    shown = yaml_fields.shown(node)
    if not (isinstance(node, yaml_tree.Scalar) and isinstance(node.value, str)):
        yaml_fields.fail(node, f"a service is a name such as nvsm.service, not {shown}")
    name = node.value if node.value.endswith(_KINDS) else f"{node.value}.service"
    why = ""
    if node.value.endswith(_OTHER_KINDS):
        why = f"only units of the kinds {', '.join(_KINDS)} can be stopped for a change"
    elif not _is_unit(name):
        why = "it is not the name of a unit; patterns and templates are not supported"
    elif name.rpartition(".")[0] in _OUR_UNITS:
        why = "it is the agent itself"
    elif is_protected(name):
        why = "the agent could not start it again"
    if why:
        yaml_fields.fail(node, f"cannot stop {shown}: {why}")
    return name
