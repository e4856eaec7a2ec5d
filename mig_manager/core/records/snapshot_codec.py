"""Snapshots of GPUs as JSON, in the journal and in the verified layout.

Profiles are identified by name, since a driver update may change ids. Instance ids and MIG UUIDs
are omitted, because they cannot be restored.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mig_manager.core import model, profile_name
from mig_manager.core.files import json_text
from mig_manager.core.records import json_values


def to_data(gpus: Sequence[model.GpuSnapshot]) -> list[dict[str, Any]]:
    """Return plain data, short because annotations are limited.

    An instance is ``[profile, id, start, size, inside]``. A creation is ``[profile, start, size]``
    of the GPU instance, followed by the span of a compute instance.
    """

    def span(place: model.Placement | None) -> list[int]:
        return [place.start, place.size] if place else []

    rows: list[dict[str, Any]] = []
    for gpu in gpus:
        data: dict[str, Any] = {
            "uuid": gpu.uuid,
            "mode": gpu.current_mode.value if gpu.current_mode else None,
            "pending": gpu.pending_mode.value if gpu.pending_mode else None,
            "instances": [
                [
                    str(gi.profile),
                    gi.profile_id,
                    *span(gi.placement),
                    [[str(ci.profile), *span(ci.placement)] for ci in gi.compute_instances],
                ]
                for gi in gpu.gpu_instances
            ],
        }
        if gpu.created is not None:
            data["created"] = [
                [str(each.profile), *span(each.gpu_instance), *span(each.span)]
                for each in gpu.created
            ]
        rows.append(data)
    return rows


def from_data(data: object) -> tuple[model.GpuSnapshot, ...]:
    """Parse the data of ``to_data``; ValueError if they are invalid."""
    with json_text.decoding("a snapshot of GPUs"):
        return tuple(map(_snapshot, json_values.items(data)))


def _snapshot(data: Mapping[str, Any]) -> model.GpuSnapshot:
    def mode(value: object) -> model.MigMode | None:
        return None if value is None else model.MigMode(value)

    created = data.get("created")
    return model.GpuSnapshot(
        uuid=json_text.string(data, "uuid"),
        current_mode=mode(data.get("mode")),
        pending_mode=mode(data.get("pending")),
        gpu_instances=_instances(json.dumps(data["instances"])),
        created=None if created is None else tuple(map(_creation, json_values.items(created))),
    )


@functools.lru_cache(maxsize=4096)
def _instances(text: str) -> tuple[model.GpuInstance, ...]:
    """Parse instances as JSON: thousands of GPUs in a cluster have the same."""
    return tuple(
        _instance(number, row) for number, row in enumerate(json_values.items(json.loads(text)))
    )


def _creation(row: Sequence[Any]) -> model.Creation:
    name, start, size, *span = row
    return model.Creation(
        profile=profile_name.parse(str(name)),
        gpu_instance=json_values.span(start, size),
        span=json_values.span(*span) if span else None,
    )


def _instance(number: int, row: Sequence[Any]) -> model.GpuInstance:
    name, profile_id, start, size, inside = row
    return model.GpuInstance(
        instance_id=number,
        profile=profile_name.parse(str(name)),
        profile_id=json_values.number(profile_id),
        placement=json_values.span(start, size),
        compute_instances=tuple(
            _compute_instance(number, each)
            for number, each in enumerate(json_values.items(inside))
        ),
    )


def _compute_instance(number: int, row: Sequence[Any]) -> model.ComputeInstance:
    name, *span = row
    return model.ComputeInstance(
        instance_id=number,
        profile=profile_name.parse(str(name)),
        placement=json_values.span(*span) if span else None,
        uuid=None,
    )
