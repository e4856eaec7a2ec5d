"""Nodes as a kill leaves them, and the end of what it left unfinished."""

from typing import TypeVar

import pytest

from mig_manager import errors
from tests.rigs.node import local_rig

_Node = TypeVar("_Node", bound=local_rig.LocalNode)


def fork(node: _Node) -> _Node:
    """Return a copy of a node."""
    return node.fork(node.layouts)


def fork_at_kill(node: _Node) -> _Node:
    """Return the node as a kill of its command at this moment leaves it."""
    dead = fork(node)
    dead.on_step, dead.refuses_step = lambda _step: None, lambda _step: False
    # The kernel releases the lock of a dead process, and the driver what it has used.
    dead.lock.is_locked = False
    return dead


def refuse(node: local_rig.LocalNode, match: str = "is undone now") -> None:
    """Ask for an impossible layout, which undoes what was left unfinished."""
    with pytest.raises(errors.LayoutError, match=match):
        node.change_to("too-much")
