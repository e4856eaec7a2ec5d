"""Which GPU instances of a node are in use, as its agent publishes it.

The instances themselves are in the published GPUs (``gpu_codec``); only the node knows which of
them a pod or a process uses. ``layout.room`` computes from both what could still be created.
"""

import dataclasses
import datetime as dt
import json
from typing import Any

from mig_manager.core import messages, model

VERSION = 1
_MOST = 64  # GPUs, and instances of each


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """What is in use on one GPU."""

    uuid: str
    in_use: frozenset[model.Placement]
    """GPU instances of which a pod or a process uses at least one compute instance."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """What is in use on a node."""

    at: dt.datetime  # of the observation
    gpus: tuple[GpuUse, ...]

    def on(self, uuid: str) -> frozenset[model.Placement] | None:
        """Return what is in use on a GPU; None: the agent has not said."""
        return next((gpu.in_use for gpu in self.gpus if gpu.uuid == uuid), None)


def from_json(text: str) -> NodeUse:
    """Parse the annotation ``mig-manager.io/capacity``; ValueError if it is malformed."""
    try:
        data: Any = json.loads(text)
        if data["version"] != VERSION:
            raise ValueError("from a version this program does not know")
        at = messages.parse_time(data["at"])
        if at is None:
            raise ValueError("it has no time")
        return NodeUse(at=at, gpus=tuple(_gpu(row) for row in data["gpus"][:_MOST]))
    except (AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"not the use of GPUs: {error!r}") from error


def _gpu(row: Any) -> GpuUse:
    spans = [model.Placement(int(start), int(size)) for start, size in row["inUse"][:_MOST]]
    return GpuUse(uuid=messages.printable(str(row["uuid"])), in_use=frozenset(spans))
