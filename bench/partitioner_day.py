"""Play a day of random pods on the real API server and scheduler: on-demand or fixed layouts.

    python -m bench.partitioner_day [--day-s 900] [--results docs/results]

Sandbox nodes have real agents, and all variants the same pods. The day is compressed: pods come
and end faster, but the driver, the device plugin and our programs take their real time, so a
change costs more than on a real day, the more so the shorter the day.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from mig_manager.adapters.host import line_writer, log
from testkit import bounds, day, day_layouts
from tests.rigs.cluster import api_servers, audit, envtest
from tests.rigs.stage import agent_stage, device_watch, pods_of_a_day, sandbox_nodes

_GPUS_EACH = 8
_SLICES = 7
_BALANCED = "all-balanced"
_PARTITIONER = ("--mode", "act", "--max-unavailable", "50%")
_TIMES = ("--quiet-s", "0.5", "--longest-wait-s", "2", "--cooldown-s", "1")
"""The defaults are for days that are not compressed."""

Entry = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The nodes and pods of a day."""

    nodes: Sequence[str]
    jobs: Sequence[day.Job]
    day_s: float

    @property
    def gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return len(self.nodes) * _GPUS_EACH


def main() -> None:
    """Play all variants, print a table, and write it as JSON with ``--results``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4, help="of 8 GPUs each")
    parser.add_argument("--pods", type=int, default=500)
    parser.add_argument("--day-s", type=float, default=900.0, help="how long to play the day")
    parser.add_argument("--load", type=float, default=0.75, help="requested share of the GPUs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variants", nargs="*", choices=_VARIANTS, default=list(_VARIANTS))
    parser.add_argument("--results", type=pathlib.Path, help="folder for partitioner-day.json")
    parser.add_argument("--logs", type=pathlib.Path, help="folder for the logs of all programs")
    options = parser.parse_args()
    log.configure(level="error", is_json=False, lines=line_writer.LineWriter(sys.stderr))
    names = [f"node-{number}" for number in range(1, options.nodes + 1)]
    jobs = day.jobs(
        seed=options.seed,
        pods=options.pods,
        day_s=options.day_s,
        gpus=len(names) * _GPUS_EACH,
        load=options.load,
    )
    plan = Plan(nodes=names, jobs=jobs, day_s=options.day_s)
    entries = [*_compute(plan)]
    for entry in entries:
        _print(entry)
    for name in options.variants:
        with _logs(options.logs, name) as folder:
            entries.append(_play(name, plan, folder))
        _print(entries[-1])
    if options.results:
        about = {"seed": options.seed, "load": options.load, "nodes": len(names)}
        about |= {"pods": len(jobs), "day_s": options.day_s}
        (options.results / "partitioner-day.json").write_text(
            json.dumps([about, *entries], indent=1) + "\n", encoding="utf-8"
        )


def _print(entry: Entry) -> None:
    print(json.dumps(entry), flush=True)


@contextlib.contextmanager
def _logs(kept: pathlib.Path | None, name: str) -> Iterator[pathlib.Path]:
    if kept:
        folder = kept / name
        folder.mkdir(parents=True)
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="mig-") as temporary:
            yield pathlib.Path(temporary)


def _compute(plan: Plan) -> Iterator[Entry]:
    """Compute the bounds, and the best fixed layout with programs that take no time."""
    end_s, gpus = plan.day_s, plan.gpus
    print(f"one hour takes {plan.day_s / 24:.1f} s")
    bound = {
        share: bounds.least_wait(plan.jobs, share, gpus=gpus, end_s=end_s) for share in _SHARES
    }
    most = _utilisation(plan, {job.name: end_s - job.at_s for job in plan.jobs})
    yield _entry("bound", placed=len(plan.jobs), waits=bound, utilisation=most)
    yield _instant_entry("instant", plan, bounds.instant(plan.jobs, gpus=gpus, end_s=end_s))
    devices = day_layouts.devices_of(day_layouts.best_fixed(plan.jobs, gpus=gpus, end_s=end_s))
    yield _instant_entry(
        "best fixed, computed", plan, day_layouts.fixed_waits(plan.jobs, devices, end_s=end_s)
    )


_SHARES = (0.5, 0.9, 0.95, 1.0)


def _instant_entry(name: str, plan: Plan, waits: day.Waits) -> Entry:
    placed = sum(wait is not None for wait in waits.values())
    left_s = {
        job.name: plan.day_s - job.at_s - wait
        for job in plan.jobs
        if (wait := waits[job.name]) is not None
    }
    quantiles = {share: day.quantile(waits, share) for share in _SHARES}
    mean_s = round(day.mean(plan.jobs, waits, end_s=plan.day_s), 2)
    utilisation = _utilisation(plan, left_s)
    return _entry(name, placed, quantiles, mean_s=mean_s, utilisation=utilisation)


def _utilisation(plan: Plan, left_s: Mapping[str, float]) -> float:
    """Return the share of the compute slices in use until the end of the day."""
    slices = day.sizes()
    used = sum(
        min(job.run_s, left_s.get(job.name, 0.0)) * slices[job.profile].compute
        for job in plan.jobs
    )
    return round(used / (_SLICES * plan.gpus * plan.day_s), 3)


def _entry(name: str, placed: int, waits: Mapping[float, float], **more: object) -> Entry:
    """Return a row; a wait is null if the pod at that share is not bound."""
    named = {
        f"p{share * 100:g}_s": round(wait, 2) if wait < float("inf") else None
        for share, wait in waits.items()
    }
    return {"variant": name, "placed": placed, **named, **more}


# -- played -----------------------------------------------------------------------------------


def _play(name: str, plan: Plan, folder: pathlib.Path) -> Entry:
    """Play the day in one variant; return its row."""
    layouts, requested = _VARIANTS[name](plan)
    shape = sandbox_nodes.NodeShape(
        names=plan.nodes,
        layouts=agent_stage.PACKAGED.read_text(encoding="utf-8") + layouts,
        agent_options=("--custom-layouts",) if name == _ON_DEMAND else (),
        folder=folder,
    )
    server = envtest.EnvtestServer(envtest.assets(), folder)
    with server.running():
        real = api_servers.EnvtestCluster(server, folder)
        try:
            with sandbox_nodes.running(real, shape) as nodes:
                nodes.apply(requested)
                with contextlib.ExitStack() as exits:
                    if name == _ON_DEMAND:
                        exits.enter_context(sandbox_nodes.installed_partitioner(real))
                        nodes.opt_in()
                        exits.callback(nodes.partitioner(*_PARTITIONER, *_TIMES).end)
                    watch = exits.enter_context(device_watch.watching(nodes.watched_nodes()))
                    requests = audit.Log(server.audit_log)
                    runs = nodes.runs()
                    played = exits.enter_context(pods_of_a_day.Day(nodes.cluster))
                    played.create_on_time(plan.jobs, end_s=plan.day_s)
                    ends = nodes.runs() - runs
        finally:
            real.close()
    return _row(name, plan, played, watch, requests, ends)


def _row(
    name: str,
    plan: Plan,
    played: pods_of_a_day.Day,
    watch: device_watch.DeviceWatch,
    requests: audit.Log,
    ends: collections.Counter[str],
) -> Entry:
    fates = list(played.fates.values())
    waits = {fate.job.name: fate.wait_s for fate in fates}
    placed = sum(wait is not None for wait in waits.values())
    ran_s = {fate.job.name: fate.ran_s(played.end_s) for fate in fates}
    failed = [f"{fate.job.name}: {fate.end}" for fate in fates if fate.end]
    for line in (*failed, *sorted(watch.losses)):
        print(f"  {name}: {line}")
    counts = {
        "partitioner": requests.requests(sandbox_nodes.PARTITIONER_USER).total(),
        "agents": requests.requests().total(),
    }
    return _entry(
        name,
        placed,
        {share: day.quantile(waits, share) for share in _SHARES},
        mean_s=round(day.mean(plan.jobs, waits, end_s=plan.day_s), 2),
        utilisation=_utilisation(plan, ran_s),
        longest_s=_longest(played),
        runs=dict(ends),
        device_checks=watch.checks,
        lost=len(watch.losses),
        failed=len(failed),
        evicted=len(requests.evicted_pods()),
        **{f"{who}_requests_per_pod": round(n / max(1, placed), 2) for who, n in counts.items()},
    )


def _longest(played: pods_of_a_day.Day) -> dict[str, float]:
    """Return the longest wait of each profile, at most until the end of the day."""
    longest: dict[str, float] = {}
    for fate in played.fates.values():
        wait_s = played.end_s - fate.created_s if fate.wait_s is None else fate.wait_s
        name = fate.job.profile
        longest[name] = max(longest.get(name, 0.0), round(wait_s, 1))
    return longest


_ON_DEMAND = "on-demand"


def _balanced_layouts(plan: Plan) -> tuple[str, dict[str, str]]:
    return "", dict.fromkeys(plan.nodes, _BALANCED)


def _best_fixed(plan: Plan) -> tuple[str, dict[str, str]]:
    """Return the layouts of the best fixed mix, spread evenly over the nodes."""
    mix = day_layouts.best_fixed(plan.jobs, gpus=plan.gpus, end_s=plan.day_s)
    gpus = [counts for counts, number in mix.items() for _ in range(number)]
    text = ""
    for number, name in enumerate(plan.nodes):
        text += f"\n  best-{name}:\n"
        for index, counts in enumerate(gpus[number :: len(plan.nodes)]):
            devices = ", ".join(f"{profile}: {count}" for profile, count in counts)
            text += f"  - {{devices: [{index}], mig-enabled: true, mig-devices: {{{devices}}}}}\n"
    return text, {name: f"best-{name}" for name in plan.nodes}


_VARIANTS: Mapping[str, Callable[[Plan], tuple[str, dict[str, str]]]] = {
    _ON_DEMAND: _balanced_layouts,
    "best fixed": _best_fixed,
    _BALANCED: _balanced_layouts,
}


if __name__ == "__main__":
    try:
        main()
    except pytest.skip.Exception as reason:
        raise SystemExit(str(reason)) from None
