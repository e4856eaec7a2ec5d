"""Nodes as a kill leaves them, and the end of what it left unfinished."""

from typing import TypeVar

import pytest

from mig_manager import errors
from mig_manager.core import steps
from tests.rigs.node import call_errors, local_rig

_Node = TypeVar("_Node", bound=local_rig.LocalRig)


def fork(rig: _Node) -> _Node:
    """Return a copy of a node."""
    return rig.fork(rig.layouts)


def fork_at_kill(rig: _Node) -> _Node:
    """Return the node as a kill of its command at this moment leaves it."""
    dead = fork(rig)
    # The kernel releases the lock of a dead process, and the driver what it has used.
    dead.lock.is_locked = False
    return dead


def refuse(rig: local_rig.LocalRig, match: str = "is undone now") -> None:
    """Ask for an impossible layout, which undoes what was left unfinished."""
    with pytest.raises(errors.LayoutError, match=match):
        rig.change_to("too-much")


def refuse_first_creation_on(rig: local_rig.LocalRig, uuid: str) -> None:
    """Have the driver refuse to create the first GPU instance on a GPU."""
    rig.failures.add(
        steps.CreateGpuInstance,
        call_errors.IN_USE,
        when=lambda: rig.driver.next_step.gpu_uuid == uuid,
        times=1,
    )
