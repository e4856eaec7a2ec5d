"""Compare the partitioner's real decision with fixed layouts and free placement, simulated.

    python -m bench.partitioner [--nodes 4 40] [--trace openb.csv] [--results docs/results]

The simulation, ``partitioner/replay/simulated_cluster.py``, is pure and seeded. Rows:
``ours``, prepared for likely pods or not, the best fixed layout and ``all-balanced``, each under
the default scheduler and a packing one; placement in no time (first-fit, and with least
fragmentation); and a bound for any scheduler.
``--trace`` is a file ``openb_pod_list_*.csv`` of Alibaba's cluster-trace-gpu-v2023; without it a
synthetic sample with the same marginals is drawn. With ``--fill`` its pods come in random order
and never end, and ``used`` is the share of the compute slices that pods get. ``--begin`` is the
layout of all nodes before the partitioner's first change.
``bench.partitioner_day`` plays one day on a real API server.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

from mig_manager.core.partitioning.decision import decisions
from mig_manager.partitioner.replay import simulated_cluster
from testkit import bounds, day, day_layouts, traces

_DAY_S = 3600.0
_LIFE_S = 600.0  # mean life of a pod, about
_PRODUCTS = {"A100": "A100-SXM4-40GB", "H100": "H100-SXM5-80GB"}
_LAYOUTS = {"all-balanced": {"3g": 1, "2g": 1, "1g": 2}, "all-7g": {"7g": 1}}
_MIXES: Mapping[str, Mapping[float, day.Mix]] = {
    "uniform": {0.0: {"1g": 1.0, "2g": 1.0, "3g": 1.0, "7g": 1.0}},
    "small": {0.0: {"1g": 0.65, "2g": 0.22, "3g": 0.10, "7g": 0.03}},
    "large": {0.0: {"1g": 0.10, "2g": 0.15, "3g": 0.35, "7g": 0.40}},
    "shift": day.SHIFT,
    "multi": {0.0: {"1g": 0.4, "2x1g": 0.2, "2g": 0.1, "2x3g": 0.1, "3g": 0.1, "2x7g": 0.1}},
}
_TRACES = {f"trace-{each.value}": each for each in traces.Mapped}
_TRACE_SHARE = 0.75  # mean part of a GPU that a pod of the trace requests, about
_SYNTHETIC_PODS = 20000
_SLICES = 7

Figures = dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination of cluster, pods and load."""

    product: str
    nodes: int
    mix: str
    load: float
    is_fill: bool = False
    begin: str

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.nodes * day.GPUS_EACH


