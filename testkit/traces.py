"""Read the pods of a published trace, or draw pods like them."""

import csv
import dataclasses
import enum
import io
import math
import random
from collections.abc import Sequence

from testkit import day


class Mapped(enum.Enum):
    """How a share of a GPU in a trace becomes a profile."""

    COMPUTE = "compute"  # the fewest sevenths of the compute slices
    MEMORY = "memory"  # the fewest eighths of the memory


_MILLI = 1000
_PROFILES = {
    Mapped.COMPUTE: (7, {1: "1g", 2: "2g", 3: "3g", 4: "4g", 7: "7g"}),
    Mapped.MEMORY: (8, {1: "1g", 2: "2g", 4: "3g", 8: "7g"}),
}
"""The parts of a GPU, and the profiles by their number of parts."""


def parse_trace(text: str, mapped: Mapped) -> list[day.Row]:
    """Parse the pods of ``openb_pod_list_*.csv`` of Alibaba's cluster-trace-gpu-v2023.

    A pod with ``gpu_milli`` below 1000 shares a GPU: it requests the smallest profile with as
    much. Other pods request whole GPUs, and pods without a GPU are left out. A life is from the
    scheduled time to the deletion.

    Raises:
        ValueError: A row is malformed.
    """
    parts, profiles = _PROFILES[mapped]
    rows = []
    for row in csv.DictReader(io.StringIO(text)):
        count, milli = int(row["num_gpu"]), int(row["gpu_milli"])
        if not count:
            continue
        needed = min(parts, math.ceil(parts * milli / _MILLI))
        size = next(name for part, name in profiles.items() if part >= needed)
        at, end = float(row["creation_time"]), float(row["deletion_time"])
        start = float(row["scheduled_time"] or at)
        request = f"{count}x{size}" if count > 1 else size
        rows.append(day.Row(at=at, life=max(1.0, end - start), request=request))
    return sorted(rows, key=lambda row: row.at)


_SHARED = {0.14: 32, 0.28: 280, 0.42: 389, 0.57: 971, 1.0: 1406}
"""Pods of the trace by the share of a GPU that they request, as by compute."""
_WHOLE = 3986
_MEDIAN_S, _NINE_TENTHS_S = 539.0, 9235.0
"""Lives of shared pods; 1.2816 standard deviations lie between the two."""


def synthetic_trace(seed: int, pods: int) -> str:
    """Return a trace with the published marginals of the real one, and none of its rows."""
    draw = random.Random(seed)  # noqa: S311 - a bench, no secret
    sigma = math.log(_NINE_TENTHS_S / _MEDIAN_S) / 1.2816
    lines = ["name,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time"]
    kinds = [*_SHARED, _WHOLE]
    at = 0.0
    for number in range(pods):
        at += draw.expovariate(1 / 60)
        (share,) = draw.choices(kinds, [*_SHARED.values(), _WHOLE])
        milli = round(1000 * min(1.0, share))
        life = draw.lognormvariate(math.log(_MEDIAN_S), sigma)
        lines.append(f"pod-{number},1,{milli},{at:.0f},{at + life:.0f},{at:.0f}")
    return "\n".join(lines)


def trace_jobs(  # noqa: PLR0913 - as ``jobs``
    rows: Sequence[day.Row],
    *,
    seed: int,
    pods: int,
    day_s: float,
    gpus: int,
    load: float,
    product: str,
) -> list[day.Job]:
    """Return consecutive pods of a trace, at its gaps, with lives scaled to a load."""
    first = random.Random(seed).randrange(max(1, len(rows) - pods))  # noqa: S311 - no secret
    window = rows[first : first + pods]
    begin, last = window[0].at, window[-1].at
    # The last pod comes as late as in ``jobs``.
    end = (last - begin + 1) * day.HOURS / (day.HOURS - 1)
    moved = [dataclasses.replace(row, at=row.at - begin) for row in window]
    return day.scale(moved, end=end, day_s=day_s, gpus=gpus, load=load, product=product)
