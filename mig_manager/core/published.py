"""The GPUs of a node as its agent publishes them, and as GPUs again for whoever plans from afar.

The annotation carries what the planner and the pictures take: of each product its profiles and
their places, told once however many GPUs share it, and of each GPU its mode and its instances at
their places. The driver's ids and the UUIDs of MIG devices are left out: nobody can use them from
afar, and they change at will.

Who may write to a Node may write anything here, so reading is strict and bounded: the planner's
search is exact, and must not be given a board to search for ever.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mig_manager import safetext
from mig_manager.core import model, profile, snapshot

VERSION = 1

_MAX_GPUS = 64
_MAX_PROFILES = 32
_MAX_SLICES = 16
"""The largest board has twelve memory slices."""
_MAX_TEXT = 80
_MAX_NUMBER = 2**32 - 1
_MAX_MEMORY_GB = 10_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What an agent says of its GPUs."""

    observed_at: str
    """ISO 8601, or empty."""
    gpus: tuple[model.Gpu, ...]
    """Ascending by index. Instance ids are made up; MIG devices have no UUID."""


def to_json(gpus: Sequence[model.Gpu], *, observed_at: str) -> str:
    """Return the annotation's value.

    Args:
        gpus: As observed.
        observed_at: When, as ISO 8601.
    """
    products: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for gpu in gpus:
        told = _product_data(gpu)
        if told not in products:
            products.append(told)
        rows.append(_gpu_data(gpu, products.index(told)))
    data = {"version": VERSION, "observedAt": observed_at, "products": products, "gpus": rows}
    return json.dumps(data, separators=(",", ":"))


def gpus(text: str) -> tuple[model.Gpu, ...]:
    """Return the GPUs that an annotation tells of.

    Raises:
        ValueError: It is not one of ours, or from a version we do not know.
    """
    return read(text).gpus


def read(text: str) -> Published:
    """Read an annotation.

    Raises:
        ValueError: It is not one of ours, or from a version we do not know.
    """
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ValueError("not of a version that this program knows")
    products = [_product(item) for item in _items(data.get("products"), _MAX_GPUS)]
    rows = _items(data.get("gpus"), _MAX_GPUS)
    found = [_gpu(_mapping(row), products) for row in rows]
    for key in ("index", "uuid"):
        if len({getattr(gpu, key) for gpu in found}) != len(found):
            raise ValueError(f"two GPUs have the same {key}")
    return Published(
        observed_at=_text(data.get("observedAt", "")),
        gpus=tuple(sorted(found, key=lambda gpu: gpu.index)),
    )


def idle(gpu: model.Gpu) -> model.Gpu:
    """Return the same GPU as if nobody had partitioned it."""
    mode = None if gpu.current_mode is None else model.MigMode.DISABLED
    return dataclasses.replace(gpu, current_mode=mode, pending_mode=mode, gpu_instances=())


def _product_data(gpu: model.Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "architecture": gpu.architecture.value,
        "device": gpu.pci_device_id,
        "subsystem": gpu.pci_subsystem_id,
        "memoryMib": gpu.memory_mib,
        "modeNeedsReset": gpu.mode_change_needs_reset,
        "profiles": None if gpu.profiles is None else [_profile_data(p) for p in gpu.profiles],
    }


def _profile_data(info: model.GpuInstanceProfile) -> list[Any]:
    return [
        str(info.profile),
        info.enum_index,
        info.profile_id,
        info.memory_mib,
        info.multiprocessors,
        info.max_instances,
        list(dataclasses.astuple(info.engines)),
        " ".join(map(str, info.placements)),
    ]


def _gpu_data(gpu: model.Gpu, product: int) -> dict[str, Any]:
    (what_it_has,) = snapshot.to_data([gpu.snapshot])
    data = {
        "index": gpu.index,
        "product": product,
        "address": gpu.pci_address,
        "virtualization": gpu.virtualization.value,
        **what_it_has,
    }
    if gpu.virtualization is model.Virtualization.NONE:
        del data["virtualization"]
    if gpu.pending_mode is gpu.current_mode:
        del data["pending"]
    return data


