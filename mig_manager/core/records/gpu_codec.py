"""GPUs as JSON: snapshots in the journal, and the published inventory of a node.

Profiles are identified by name, since a driver update may change ids. Instance ids and MIG UUIDs
are omitted, because they cannot be restored; only the inventory on the host has the UUIDs.
"""

import dataclasses
import enum
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mig_manager import errors
from mig_manager.core import messages, model, profile_name
from mig_manager.core.files import json_text

_Enum = TypeVar("_Enum", bound=enum.Enum)

VERSION = 1  # version of the inventory
_MAX_LISTED = 64  # GPUs, models, profiles and instances
_MAX_SLICE = 1_000  # more than any GPU has: a journal must be readable on GPUs of the future
_MAX_SLICES = 16  # in the inventory, which is untrusted: the largest GPU has twelve memory slices
_MAX_MEMORY_GB = 10_000
_MAX_LETTERS = 80
_MAX_LETTERS_OF_MESSAGE = 400  # the driver's answer about an unreachable GPU
_MAX_NUMBER = 2**32 - 1


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
        return tuple(map(_snapshot, _list(data)))


def _snapshot(data: Mapping[str, Any]) -> model.GpuSnapshot:
    if not isinstance(data["uuid"], str):
        raise ValueError("the uuid of a GPU is not a text")  # noqa: TRY004 - content

    def mode(value: object) -> model.MigMode | None:
        return None if value is None else model.MigMode(value)

    created = tuple(map(_creation, _list(data["created"]))) if "created" in data else None
    return model.GpuSnapshot(
        uuid=data["uuid"],
        current_mode=mode(data.get("mode")),
        pending_mode=mode(data.get("pending")),
        gpu_instances=_instances(json.dumps(data["instances"])),
        created=created,
    )


@functools.lru_cache(maxsize=4096)
def _instances(text: str) -> tuple[model.GpuInstance, ...]:
    """Parse instances as JSON: thousands of GPUs in a cluster have the same."""
    return tuple(_instance(number, row) for number, row in enumerate(_list(json.loads(text))))


def _creation(row: Sequence[Any]) -> model.Creation:
    name, start, size, *span = row
    return model.Creation(
        profile=profile_name.parse(str(name)),
        gpu_instance=_span(start, size),
        span=_span(*span) if span else None,
    )


def _instance(number: int, row: Sequence[Any]) -> model.GpuInstance:
    name, profile_id, start, size, inside = row
    return model.GpuInstance(
        instance_id=number,
        profile=profile_name.parse(str(name)),
        profile_id=_number(profile_id),
        placement=_span(start, size),
        compute_instances=tuple(
            _compute_instance(number, each) for number, each in enumerate(_list(inside))
        ),
    )


def _compute_instance(number: int, row: Sequence[Any]) -> model.ComputeInstance:
    name, *span = row
    return model.ComputeInstance(
        instance_id=number,
        profile=profile_name.parse(str(name)),
        placement=_span(*span) if span else None,
        uuid=None,
    )


# -- the inventory -------------------------------------------------------------------------------


def to_json(gpus: Sequence[model.Gpu]) -> str:
    """Return the annotation's value: one line, the same for the same GPUs."""
    return json.dumps(to_inventory(gpus), separators=(",", ":"))


