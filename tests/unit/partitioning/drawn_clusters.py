"""Random clusters for properties of decisions."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from mig_manager.core import model
from tests.rigs.cluster import partitions
from tests.rigs.node import driver_rules, samples

_STARTS = {"1g.5gb": range(7), "1g.10gb": (0, 2, 4, 6), "2g.10gb": (0, 2, 4), "3g.20gb": (0, 4)}
_SPOTS = [f"{name}@{start}" for name, starts in _STARTS.items() for start in starts]
_SPOTS += ["4g.20gb@0", "7g.40gb@0", "1g.5gb+me@3", "2g.10gb@2[1c@0 1c@1]", "3g.20gb@4[]"]
PROFILES = ("1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")
SPECS = {spec.profile: spec for spec in samples.A100}


def spot(text: str) -> tuple[model.Profile, model.Placement]:
    name, _, rest = text.rstrip("*").partition("@")
    profile, start = samples.profile(name), int(rest.partition("[")[0])
    return profile, next(p for p in SPECS[profile].placements if p.start == start)


def fits(spots: Sequence[tuple[model.Profile, model.Placement]]) -> bool:
    gpu = samples.gpu(samples.A100)
    apart = not any(a.overlaps(b) for (_, a), (_, b) in itertools.combinations(spots, 2))
    return apart and driver_rules.pool_allows(gpu, [profile for profile, _ in spots])


@st.composite
def instances(draw: st.DrawFn) -> tuple[str, ...]:
    """Instances of one GPU, each in use or not; one without compute instances is not."""
    instances_so_far: list[str] = []
    for text in draw(st.lists(st.sampled_from(_SPOTS), max_size=6)):
        if fits([spot(each) for each in (*instances_so_far, text)]):
            instances_so_far.append(text)
    instances_so_far.sort(key=lambda text: spot(text)[1])
    return tuple(
        text + "*" if not text.endswith("[]") and draw(st.booleans()) else text
        for text in instances_so_far
    )


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes by name with their GPUs and their API objects, and pods."""

    gpus: dict[str, model.ObservedGpus]
    in_use: dict[str, dict[str, frozenset[model.Placement]]]
    """By node and UUID; a GPU of unknown use is missing."""
    pods: tuple[dict[str, Any], ...]
    limits: dict[str, Any]

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return [
            partitions.node_object(name, self.gpus[name], self.in_use[name]) for name in self.gpus
        ]

    def spans(self, name: str) -> set[tuple[str, model.Placement]]:
        return {
            (uuid, placement)
            for uuid, placements in self.in_use[name].items()
            for placement in placements
        }


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    gpus, in_use = {}, {}
    for name in "abc"[: draw(st.integers(2, 3))]:
        every = draw(st.lists(instances(), min_size=1, max_size=2))
        gpus[name] = partitions.gpus(name, *every)
        in_use[name] = partitions.placements_in_use(gpus[name], *every)
        if draw(st.sampled_from([False, False, False, True])):
            del in_use[name][gpus[name][0].uuid]
    # So many that most decisions have a change, and each property can fail.
    profiles = st.lists(st.sampled_from(PROFILES), min_size=1, max_size=3)
    requests = draw(st.lists(profiles, min_size=2, max_size=5))
    pods = tuple(
        partitions.pod(
            f"p{number}",
            *(f"{named.count(each)}x{each}" for each in dict.fromkeys(named)),
            age_s=draw(st.integers(0, 1000)),
            spec={"priority": draw(st.integers(0, 1))},
        )
        for number, named in enumerate(requests)
    )
    reserved = draw(st.dictionaries(st.sampled_from(PROFILES), st.integers(1, 3), max_size=2))
    limits = {
        "max_unavailable": draw(st.sampled_from(["1", "2", "100%"])),
        "reserved": {samples.profile(name): count for name, count in reserved.items()},
        "cooldown_s": 0.0,
    }
    return Cluster(gpus, in_use, pods, limits)
