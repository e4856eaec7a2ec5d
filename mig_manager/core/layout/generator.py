"""A config document for GPUs that one has: the standard layouts, and all that leave no room.

The standard ones are those of NVIDIA's ``nvidia-mig-parted generate-config``: ``all-disabled``,
``all-enabled``, ``all-PROFILE`` with as many instances of one profile as fit, and
``all-balanced``. How many fit is worked out from the placements rather than read from NVML, whose
counts are wrong on A30; on every GPU known to us both agree otherwise.
"""

import collections
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.layout import config, layouts
from mig_manager.core.planner import placement

Counts = tuple[tuple[model.Profile, int], ...]
"""Positive counts, in the order in which people read layouts."""

LONGEST_NAME = 63  # A layout's name is a label's value in Kubernetes

_BALANCED: Mapping[int, Mapping[int, int]] = {7: {3: 1, 2: 1, 1: 2}, 4: {2: 1, 1: 2}}
"""Slices of the GPU to how many instances of how many slices, as mig-parted has it."""
_HASH_DIGITS = 8
_BALANCED_NAME = "all-balanced"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """GPUs that differ in nothing that a layout can ask for."""

    device_ids: tuple[int, ...]
    """PCI ids, device and vendor packed as NVML does; of one product they may be several."""
    subsystem_id: int | None = None
    """Where GPUs of one PCI id offer different profiles; None: all of these PCI ids are alike."""
    name: str = ""  # of the product
    profiles: tuple[model.GpuInstanceProfile, ...]  # what such a GPU offers

    @property
    def filters(self) -> tuple[config.DeviceFilter, ...]:
        """The filters that select these GPUs."""
        return tuple(
            config.DeviceFilter(device_id=each, subsystem_id=self.subsystem_id)
            for each in self.device_ids
        )


def kinds_of(gpus: Iterable[model.Gpu]) -> tuple[GpuKind, ...]:
    """Sort the MIG-capable GPUs of a node by PCI id, and by subsystem where that matters.

    LayoutError if none has MIG (NOT_MIG_CAPABLE), or the driver lists no profiles while MIG is off
    (NOT_SUPPORTED).
    """
    capable: dict[int, list[model.Gpu]] = {}
    for gpu in gpus:
        if gpu.is_mig_capable:
            capable.setdefault(gpu.pci_device_id, []).append(gpu)
    if not capable:
        problem = "this node has no MIG-capable GPU"
        raise errors.LayoutError(problem, reason=errors.Reason.NOT_MIG_CAPABLE)
    found: list[GpuKind] = []
    for device_id, alike in sorted(capable.items()):
        boards: dict[int | None, list[model.Gpu]] = {}
        for gpu in alike:
            if gpu.profiles:
                boards.setdefault(gpu.pci_subsystem_id, []).append(gpu)
        if not boards:
            raise errors.LayoutError(
                f"this driver lists the profiles of {alike[0]} only once MIG is on: apply "
                "'all-enabled' first, or name the product with --gpu",
                reason=errors.Reason.NOT_SUPPORTED,
            )
        if len({_offer(gpu) for members in boards.values() for gpu in members}) == 1:
            boards = {None: alike}
        for subsystem_id, members in boards.items():
            found.append(
                GpuKind(
                    device_ids=(device_id,),
                    subsystem_id=subsystem_id,
                    name=members[0].name,
                    profiles=_common(members),
                )
            )
    return tuple(found)


def _common(gpus: Iterable[model.Gpu]) -> tuple[model.GpuInstanceProfile, ...]:
    """Return the profiles that all GPUs offer that list any."""
    listing = [gpu for gpu in gpus if gpu.profiles]
    shared = frozenset.intersection(*map(_offer, listing))
    return tuple(spec for spec in listing[0].profiles or () if _facts(spec) in shared)


def _offer(gpu: model.Gpu) -> frozenset[object]:
    return frozenset(map(_facts, gpu.profiles or ()))


def _facts(spec: model.GpuInstanceProfile) -> object:
    """Return what a generated layout depends on."""
    return spec.profile, spec.placements, spec.engines


def document(kinds: Sequence[GpuKind], *, has_all_maximal: bool = False) -> dict[str, object]:
    """Return a document, as plain data, for nodes with these GPUs.

    A ``device-filter`` appears only where there are GPUs of several kinds. Layouts are in the
    order of their names, with numbers by their value.

    No PCI id is in two ``kinds``. ``has_all_maximal`` adds every layout to which no instance can
    be added, but those that a standard layout is already.
    """
    rules = _standard(kinds)
    known = {(kind, n) for each in rules.values() for (_, n), of in each.items() for kind in of}
    for kind in kinds if has_all_maximal else ():
        for counts in maximal(kind.profiles):
            if (kind, counts) not in known:
                rules.setdefault(maximal_name(counts), {}).setdefault((None, counts), [])
                rules[maximal_name(counts)][None, counts].append(kind)
    configs = {
        name: [_plain(filters, counts) for filters, counts in _ordered(rules[name], kinds)]
        for name in sorted(rules, key=_natural)
    }
    return {"version": config.VERSION, "mig-configs": configs}


def layouts_of(kinds: Sequence[GpuKind]) -> dict[str, config.Layout]:
    """Return the standard layouts for nodes with these GPUs, equal to those of ``document``.

    The location of each names the products that it is for.
    """
    rules = _standard(kinds)
    return {name: _layout(name, rules[name], kinds) for name in sorted(rules, key=_natural)}


