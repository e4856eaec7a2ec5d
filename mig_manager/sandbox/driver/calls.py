"""The registry of simulated C functions.

A function registers with ``function``. It receives a view of the node, then the raw C arguments:
numbers, handles, arrays and strings as ctypes passes them. Queries write to the caller's memory;
changes also return the GPU's new state. Both raise ``Refused`` for an NVML error code, which
docstrings name.
"""

import ctypes
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mig_manager.sandbox.driver import arguments, sessions, views

_Body = TypeVar("_Body", bound=Callable[..., Any])

GPU = frozenset({sessions.HandleKind.GPU})
DEVICE = frozenset({sessions.HandleKind.GPU, sessions.HandleKind.MIG_DEVICE})
GPU_INSTANCE = frozenset({sessions.HandleKind.GPU_INSTANCE})
COMPUTE_INSTANCE = frozenset({sessions.HandleKind.COMPUTE_INSTANCE})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One C function."""

    body: Callable[..., Any]
    takes: frozenset[sessions.HandleKind]
    """Kinds of handle that its first argument may be; empty: the first argument is no handle."""
    latency: str | Callable[..., str]
    """Field of ``Latency`` for the time of a call; may depend on its view and arguments."""
    is_change: bool
    needs_session: bool


FUNCTIONS: dict[str, Function] = {}


def function(
    *names: str,
    takes: frozenset[sessions.HandleKind] = frozenset(),
    latency: str | Callable[..., str] = "query_s",
    is_change: bool = False,
    needs_session: bool = True,
) -> Callable[[_Body], _Body]:
    """Register a C function under its names; see ``Function``."""

    def register(body: _Body) -> _Body:
        registered = Function(
            body=body,
            takes=takes,
            latency=latency,
            is_change=is_change,
            needs_session=needs_session,
        )
        FUNCTIONS.update(dict.fromkeys(names, registered))
        return body

    return register


def change(
    name: str, takes: frozenset[sessions.HandleKind], latency: str | Callable[..., str]
) -> Callable[[_Body], _Body]:
    """Register a change of a GPU, which returns the GPU's new state."""
    return function(name, takes=takes, latency=latency, is_change=True)


def numbers(
    takes: frozenset[sessions.HandleKind], values: Mapping[str, Callable[[views.DeviceView], int]]
) -> None:
    """Register queries by C name that write one unsigned number."""

    def register(name: str, value: Callable[[views.DeviceView], int]) -> None:
        @function(name, takes=takes)
        def _query(view: views.DeviceView, reference: Any) -> None:
            arguments.put(reference, ctypes.c_uint, value(view))

    for name, value in values.items():
        register(name, value)
