"""What holds of every decision of the partitioner, whatever nodes and pods there are."""

import collections
import dataclasses
import datetime as dt
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
from hypothesis import strategies as st

from mig_manager.core import model
from mig_manager.core.node import resources
from mig_manager.core.partitioning import decisions, demand, past_decisions, waiting
from tests.unit import machine, partitions, samples

_STARTS = {"1g.5gb": range(7), "1g.10gb": (0, 2, 4, 6), "2g.10gb": (0, 2, 4), "3g.20gb": (0, 4)}
_SPOTS = [f"{name}@{start}" for name, starts in _STARTS.items() for start in starts]
_SPOTS += ["4g.20gb@0", "7g.40gb@0", "1g.5gb+me@3", "2g.10gb@2[1c@0 1c@1]", "3g.20gb@4[]"]
_PROFILES = ("1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")
_SPECS = {spec.profile: spec for spec in samples.A100}


def spot(text: str) -> tuple[model.Profile, model.Placement]:
    name, _, rest = text.rstrip("*").partition("@")
    profile, start = samples.profile(name), int(rest.partition("[")[0])
    return profile, next(p for p in _SPECS[profile].placements if p.start == start)


def fits(spots: Sequence[tuple[model.Profile, model.Placement]]) -> bool:
    gpu = samples.gpu(samples.A100)
    apart = not any(a.overlaps(b) for (_, a), (_, b) in itertools.combinations(spots, 2))
    return apart and machine.pool_allows(gpu, [profile for profile, _ in spots])


