"""Generate the layouts of given GPUs: the standard ones, and all maximal ones.

The standard ones come from NVIDIA's ``nvidia-mig-parted generate-config``: ``all-disabled``,
``all-enabled``, ``all-PROFILE`` with as many instances of one profile as fit, and
``all-balanced``. The counts follow from the placements: NVML's are wrong on A30, and equal on
every other known GPU.
"""

import collections
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.core import model
from mig_manager.core.layout import gpu_selectors, layouts
from mig_manager.core.planner import placement

_MAX_NAME = 63  # a layout's name is a label's value in Kubernetes
_HASH_DIGITS = 8
_BALANCED = "all-balanced"
_BALANCED_COUNTS: Mapping[int, Mapping[int, int]] = {7: {3: 1, 2: 1, 1: 2}, 4: {2: 1, 1: 2}}
"""By the GPU's slices, as in mig-parted: slices of an instance to the number of instances."""


def layouts_of(
    kinds: Sequence[gpu_selectors.GpuKind], *, has_all_maximal: bool = False
) -> dict[str, layouts.Layout]:
    """Return the layouts for nodes with these GPUs, sorted by name with numbers by value.

    The location of a layout names its products. Only layouts for several kinds have a
    ``device-filter``.

    Args:
        kinds: No two share a PCI id.
        has_all_maximal: Add every maximal layout that no standard one equals.
    """
    rules: dict[str, _Rules] = {
        "all-disabled": {(None, None): list(kinds)},
        "all-enabled": {(None, ()): list(kinds)},
    }
    for kind in kinds:
        named = dict(_standard(kind))
        if has_all_maximal:
            others = (each for each in maximal(kind.profiles) if each not in named.values())
            named |= {maximal_name(each): each for each in others}
        for name, counts in named.items():
            # As in mig-parted: balanced rules stay apart, other rules of equal counts are joined.
            apart = kind if name == _BALANCED else None
            rules.setdefault(name, {}).setdefault((apart, counts), []).append(kind)
    return {name: _layout(name, rules[name], kinds) for name in sorted(rules, key=_natural)}


_Rules = dict[
    tuple[gpu_selectors.GpuKind | None, model.Devices | None], list[gpu_selectors.GpuKind]
]
"""The GPUs of every rule, by the kind that keeps it apart and by its instances; None: MIG off."""


def _layout(name: str, rules: _Rules, kinds: Sequence[gpu_selectors.GpuKind]) -> layouts.Layout:
    """Order the rules by their number of instances, then by their filters."""
    products = dict.fromkeys(
        kind.name for kind in kinds if any(kind in members for members in rules.values())
    )
    location = errors.Location(source=f"generated for {', '.join(products)}", line=0, column=0)
    made: list[tuple[int, list[str], layouts.Rule]] = []
    for (apart, counts), members in rules.items():
        # Every GPU can have no instances.
        has_filters = counts and len(kinds) > 1
        filters = [each for kind in members for each in kind.filters] if has_filters else []
        rule = layouts.Rule(
            filters=tuple(sorted(filters, key=str)),
            indices=None,
            desired=model.DesiredGpu.of(
                model.MigMode.DISABLED if counts is None else model.MigMode.ENABLED,
                dict(counts or ()),
            ),
            location=location,
        )
        instances = 0 if apart else sum(count for _, count in counts or ())
        made.append((instances, list(map(str, rule.filters)), rule))
    made.sort(key=lambda each: each[:2])
    return layouts.Layout(name=name, rules=tuple(rule for *_, rule in made), location=location)


def _standard(kind: gpu_selectors.GpuKind) -> Iterator[tuple[str, model.Devices]]:
    """Yield the names and instances of the standard layouts with instances."""
    capacity = placement.Capacity(kind.profiles)
    if balanced := _balanced_devices(kind, capacity):
        yield _BALANCED, balanced
    for spec in capacity.specs:
        yield _label("all-", str(spec.profile)), ((spec.profile, capacity.maximum(spec.profile)),)


