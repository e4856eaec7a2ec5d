"""Turn decisions about GPU instances into steps, in their order.

Compute instances are destroyed before GPU instances, as the driver requires. All are destroyed
before MIG mode changes: Ampere counts GPU instances as clients of the GPU and would leave the
change pending. Then instances are created, each with its placement.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from mig_manager.core import model, steps
from mig_manager.core.planner import packing, placement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A live GPU instance that stays, with its compute instances."""

    position: int
    """Its position in ``in_order``."""
    kept: tuple[int, ...]
    """Positions of the compute instances that stay, in ``in_order``."""
    added: tuple[steps.TargetComputeInstance, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The instances of one GPU after the plan; live ones that are not listed are destroyed."""

    stays: tuple[Stay, ...] = ()
    created: tuple[steps.TargetInstance, ...] = ()
    """Pinned ones first, then the largest."""


def in_order(gpu: model.Gpu | model.GpuSnapshot) -> tuple[model.GpuInstance, ...]:
    """Return GPU instances and their compute instances by placement; none with MIG disabled."""
    if gpu.current_mode is not model.MigMode.ENABLED:
        return ()
    return tuple(
        dataclasses.replace(
            gi, compute_instances=tuple(sorted(gi.compute_instances, key=_compute_order))
        )
        for gi in sorted(gpu.gpu_instances, key=lambda gi: gi.placement)
    )


def inside(
    profile: model.Profile, spans: packing.Spans
) -> tuple[steps.TargetComputeInstance, ...]:
    """Return the compute instances at these spans of a GPU instance."""
    return tuple(
        steps.TargetComputeInstance(
            profile=dataclasses.replace(profile, compute_slices=span.size), placement=span
        )
        for span in spans
    )


def build(
    gpu: model.Gpu,
    live: Sequence[model.GpuInstance],
    decision: Decision,
    switch: steps.SetMode | None,
) -> steps.GpuPlan | None:
    """Turn a decision about instances ``in_order`` into a plan; None if there is nothing to do."""
    stays = {stay.position: stay for stay in decision.stays}
    ordered = (
        *_end_compute(gpu, live, stays),
        *(
            steps.DestroyGpuInstance(
                gpu_uuid=gpu.uuid,
                gpu_instance_id=gi.instance_id,
                profile=gi.profile,
                placement=gi.placement,
            )
            for position, gi in enumerate(live)
            if position not in stays
        ),
        *([switch] if switch else []),
        *_create(gpu, live, decision),
    )
    target = (*(_staying(live[stay.position], stay) for stay in decision.stays), *decision.created)
    plan = steps.GpuPlan(
        gpu_uuid=gpu.uuid,
        gpu_index=gpu.index,
        steps=ordered,
        target=tuple(sorted(target, key=lambda instance: instance.placement)),
    )
    return plan if ordered else None


def _end_compute(
    gpu: model.Gpu, live: Sequence[model.GpuInstance], stays: dict[int, Stay]
) -> Iterator[steps.DestroyComputeInstance]:
    for position, gi in enumerate(live):
        kept = stays[position].kept if position in stays else ()
        for inner, ci in enumerate(gi.compute_instances):
            if inner not in kept:
                yield steps.DestroyComputeInstance(
                    gpu_uuid=gpu.uuid,
                    gpu_instance_id=gi.instance_id,
                    compute_instance_id=ci.instance_id,
                    profile=ci.profile,
                    uuid=ci.uuid,
                )


def _create(
    gpu: model.Gpu, live: Sequence[model.GpuInstance], decision: Decision
) -> Iterator[steps.CreateGpuInstance | steps.CreateComputeInstance]:
    """Yield new compute instances of GPU instances that stay, then the new GPU instances."""
    for stay in decision.stays:
        yield from _fill(gpu, live[stay.position].placement, stay.added)
    for new in decision.created:
        yield steps.CreateGpuInstance(
            gpu_uuid=gpu.uuid,
            profile=new.profile,
            profile_id=new.profile_id,
            placement=new.placement,
        )
        yield from _fill(gpu, new.placement, new.compute_instances)


def _fill(
    gpu: model.Gpu, place: model.Placement, content: Sequence[steps.TargetComputeInstance]
) -> Iterator[steps.CreateComputeInstance]:
    for ci in content:
        yield steps.CreateComputeInstance(
            gpu_uuid=gpu.uuid,
            gpu_instance_placement=place,
            profile=ci.profile,
            placement=ci.placement,
        )


def _staying(gi: model.GpuInstance, stay: Stay) -> steps.TargetInstance:
    kept = tuple(gi.compute_instances[inner] for inner in stay.kept)
    content = (*_spans(gi.profile, kept), *stay.added)
    return steps.TargetInstance(
        profile=gi.profile,
        profile_id=gi.profile_id,
        placement=gi.placement,
        compute_instances=tuple(sorted(content, key=lambda ci: ci.placement)),
        kept=True,
    )


def _spans(
    profile: model.Profile, kept: Sequence[model.ComputeInstance]
) -> Iterator[steps.TargetComputeInstance]:
    """Yield the kept compute instances, with an assumed span where the driver reports none."""
    known = [(ci.profile, ci.placement) for ci in kept if ci.placement]
    vague = sorted(
        (ci.profile for ci in kept if not ci.placement), key=lambda ci: -ci.compute_slices
    )
    sizes = [ci.compute_slices for ci in vague]
    counts = tuple(sizes.count(size + 1) for size in range(profile.gpu_slices))
    assumed = packing.fit(counts, placement.slices(span for _, span in known))
    spans = assumed or tuple(model.Placement(0, size) for size in sizes)
    for ci, span in (*known, *zip(vague, spans, strict=True)):
        yield steps.TargetComputeInstance(profile=ci, placement=span)


def _compute_order(ci: model.ComputeInstance) -> tuple[object, ...]:
    place = ci.placement or model.Placement(-1, 0)
    return place, ci.profile.sort_key, ci.instance_id
