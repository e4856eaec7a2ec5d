"""Measure how long the partitioner decides in large clusters, and its memory.

    python -m bench.partitioner_scale [--sizes 1000x1000 10000x10000] [--profile]

Every node has eight A100 with random maximal layouts, so hardly two nodes are equal. One pod uses
each instance of a profile that pending pods request, and half of the others; one GPU in twenty is
idle. The pending pods request one to three devices, in three pools, with a few amounts of CPU;
``--unequal`` gives each pod its own.

``read`` is the time to parse all objects, ``first`` the first decision of a leader, ``next`` the
decision after one node and one pod of a hundred have changed. Both prepare for likely pods, as if
the pending ones had arrived at once. ``peak`` is of the whole process.
"""

import argparse
import cProfile
import dataclasses
import datetime as dt
import json
import math
import pstats
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.speed import planning
from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning import decider, demand
from mig_manager.core.partitioning.batch import arrivals
from mig_manager.core.partitioning.decision import decisions, situations
from mig_manager.core.partitioning.nodes import (
    node_index,
    node_requests,
    own_clock,
    partitioned_nodes,
)
from mig_manager.core.records import capacity, inventory_codec

_PRODUCT = "A100-SXM4-40GB"
_GPUS = 8
_IDLE_GPUS = 0.05
_IN_USE = 0.5  # of the profiles that no pending pod requests
_CHURN = 0.01
_POOLS = ("a", "b", "c")
_PROFILES = ("1g.5gb", "1g.5gb", "1g.5gb", "2g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")
_NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
_LIMITS = decisions.PartitionerLimits(max_unavailable="10%")
_SIZES = ("1000x1000", "4000x1000", "4000x4000", "10000x10000")
_PROFILED_LINES = 25