def _balanced_devices(kind: gpu_selectors.GpuKind, capacity: placement.Capacity) -> model.Devices:
    """Return one large, one medium and two small instances; empty where a size is missing."""
    base = [
        spec.profile
        for spec in sorted(kind.profiles, key=lambda spec: spec.enum_index)
        if not (spec.profile.attributes or spec.profile.negated_attributes)
    ]
    slices = max((profile.gpu_slices for profile in base), default=0)
    balanced: dict[model.Profile, int] = {}
    for size, count in _BALANCED_COUNTS.get(slices, {}).items():
        candidates = [profile for profile in base if profile.gpu_slices == size]
        if not candidates:
            return ()
        # The profile that fits most often takes the least memory; max returns the first of equals.
        balanced[max(candidates, key=capacity.maximum)] = count
    return model.in_order(balanced)


def maximal(profiles: Iterable[model.GpuInstanceProfile]) -> Iterator[model.Devices]:
    """Yield the instances of every maximal layout: no instance of any profile can be added."""
    capacity = placement.Capacity(profiles)
    order = sorted(spec.profile for spec in capacity.specs)

    def possible_after(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(counts) == len(order):
            yield counts
            return
        for n in itertools.count():
            more = (*counts, n)
            if not capacity.fits(dict(zip(order, more, strict=False))):
                return
            yield from possible_after(more)

    possible = set(possible_after(()))
    for counts in sorted(possible, reverse=True):
        if not any(
            (*counts[:nth], counts[nth] + 1, *counts[nth + 1 :]) in possible
            for nth in range(len(order))
        ):
            yield tuple((each, n) for each, n in zip(order, counts, strict=True) if n)


def maximal_name(counts: model.Devices) -> str:
    """Return the name of a maximal layout, such as ``max-3g.20gb_4x1g.5gb``.

    The name depends only on the instances. A name too long for a label is cut and ends in a hash.
    """
    parts = (f"{n}x{each}" if n > 1 else str(each) for each, n in counts)
    name = _label("max-", "_".join(parts))
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{name[: _MAX_NAME - _HASH_DIGITS - 1].rstrip('-_.')}_{digest}"


def _label(prefix: str, text: str) -> str:
    """Return a valid label value: Kubernetes allows neither plus nor comma."""
    return prefix + re.sub(r"[+,]", ".", text)


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key that puts ``1g.5gb`` before ``1g.10gb``."""
    return [
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.split(r"(\d+)", text)
        if part
    ]


def kinds_of(gpus: Iterable[model.Gpu]) -> tuple[gpu_selectors.GpuKind, ...]:
    """Group the MIG-capable GPUs of a node by PCI id, and by subsystem where profiles differ.

    Raises:
        LayoutError: No GPU has MIG (NOT_MIG_CAPABLE), or the driver lists no profiles while MIG
            is off (NOT_SUPPORTED).
    """
    capable: dict[int, list[model.Gpu]] = collections.defaultdict(list)
    for gpu in gpus:
        if gpu.is_mig_capable:
            capable[gpu.pci_device_id].append(gpu)
    if not capable:
        problem = "this node has no MIG-capable GPU"
        raise errors.LayoutError(problem, reason=reasons.Reason.NOT_MIG_CAPABLE)
    kinds: list[gpu_selectors.GpuKind] = []
    for device_id, alike in sorted(capable.items()):
        offers = {gpu.uuid: _offer(gpu) for gpu in alike if gpu.profiles}
        if not offers:
            raise errors.LayoutError(
                f"this driver lists the profiles of {alike[0]} only once MIG is on: apply "
                "'all-enabled' first, or name the product with --gpu",
                reason=reasons.Reason.NOT_SUPPORTED,
            )
        is_uniform = len(set(map(frozenset, offers.values()))) == 1
        boards: dict[int | None, list[model.Gpu]] = collections.defaultdict(list)
        for gpu in alike:
            if gpu.profiles:
                boards[None if is_uniform else gpu.pci_subsystem_id].append(gpu)
        for subsystem_id, board in boards.items():
            first, *others = (offers[gpu.uuid] for gpu in board)
            shared = [fact for fact in first if all(fact in other for other in others)]
            kinds.append(
                gpu_selectors.GpuKind(
                    device_ids=(device_id,),
                    subsystem_id=subsystem_id,
                    name=board[0].name,
                    profiles=tuple(first[fact] for fact in shared),
                )
            )
    return tuple(kinds)


def _offer(gpu: model.Gpu) -> dict[object, model.GpuInstanceProfile]:
    """Return the profiles of a GPU by the facts on which a generated layout depends."""
    return {(spec.profile, spec.placements, spec.engines): spec for spec in gpu.profiles or ()}
