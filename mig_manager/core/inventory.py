"""GPUs as a node's annotation tells them, so that a plan can be made where no GPU is.

What the GPUs of one product have in common is written once. Ids of instances and UUIDs of MIG
devices are left out: the planner needs neither, and nobody outside of the node can do anything
with them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mig_manager.core import model, profile
from mig_manager.core import snapshot as snapshots

VERSION = 1
_MOST = 1_000
"""GPUs, models and profiles; it keeps nonsense from being planned with."""
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
    data = {"version": VERSION, "models": models, "gpus": rows}
    return json.dumps(data, separators=(",", ":"))


def from_json(text: str) -> tuple[model.Gpu, ...]:
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
        return tuple(_gpu(row, snapshot, kinds) for row, snapshot in zip(rows, had, strict=True))
    except (AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"not a list of GPUs: {error!r}") from error


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
        "name": str(data["name"]),
        "architecture": model.Architecture(data["architecture"]),
        "pci_device_id": int(data["device"]),
        "pci_subsystem_id": int(data["subsystem"]),
        "memory_mib": int(data["memory"]),
        "mode_change_needs_reset": data["reset"] is True,
        "virtualization": model.Virtualization(data["virtualization"]),
        "profiles": None if rows is None else tuple(_profile(row) for row in _list(rows)),
    }


def _profile(row: object) -> model.GpuInstanceProfile:
    name, enum_index, profile_id, memory, processors, most, engines, places = _list(
        row, length=_PROFILE_ROW
    )
    decoders, encoders, jpegs, ofas = map(int, _list(engines, length=_ENGINE_ROW))
    return model.GpuInstanceProfile(
        profile=profile.parse(str(name)),
        enum_index=int(enum_index),
        profile_id=int(profile_id),
        memory_mib=int(memory),
        multiprocessors=int(processors),
        max_instances=int(most),
        engines=model.Engines(decoders=decoders, encoders=encoders, jpegs=jpegs, ofas=ofas),
        placements=tuple(_place(place) for place in _list(places)),
    )


def _place(row: object) -> model.Placement:
    start, size = map(int, _list(row, length=2))
    if not (start >= 0 and size > 0 and start + size <= _MOST):
        raise ValueError(f"{start}:{size} is no span of slices")
    return model.Placement(start, size)


def _gpu(
    row: Mapping[str, Any], had: model.GpuSnapshot, kinds: Sequence[Mapping[str, Any]]
) -> model.Gpu:
    return model.Gpu(
        index=int(row["index"]),
        uuid=had.uuid,
        pci_address=str(row["pci"]),
        current_mode=had.current_mode,
        pending_mode=had.pending_mode,
        gpu_instances=had.gpu_instances,
        **kinds[int(row["model"])],
    )


def _list(value: object, *, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST:
        raise ValueError("a list is something else, or too long")
    if length is not None and len(value) != length:
        raise ValueError(f"a row has {len(value)} members, not {length}")
    return value
