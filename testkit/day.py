"""Draw a day of pods that request MIG devices.

All times are seconds of the day as it is played, which is compressed.
"""

import bisect
import dataclasses
import functools
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.core.planner import placement

Waits = Mapping[str, float | None]
"""From a pod's creation to its binding, by name; None: it is not bound by the end of the day."""


PRODUCT = "A100-SXM4-40GB"
GPUS_EACH = 8  # GPUs of a node
Mix = Mapping[str, float]  # shares of the requests: ``3g`` is one device, ``2x1g`` are two
NIGHT: Mix = {"1g": 0.20, "2g": 0.20, "3g": 0.35, "7g": 0.25}
_NOON: Mix = {"1g": 0.65, "2g": 0.22, "3g": 0.10, "7g": 0.03}
_EVENING: Mix = {"1g": 0.20, "2g": 0.55, "3g": 0.20, "7g": 0.05}
SHIFT: Mapping[float, Mix] = {
    0.0: NIGHT,
    7.0: NIGHT,
    10.0: _NOON,
    16.0: _NOON,
    19.0: _EVENING,
    24.0: NIGHT,
}
"""The mix at an hour: training by night, notebooks by day, inference in the evening; between the
hours it changes evenly."""
_SPREAD = 1.0
"""Standard deviation of the logarithm of a life: one pod in twenty lives five times the median."""
HOURS = 24.0
_MAX_FACTOR = 1e6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A pod of a day; seconds since its begin."""

    name: str
    profile: str
    at_s: float
    run_s: float
    count: int = 1  # devices of this profile, all on one node


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The slices of a GPU that a profile needs."""

    compute: int
    memory: int
    most: int  # how many instances of this profile fit on a GPU


@functools.cache
def capacity(product: str = PRODUCT) -> placement.Capacity:
    """Return the profiles and placements of the GPUs."""
    return placement.Capacity(hardware.template(hardware.find(product)).profiles or ())


@functools.cache
def plain(product: str = PRODUCT) -> dict[str, model.Profile]:
    """Return the profile with the least memory by its slices, such as ``3g``."""
    profiles = sorted(capacity(product).by_profile, key=lambda p: -p.memory_gb)
    return {f"{p.gpu_slices}g": p for p in profiles if str(p).endswith("gb")}


@functools.cache
def sizes(product: str = PRODUCT) -> dict[str, Size]:
    """Return the profiles that pods request."""
    return {
        str(profile): Size(
            compute=profile.gpu_slices,
            memory=capacity(product).by_profile[profile].placements[0].size,
            most=capacity(product).maximum(profile),
        )
        for profile in plain(product).values()
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A pod before its life is scaled to a load; in units of the same, unknown length."""

    at: float
    life: float
    request: str  # as in ``Mix``


def jobs(  # noqa: PLR0913 - a cluster, its pods and a time
    *,
    seed: int,
    pods: int,
    day_s: float,
    gpus: int,
    load: float,
    mix: Mapping[float, Mix] | None = None,
    product: str = PRODUCT,
) -> list[Job]:
    """Draw the pods of a day.

    Args:
        seed: The same seed gives the same day for every ``day_s``.
        pods: Their number; the last pod comes an hour before the end.
        day_s: How long the day is played.
        gpus: The number of GPUs of the cluster.
        load: The share of all GPUs that the pods would use if none waited, where a device uses
            the n-th part of a GPU if n instances of its profile fit.
        mix: The requests by the hour; ``SHIFT`` by default.
        product: The GPUs.
    """
    draw = random.Random(seed)  # noqa: S311 - a bench, no secret
    rows = []
    for hour in sorted(draw.uniform(0.0, HOURS - 1.0) for _ in range(pods)):
        shares = _mix(hour, mix or SHIFT)
        (request,) = draw.choices(list(shares), list(shares.values()))
        rows.append(Row(at=hour, life=draw.lognormvariate(0.0, _SPREAD), request=request))
    return scale(rows, end=HOURS, day_s=day_s, gpus=gpus, load=load, product=product)


def scale(
    rows: Sequence[Row], *, end: float, day_s: float, gpus: int, load: float, product: str
) -> list[Job]:
    """Return jobs whose lives are scaled so that they keep a share of the GPUs."""
    requests = {row.request: _parse_request(row.request, product) for row in rows}
    most = {name: size.most for name, size in sizes(product).items()}
    shares = {key: count / most[name] for key, (name, count) in requests.items()}

    def share_of(factor: float) -> float:
        spans = ((min(row.life * factor, end - row.at), row.request) for row in rows)
        return sum(span * shares[request] for span, request in spans) / (gpus * end)

    # Lives are cut at the end of the day, so the factor must be searched.
    low, high = 0.0, end
    while share_of(high) < load and high < _MAX_FACTOR:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if share_of(middle) < load else (low, middle)
    factor = day_s / end
    return [
        Job(
            name=f"pod-{number:03}",
            profile=requests[row.request][0],
            count=requests[row.request][1],
            at_s=row.at * factor,
            run_s=row.life * low * factor,
        )
        for number, row in enumerate(rows)
    ]


def endless(
    requests: Iterable[str], *, day_s: float, gpus: int, load: float, product: str
) -> list[Job]:
    """Return pods at equal gaps that do not end, until they request this share of the GPUs."""
    pods: list[tuple[str, int]] = []
    missing = load * gpus
    for request in requests:
        if missing <= 0:
            break
        pods.append(_parse_request(request, product))
        missing -= pods[-1][1] / sizes(product)[pods[-1][0]].most
    # The last pod comes as late as in ``jobs``.
    gap_s = day_s * (HOURS - 1) / HOURS / max(1, len(pods))
    return [
        Job(name=f"pod-{n:03}", profile=name, count=count, at_s=n * gap_s, run_s=2 * day_s)
        for n, (name, count) in enumerate(pods)
    ]


def mean_share(mix: Mapping[float, Mix], product: str) -> float:
    """Return the part of a GPU that a pod of this mix uses in the mean."""
    most = {name: size.most for name, size in sizes(product).items()}
    hours = [HOURS * step / 100 for step in range(100)]
    total = 0.0
    for hour in hours:
        shares = _mix(hour, mix)
        requests = {key: _parse_request(key, product) for key in shares}
        parts = (
            share * requests[key][1] / most[requests[key][0]] for key, share in shares.items()
        )
        total += sum(parts) / sum(shares.values())
    return total / len(hours)


def _parse_request(text: str, product: str) -> tuple[str, int]:
    """Return the profile and the number of devices."""
    count, _, size = text.rpartition("x")
    return str(plain(product)[size]), int(count or 1)


def _mix(hour: float, mixes: Mapping[float, Mix]) -> dict[str, float]:
    hours = list(mixes)
    after = max(1, bisect.bisect_left(hours, hour))
    if len(hours) == 1:
        return dict(mixes[hours[0]])
    first, last = hours[after - 1], hours[after]
    part = (hour - first) / (last - first)
    return {
        name: share * (1 - part) + mixes[last][name] * part for name, share in mixes[first].items()
    }


def quantile(waits: Waits, share: float) -> float:
    """Return how long the pod at this share of all waits; infinite if it is not bound."""
    ordered = sorted(math.inf if wait is None else wait for wait in waits.values())
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def mean(day: Iterable[Job], waits: Waits, *, end_s: float) -> float:
    """Return the mean wait; a pod without a node counts as waiting until the end of the day."""
    each = ((waits[job.name], end_s - job.at_s) for job in day)
    return statistics.fmean(late_s if wait is None else wait for wait, late_s in each)
