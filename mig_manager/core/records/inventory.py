"""GPUs as a node's annotation tells them, so that a plan can be made where no GPU is.

What the GPUs of one product have in common is written once. Ids of instances and UUIDs of MIG
devices are left out: the planner needs neither, and nobody outside of the node can do anything
with them.

Who may write to a Node may write anything here, and a planner or a terminal elsewhere is given it:
so reading is strict, texts are made harmless, and nothing is larger than any board, for the
planner's search is exact and must not be given one to search for ever.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.core import model, profile
from mig_manager.core.records import snapshot as snapshots
from mig_manager.core.text import messages

VERSION = 1
_MOST = 64
"""GPUs, models and profiles."""
_MOST_SLICES = 16
"""The largest board has twelve memory slices."""
_MOST_MEMORY_GB = 10_000
_MOST_LETTERS = 80
_MOST_LETTERS_TOLD = 400
"""Of the driver's answer about an unreachable GPU."""
_MOST_NUMBER = 2**32 - 1
_PROFILE_ROW = 8
_ENGINE_ROW = 4


def to_json(gpus: Sequence[model.Gpu]) -> str:
    """Return the annotation's value: one line, the same for the same GPUs."""
    models: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for gpu, had in zip(gpus, snapshots.to_data([gpu.snapshot for gpu in gpus]), strict=True):
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
        kinds = [_common(each) for each in _list(data["models"])]
        rows = _list(data["gpus"])
        had = snapshots.from_data(rows)
        gpus = tuple(_gpu(row, before, kinds) for row, before in zip(rows, had, strict=True))
        lost = [_unreachable(row) for row in _list(data.get("unreachable", []))]
    except (AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"not a list of GPUs: {error!r}") from error
    for identity in ("index", "uuid"):
        if len({getattr(gpu, identity) for gpu in gpus}) != len(gpus):
            raise ValueError(f"two GPUs have the same {identity}")
    return model.ObservedGpus(gpus, lost)


def idle(gpu: model.Gpu) -> model.Gpu:
    """Return the same GPU as if nobody had partitioned it."""
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
        "message": gpu.message[:_MOST_LETTERS_TOLD],
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
        message=_text(row["message"], most=_MOST_LETTERS_TOLD),
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
        "profiles": None if rows is None else tuple(_profile(row) for row in _list(rows)),
    }


def _profile(row: object) -> model.GpuInstanceProfile:
    name, enum_index, profile_id, memory, processors, most, engines, places = _list(
        row, length=_PROFILE_ROW
    )
    decoders, encoders, jpegs, ofas = map(_number, _list(engines, length=_ENGINE_ROW))
    return model.GpuInstanceProfile(
        profile=_sound(profile.parse(_text(name))),
        enum_index=_number(enum_index),
        profile_id=_number(profile_id),
        memory_mib=_number(memory),
        multiprocessors=_number(processors),
        max_instances=_number(most),
        engines=model.Engines(decoders=decoders, encoders=encoders, jpegs=jpegs, ofas=ofas),
        placements=tuple(_place(place) for place in _list(places)),
    )


def _place(row: object) -> model.Placement:
    start, size = map(_number, _list(row, length=2))
    return _within(model.Placement(start, size), _MOST_SLICES)


def _within(place: model.Placement, slices: int) -> model.Placement:
    if not (place.size > 0 and place.end <= slices):
        raise ValueError(f"{place} is no span of {slices} slices")
    return place


def _gpu(
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


def _list(value: object, *, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST:
        raise ValueError("a list is something else, or too long")
    if length is not None and len(value) != length:
        raise ValueError(f"a row has {len(value)} members, not {length}")
    return value
