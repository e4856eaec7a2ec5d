"""The GPU instances of a node that are in use, as its agent publishes them.

The published GPUs (``inventory_codec``) have the instances; only the node knows which of them
pods and processes use. From both, ``planner.free_capacity`` computes the room for further
instances. The agent publishes that as well, for programs without a planner.
"""

import dataclasses
import datetime as dt
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mig_manager.core import messages, model, timestamps
from mig_manager.core.files import json_text
from mig_manager.core.planner import free_capacity

VERSION = 1
_MAX_LISTED = 64  # GPUs, and instances of each


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """The instances in use on a node."""

    at: dt.datetime  # when they were observed
    in_use: Mapping[str, frozenset[model.Placement]]
    """GPU instances with a compute instance that a pod or a process uses, by UUID of the GPU; no
    entry if the use is unknown. A span that matches no instance, such as all slices of a GPU
    without MIG, means that the whole GPU is in use."""


def to_json(
    gpus: Iterable[model.Gpu], in_use: Mapping[str, Collection[model.Placement]], *, at: str
) -> str:
    """Return the annotation's value; apart from ``at`` the same for the same facts.

    ``in_use`` as in ``NodeUse``; ``at`` is the time of the observation, as RFC 3339.
    """
    rows = [_row(gpu, in_use[gpu.uuid]) for gpu in gpus if gpu.uuid in in_use]
    return json.dumps({"version": VERSION, "at": at, "gpus": rows}, separators=(",", ":"))


def _row(gpu: model.Gpu, in_use: Collection[model.Placement]) -> dict[str, Any]:
    # If the whole GPU is in use, it has no room.
    free = free_capacity.measure(gpu, in_use) or free_capacity.NONE
    return {
        "uuid": gpu.uuid,
        "inUse": [[place.start, place.size] for place in sorted(in_use)],
        "free": free.free_slices,
        "room": {str(profile): count for profile, count in free.room.items() if count},
        "stranded": free.stranded_slices,
        "fragmentation": round(free.fragmentation, 2),
    }


def has_same_facts(text: str, other: str) -> bool:
    """Return whether two values differ at most in the time of the observation."""
    try:
        one, two = (json_text.parse_object(each) | {"at": ""} for each in (text, other))
    except ValueError:
        return False
    return bool(one == two)


def from_json(text: str) -> NodeUse:
    """Parse the annotation ``mig-manager.io/capacity``; ValueError if it is malformed."""
    with json_text.decoding("the use of GPUs"):
        data = json_text.parse_object(text)
        if data["version"] != VERSION:
            raise ValueError("from a version this program does not know")
        at = timestamps.parse(data["at"])
        if at is None:
            raise ValueError("'at' is missing or not a time")
        in_use = {
            messages.printable(json_text.string(row, "uuid")): frozenset(
                model.Placement(int(start), int(size))
                for start, size in row["inUse"][:_MAX_LISTED]
            )
            for row in data["gpus"][:_MAX_LISTED]
        }
        return NodeUse(at=at, in_use=in_use)
