"""Simulate a node: its devices, the pods that use them, and an agent that changes them.

Kubelet gives a pod any idle device of the profile. The agent refuses a change that would destroy
an instance in use.
"""

import collections
import dataclasses
import datetime as dt
import random
from collections.abc import Mapping

from mig_manager.core import model
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.decision import decisions
from mig_manager.core.partitioning.nodes import partitioned_nodes
from mig_manager.core.planner import planner

_SLICES = 7
_Span = tuple[str, model.Placement]  # a GPU instance: the UUID of its GPU, and its placement


class SimulatedNode:
    """A node whose devices, pods and agent are simulated."""

    def __init__(self, origin: partitioned_nodes.PartitionedNode) -> None:
        """Begin without pods."""
        self._node = origin
        """As its agent published it."""
        self._published: partitioned_nodes.PartitionedNode | None = None
        """With its pods; None: they have changed."""
        self._others = {
            name: n for name, n in origin.supply.allocatable if not resources.is_mig(name)
        }
        self._requested: collections.Counter[str] = collections.Counter()
        self._slices = 0
        """Compute slices of its pods."""
        self._used: dict[str, list[tuple[str, _Span]]] = {}
        """By UID of a pod: its devices, with the resource of each."""
        self._idle: dict[str, list[_Span]] = {}
        self._total: collections.Counter[str] = collections.Counter()
        self._is_tainted = False
        self._list_devices()

    # -- for the scheduler and kubelet ---------------------------------------------------------

    def has_room(self, needs: demand.Needs) -> bool:
        """Return whether a pod fits now."""
        return (
            not self._is_tainted
            and all(len(self._idle.get(name, ())) >= n for name, n in needs.mig)
            and all(
                self._others.get(name, 0) - self._requested[name] >= n for name, n in needs.others
            )
        )

    def score(self, needs: demand.Needs, *, is_packed: bool) -> int:
        """Return a score of 0 to 100, as of the plugin NodeResourcesFit."""
        if not is_packed:
            slices = _SLICES * len(self._node.gpus)
            return 100 * (slices - self._slices - _slices(needs)) // slices
        used = [
            100 * (self._total[name] - len(self._idle[name]) + n) // self._total[name]
            for name, n in needs.mig
        ]
        return sum(used) // len(used)

    def bind(self, pod: demand.PendingPod, draw: random.Random) -> None:
        """Give a pod that fits its devices."""
        devices = self._used[pod.uid] = []
        for name, count in pod.needs.mig:
            idle = self._idle[name]
            devices += [(name, idle.pop(draw.randrange(len(idle)))) for _ in range(count)]
        self._requested.update(dict(pod.needs.amounts))
        self._slices += _slices(pod.needs)
        self._published = None

    def end(self, pod: demand.PendingPod) -> None:
        """Make the devices of a pod that ends idle."""
        for name, span in self._used.pop(pod.uid):
            self._idle[name].append(span)
        self._requested.subtract(dict(pod.needs.amounts))
        self._slices -= _slices(pod.needs)
        self._published = None

    # -- the agent -----------------------------------------------------------------------------

    def request(self, *, now: dt.datetime) -> None:
        """Record that a change is requested."""
        self._publish(
            labels={**self._node.labels, well_known.CONFIG_LABEL: well_known.CUSTOM_LAYOUT},
            agent=partitioned_nodes.AgentState(
                changing="its agent works on layout custom", is_closed=True
            ),
            times=dataclasses.replace(self._node.times, requested_at=now),
        )

    def begin(self, change: decisions.NodeChange, *, now: dt.datetime) -> bool:
        """Taint the node for a change; return False if it would destroy an instance in use."""
        self._publish(
            times=dataclasses.replace(self._node.times, requested_at=None, started_at=now)
        )
        _, destroyed = apply_desired(self._node.gpus, change.desired)
        self._is_tainted = destroyed.isdisjoint(self._in_use())
        if not self._is_tainted:
            self._finish(now, failed_hash=change.content_hash)
        return self._is_tainted

    def change(self, change: decisions.NodeChange, *, now: dt.datetime) -> tuple[int, int]:
        """Apply the change and remove the taint.

        Return how many instances it destroyed, and how many of these were in use.
        """
        gpus, destroyed = apply_desired(self._node.gpus, change.desired)
        self._is_tainted = False
        self._finish(now, gpus=gpus)
        self._list_devices()
        return len(destroyed), len(destroyed & self._in_use())

    def as_published(self) -> partitioned_nodes.PartitionedNode:
        """Return the node as the partitioner sees it."""
        if self._published is None:
            in_use: dict[str, set[model.Placement]] = {gpu.uuid: set() for gpu in self._node.gpus}
            for uuid, placement in self._in_use():
                in_use[uuid].add(placement)
            self._published = dataclasses.replace(
                self._node,
                supply=dataclasses.replace(
                    self._node.supply,
                    allocatable=demand.to_amounts(self._others | self._total),
                ),
                pods=partitioned_nodes.PodFacts(allocated=demand.to_amounts(self._requested)),
                in_use={uuid: frozenset(placements) for uuid, placements in in_use.items()},
            )
        return self._published

    def _finish(self, now: dt.datetime, *, failed_hash: str = "", **facts: object) -> None:
        started_at = self._node.times.started_at or now
        self._publish(
            agent=partitioned_nodes.AgentState(
                took_s=(now - started_at).total_seconds(),
                failed_hash=failed_hash,
                is_repeatable=bool(failed_hash),
            ),
            times=dataclasses.replace(self._node.times, finished_at=now),
            **facts,
        )

    def _publish(self, **facts: object) -> None:
        self._node = dataclasses.replace(self._node, **facts)  # type: ignore[arg-type]
        self._published = None

    def _in_use(self) -> set[_Span]:
        return {span for devices in self._used.values() for _, span in devices}

    def _list_devices(self) -> None:
        """List the idle devices again after a change."""
        in_use = self._in_use()
        self._idle, self._total = {}, collections.Counter()
        for gpu in self._node.gpus:
            for _, name, placement in resources.devices(gpu):
                if placement is not None:
                    self._total[name] += 1
                    idle = self._idle.setdefault(name, [])
                    if (gpu.uuid, placement) not in in_use:
                        idle.append((gpu.uuid, placement))


def _slices(needs: demand.Needs) -> int:
    """Return how many compute slices a pod requests."""
    return sum(profile.gpu_slices * count for profile, count in needs.devices)


def apply_desired(
    gpus: tuple[model.Gpu, ...], desired: Mapping[str, model.DesiredGpu]
) -> tuple[tuple[model.Gpu, ...], set[_Span]]:
    """Return the GPUs after a change, and the instances that it destroys."""
    plans = {plan.gpu_uuid: plan for plan in planner.plan(gpus, desired).gpus}
    kept = {
        (uuid, target.placement)
        for uuid, plan in plans.items()
        for target in plan.target
        if target.is_kept
    }
    before = {
        (gpu.uuid, gi.placement) for gpu in gpus if gpu.uuid in plans for gi in gpu.gpu_instances
    }
    after = tuple(
        dataclasses.replace(gpu, gpu_instances=plans[gpu.uuid].instances)
        if gpu.uuid in plans
        else gpu
        for gpu in gpus
    )
    return after, before - kept
