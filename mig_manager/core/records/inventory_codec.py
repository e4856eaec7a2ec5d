"""The inventory of a node as JSON: its GPUs, as the agent publishes them.

Only the inventory on the host has the UUIDs of MIG devices, which are valid until a reboot.
"""

import dataclasses
import enum
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mig_manager import reasons
from mig_manager.core import model, profile_name
from mig_manager.core.files import json_text
from mig_manager.core.records import json_values, snapshot_codec

_Enum = TypeVar("_Enum", bound=enum.Enum)

VERSION = 1
_MAX_SLICES = 16  # the largest GPU has twelve memory slices
_MAX_MEMORY_GB = 10_000
_MAX_LETTERS_OF_MESSAGE = 400  # the driver's answer about an unreachable GPU


def to_json(gpus: Sequence[model.Gpu]) -> str:
    """Return the annotation's value: one line, the same for the same GPUs."""
    return json.dumps(to_data(gpus), separators=(",", ":"))


def to_data(gpus: Sequence[model.Gpu], *, has_devices: bool = False) -> dict[str, Any]:
    """Return plain data; ``has_devices``: with the UUIDs of MIG devices, valid until a reboot."""
    models: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    snapshots = snapshot_codec.to_data([gpu.snapshot for gpu in gpus])
    for gpu, snapshot in zip(gpus, snapshots, strict=True):
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
        return from_data(json_text.parse_object(text))


def from_data(data: Mapping[str, Any]) -> model.ObservedGpus:
    """Parse the data of ``to_data``; ValueError if they are invalid."""
    with json_text.decoding("a list of GPUs"):
        if data["version"] != VERSION:
            raise ValueError("from a version this program does not know")
        kinds = [_model(each) for each in json_values.items(data["models"])]
        rows = json_values.items(data["gpus"])
        gpus = tuple(
            _gpu(row, before, kinds)
            for row, before in zip(rows, snapshot_codec.from_data(rows), strict=True)
        )
        unreachable = [_unreachable(row) for row in json_values.items(data.get("unreachable", []))]
    for identity in ("index", "uuid"):
        if len({getattr(gpu, identity) for gpu in gpus}) != len(gpus):
            raise ValueError(f"two GPUs have the same {identity}")
    return model.ObservedGpus(gpus, unreachable)


def _model(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": json_values.text(data["name"]),
        "architecture": _parse_enum(data["architecture"], model.Architecture.OTHER),
        "pci_device_id": json_values.number(data["device"]),
        "pci_subsystem_id": json_values.number(data["subsystem"]),
        "memory_mib": json_values.number(data["memory"]),
        "mode_change_needs_reset": data["reset"] is True,
        "virtualization": _parse_enum(data["virtualization"], model.Virtualization.NONE),
        "profiles": _profiles(json.dumps(data["profiles"])),
    }


@functools.lru_cache(maxsize=256)
def _profiles(text: str) -> tuple[model.GpuInstanceProfile, ...] | None:
    """Parse profiles as JSON: all GPUs of a model have the same."""
    rows = json.loads(text)
    return None if rows is None else tuple(map(_profile, json_values.items(rows)))


def _profile(row: Sequence[Any]) -> model.GpuInstanceProfile:
    name, enum_index, profile_id, memory, processors, maximum, engines, placements = row
    decoders, encoders, jpegs, ofas = map(json_values.number, engines)
    return model.GpuInstanceProfile(
        profile=_check_profile(profile_name.parse(json_values.text(name))),
        enum_index=json_values.number(enum_index),
        profile_id=json_values.number(profile_id),
        memory_mib=json_values.number(memory),
        multiprocessors=json_values.number(processors),
        max_instances=json_values.number(maximum),
        engines=model.Engines(decoders, encoders, jpegs, ofas),
        placements=tuple(
            json_values.span(*span, limit=_MAX_SLICES) for span in json_values.items(placements)
        ),
    )


def _gpu(
    row: Mapping[str, Any], snapshot: model.GpuSnapshot, kinds: Sequence[Mapping[str, Any]]
) -> model.Gpu:
    reached = 0
    for gi in sorted(snapshot.gpu_instances, key=lambda gi: gi.placement):
        place = json_values.span(gi.placement.start, gi.placement.size, limit=_MAX_SLICES)
        if place.start < reached:
            raise ValueError("two instances overlap")
        reached = place.end
        slices = _check_profile(gi.profile).gpu_slices
        if len(gi.compute_instances) > slices:
            raise ValueError("an instance has more parts than slices")
        for ci in gi.compute_instances:
            _check_profile(ci.profile)
            if ci.placement is not None:
                json_values.span(ci.placement.start, ci.placement.size, limit=slices)
    return model.Gpu(
        index=json_values.number(row["index"]),
        uuid=json_values.text(snapshot.uuid),
        pci_address=json_values.text(row["pci"]),
        current_mode=snapshot.current_mode,
        pending_mode=snapshot.pending_mode,
        gpu_instances=_with_devices(snapshot.gpu_instances, row.get("devices")),
        recovery_action=None
        if row.get("recovery") is None
        else _parse_enum(row["recovery"], model.RecoveryAction.OTHER),
        **kinds[json_values.number(row["model"])],
    )


def _with_devices(
    instances: tuple[model.GpuInstance, ...], uuids: object
) -> tuple[model.GpuInstance, ...]:
    """Return the instances with the UUIDs of their devices, if these are known."""
    if uuids is None:
        return instances
    texts = [None if uuid is None else json_values.text(uuid) for uuid in json_values.items(uuids)]
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
        index=json_values.number(row["index"]),
        uuid=json_values.text(row["uuid"]),
        pci_address=json_values.text(row["pci"]),
        pci_device_id=None if device is None else json_values.number(device),
        name=json_values.text(row["name"]),
        reason=_parse_enum(row["reason"], reasons.Reason.NVML_ERROR),
        code=None if code is None else json_values.number(code),
        message=json_values.text(row["message"], limit=_MAX_LETTERS_OF_MESSAGE),
    )


def _check_profile(profile: model.Profile) -> model.Profile:
    """Refuse a well-formed profile that no GPU can have."""
    is_ordered = 1 <= profile.compute_slices <= profile.gpu_slices <= _MAX_SLICES
    if not is_ordered or profile.memory_gb > _MAX_MEMORY_GB:
        raise ValueError(f"no GPU has a profile {str(profile)[: json_values.MAX_LETTERS]}")
    return profile
