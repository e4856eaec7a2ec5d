"""Random layouts that a driver could have been brought to, whatever the order of calls."""

from hypothesis import strategies as st

from mig_manager.core import model
from tests.rigs.node import driver_rules, samples
from tests.rigs.planner import oracle


@st.composite
def gpus(
    draw: st.DrawFn, product: str, *, splits: bool = True, idle: bool = True, index: int = 0
) -> model.Gpu:
    """Draw a GPU with instances anywhere, some of them split, some of them idle."""
    empty = samples.gpu(samples.PRODUCTS[product], index=index)
    spots = [(spec, place) for spec in empty.profiles or () for place in spec.placements]
    instances: list[tuple[model.GpuInstanceProfile, model.Placement]] = []
    # Lists alone seldom fill a GPU, permutations always do.
    order = st.lists(st.sampled_from(spots), max_size=6) | st.permutations(spots)
    for spec, place in draw(order):
        is_free = not any(place.overlaps(other) for _, other in instances)
        if is_free and driver_rules.pool_allows(
            empty, [spec.profile, *(other.profile for other, _ in instances)]
        ):
            instances.append((spec, place))
    words = [_instance(draw, spec, place, splits=splits, idle=idle) for spec, place in instances]
    return samples.gpu(samples.PRODUCTS[product], *words, index=index)


@st.composite
def desired_devices(draw: st.DrawFn, product: str, *, splits: bool = True) -> model.DesiredGpu:
    """Draw a desired GPU that fits the product, since something like it was there."""
    there = draw(gpus(product, splits=splits, idle=False))
    return model.DesiredGpu.of(model.MigMode.ENABLED, samples.devices_of(there))


def _instance(
    draw: st.DrawFn,
    spec: model.GpuInstanceProfile,
    place: model.Placement,
    *,
    splits: bool,
    idle: bool,
) -> str:
    slices = spec.profile.gpu_slices
    full = frozenset({(slices, 0)})
    choices = [full, full]
    if splits:
        choices += [inside for inside in oracle.insides(slices) if inside]
    if idle:
        choices.append(frozenset())
    inside = draw(st.sampled_from(choices))
    words = " ".join(f"{size}c@{at}" for size, at in sorted(inside))
    return f"{spec.profile}@{place.start}[{words}]"
