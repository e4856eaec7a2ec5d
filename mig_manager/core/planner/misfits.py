"""Explain why a layout does not fit a GPU, and which part of it fits."""

import collections
from collections.abc import Iterable, Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.core import messages, model, profile_name
from mig_manager.core.planner import packing, placement

_ENGINES = (
    ("decoders", "decoder (NVDEC)"),
    ("encoders", "encoder (NVENC)"),
    ("jpegs", "JPEG engine (NVJPG)"),
    ("ofas", "optical-flow engine (OFA)"),
)


def unknown_profile(
    gpu: model.Gpu, profile: model.Profile, capacity: placement.Capacity
) -> errors.LayoutError:
    """Return the error for a profile that this GPU lacks; it lists the GPU's profiles."""
    spec = capacity.by_profile.get(profile.gpu_instance)
    if spec:
        slices = profile.gpu_slices
        sizes = [s for s in range(slices, 0, -1) if packing.exists(s, slices)]
        why = f": {profile.gpu_instance} has compute instances of {_join(sizes)} slices"
    elif not capacity.specs:
        why = ": the driver lists no profiles of this GPU"
    else:
        profiles = [spec.profile for spec in capacity.specs]
        similar = profile_name.suggest(profile, profiles)
        hint = f"; did you mean {similar[0]}? Its" if similar else "; its"
        why = f"{hint} profiles: {_join(reversed(profiles))}"
    return errors.LayoutError(
        f"{gpu} has no profile {profile}{why}",
        reason=reasons.Reason.UNKNOWN_PROFILE,
        gpu_uuid=gpu.uuid,
        profile=str(profile),
    )


def does_not_fit(
    gpu: model.Gpu,
    devices: Mapping[model.Profile, int],
    capacity: placement.Capacity,
    *,
    pinned: Sequence[placement.Placed] = (),
) -> errors.LayoutError:
    """Return the error for a layout that does not fit; it names the largest part that fits.

    ``devices`` are the devices without ``pinned`` placements.
    """
    needed = instances(devices, capacity)
    everything = collections.Counter(profile for profile, _ in pinned)
    everything.update(needed)
    engines = missing_engines(everything, capacity)
    occupied = packing.slices(place for _, place in pinned)
    crowded = [
        f"it needs {count}x {profile} and the memory slices have room for {room}"
        for profile, count in needed.items()
        if count > (room := placement.max_instances(capacity.by_profile[profile], occupied))
    ]
    why = [*crowded, *engines] or [_why_scattered(needed, capacity, pinned)]
    part = _largest_part(devices, capacity, pinned)
    rest = "" if engines else _free_slices(devices, part, capacity, pinned)
    beside = f" beside {_placed_text(pinned)}" if pinned else ""
    return errors.LayoutError(
        f"{profile_name.with_counts(devices)}{beside} does not fit {gpu}: {'; '.join(why)}; "
        "the largest part that fits is "
        f"{profile_name.with_counts(part) if part else 'nothing'}{rest}",
        reason=reasons.Reason.DOES_NOT_FIT,
        gpu_uuid=gpu.uuid,
    )


def missing_engines(
    counts: Mapping[model.Profile, int], capacity: placement.Capacity
) -> list[str]:
    """Describe the shortage of media engines."""
    missing = []
    for field, name in _ENGINES:
        has = getattr(capacity.pool, field)
        wants = sum(
            count * getattr(spec.engines, field)
            for profile, count in counts.items()
            if (spec := capacity.by_profile.get(profile))
        )
        if wants > has:
            missing.append(f"it needs {wants} x {name} and the GPU has {has}")
    return missing


def instances(
    devices: Mapping[model.Profile, int], capacity: placement.Capacity
) -> dict[model.Profile, int]:
    """Count the fewest GPU instances for these devices."""
    needed: dict[model.Profile, int] = {}
    for profile in sorted({device.gpu_instance for device in devices}):
        counts = packing.count_sizes(devices, profile)
        rough = -(-packing.total_slices(counts) // profile.gpu_slices)
        # Packing an impossible count would take too long.
        hopeless = rough > capacity.maximum(profile)
        needed[profile] = rough if hopeless else len(packing.bins(counts))
    return needed


def _why_scattered(
    needed: Mapping[model.Profile, int],
    capacity: placement.Capacity,
    pinned: Sequence[placement.Placed],
) -> str:
    sizes = {spec.profile: max(p.size for p in spec.placements) for spec in capacity.specs}
    wants = sum(count * sizes[profile] for profile, count in needed.items())
    free = capacity.memory_slices - sum(place.size for _, place in pinned)
    if wants > free:
        sums = " + ".join(f"{count} x {sizes[profile]}" for profile, count in needed.items())
        return f"it needs {wants} memory slices and the GPU has {free} ({sums})"
    return f"the possible placements in the {free} memory slices overlap however they are chosen"


def _largest_part(
    devices: Mapping[model.Profile, int],
    capacity: placement.Capacity,
    pinned: Sequence[placement.Placed],
) -> dict[model.Profile, int]:
    part: dict[model.Profile, int] = {}
    for profile in sorted(devices):
        for count in range(1, devices[profile] + 1):
            needed = instances({**part, profile: count}, capacity)
            if not capacity.fits(needed, pinned=pinned):
                break
            part[profile] = count
    return part


def _free_slices(
    devices: Mapping[model.Profile, int],
    part: Mapping[model.Profile, int],
    capacity: placement.Capacity,
    pinned: Sequence[placement.Placed],
) -> str:
    """Describe the placements of a part, and the first profile that does not fit beside it."""
    short = next(profile for profile in sorted(devices) if part.get(profile, 0) < devices[profile])
    spec = capacity.by_profile[short.gpu_instance]
    arrangement = capacity.best((), instances(part, capacity), pinned=pinned)
    placed = [*pinned, *(arrangement.placed if arrangement else ())]
    occupied = packing.slices(place for _, place in placed)
    free = [each for each in range(capacity.memory_slices) if not occupied >> each & 1]
    size = max(place.size for place in spec.placements)
    starts = sorted({place.start for place in spec.placements})
    room = (
        f"memory slice {shown_slices(free, 'and')} is free" if free else "no memory slice is free"
    )
    where = f" ({_placed_text(placed)})" if placed else ""
    takes = f"needs {size} in a row, starting" if size > 1 else "can only be"
    return f"{where}; then {room}, and {spec.profile} {takes} at {shown_slices(starts)}"


def _placed_text(placed: Iterable[placement.Placed]) -> str:
    """Render placements: ``3g.20gb at 0-3, 4-7``."""
    spans: dict[model.Profile, list[str]] = collections.defaultdict(list)
    for profile, place in sorted(placed, key=lambda each: each[1]):
        spans[profile] += messages.ranges(range(place.start, place.end))
    return "; ".join(f"{profile} at {_join(texts)}" for profile, texts in spans.items())


def span_text(place: model.Placement) -> str:
    """Render a span as ``slices 0-3`` or ``slice 7``."""
    (text,) = messages.ranges(range(place.start, place.end))
    return f"slices {text}" if place.size > 1 else f"slice {text}"


def shown_slices(slices: Sequence[int], conjunction: str = "or") -> str:
    """Render slices as ``0-3 or 7``."""
    *first, last = messages.ranges(slices) or ["none"]
    return f"{', '.join(first)} {conjunction} {last}" if first else last


def _join(words: Iterable[object]) -> str:
    return ", ".join(map(str, words))