Object = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one size."""

    nodes: int
    pods: int
    bound: int
    needs: int  # distinct
    read_s: float
    first_s: float
    next_s: float
    peak_mb: int
    changes: int
    node_bytes: int  # mean size of the agents' annotations for the partitioner


class Objects:
    """Draws the Node and Pod objects of the API."""

    def __init__(self, seed: int, *, is_unequal: bool) -> None:
        self._draw = random.Random(seed)  # noqa: S311 - a bench, no secret
        self._is_unequal = is_unequal
        self._gpu = dataclasses.replace(
            hardware.template(hardware.find(_PRODUCT)),
            current_mode=model.MigMode.ENABLED,
            pending_mode=model.MigMode.ENABLED,
        )
        self._layouts = planning.maximal(self._gpu)
        self._idle = [
            layout
            for layout in self._layouts
            if not any(str(spec.profile) in _PROFILES for spec, _ in layout)
        ]

    def node(self, number: int) -> Object:
        """Return a node, whose instances in use have pods (``bound``)."""
        gpus, in_use = [], {}
        for index in range(_GPUS):
            is_idle = self._draw.random() < _IDLE_GPUS
            gpu = self._gpu_of(number, index, self._idle if is_idle else self._layouts)
            in_use[gpu.uuid] = frozenset(
                gi.placement
                for gi in gpu.gpu_instances
                if str(gi.profile) in _PROFILES or (not is_idle and self._draw.random() < _IN_USE)
            )
            gpus.append(gpu)
        counts: dict[str, int] = {"cpu": 128, "memory": 1 << 40, "pods": 110}
        for gpu in gpus:
            for device in gpu.devices:
                name = resources.of_profile(device.profile) or ""
                counts[name] = counts.get(name, 0) + 1
        return {
            "metadata": {
                "name": f"node-{number:05}",
                "resourceVersion": str(self._draw.randrange(1 << 30)),
                "labels": {
                    well_known.PARTITIONING_LABEL: well_known.ON_DEMAND,
                    "pool": self._draw.choice(_POOLS),
                    **{f"example.com/label-{each}": f"{number}" for each in range(20)},
                },
                "annotations": {
                    well_known.GPUS_ANNOTATION: inventory_codec.to_json(gpus),
                    well_known.CAPACITY_ANNOTATION: capacity.to_json(
                        gpus, in_use, at=_NOW.isoformat()
                    ),
                },
            },
            "spec": {},
            "status": {
                "allocatable": {name: str(count) for name, count in counts.items()},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }

    def bound(self, node: Object) -> Iterator[Object]:
        """Yield the pods of a node: one on each instance in use."""
        gpus = inventory_codec.from_json(
            node["metadata"]["annotations"][well_known.GPUS_ANNOTATION]
        )
        use = capacity.from_json(node["metadata"]["annotations"][well_known.CAPACITY_ANNOTATION])
        for gpu in gpus:
            for gi in gpu.gpu_instances:
                if gi.placement in use.in_use[gpu.uuid]:
                    yield self._pod(
                        f"{node['metadata']['name']}-{gpu.index}-{gi.placement.start}",
                        {gi.profile: 1},
                        node=node["metadata"]["name"],
                    )

    def pending(self, number: int) -> Object:
        """Return a pod that the scheduler could not place."""
        count = self._draw.choice((1, 1, 1, 1, 2, 3))
        profile = profile_name.parse(self._draw.choice(_PROFILES))
        return self._pod(f"pending-{number}", {profile: count})

    def _pod(self, name: str, devices: dict[model.Profile, int], node: str = "") -> Object:
        draw = self._draw
        cpu = f"{draw.randrange(4000)}m" if self._is_unequal else draw.choice(("1", "2"))
        requests = {"cpu": cpu, "memory": "4Gi"}
        requests |= {resources.of_profile(p) or "": str(n) for p, n in devices.items()}
        spec: Object = {
            "containers": [{"name": "main", "resources": {"requests": requests}}],
            "priority": draw.choice((0, 0, 0, 100)),
        }
        status: Object = {"phase": "Running"}
        if node:
            spec["nodeName"] = node
        else:
            if pool := draw.choice((*_POOLS, "")):
                spec["nodeSelector"] = {"pool": pool}
            reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            status = {"phase": "Pending", "conditions": [reason]}
        created = _NOW - dt.timedelta(seconds=draw.randrange(1000))
        return {
            "metadata": {
                "namespace": draw.choice(("ml", "research", "ci")),
                "name": name,
                "uid": f"{draw.getrandbits(128):032x}",
                "creationTimestamp": created.isoformat(),
            },
            "spec": spec,
            "status": status,
        }

    def _gpu_of(self, number: int, index: int, layouts: Sequence[planning.Layout]) -> model.Gpu:
        layout = self._draw.choice(layouts)
        uuid = f"GPU-{number:08x}-0000-0000-0000-{index:012x}"
        gpu = dataclasses.replace(self._gpu, index=index, uuid=uuid)
        return planning.gpu_with(gpu, layout)


class WatchedObjects:
    """What the watches have parsed; counts the time of that."""

    def __init__(self, objects: Objects, nodes: int, pods: int) -> None:
        self._objects = objects
        self.read_s = 0.0
        self.bytes = 0
        self.nodes: dict[str, partitioned_nodes.PartitionedNode] = {}
        self.bound: dict[str, list[demand.BoundPod]] = {}
        self.requests = node_requests.Requests()
        self.pending: list[demand.PendingPod] = []
        self.arrivals = arrivals.Arrivals()
        for number in range(nodes):
            self.set_node(number)
        for number in range(pods):
            self.add_pending(number)

    def set_node(self, number: int) -> None:
        """Let a node and its pods appear or change."""
        item = self._objects.node(number)
        pods = [json.dumps(each) for each in self._objects.bound(item)]
        self.bytes += sum(map(len, item["metadata"]["annotations"].values()))
        text = json.dumps(item)
        began_s = time.process_time()
        node = partitioned_nodes.parse(json.loads(text))
        assert node is not None  # noqa: S101 - a bench
        self.nodes[node.name] = node
        for before in self.bound.get(node.name, ()):
            self.requests.replace(before, None)
        bound = [demand.parse(json.loads(each)) for each in pods]
        self.bound[node.name] = [each for each in bound if isinstance(each, demand.BoundPod)]
        for pod in self.bound[node.name]:
            self.requests.replace(None, pod)
        self.read_s += time.process_time() - began_s

    def add_pending(self, number: int) -> None:
        """Let a pod appear."""
        text = json.dumps(self._objects.pending(number))
        began_s = time.process_time()
        pod = demand.parse(json.loads(text))
        assert isinstance(pod, demand.PendingPod)  # noqa: S101 - a bench
        self.pending.append(pod)
        self.arrivals.add(pod.needs, 0.0)
        self.read_s += time.process_time() - began_s


class Decider:
    """Decides as the loop does."""

    def __init__(self, watched: WatchedObjects) -> None:
        self._objects = watched
        self._history = situations.History()
        self._own_clock = own_clock.OwnClock()
        self._cache = node_index.NodeCache()
        self.changes = 0

    def decide(self, now: dt.datetime) -> float:
        """Decide once; return the time that it took."""
        began_s = time.process_time()
        nodes = self._own_clock.with_own_times(
            self._objects.nodes.values(), self._objects.requests, now=now
        )
        situation = situations.Situation(
            index=node_index.NodeIndex(nodes, self._cache),
            limits=_LIMITS,
            now=now,
            history=self._history,
        )
        likely = self._objects.arrivals.expected_pods(0.0, _LIMITS.prepare_for_s, situation.index)
        decision = decider.decide(situation, self._objects.pending, expected=likely)
        self._history = situation.after(decision)
        self.changes += len(decision.changes)
        return time.process_time() - began_s


def measure(nodes: int, pods: int, *, is_unequal: bool) -> Row:
    """Measure one size in this process."""
    watched = WatchedObjects(Objects(1, is_unequal=is_unequal), nodes, pods)
    read_s, size = watched.read_s, watched.bytes / nodes
    deciding = Decider(watched)
    first_s = deciding.decide(_NOW)
    changes = deciding.changes
    for number in range(0, nodes, round(1 / _CHURN)):
        watched.set_node(number)
    for number in range(0, pods, round(1 / _CHURN)):
        del watched.pending[number]
        watched.add_pending(pods + number)
    next_s = deciding.decide(_NOW + dt.timedelta(seconds=5))
    return Row(
        nodes=nodes,
        pods=pods,
        bound=sum(map(len, watched.bound.values())),
        needs=len({pod.needs for pod in watched.pending}),
        read_s=round(read_s, 2),
        first_s=round(first_s, 2),
        next_s=round(next_s, 2),
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        changes=changes,
        node_bytes=round(size),
    )


def main() -> None:
    """Measure every size in a process of its own, and print the rows and the growth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", default=_SIZES, metavar="NODESxPODS")
    parser.add_argument("--unequal", action="store_true", help="no two pods request equal CPU")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here or options.profile:
        profiler = cProfile.Profile()
        for size in [options.here] if options.here else options.sizes:
            nodes, pods = map(int, size.split("x"))
            if options.profile:
                profiler.enable()
            print(json.dumps(dataclasses.asdict(measure(nodes, pods, is_unequal=options.unequal))))
        if options.profile:
            profiler.disable()
            pstats.Stats(profiler).sort_stats("cumulative").print_stats(_PROFILED_LINES)
        return
    rows = []
    for size in options.sizes:
        command = [sys.executable, "-m", "bench.partitioner_scale", "--here", size]
        command += ["--unequal"] if options.unequal else []
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - ourselves
        rows.append(Row(**json.loads(text)))
        print(text.strip(), flush=True)
    print(json.dumps(_growth(rows)))


def _growth(rows: Sequence[Row]) -> dict[str, float]:
    """Return the exponents of nodes and pods together, between the smallest and largest square."""
    squares = sorted((row for row in rows if row.nodes == row.pods), key=lambda row: row.nodes)
    if len(squares) < 2:  # noqa: PLR2004 - two points
        return {}
    least, most = squares[0], squares[-1]
    size = math.log(most.nodes / least.nodes)
    return {
        "first_exponent": round(math.log(most.first_s / least.first_s) / size, 2),
        "next_exponent": round(math.log(most.next_s / least.next_s) / size, 2),
    }


if __name__ == "__main__":
    main()