@st.composite
def instances(draw: st.DrawFn) -> tuple[str, ...]:
    """Instances of one GPU, each in use or not; one without compute instances is not."""
    chosen: list[str] = []
    for text in draw(st.lists(st.sampled_from(_SPOTS), max_size=6)):
        if fits([spot(each) for each in (*chosen, text)]):
            chosen.append(text)
    chosen.sort(key=lambda text: spot(text)[1])
    return tuple(
        text + "*" if not text.endswith("[]") and draw(st.booleans()) else text for text in chosen
    )


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes by name with their GPUs and their API objects, and pods."""

    gpus: dict[str, model.ObservedGpus]
    in_use: dict[str, dict[str, Any]]  # by node and UUID; a GPU of unknown use is missing
    pods: tuple[dict[str, Any], ...]
    limits: dict[str, Any]

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return [partitions.item(name, self.gpus[name], self.in_use[name]) for name in self.gpus]

    def spans(self, name: str) -> set[tuple[str, model.Placement]]:
        return {
            (uuid, model.Placement(*span))
            for uuid, spans in self.in_use[name].items()
            for span in spans
        }


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    gpus, in_use = {}, {}
    for name in "abc"[: draw(st.integers(2, 3))]:
        every = draw(st.lists(instances(), min_size=1, max_size=2))
        gpus[name] = partitions.gpus(name, *every)
        in_use[name] = partitions.used(gpus[name], *every)
        if draw(st.sampled_from([False, False, False, True])):
            del in_use[name][gpus[name][0].uuid]
    # So many that most decisions have a change, and each property can fail.
    profiles = st.lists(st.sampled_from(_PROFILES), min_size=1, max_size=3)
    asked = draw(st.lists(profiles, min_size=2, max_size=5))
    pods = tuple(
        partitions.pod(
            f"p{number}",
            *(f"{named.count(each)}x{each}" for each in dict.fromkeys(named)),
            age_s=draw(st.integers(0, 1000)),
            spec={"priority": draw(st.integers(0, 1))},
        )
        for number, named in enumerate(asked)
    )
    reserved = draw(st.dictionaries(st.sampled_from(_PROFILES), st.integers(1, 3), max_size=2))
    limits = {
        "max_unavailable": draw(st.sampled_from(["1", "2", "100%"])),
        "reserved": {samples.profile(name): count for name, count in reserved.items()},
        "cooldown_s": 0.0,
    }
    return Cluster(gpus, in_use, pods, limits)


def decided(found: Cluster, *, is_expected: bool = False) -> decisions.PartitioningDecision:
    """Decide about the pods, or about preparing nodes for them beside all but the first."""
    pods: dict[str, Any] = {"pods": found.pods}
    if is_expected:
        pods = {"pods": found.pods[1:], "expected": found.pods}
    return partitions.decided(found.nodes, **pods, **found.limits)


def counts(gpus: Sequence[model.Gpu]) -> "collections.Counter[model.Profile]":
    return sum(
        (collections.Counter(samples.devices_of(gpu)) for gpu in gpus), collections.Counter()
    )


def devices_for(pods: Sequence[demand.Pending]) -> "collections.Counter[model.Profile]":
    return sum((collections.Counter(pod.needs.profiles) for pod in pods), collections.Counter())


@hypothesis.given(clusters(), st.booleans())
def test_no_change_touches_an_instance_in_use_or_a_gpu_of_unknown_use(
    found: Cluster,
    is_expected: bool,  # noqa: FBT001 - a case
) -> None:
    for change in decided(found, is_expected=is_expected).changes:
        every = found.gpus[change.node]
        assert partitions.wanted(change, every).keys() <= found.in_use[change.node].keys()
        _, gone = partitions.after(change, every)
        assert not gone & found.spans(change.node)


@hypothesis.given(clusters(), st.booleans())
def test_after_a_change_its_pods_and_those_left_to_the_scheduler_fit(
    found: Cluster,
    is_expected: bool,  # noqa: FBT001 - a case
) -> None:
    decision = decided(found, is_expected=is_expected)
    for change in decision.changes:
        now, _ = partitions.after(change, found.gpus[change.node])
        rooms = decision.room_since
        left = [w.pod for w in decision.waiting if change.node in rooms.get(w.pod.uid, ())]
        used = found.spans(change.node)
        idle = counts(
            [
                dataclasses.replace(
                    gpu,
                    gpu_instances=tuple(
                        gi for gi in gpu.gpu_instances if (gpu.uuid, gi.placement) not in used
                    ),
                )
                for gpu in now
            ]
        )
        assert change.pods or is_expected or not change.created
        assert devices_for([*change.pods, *left]) <= idle


@hypothesis.given(clusters(), st.booleans())
def test_a_change_leaves_the_reserved_devices_that_there_were(
    found: Cluster,
    is_expected: bool,  # noqa: FBT001 - a case
) -> None:
    for change in decided(found, is_expected=is_expected).changes:
        before = counts(found.gpus[change.node])
        now, _ = partitions.after(change, found.gpus[change.node])
        for profile, count in found.limits["reserved"].items():
            assert counts(now)[profile] >= min(count, before[profile])


@hypothesis.given(clusters())
def test_each_pod_gets_exactly_one_answer(found: Cluster) -> None:
    decision = decided(found)
    answered = [pod.uid for change in decision.changes for pod in change.pods]
    answered += [each.pod.uid for each in decision.unmet]
    answered += [each.pod.uid for each in decision.waiting]
    assert sorted(answered) == sorted(pod["metadata"]["uid"] for pod in found.pods)


@hypothesis.given(clusters(), st.randoms(use_true_random=False))
def test_the_order_of_nodes_and_pods_does_not_matter(
    found: Cluster, chance: random.Random
) -> None:
    nodes, pods = found.nodes, list(found.pods)
    chance.shuffle(nodes)
    chance.shuffle(pods)
    assert partitions.decided(nodes, pods, **found.limits) == decided(found)


@hypothesis.given(clusters())
def test_deciding_again_after_the_changes_wants_nothing(found: Cluster) -> None:
    found = dataclasses.replace(found, limits={**found.limits, "max_unavailable": "100%"})
    decision = decided(found)
    history = past_decisions.remember(
        past_decisions.History(),
        *partitions.seen(found.nodes, found.pods),
        decision,
        now=partitions.NOW,
    )
    gpus = dict(found.gpus)
    for change in decision.changes:
        gpus[change.node] = model.ObservedGpus(partitions.after(change, gpus[change.node])[0])
    again = partitions.decided(
        dataclasses.replace(found, gpus=gpus).nodes,
        found.pods,
        history=history,
        now=partitions.NOW + dt.timedelta(seconds=1),
        **found.limits,
    )
    served = {pod.uid for change in decision.changes for pod in change.pods}
    placed = {
        each.pod.uid for each in again.waiting if each.reason is waiting.WaitReason.SCHEDULER
    }
    assert served <= placed
    assert not any(change.pods for change in again.changes)


def ways(
    asked: Sequence[model.Profile], beside: list[tuple[model.Profile, model.Placement]]
) -> Iterator[bool]:
    """Try every placement of every device."""
    if not asked:
        yield True
        return
    for place in _SPECS[asked[0]].placements:
        there = [*beside, (asked[0], place)]
        if fits(there):
            yield from ways(asked[1:], there)


@hypothesis.given(
    instances().filter(lambda texts: not any("[" in text for text in texts)),
    st.lists(st.sampled_from(_PROFILES), min_size=1, max_size=4),
)
def test_pod_is_served_whenever_possible_for_the_fewest_instances(
    texts: tuple[str, ...], names: list[str]
) -> None:
    asked = collections.Counter(samples.profile(name) for name in names)
    idle = [spot(text) for text in texts if not text.endswith("*")]
    fixed = [spot(text) for text in texts if text.endswith("*")]
    free = collections.Counter(profile for profile, _ in idle)
    missing = asked - free
    costs = []
    for size in range(len(idle), -1, -1):
        for stay in itertools.combinations(idle, size):
            # What of the idle devices serves the pod as it is must be there afterwards too.
            again = (asked & free) - collections.Counter(profile for profile, _ in stay)
            new = list((missing + again).elements())
            if next(ways(new, [*fixed, *stay]), False):
                costs.append(len(idle) - size)
        if costs:
            break
    spec = [f"{count}x{profile}" for profile, count in asked.items()]
    decision = partitions.decided([partitions.node("a", texts)], [partitions.pod("p", *spec)])
    assert bool(decision.room_since) is (not missing)
    if missing:
        assert len(decision.changes) == bool(costs)
        for change in decision.changes:
            assert sum(change.destroyed.values()) == costs[0]


def test_the_names_of_resources_and_profiles_belong_together() -> None:
    for name in (*_PROFILES, "1g.24gb+me.all", "2g.48gb-me", "1g.12gb+gfx"):
        profile = samples.profile(name)
        resource = resources.of_profile(profile) or ""
        assert resources.profile_of(resource) == profile
    assert resources.profile_of("nvidia.com/mig-1g.5gb.shared") is None
    assert resources.profile_of("nvidia.com/gpu") is None
    assert resources.profile_of("nvidia.com/mig-1c.2g.10gb") is None
