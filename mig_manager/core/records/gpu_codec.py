"""The codec of GPUs: snapshots in the journal, and the published inventory of a node.

Profiles are identified by name, since a driver update may change ids. Instance ids and MIG UUIDs
are omitted: they cannot be restored.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.core import messages, model, profile_name

_MAX_SLICE = 1_000  # more than any GPU has


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
    """Read what ``to_data`` wrote. Raises ValueError: It is something else."""
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
        profile=profile_name.parse(str(name)),
        gpu_instance=_place(start, size),
        span=_place(*span) if span else None,
    )


def _mode(value: object) -> model.MigMode | None:
    return None if value is None else model.MigMode(value)


def _instance(number: int, data: object) -> model.GpuInstance:
    name, profile_id, start, size, inside = _row(data, 5)
    return model.GpuInstance(
        instance_id=number,
        profile=profile_name.parse(str(name)),
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
        profile=profile_name.parse(str(name)),
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


VERSION = 1
_MOST = 64  # GPUs, models and profiles
_MOST_SLICES = 16  # the largest GPU has twelve memory slices
_MOST_MEMORY_GB = 10_000
_MOST_LETTERS = 80
_MOST_LETTERS_OF_MESSAGE = 400  # of the driver's answer about an unreachable GPU
_MOST_NUMBER = 2**32 - 1
_PROFILE_ROW = 8
_ENGINE_ROW = 4


def to_json(gpus: Sequence[model.Gpu]) -> str:
    """Return the annotation's value: one line, the same for the same GPUs."""
    models: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for gpu, had in zip(gpus, to_data([gpu.snapshot for gpu in gpus]), strict=True):
        kind = _model(gpu)
        if kind not in models:
            models.append(kind)
        place = {"index": gpu.index, "pci": gpu.pci_address, "model": models.index(kind)}
        rows.append(place | had)
    data: dict[str, Any] = {"version": VERSION, "models": models, "gpus": rows}
    lost = [_unreachable_row(gpu) for gpu in model.unreachable(gpus)]
    if lost:
        data["unreachable"] = lost
    return json.dumps(data, separators=(",", ":"))


def from_json(text: str) -> model.ObservedGpus:
    """Read what ``to_json`` wrote.

    Raises:
        ValueError: It is something else, or from a version we do not know.
    """
    try:
        data = json.loads(text)
        if data["version"] != VERSION:
            raise ValueError("from a version this program does not know")
        kinds = [_common(each) for each in _inventory_list(data["models"])]
        rows = _inventory_list(data["gpus"])
        had = from_data(rows)
        gpus = tuple(
            _inventory_gpu(row, before, kinds) for row, before in zip(rows, had, strict=True)
        )
        lost = [_unreachable(row) for row in _inventory_list(data.get("unreachable", []))]
    except (AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"not a list of GPUs: {error!r}") from error
    for identity in ("index", "uuid"):
        if len({getattr(gpu, identity) for gpu in gpus}) != len(gpus):
            raise ValueError(f"two GPUs have the same {identity}")
    return model.ObservedGpus(gpus, lost)


def idle(gpu: model.Gpu) -> model.Gpu:
    """Return the same GPU, not partitioned."""
    mode = None if gpu.current_mode is None else model.MigMode.DISABLED
    return dataclasses.replace(gpu, current_mode=mode, pending_mode=mode, gpu_instances=())


def _unreachable_row(gpu: model.UnreachableGpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "pci": gpu.pci_address,
        "device": gpu.pci_device_id,
        "name": gpu.name,
        "reason": gpu.reason.value,
        "code": gpu.code,
        "message": gpu.message[:_MOST_LETTERS_OF_MESSAGE],
    }


def _unreachable(row: Mapping[str, Any]) -> model.UnreachableGpu:
    device, code = row["device"], row["code"]
    return model.UnreachableGpu(
        index=_number(row["index"]),
        uuid=_text(row["uuid"]),
        pci_address=_text(row["pci"]),
        pci_device_id=None if device is None else _number(device),
        name=_text(row["name"]),
        reason=errors.Reason(row["reason"]),
        code=None if code is None else _number(code),
        message=_text(row["message"], most=_MOST_LETTERS_OF_MESSAGE),
    )


def _model(gpu: model.Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "architecture": gpu.architecture.value,
        "device": gpu.pci_device_id,
        "subsystem": gpu.pci_subsystem_id,
        "memory": gpu.memory_mib,
        "reset": gpu.mode_change_needs_reset,
        "virtualization": gpu.virtualization.value,
        "profiles": None if gpu.profiles is None else [_profile_row(p) for p in gpu.profiles],
    }


