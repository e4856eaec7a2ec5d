"""Compare our agent with NVIDIA's mig-manager on the same real node, story by story.

    python -m bench.realnode [--runs 3] [--only STORY ...] [--manager ours|nvidia ...]
                             [--idle-s 120] [--logs FOLDER]

kubelet, containerd, the API server and NVIDIA's device plugin are real and built from source
(``tests/realnode``; as root, no GPU). Only the driver is simulated, with the latencies of
``bench.speed``. It refuses to destroy an instance that a container uses, as a real one does.

Both managers read the same layouts, beside a device plugin as the GPU operator deploys it. One
plays all stories, then the other. All figures are observed from outside: from the node object,
kubelet, the driver, and the API server's audit log. Figures of docs/migration.md and
docs/performance.md come from here.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bench.realnode import node
from mig_manager.sandbox.driver import states
from testkit import matrix, nvml_faults
from tests.realnode import manifests, namespaces, nvidia_manager, real_cluster

_PRODUCT = "A100-SXM4-40GB"
_SEVEN: matrix.Devices = {"1g.5gb": 7}
_FULL = (_SEVEN, _SEVEN)
_STORIES = (
    node.Story(name="first layout, idle node", before=(None, None), layout="all-1g.5gb"),
    node.Story(
        name="one instance is added beside 13 busy pods",
        before=(_SEVEN, {"1g.5gb": 6}),
        layout="all-1g.5gb",
        pods=13,
    ),
    node.Story(
        name="layout already applied, 14 busy pods", before=_FULL, layout="all-1g.5gb", pods=14
    ),
    node.Story(name="layout does not fit", before=_FULL, layout="eight-slices"),
    node.Story(name="a pod uses a device that goes", before=_FULL, layout="all-2g.10gb", pods=1),
    node.Story(
        name="the same, with a budget of 0",
        before=_FULL,
        layout="all-2g.10gb",
        pods=1,
        has_budget=True,
    ),
    node.Story(
        name="the driver fails the fourth of six creations, once",
        before=_FULL,
        layout="all-2g.10gb",
        fails_creation=4,
    ),
    node.Story(
        name="the manager is killed while GPUs change",
        before=_FULL,
        layout="all-2g.10gb",
        is_killed=True,
    ),
)


@contextlib.contextmanager
def _install_ours(cluster: real_cluster.RealCluster) -> Iterator[None]:
    layouts = manifests.layouts("") | {"data": {"config.yaml": nvidia_manager.LAYOUTS}}
    cluster.install("unprivileged", layouts)
    yield
    cluster.uninstall("unprivileged")


@contextlib.contextmanager
def _install_nvidias(cluster: real_cluster.RealCluster) -> Iterator[None]:
    nvidia_manager.install(cluster)
    yield
    nvidia_manager.remove(cluster)


_MANAGERS: Mapping[str, node.Manager] = {
    "ours": node.Manager(
        title="mig-manager",
        install=_install_ours,
        namespace="mig-manager",
        name="mig-manager",
        labels={"app.kubernetes.io/name": "mig-manager"},
    ),
    "nvidia": node.Manager(
        title="NVIDIA's",
        install=_install_nvidias,
        namespace=nvidia_manager.NAMESPACE,
        name=nvidia_manager.NAME,
        labels={"app": nvidia_manager.NAME},
    ),
}


class Results:
    """The outcomes so far, which are also printed if the benchmark fails."""

    def __init__(self) -> None:
        self._outcomes: dict[tuple[str, str], list[node.Outcome]] = collections.defaultdict(list)
        self._at_rest: dict[str, tuple[collections.Counter[str], float]] = {}

    def add(self, story: str, manager: str, outcome: node.Outcome) -> None:
        """Add one run of a story."""
        self._outcomes[story, manager].append(outcome)
        print(f"load {os.getloadavg()[0]:.1f}; {story}, {manager}: {outcome}", flush=True)

    def add_at_rest(
        self, manager: str, requests: collections.Counter[str], seconds: float
    ) -> None:
        """Add the requests of a manager at rest."""
        self._at_rest[manager] = (requests, seconds)

    def report(self) -> None:
        """Print the table in Markdown, and the requests by verb and resource."""
        columns = (
            *("story", "manager", "state", "until the state", "until schedulable", "evicted"),
            *("other pods ended", "pods on missing devices", "API requests", "afterwards"),
        )
        print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        played = [story.name for story in _STORIES]
        for (story, manager), outcomes in sorted(
            self._outcomes.items(), key=lambda item: played.index(item[0][0])
        ):
            print(f"| {story} | {manager} | {' | '.join(_cells(outcomes))} |")
        print()
        for (story, manager), outcomes in self._outcomes.items():
            median = sorted((each.requests for each in outcomes), key=collections.Counter.total)
            print(f"{story}, {manager}: {_kinds(median[len(median) // 2])}")
        for manager, (requests, seconds) in self._at_rest.items():
            per_minute = requests.total() * 60 / seconds
            print(f"{manager} at rest, {per_minute:.1f} a minute: {_kinds(requests)}")


def _cells(outcomes: Sequence[node.Outcome]) -> list[str]:
    return [
        _distinct(f"`{each.state}`" for each in outcomes),
        _seconds([each.state_s for each in outcomes]),
        _seconds([each.schedulable_s for each in outcomes]),
        _distinct(each.evictions for each in outcomes),
        _distinct(each.other_ends for each in outcomes),
        _distinct(each.on_missing_devices for each in outcomes),
        f"{statistics.median(each.requests.total() for each in outcomes):.0f}",
        _distinct(each.afterwards for each in outcomes),
    ]


def _seconds(times: Sequence[float | None]) -> str:
    values = [each for each in times if each is not None]
    if not values:
        return "-"
    return f"{statistics.median(values):.1f} s ({min(values):.1f} to {max(values):.1f})"


def _distinct(values: Iterable[object]) -> str:
    return " or ".join(dict.fromkeys(map(str, values)))


def _kinds(requests: collections.Counter[str]) -> str:
    kinds = [f"{count} {kind}" for kind, count in requests.most_common()]
    return f"{requests.total()} requests: {', '.join(kinds) or 'none'}"


def main() -> None:
    """Play the stories, and print the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="of each story (default: 3)")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of stories")
    parser.add_argument("--manager", nargs="+", choices=_MANAGERS, default=[*_MANAGERS])
    parser.add_argument("--idle-s", type=float, default=120.0, help="seconds at rest; 0: none")
    parser.add_argument("--logs", type=pathlib.Path, help="folder for the logs")
    options = parser.parse_args()
    if missing := namespaces.missing():
        sys.exit(missing)
    results = Results()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        ending.callback(results.report)
        _measure(results, options, pathlib.Path(folder))


