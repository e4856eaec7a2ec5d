"""The way back of one GPU to exactly the instances it had: profiles, places and spans.

Unlike a layout, a snapshot does say where everything lies, and also what lay idle. So nothing is
searched here: what is still in its place stays, the rest goes, and what is missing comes back.
"""

import collections
from collections.abc import Sequence

from mig_manager import errors
from mig_manager.core import model, packing, steps


def decide(
    gpu: model.Gpu, live: Sequence[model.GpuInstance], past: Sequence[model.GpuInstance]
) -> steps.Decision:
    """Decide what becomes of each GPU instance.

    Args:
        gpu: The GPU as it is.
        live: Its GPU instances, in order.
        past: Those of the snapshot, in order.

    Raises:
        errors.LayoutError: The snapshot lacks the spans of compute instances and they cannot be
            packed anew (DOES_NOT_FIT).
    """
    places = {(gi.profile, gi.placement): i for i, gi in enumerate(live)}
    stays: list[steps.Stay] = []
    created: list[model.TargetInstance] = []
    for old in past:
        position = places.get((old.profile, old.placement))
        if position is None:
            created.append(_again(gpu, old))
        else:
            stays.append(_mend(gpu, position, live[position], old))
    created.sort(key=lambda new: (-new.placement.size, new.placement))
    return steps.Decision(stays=tuple(stays), created=tuple(created))


def _again(gpu: model.Gpu, old: model.GpuInstance) -> model.TargetInstance:
    # The driver may have been updated since; the profile's name outlives its id.
    ids = {spec.profile: spec.profile_id for spec in gpu.profiles or ()}
    return model.TargetInstance(
        profile=old.profile,
        profile_id=ids.get(old.profile, old.profile_id),
        placement=old.placement,
        compute_instances=_inside(gpu, old),
        kept=False,
    )


def _mend(
    gpu: model.Gpu, position: int, now: model.GpuInstance, old: model.GpuInstance
) -> steps.Stay:
    """Bring the inside back; anew as a whole where spans are unknown and profiles differ."""
    if _is_vague(now) or _is_vague(old):
        is_alike = _profiles(now) == _profiles(old)
        return steps.Stay(
            position=position,
            kept=tuple(range(len(now.compute_instances))) if is_alike else (),
            added=() if is_alike else _inside(gpu, old),
        )
    wanted = {(ci.profile, ci.placement) for ci in old.compute_instances}
    has = {(ci.profile, ci.placement) for ci in now.compute_instances}
    return steps.Stay(
        position=position,
        kept=tuple(
            i for i, ci in enumerate(now.compute_instances) if (ci.profile, ci.placement) in wanted
        ),
        added=tuple(ci for ci in _inside(gpu, old) if (ci.profile, ci.placement) not in has),
    )


def _inside(gpu: model.Gpu, old: model.GpuInstance) -> tuple[model.TargetComputeInstance, ...]:
    """Return the compute instances with their spans; packed anew when any span is unknown."""
    if not _is_vague(old):
        return tuple(
            model.TargetComputeInstance(profile=ci.profile, placement=ci.placement)
            for ci in old.compute_instances
            if ci.placement
        )
    spans = packing.fit(packing.count_sizes(_profiles(old), old.profile))
    if spans is None:
        raise errors.LayoutError(
            f"the compute instances that {gpu} had in its {old.profile} at {old.placement} "
            "cannot be placed again",
            reason=errors.Reason.DOES_NOT_FIT,
        )
    return steps.inside(old.profile, spans)


def _profiles(gi: model.GpuInstance) -> collections.Counter[model.Profile]:
    return collections.Counter(ci.profile for ci in gi.compute_instances)


def _is_vague(gi: model.GpuInstance) -> bool:
    return any(ci.placement is None for ci in gi.compute_instances)