def _profile_row(info: model.GpuInstanceProfile) -> list[Any]:
    engines = info.engines
    return [
        str(info.profile),
        info.enum_index,
        info.profile_id,
        info.memory_mib,
        info.multiprocessors,
        info.max_instances,
        [engines.decoders, engines.encoders, engines.jpegs, engines.ofas],
        [[place.start, place.size] for place in info.placements],
    ]


def _common(data: Mapping[str, Any]) -> dict[str, Any]:
    rows = data["profiles"]
    return {
        "name": _text(data["name"]),
        "architecture": model.Architecture(data["architecture"]),
        "pci_device_id": _number(data["device"]),
        "pci_subsystem_id": _number(data["subsystem"]),
        "memory_mib": _number(data["memory"]),
        "mode_change_needs_reset": data["reset"] is True,
        "virtualization": model.Virtualization(data["virtualization"]),
        "profiles": None
        if rows is None
        else tuple(_profile(row) for row in _inventory_list(rows)),
    }


def _profile(row: object) -> model.GpuInstanceProfile:
    name, enum_index, profile_id, memory, processors, most, engines, placements = _inventory_list(
        row, length=_PROFILE_ROW
    )
    decoders, encoders, jpegs, ofas = map(_number, _inventory_list(engines, length=_ENGINE_ROW))
    return model.GpuInstanceProfile(
        profile=_sound(profile_name.parse(_text(name))),
        enum_index=_number(enum_index),
        profile_id=_number(profile_id),
        memory_mib=_number(memory),
        multiprocessors=_number(processors),
        max_instances=_number(most),
        engines=model.Engines(decoders=decoders, encoders=encoders, jpegs=jpegs, ofas=ofas),
        placements=tuple(_inventory_place(place) for place in _inventory_list(placements)),
    )


def _inventory_place(row: object) -> model.Placement:
    start, size = map(_number, _inventory_list(row, length=2))
    return _within(model.Placement(start, size), _MOST_SLICES)


def _within(place: model.Placement, slices: int) -> model.Placement:
    if not (place.size > 0 and place.end <= slices):
        raise ValueError(f"{place} is no span of {slices} slices")
    return place


def _inventory_gpu(
    row: Mapping[str, Any], had: model.GpuSnapshot, kinds: Sequence[Mapping[str, Any]]
) -> model.Gpu:
    _check_instances(had.gpu_instances)
    return model.Gpu(
        index=_number(row["index"]),
        uuid=_text(had.uuid),
        pci_address=_text(row["pci"]),
        current_mode=had.current_mode,
        pending_mode=had.pending_mode,
        gpu_instances=had.gpu_instances,
        **kinds[_number(row["model"])],
    )


def _check_instances(instances: Sequence[model.GpuInstance]) -> None:
    """Refuse what no GPU can have.

    Raises:
        ValueError: Instances overlap, or one is larger than what it lies in.
    """
    reached = 0
    for gi in sorted(instances, key=lambda gi: gi.placement):
        if _within(gi.placement, _MOST_SLICES).start < reached:
            raise ValueError("two instances overlap")
        reached = gi.placement.end
        slices = _sound(gi.profile).gpu_slices
        if len(gi.compute_instances) > slices:
            raise ValueError("an instance has more parts than slices")
        for ci in gi.compute_instances:
            _sound(ci.profile)
            if ci.placement is not None:
                _within(ci.placement, slices)


def _sound(named: model.Profile) -> model.Profile:
    """Refuse a profile that is well formed and that no GPU can have."""
    is_sound = 1 <= named.compute_slices <= named.gpu_slices <= _MOST_SLICES
    if not (is_sound and named.memory_gb <= _MOST_MEMORY_GB):
        raise ValueError(f"no GPU has a profile {str(named)[:_MOST_LETTERS]}")
    return named


def _text(value: object, *, most: int = _MOST_LETTERS) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise ValueError("a text is missing or too long")
    return messages.printable(value)


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_NUMBER:
        raise ValueError("a number is missing or out of range")
    return value


def _inventory_list(value: object, *, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST:
        raise ValueError("a list is something else, or too long")
    if length is not None and len(value) != length:
        raise ValueError(f"a row has {len(value)} members, not {length}")
    return value