def to_inventory(gpus: Sequence[model.Gpu], *, has_devices: bool = False) -> dict[str, Any]:
    """Return plain data; ``has_devices``: with the UUIDs of MIG devices, valid until a reboot."""
    models: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for gpu, snapshot in zip(gpus, to_data([gpu.snapshot for gpu in gpus]), strict=True):
        kind = {
            "name": gpu.name,
            "architecture": gpu.architecture.value,
            "device": gpu.pci_device_id,
            "subsystem": gpu.pci_subsystem_id,
            "memory": gpu.memory_mib,
            "reset": gpu.mode_change_needs_reset,
            "virtualization": gpu.virtualization.value,
            "profiles": None if gpu.profiles is None else [_profile_row(p) for p in gpu.profiles],
        }
        if kind not in models:
            models.append(kind)
        place: dict[str, Any] = {
            "index": gpu.index,
            "pci": gpu.pci_address,
            "model": models.index(kind),
        }
        if gpu.needs_recovery and gpu.recovery_action:
            place["recovery"] = gpu.recovery_action.value
        if has_devices:
            place["devices"] = [device.uuid for device in gpu.devices]
        rows.append(place | snapshot)
    data: dict[str, Any] = {"version": VERSION, "models": models, "gpus": rows}
    unreachable = [
        {
            "index": gpu.index,
            "uuid": gpu.uuid,
            "pci": gpu.pci_address,
            "device": gpu.pci_device_id,
            "name": gpu.name,
            "reason": gpu.reason.value,
            "code": gpu.code,
            "message": gpu.message[:_MAX_LETTERS_OF_MESSAGE],
        }
        for gpu in model.unreachable_of(gpus)
    ]
    if unreachable:
        data["unreachable"] = unreachable
    return data


def _profile_row(info: model.GpuInstanceProfile) -> list[Any]:
    return [
        str(info.profile),
        info.enum_index,
        info.profile_id,
        info.memory_mib,
        info.multiprocessors,
        info.max_instances,
        list(info.engines.counts),
        [[place.start, place.size] for place in info.placements],
    ]


def from_json(text: str) -> model.ObservedGpus:
    """Parse the annotation's value; ValueError if it is invalid, or of another version."""
    with json_text.decoding("a list of GPUs"):
        return from_inventory(json_text.parse_object(text))


def from_inventory(data: Mapping[str, Any]) -> model.ObservedGpus:
    """Parse the data of ``to_inventory``; ValueError if they are invalid."""
    with json_text.decoding("a list of GPUs"):
        if data["version"] != VERSION:
            raise ValueError("from a version this program does not know")
        kinds = [_model(each) for each in _list(data["models"])]
        rows = _list(data["gpus"])
        gpus = tuple(
            _gpu(row, before, kinds) for row, before in zip(rows, from_data(rows), strict=True)
        )
        unreachable = [_unreachable(row) for row in _list(data.get("unreachable", []))]
    for identity in ("index", "uuid"):
        if len({getattr(gpu, identity) for gpu in gpus}) != len(gpus):
            raise ValueError(f"two GPUs have the same {identity}")
    return model.ObservedGpus(gpus, unreachable)


def idle(gpu: model.Gpu) -> model.Gpu:
    """Return the same GPU, not partitioned."""
    mode = None if gpu.current_mode is None else model.MigMode.DISABLED
    return dataclasses.replace(gpu, current_mode=mode, pending_mode=mode, gpu_instances=())


def _model(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": _text(data["name"]),
        "architecture": _parse_enum(data["architecture"], model.Architecture.OTHER),
        "pci_device_id": _number(data["device"]),
        "pci_subsystem_id": _number(data["subsystem"]),
        "memory_mib": _number(data["memory"]),
        "mode_change_needs_reset": data["reset"] is True,
        "virtualization": _parse_enum(data["virtualization"], model.Virtualization.NONE),
        "profiles": _profiles(json.dumps(data["profiles"])),
    }


@functools.lru_cache(maxsize=256)
def _profiles(text: str) -> tuple[model.GpuInstanceProfile, ...] | None:
    """Parse profiles as JSON: all GPUs of a model have the same."""
    rows = json.loads(text)
    return None if rows is None else tuple(map(_profile, _list(rows)))


def _profile(row: Sequence[Any]) -> model.GpuInstanceProfile:
    name, enum_index, profile_id, memory, processors, maximum, engines, placements = row
    decoders, encoders, jpegs, ofas = map(_number, engines)
    return model.GpuInstanceProfile(
        profile=_check_profile(profile_name.parse(_text(name))),
        enum_index=_number(enum_index),
        profile_id=_number(profile_id),
        memory_mib=_number(memory),
        multiprocessors=_number(processors),
        max_instances=_number(maximum),
        engines=model.Engines(decoders, encoders, jpegs, ofas),
        placements=tuple(_span(*span, limit=_MAX_SLICES) for span in _list(placements)),
    )


