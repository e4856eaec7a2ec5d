"""What GPUs had, as plain data and back: the part of a journal that a way back needs.

The names of profiles and not the driver's ids are what counts: a driver may be updated between
writing and reading. Instance ids and MIG UUIDs are left out, for nothing can bring them back.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mig_manager.core import model, profile

_MAX_SLICE = 1_000
"""No GPU has so many; it keeps nonsense from being planned with."""


def to_data(gpus: Sequence[model.GpuSnapshot]) -> list[dict[str, Any]]:
    """Return plain data, short because annotations are.

    An instance is ``[profile, id, start, size, inside]``, a creation ``[profile, start, size]``
    of a GPU instance and, of a compute instance, its span after that.
    """
    return [
        {
            "uuid": gpu.uuid,
            "mode": _mode_text(gpu.current_mode),
            "pending": _mode_text(gpu.pending_mode),
            "instances": [
                [
                    str(gi.profile),
                    gi.profile_id,
                    gi.placement.start,
                    gi.placement.size,
                    [_inside(ci) for ci in gi.compute_instances],
                ]
                for gi in gpu.gpu_instances
            ],
        }
        | ({} if gpu.created is None else {"created": [_creation(each) for each in gpu.created]})
        for gpu in gpus
    ]


def from_data(data: object) -> tuple[model.GpuSnapshot, ...]:
    """Read what ``to_data`` wrote.

    Raises:
        ValueError: It is something else.
    """
    return tuple(_gpu(item) for item in _list(data))


def _creation(each: model.Creation) -> list[Any]:
    span = [each.span.start, each.span.size] if each.span else []
    return [str(each.profile), each.gpu_instance.start, each.gpu_instance.size, *span]


def _inside(ci: model.ComputeInstance) -> list[Any]:
    place = [ci.placement.start, ci.placement.size] if ci.placement else []
    return [str(ci.profile), *place]


def _mode_text(mode: model.MigMode | None) -> str | None:
    return mode.value if mode else None


def _gpu(data: object) -> model.GpuSnapshot:
    if not isinstance(data, Mapping) or not isinstance(data.get("uuid"), str):
        raise ValueError("a GPU of the snapshot has no uuid")  # noqa: TRY004 - content
    return model.GpuSnapshot(
        uuid=data["uuid"],
        current_mode=_mode(data.get("mode")),
        pending_mode=_mode(data.get("pending")),
        gpu_instances=tuple(
            _instance(number, item) for number, item in enumerate(_list(data.get("instances")))
        ),
        created=tuple(_created(item) for item in _list(data["created"]))
        if "created" in data
        else None,
    )


def _created(data: object) -> model.Creation:
    row = _list(data)
    name, start, size, *span = _row(row, 5 if len(row) != 3 else 3)  # noqa: PLR2004 - see to_data
    return model.Creation(
        profile=profile.parse(str(name)),
        gpu_instance=_place(start, size),
        span=_place(*span) if span else None,
    )


def _mode(value: object) -> model.MigMode | None:
    return None if value is None else model.MigMode(value)


def _instance(number: int, data: object) -> model.GpuInstance:
    name, profile_id, start, size, inside = _row(data, 5)
    return model.GpuInstance(
        instance_id=number,
        profile=profile.parse(str(name)),
        profile_id=_whole(profile_id),
        placement=_place(start, size),
        compute_instances=tuple(
            _compute_instance(inner, item) for inner, item in enumerate(_list(inside))
        ),
    )


def _compute_instance(number: int, data: object) -> model.ComputeInstance:
    row = _list(data)
    name, start, size = _row(row, 3) if len(row) != 1 else (row[0], None, None)
    return model.ComputeInstance(
        instance_id=number,
        profile=profile.parse(str(name)),
        placement=None if start is None else _place(start, size),
        uuid=None,
    )


def _place(start: object, size: object) -> model.Placement:
    place = model.Placement(_whole(start), _whole(size))
    if not (place.start >= 0 and place.size > 0 and place.end <= _MAX_SLICE):
        raise ValueError(f"{place} is no span of slices")
    return place


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is no whole number")  # noqa: TRY004 - content, not type
    return value


def _row(data: object, length: int) -> list[Any]:
    row = _list(data)
    if len(row) != length:
        raise ValueError(f"an instance of the snapshot has {len(row)} members, not {length}")
    return row


def _list(data: object) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError("a list of the snapshot is something else")  # noqa: TRY004 - content
    return data