def main() -> None:
    """Simulate every cell, print its rows, and write them with ``--results``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*_MIXES, *_TRACES]
    parser.add_argument("--products", nargs="*", choices=_PRODUCTS, default=list(_PRODUCTS))
    parser.add_argument("--nodes", nargs="*", type=int, default=[4], help="of 8 GPUs each")
    parser.add_argument("--mixes", nargs="*", choices=names, default=names)
    parser.add_argument("--loads", nargs="*", type=float, default=[0.5, 0.75, 0.9, 1.0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trace", type=pathlib.Path, help="openb_pod_list_*.csv")
    parser.add_argument("--fill", action="store_true", help="pods of the trace never end")
    parser.add_argument("--begin", choices=_LAYOUTS, default="all-balanced")
    parser.add_argument("--results", type=pathlib.Path, help="folder for partitioner.json")
    options = parser.parse_args()
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
    if options.trace:
        text = options.trace.read_text(encoding="utf-8")
    else:
        text = traces.synthetic_trace(0, _SYNTHETIC_PODS)
    rows = {name: traces.parse_trace(text, mapped) for name, mapped in _TRACES.items()}
    entries = []
    for product, nodes, mix, load in itertools.product(
        options.products, options.nodes, options.mixes, options.loads
    ):
        is_fill = options.fill and mix in rows
        cell = Cell(
            product=_PRODUCTS[product],
            nodes=nodes,
            mix=mix,
            load=load,
            is_fill=is_fill,
            begin=options.begin,
        )
        began_s = time.process_time()
        drawn = [_jobs(cell, seed, rows) for seed in range(1, options.seeds + 1)]
        every = [dict(_rows(cell, jobs, seed)) for seed, jobs in enumerate(drawn, 1)]
        took_s = round(time.process_time() - began_s, 1)
        entries.append({**dataclasses.asdict(cell), "took_s": took_s, "rows": _means(every)})
        print(json.dumps(entries[-1]), flush=True)
    if options.results:
        about = {"seeds": options.seeds, "is_synthetic": options.trace is None, "day_s": _DAY_S}
        (options.results / "partitioner.json").write_text(
            json.dumps([about, *entries], indent=1) + "\n", encoding="utf-8"
        )


def _jobs(cell: Cell, seed: int, rows: Mapping[str, Sequence[day.Row]]) -> list[day.Job]:
    load, gpus, product = cell.load, cell.gpus, cell.product
    if cell.is_fill:
        drawn = random.Random(seed).sample(rows[cell.mix], len(rows[cell.mix]))  # noqa: S311 - no secret
        requests = (row.request for row in drawn)
        return day.endless(requests, day_s=_DAY_S, gpus=gpus, load=load, product=product)
    if cell.mix in rows:
        pods = round(load * gpus * _DAY_S / _LIFE_S / _TRACE_SHARE)
        return traces.trace_jobs(
            rows[cell.mix],
            seed=seed,
            pods=pods,
            day_s=_DAY_S,
            gpus=gpus,
            load=load,
            product=product,
        )
    mix = _MIXES[cell.mix]
    pods = round(load * gpus * _DAY_S / _LIFE_S / day.mean_share(mix, product))
    return day.jobs(
        seed=seed, pods=pods, day_s=_DAY_S, gpus=gpus, load=load, mix=mix, product=product
    )


def _rows(cell: Cell, jobs: list[day.Job], seed: int) -> Iterator[tuple[str, Figures]]:
    """Yield the figures of each way to serve the pods."""
    gpus, product = cell.gpus, cell.product
    yield "bound", {"mean_s": bounds.least_mean(jobs, gpus=gpus, end_s=_DAY_S, product=product)}
    for name, choice in (
        ("first-fit", bounds.Choice.FIRST),
        ("least fragmentation", bounds.Choice.LEAST_FRAGMENTED),
    ):
        free = bounds.instant(jobs, gpus=gpus, end_s=_DAY_S, choice=choice, product=product)
        yield name, _waits(jobs, free, cell)
    sizes = day.plain(product)
    begin, balanced = (
        {tuple((str(sizes[size]), count) for size, count in _LAYOUTS[name].items()): gpus}
        for name in (cell.begin, "all-balanced")
    )
    best = day_layouts.best_fixed(jobs, gpus=gpus, end_s=_DAY_S, product=product)
    limits = decisions.PartitionerLimits()
    unprepared = decisions.PartitionerLimits(prepare_for_s=0.0)
    for scheduler in simulated_cluster.Scheduler:
        for name, layouts, changes in (
            ("ours", begin, limits),
            ("ours, not prepared", begin, unprepared),
            ("best fixed", best, None),
            ("all-balanced", balanced, None),
        ):
            cluster = day_layouts.cluster(
                day_layouts.spread(layouts), scheduler, seed=seed, product=product
            )
            result = simulated_cluster.simulate(
                day_layouts.pods(jobs), cluster, end_s=_DAY_S, limits=changes
            )
            figures = _waits(jobs, result.waits, cell)
            if changes:
                figures |= {
                    "changes": result.changes,
                    "refused": result.refused,
                    "tainted_s": result.tainted_s,
                    "lost": result.lost,
                }
            yield f"{name}, {scheduler.value}", figures


def _waits(jobs: Sequence[day.Job], waits: day.Waits, cell: Cell) -> Figures:
    late = [wait for job in jobs if (wait := waits[job.name]) is not None]
    largest = [job for job in jobs if job.profile.startswith("7g")]
    placed = sum(waits[job.name] is not None for job in largest)
    figures = {
        "mean_s": day.mean(jobs, waits, end_s=_DAY_S),
        "p95_s": min(_DAY_S, day.quantile(waits, 0.95)),
        "placed": len(late) / len(jobs),
    }
    if cell.is_fill:
        sizes = day.sizes(cell.product)
        slices = (sizes[j.profile].compute * j.count for j in jobs if waits[j.name] is not None)
        figures["used"] = sum(slices) / (_SLICES * cell.gpus)
    return figures | ({"placed_7g": placed / len(largest)} if largest else {})


def _means(every: Sequence[Mapping[str, Figures]]) -> dict[str, dict[str, float]]:
    """Return the means over the seeds, and the standard error of the mean wait."""
    joined = {}
    for name in every[0]:
        runs = [each[name] for each in every]
        row = {
            key: round(statistics.fmean(run.get(key, 0.0) for run in runs), 3) for key in runs[0]
        }
        means = [run["mean_s"] for run in runs]
        error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0
        joined[name] = row | {"error_s": round(error, 3)}
    return joined


if __name__ == "__main__":
    main()