def _gpu(
    row: Mapping[str, Any], snapshot: model.GpuSnapshot, kinds: Sequence[Mapping[str, Any]]
) -> model.Gpu:
    reached = 0
    for gi in sorted(snapshot.gpu_instances, key=lambda gi: gi.placement):
        if _span(gi.placement.start, gi.placement.size, limit=_MAX_SLICES).start < reached:
            raise ValueError("two instances overlap")
        reached = gi.placement.end
        slices = _check_profile(gi.profile).gpu_slices
        if len(gi.compute_instances) > slices:
            raise ValueError("an instance has more parts than slices")
        for ci in gi.compute_instances:
            _check_profile(ci.profile)
            if ci.placement is not None:
                _span(ci.placement.start, ci.placement.size, limit=slices)
    return model.Gpu(
        index=_number(row["index"]),
        uuid=_text(snapshot.uuid),
        pci_address=_text(row["pci"]),
        current_mode=snapshot.current_mode,
        pending_mode=snapshot.pending_mode,
        gpu_instances=_with_devices(snapshot.gpu_instances, row.get("devices")),
        recovery_action=None
        if row.get("recovery") is None
        else _parse_enum(row["recovery"], model.RecoveryAction.OTHER),
        **kinds[_number(row["model"])],
    )


def _with_devices(
    instances: tuple[model.GpuInstance, ...], uuids: object
) -> tuple[model.GpuInstance, ...]:
    """Return the instances with the UUIDs of their devices, if these are known."""
    if uuids is None:
        return instances
    texts = [None if uuid is None else _text(uuid) for uuid in _list(uuids)]
    if len(texts) != sum(len(gi.compute_instances) for gi in instances):
        raise ValueError("a UUID for each device is missing")
    in_order = iter(texts)
    return tuple(
        dataclasses.replace(
            gi,
            compute_instances=tuple(
                dataclasses.replace(ci, uuid=next(in_order)) for ci in gi.compute_instances
            ),
        )
        for gi in instances
    )


def _parse_enum(value: object, otherwise: _Enum) -> _Enum:
    """Return a published value, or ``otherwise`` for one that only a newer agent knows."""
    return next((each for each in type(otherwise) if each.value == value), otherwise)


def _unreachable(row: Mapping[str, Any]) -> model.UnreachableGpu:
    device, code = row["device"], row["code"]
    return model.UnreachableGpu(
        index=_number(row["index"]),
        uuid=_text(row["uuid"]),
        pci_address=_text(row["pci"]),
        pci_device_id=None if device is None else _number(device),
        name=_text(row["name"]),
        reason=_parse_enum(row["reason"], errors.Reason.NVML_ERROR),
        code=None if code is None else _number(code),
        message=_text(row["message"], limit=_MAX_LETTERS_OF_MESSAGE),
    )


# -- untrusted values; ValueError if one is invalid ----------------------------------------------


def _check_profile(profile: model.Profile) -> model.Profile:
    """Refuse a well-formed profile that no GPU can have."""
    is_ordered = 1 <= profile.compute_slices <= profile.gpu_slices <= _MAX_SLICES
    if not is_ordered or profile.memory_gb > _MAX_MEMORY_GB:
        raise ValueError(f"no GPU has a profile {str(profile)[:_MAX_LETTERS]}")
    return profile


def _span(start: object, size: object, *, limit: int = _MAX_SLICE) -> model.Placement:
    place = model.Placement(_number(start), _number(size))
    if not (place.size > 0 and place.end <= limit):
        raise ValueError(f"{place} is no span of {limit} slices")
    return place


def _text(value: object, *, limit: int = _MAX_LETTERS) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise ValueError("a text is missing or too long")
    return messages.printable(value)


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_NUMBER:
        raise ValueError("a number is missing or out of range")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MAX_LISTED:
        raise ValueError("a list is missing or too long")
    return value
