"""Measure the planner from every maximal layout to every other, on every product.

A layout is maximal if no further GPU instance fits. One GPU is planned from each to each of the
others, and a node of 16 GPUs in different layouts as a whole.
"""

import collections
import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.core.planner import packing, placement, planner

_NODE_GPUS = 16
_NODES = 15
_SLOWEST = 40
_RETRIES = 4

Layout = tuple[tuple[model.GpuInstanceProfile, model.Placement], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanningTime:
    """The times of planning on one product, in seconds."""

    product: str
    layouts: int
    pairs: int
    median_s: float
    worst_s: float
    worst: str  # the slowest pair
    node_s: float
    """A node whose GPUs have random layouts and half of their instances in use; median."""


def measure() -> Iterator[PlanningTime]:
    """Measure every product; products with the same profiles and placements count as one."""
    chance = random.Random(0)  # noqa: S311 - no secret
    alike: dict[object, list[tuple[str, model.Gpu]]] = {}
    for name, product in hardware.products().items():
        if product.not_simulatable or not product.is_mig_capable:
            continue
        gpu = dataclasses.replace(
            hardware.template(product),
            current_mode=model.MigMode.ENABLED,
            pending_mode=model.MigMode.ENABLED,
        )
        shape = tuple((p.enum_index, p.placements, p.engines) for p in gpu.profiles or ())
        alike.setdefault(shape, []).append((name, gpu))
    for each in alike.values():
        name, gpu = each[0]
        more = f" and {len(each) - 1} like it" if each[1:] else ""
        yield _measure(f"{name}{more}", gpu, chance)


def maximal(gpu: model.Gpu) -> tuple[Layout, ...]:
    """Return every maximal layout of a GPU, one arrangement for each set of profiles."""
    capacity = placement.Capacity(gpu.profiles or ())
    layouts: dict[tuple[str, ...], Layout] = {}
    spots = [(spec, place) for spec in capacity.specs for place in spec.placements]

    def grow(spot_numbers: tuple[int, ...], occupied: int) -> None:
        drawn = capacity.engines(spots[i][0].profile for i in spot_numbers)
        room = capacity.room(occupied, drawn)
        if not any(room):
            filled = tuple(spots[i] for i in spot_numbers)
            layouts.setdefault(tuple(sorted(str(spec.profile) for spec, _ in filled)), filled)
            return
        for i in range(spot_numbers[-1] + 1 if spot_numbers else 0, len(spots)):
            spec, place = spots[i]
            if occupied & packing.mask(place):
                continue
            if not model.Engines.total([drawn, spec.engines]).within(capacity.pool):
                continue
            grow((*spot_numbers, i), occupied | packing.mask(place))

    grow((), 0)
    return tuple(layouts[key] for key in sorted(layouts))


def _measure(name: str, gpu: model.Gpu, chance: random.Random) -> PlanningTime:
    layouts = maximal(gpu)

    def pair_s(before: Layout, after: Layout) -> float:
        return _planning_s([gpu_with(gpu, before)], {gpu.uuid: _desired_gpu(after)}, {})

    pairs = list(itertools.permutations(layouts, 2))
    once = sorted((pair_s(a, b), number) for number, (a, b) in enumerate(pairs))
    # Other work may have slowed the machine down: the worst are measured again.
    slow = [
        (min(seconds, *(pair_s(*pairs[number]) for _ in range(_RETRIES))), number)
        for seconds, number in once[-_SLOWEST:]
    ]
    worst_s, worst = max(slow)
    before, after = pairs[worst]
    return PlanningTime(
        product=name,
        layouts=len(layouts),
        pairs=len(pairs),
        median_s=once[len(once) // 2][0],
        worst_s=worst_s,
        worst=f"{_text_of(before)} -> {_text_of(after)}",
        node_s=statistics.median(_node(gpu, layouts, chance) for _ in range(_NODES)),
    )


def _node(gpu: model.Gpu, layouts: Sequence[Layout], chance: random.Random) -> float:
    """Plan a node whose GPUs differ, so that no result of one serves another."""
    gpus, desired = [], {}
    for index in range(_NODE_GPUS):
        one = dataclasses.replace(gpu, index=index, uuid=f"GPU-{index}")
        gpus.append(gpu_with(one, chance.choice(layouts)))
        desired[one.uuid] = _desired_gpu(chance.choice(layouts))
    uuids = [uuid for one in gpus for uuid in one.mig_uuids]
    use = dict.fromkeys(chance.sample(uuids, len(uuids) // 2), 1)
    return _planning_s(gpus, desired, use)


def _planning_s(
    gpus: Sequence[model.Gpu], desired: Mapping[str, model.DesiredGpu], use: Mapping[str, int]
) -> float:
    since = time.perf_counter()
    planner.plan(gpus, desired, use=use)
    return time.perf_counter() - since


def gpu_with(gpu: model.Gpu, layout: Layout) -> model.Gpu:
    """Return a GPU with the instances of a layout."""
    instances = tuple(
        model.GpuInstance(
            instance_id=number,
            profile=spec.profile,
            profile_id=spec.profile_id,
            placement=place,
            compute_instances=(
                model.ComputeInstance(
                    instance_id=0,
                    profile=spec.profile,
                    placement=model.Placement(0, spec.profile.gpu_slices),
                    uuid=f"MIG-{gpu.index}-{number}",
                ),
            ),
        )
        for number, (spec, place) in enumerate(layout)
    )
    return dataclasses.replace(gpu, gpu_instances=instances)


def _desired_gpu(layout: Layout) -> model.DesiredGpu:
    devices = collections.Counter(spec.profile for spec, _ in layout)
    return model.DesiredGpu.of(model.MigMode.ENABLED, devices)


def _text_of(layout: Layout) -> str:
    return " ".join(str(spec.profile) for spec, _ in layout)