def _measure(results: Results, options: argparse.Namespace, folder: pathlib.Path) -> None:
    stories = [each for each in _STORIES if any(part in each.name for part in options.only)]
    starts = [_start(each, folder / f"{number}.json") for number, each in enumerate(stories)]
    shape = real_cluster.ClusterShape(gpus=f"2x{_PRODUCT}", overlay=None, latency=states.REALISTIC)
    if "nvidia" in options.manager:
        nvidia_manager.prepare()
    cluster = real_cluster.RealCluster(folder / "cluster", real_cluster.CACHE, shape)
    with cluster.up(), contextlib.ExitStack() as ending:
        if options.logs:
            ending.callback(cluster.save, options.logs)
        versions = node.watch(cluster)
        nvidia_manager.install_plugin(cluster)
        for manager in (_MANAGERS[each] for each in options.manager):
            with manager.install(cluster):
                served = node.Node(cluster, manager, versions)
                for story, start in zip(stories, starts, strict=True):
                    for _ in range(options.runs):
                        results.add(story.name, manager.title, served.play(story, start))
                if options.idle_s:
                    log = cluster.listen()
                    threading.Event().wait(options.idle_s)
                    results.add_at_rest(manager.title, log.requests(manager.user), options.idle_s)


def _start(story: node.Story, path: pathlib.Path) -> nvml_faults.SharedState:
    """Return the GPUs at the start of a story."""
    start = matrix.Transition(product=_PRODUCT, before=story.before, after=story.before)
    matrix.prepare(start, path)
    return nvml_faults.SharedState(path)


if __name__ == "__main__":
    main()