def _layout(name: str, rules: "_Rules", kinds: Sequence[GpuKind]) -> config.Layout:
    products = dict.fromkeys(
        kind.name for kind in kinds if any(kind in of for of in rules.values())
    )
    location = errors.Location(source=f"generated for {', '.join(products)}", line=0, column=0)
    ordered = tuple(
        config.Rule(
            filters=tuple(sorted(filters, key=str)),
            indices=None,
            wanted=model.DesiredGpu.of(
                model.MigMode.DISABLED if counts is None else model.MigMode.ENABLED,
                dict(counts or ()),
            ),
            location=location,
            profile_locations={},
        )
        for filters, counts in _ordered(rules, kinds)
    )
    return config.Layout(
        name=name, rules=ordered, content_hash=layouts.content_hash(ordered), location=location
    )


def maximal(profiles: Iterable[model.GpuInstanceProfile]) -> Iterator[Counts]:
    """Yield what an empty GPU can hold so that not one more instance of any profile fits."""
    capacity = placement.Capacity(profiles)
    order = sorted((spec.profile for spec in capacity.specs), key=lambda each: each.sort_key)
    possible = set(_possible(capacity, order, ()))
    for counts in sorted(possible, reverse=True):
        if not any(
            (*counts[:nth], counts[nth] + 1, *counts[nth + 1 :]) in possible
            for nth in range(len(order))
        ):
            yield tuple((each, n) for each, n in zip(order, counts, strict=True) if n)


def maximal_name(counts: Counts) -> str:
    """Return what a layout of these instances is called, such as ``max-3g.20gb_4x1g.5gb``.

    Equal instances have equal names, on every GPU and in every version; a name too long for a
    label is cut, and ends in a hash of the whole.
    """
    parts = (f"{n}x{each}" if n > 1 else str(each) for each, n in counts)
    name = _label("max-", "_".join(parts))
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{name[: LONGEST_NAME - _HASH_DIGITS - 1].rstrip('-_.')}_{digest}"


_Rules = dict[tuple[GpuKind | None, Counts | None], list[GpuKind]]
"""The GPUs of each rule of a layout, by the kind that keeps it apart and by what it gives: without
counts it disables MIG."""


def _standard(kinds: Sequence[GpuKind]) -> dict[str, _Rules]:
    """Return the rules of the standard layouts."""
    rules: dict[str, _Rules] = {
        "all-disabled": {(None, None): list(kinds)},
        "all-enabled": {(None, ()): list(kinds)},
    }
    for kind in kinds:
        if balanced := _balanced(kind):
            # As mig-parted has it: balanced rules stay apart, equal others are joined.
            rules.setdefault(_BALANCED_NAME, {})[kind, balanced] = [kind]
        capacity = placement.Capacity(kind.profiles)
        for spec in capacity.specs:
            counts = ((spec.profile, capacity.most(spec.profile)),)
            name = _label("all-", str(spec.profile))
            rules.setdefault(name, {}).setdefault((None, counts), []).append(kind)
    return rules


def _ordered(
    rules: _Rules, kinds: Sequence[GpuKind]
) -> list[tuple[list[config.DeviceFilter], Counts | None]]:
    """Return the rules of a layout, those of the fewest instances first.

    A rule without filters is about every GPU.
    """
    ordered = [
        (
            0 if apart else sum(n for _, n in counts or ()),
            # What needs no instance fits every GPU.
            sorted((f for kind in of for f in kind.filters), key=str)
            if counts and len(kinds) > 1
            else [],
            counts,
        )
        for (apart, counts), of in rules.items()
    ]
    ordered.sort(key=lambda rule: (rule[0], list(map(str, rule[1]))))
    return [(filters, counts) for _, filters, counts in ordered]


def _plain(filters: Sequence[config.DeviceFilter], counts: Counts | None) -> dict[str, object]:
    devices = sorted(counts or (), key=lambda item: _natural(str(item[0])))
    rule: dict[str, object] = {"device-filter": [str(each) for each in filters]} if filters else {}
    rule["devices"] = "all"
    rule["mig-enabled"] = counts is not None
    rule["mig-devices"] = {str(each): n for each, n in devices}
    return rule


def _balanced(kind: GpuKind) -> Counts:
    """Return one large, one medium and two small instances; none where the GPU has no such."""
    base = [
        spec.profile
        for spec in sorted(kind.profiles, key=lambda spec: spec.enum_index)
        if not (spec.profile.attributes or spec.profile.negated_attributes)
    ]
    slices = max((profile.gpu_slices for profile in base), default=0)
    capacity = placement.Capacity(kind.profiles)
    found: collections.Counter[model.Profile] = collections.Counter()
    for size, count in _BALANCED.get(slices, {}).items():
        candidates = [profile for profile in base if profile.gpu_slices == size]
        if not candidates:
            return ()
        # The one that fits most often takes the least memory; of equals the first, as max does.
        found[max(candidates, key=capacity.most)] = count
    return tuple(sorted(found.items(), key=lambda item: item[0].sort_key))


def _possible(
    capacity: placement.Capacity, order: Sequence[model.Profile], counts: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yield every combination that an empty GPU can hold, as counts in this order."""
    if len(counts) == len(order):
        yield counts
        return
    for n in itertools.count():
        more = (*counts, n)
        if not capacity.fits(dict(zip(order, more, strict=False))):
            return
        yield from _possible(capacity, order, more)


def _label(prefix: str, text: str) -> str:
    """Return a legal label value: Kubernetes allows no plus and no comma there."""
    return prefix + re.sub(r"[+,]", ".", text)


def _natural(text: str) -> list[tuple[int, str]]:
    """Return what to sort by so that ``1g.5gb`` comes before ``1g.10gb``."""
    return [
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.split(r"(\d+)", text)
        if part
    ]