def _product(item: object) -> model.Gpu:
    """Return an idle GPU of this product, without an identity."""
    data = _mapping(item)
    rows = data.get("profiles")
    resets = data.get("modeNeedsReset")
    if not isinstance(resets, bool):
        raise ValueError("modeNeedsReset is neither true nor false")  # noqa: TRY004 - content
    return model.Gpu(
        index=0,
        uuid="",
        name=_text(data.get("name")),
        architecture=model.Architecture(data.get("architecture")),
        pci_address="",
        pci_device_id=_number(data.get("device")),
        pci_subsystem_id=_number(data.get("subsystem")),
        memory_mib=_number(data.get("memoryMib")),
        current_mode=None,
        pending_mode=None,
        mode_change_needs_reset=resets,
        profiles=None if rows is None else tuple(map(_profile, _items(rows, _MAX_PROFILES))),
        gpu_instances=(),
    )


def _profile(item: object) -> model.GpuInstanceProfile:
    row = _items(item, 8)
    if len(row) != len(dataclasses.fields(model.GpuInstanceProfile)):
        raise ValueError("a profile has too few members")
    name, enum_index, profile_id, memory, processors, most, engines, places = row
    counts = [_number(count) for count in _items(engines, 4)]
    if len(counts) != len(dataclasses.fields(model.Engines)):
        raise ValueError("a profile has too few engines")
    decoders, encoders, jpegs, ofas = counts
    return model.GpuInstanceProfile(
        profile=_sound(profile.parse(_text(name))),
        enum_index=_number(enum_index),
        profile_id=_number(profile_id),
        memory_mib=_number(memory),
        multiprocessors=_number(processors),
        max_instances=_number(most),
        engines=model.Engines(decoders=decoders, encoders=encoders, jpegs=jpegs, ofas=ofas),
        placements=tuple(_placement(each) for each in _text(places, most=400).split()),
    )


def _placement(text: str) -> model.Placement:
    start, colon, size = text.partition(":")
    is_number = start.isdecimal() and size.isdecimal() and text.isascii()
    if not (colon and is_number and max(len(start), len(size)) <= len(str(_MAX_SLICES))):
        raise ValueError("a placement is not start:size")
    return _within(model.Placement(int(start), int(size)), _MAX_SLICES)


def _within(place: model.Placement, slices: int) -> model.Placement:
    if not (place.start >= 0 and place.size > 0 and place.end <= slices):
        raise ValueError(f"{place} lies outside of {slices} slices")
    return place


def _gpu(row: Mapping[str, Any], products: Sequence[model.Gpu]) -> model.Gpu:
    number = _number(row.get("product"))
    if number >= len(products):
        raise ValueError("a GPU is of a product that is not told")
    (had,) = snapshot.from_data([{"pending": row.get("mode"), **row}])
    _check_instances(had.gpu_instances)
    return dataclasses.replace(
        products[number],
        index=_number(row.get("index")),
        uuid=_text(had.uuid),
        pci_address=_text(row.get("address")),
        current_mode=had.current_mode,
        pending_mode=had.pending_mode,
        gpu_instances=had.gpu_instances,
        virtualization=model.Virtualization(row.get("virtualization", "none")),
    )


def _check_instances(instances: Sequence[model.GpuInstance]) -> None:
    """Refuse what no GPU can have.

    Raises:
        ValueError: Instances overlap, or one is larger than what it lies in.
    """
    if len(instances) > _MAX_SLICES:
        raise ValueError("a GPU has more instances than slices")
    reached = 0
    for gi in sorted(instances, key=lambda gi: gi.placement):
        if _within(gi.placement, _MAX_SLICES).start < reached:
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
    is_sound = 1 <= named.compute_slices <= named.gpu_slices <= _MAX_SLICES
    if not (is_sound and named.memory_gb <= _MAX_MEMORY_GB):
        raise ValueError(f"no GPU has a profile {str(named)[:_MAX_TEXT]}")
    return named


def _text(value: object, *, most: int = _MAX_TEXT) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise ValueError("a text is missing or too long")
    return safetext.printable(value)


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_NUMBER:
        raise ValueError("a number is missing or out of range")
    return value


def _items(value: object, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError("a list is missing or too long")
    return value


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a GPU or product is no mapping")  # noqa: TRY004 - content
    return value
