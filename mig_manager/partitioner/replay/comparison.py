"""Replay past pods on the cluster's nodes with the real decision: ``--simulate --replay``.

Pods arrive when they were created and run as long as they ran. Beside the partitioner, the same
pods are simulated on the present layouts and on every generated one, unchanged.
"""

import collections
import dataclasses
import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence

from mig_manager import errors
from mig_manager.core import model, profile_name
from mig_manager.core.layout import available_layouts, layout_documents, selection
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning.decision import decisions
from mig_manager.core.partitioning.nodes import partitioned_nodes
from mig_manager.partitioner.replay import (
    past_pods,
    replay_report,
    simulated_cluster,
    simulated_node,
)

PARTITIONER = "partitioner"
REAL = "as it was"
_MAX_RECHECK_S = 300.0

Proceed = Callable[[str, float], bool]
"""Takes the name of a row and the share of it that is simulated; returns False to stop."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """What to replay, and how."""

    limits: decisions.PartitionerLimits
    scheduler: simulated_cluster.Scheduler
    days: float  # before the last time that the pods name
    quiet_s: float  # how long demand must be unchanged before a decision
    longest_wait_s: float  # longest time to wait for demand to be unchanged
    base_layout: str | None = None  # to which idle instances are merged back
    document: layout_documents.Document | None = None
    """With the base layout; None: it is generated."""


def replay(
    nodes: Sequence[partitioned_nodes.PartitionedNode],
    pods: Iterable[past_pods.PastPod],
    *,
    prometheus_pods: Iterable[past_pods.PastPod],
    settings: ReplaySettings,
    proceed: Proceed,
) -> replay_report.ReplayReport:
    """Replay past pods on nodes.

    Args:
        nodes: As parsed; what keeps them from a change today does not count.
        pods: Of the API.
        prometheus_pods: Of Prometheus; pods of the API are skipped.
        settings: What to replay, and how.
        proceed: Is called often, see ``Proceed``.

    Raises:
        UsageError: There is nothing to replay.
    """
    by_uid = {pod.pod.uid: pod for pod in pods}
    only_prometheus = {
        each.pod.uid: each for each in prometheus_pods if each.pod.uid not in by_uid
    }
    past = sorted((*by_uid.values(), *only_prometheus.values()), key=lambda each: each.created)
    if not past:
        raise errors.UsageError("no pod of the files requested MIG devices")
    usable, is_opted_in = _usable(nodes)
    if not usable:
        raise errors.UsageError("no node of the file has published GPUs with MIG enabled")
    end = max(when for each in past for when in (each.created, each.start, each.end) if when)
    begin = max(past[0].created, end - dt.timedelta(days=settings.days))
    jobs, real_waits = _jobs(past, begin, end)
    if not real_waits:
        raise errors.UsageError("no pod was created in these days; --replay-days allows more")
    simulations = _Simulations(usable, jobs, begin=begin, settings=settings, proceed=proceed)
    compared = simulations.compare(real_waits, end_s=(end - begin).total_seconds())
    decided = compared.rows[0].result
    return replay_report.ReplayReport(
        begin=begin,
        end=begin + dt.timedelta(seconds=compared.end_s),
        is_complete=compared.is_complete,
        nodes=len(usable),
        gpus=sum(len(node.gpus) for node in usable),
        left_out=sum(not node.gpus for node in nodes),
        is_opted_in=is_opted_in,
        only_prometheus=sum(job.pod.uid in only_prometheus for job in compared.counted),
        rows=compared.rows,
        unmet=tuple(
            (job.pod.key, decided.unmet[job.pod.uid])
            for job in compared.counted
            if job.pod.uid in decided.unmet and decided.waits[job.pod.uid] is None
        ),
    )


def _usable(
    nodes: Iterable[partitioned_nodes.PartitionedNode],
) -> tuple[list[partitioned_nodes.PartitionedNode], bool]:
    """Return the nodes with GPUs, ready for changes, and whether one is opted in.

    What their agents did until now is no part of the past.
    """
    with_gpus = sorted((node for node in nodes if node.gpus), key=lambda node: node.name)
    is_opted_in = any(node.is_opted_in for node in with_gpus)
    usable: list[partitioned_nodes.PartitionedNode] = []
    for node in with_gpus:
        ready = partitioned_nodes.PartitionedNode(
            name=node.name,
            version=node.version,
            labels=node.labels,
            taints=tuple(taint for taint in node.taints if taint.key != well_known.CORDON_TAINT),
            is_opted_in=node.is_opted_in or not is_opted_in,
            gpus=node.gpus,
            supply=dataclasses.replace(node.supply, mismatch="", claimed=()),
        )
        usable.append(ready)
    return usable, is_opted_in


def _jobs(
    past: Iterable[past_pods.PastPod], begin: dt.datetime, end: dt.datetime
) -> tuple[list[simulated_cluster.SimulatedPod], dict[str, float | None]]:
    """Return the pods that ran since the begin, and by UID how long the newly created waited.

    The pods created before only use devices.
    """
    jobs: list[simulated_cluster.SimulatedPod] = []
    real_waits: dict[str, float | None] = {}
    for each in past:
        if each.end is not None and each.end <= begin:
            continue
        ran = (each.end or end) - max(each.start or each.created, begin)
        job = simulated_cluster.SimulatedPod(
            pod=each.pod,
            at_s=max(0.0, (each.created - begin).total_seconds()),
            run_s=max(0.0, ran.total_seconds()),
        )
        jobs.append(job)
        if each.created >= begin:
            real_waits[each.pod.uid] = (
                (each.start - each.created).total_seconds() if each.start else None
            )
    return jobs, real_waits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """All rows of a replay, about the same time and pods."""

    rows: tuple[replay_report.ReplayRow, ...]
    counted: Sequence[simulated_cluster.SimulatedPod]  # the pods that the rows are about
    end_s: float
    is_complete: bool  # False: ``proceed`` ended a simulation early


class _Simulations:
    """Simulates the same pods with the partitioner and on fixed layouts."""

    def __init__(
        self,
        nodes: Sequence[partitioned_nodes.PartitionedNode],
        jobs: Sequence[simulated_cluster.SimulatedPod],
        *,
        begin: dt.datetime,
        settings: ReplaySettings,
        proceed: Proceed,
    ) -> None:
        self._nodes = nodes
        self._jobs = jobs
        self._begin = begin
        self._settings = settings
        self._proceed = proceed

    def compare(self, real_waits: dict[str, float | None], *, end_s: float) -> _Comparison:
        """Simulate; after a stop, every row is about the time that the partitioner reached."""
        decided = self._simulate(
            PARTITIONER, self._nodes, end_s=end_s, limits=self._settings.limits
        )
        reached_s = decided.end_s
        created = [job for job in self._jobs if job.pod.uid in real_waits]
        counted = [job for job in created if job.at_s <= reached_s] or created[:1]
        present = self._simulate(replay_report.PRESENT, self._nodes, end_s=reached_s)
        real = simulated_cluster.SimulationResult(waits=real_waits, end_s=reached_s)
        generated = _with_layouts(self._nodes)
        fixed = []
        for name, nodes in generated.items():
            result = self._simulate(name, nodes, end_s=reached_s)
            if result.end_s < reached_s:
                break
            fixed.append(_row(name, result, counted))
        fixed.sort(key=lambda row: (-row.waits.placed, row.waits.mean_s))
        return _Comparison(
            rows=(
                _row(PARTITIONER, decided, counted),
                _row(replay_report.PRESENT, present, counted),
                _row(REAL, real, counted),
                *fixed,
            ),
            counted=counted,
            end_s=reached_s,
            is_complete=reached_s == end_s and len(fixed) == len(generated),
        )

    def _simulate(
        self,
        name: str,
        nodes: Sequence[partitioned_nodes.PartitionedNode],
        *,
        end_s: float,
        limits: decisions.PartitionerLimits | None = None,
    ) -> simulated_cluster.SimulationResult:
        cluster = simulated_cluster.SimulatedCluster(
            nodes=nodes,
            scheduler=self._settings.scheduler,
            seed=0,
            begin=self._begin,
            base={node.name: self._base(node) for node in nodes if limits},
            times=simulated_cluster.SimulatedTimes(
                quiet_s=self._settings.quiet_s,
                longest_wait_s=self._settings.longest_wait_s,
                max_recheck_s=_MAX_RECHECK_S,
            ),
        )
        return simulated_cluster.simulate(
            self._jobs,
            cluster,
            end_s=end_s,
            limits=limits,
            # The present layouts, without decisions, take far less time than the partitioner.
            proceed=lambda now_s: (
                self._proceed(name, now_s / max(end_s, 1.0)) or name == replay_report.PRESENT
            ),
        )

    def _base(self, node: partitioned_nodes.PartitionedNode) -> Mapping[str, model.DesiredGpu]:
        name = self._settings.base_layout
        try:
            return (
                available_layouts.desired_gpus(name, self._settings.document, node.gpus)
                if name
                else {}
            )
        except errors.LayoutError:
            return {}


def _row(
    name: str,
    result: simulated_cluster.SimulationResult,
    counted: Iterable[simulated_cluster.SimulatedPod],
) -> replay_report.ReplayRow:
    everything: list[replay_report.PodWait] = []
    by_profile = collections.defaultdict[str, list[replay_report.PodWait]](list)
    by_namespace = collections.defaultdict[str, list[replay_report.PodWait]](list)
    for job in counted:
        wait = result.waits[job.pod.uid]
        late_s = result.end_s - job.at_s
        # What becomes free at the end itself serves no pod.
        is_late = wait is None or 0 < late_s <= wait
        each = None if is_late else wait, late_s
        everything.append(each)
        by_profile[profile_name.with_counts(job.pod.needs.profiles)].append(each)
        by_namespace[job.pod.namespace].append(each)
    return replay_report.ReplayRow(
        name=name,
        waits=replay_report.Waits.of(everything),
        by_profile=_waits(by_profile),
        by_namespace=_waits(by_namespace),
        result=result,
    )


def _waits(
    groups: Mapping[str, Sequence[replay_report.PodWait]],
) -> Mapping[str, replay_report.Waits]:
    return {key: replay_report.Waits.of(groups[key]) for key in sorted(groups)}


def _with_layouts(
    nodes: Sequence[partitioned_nodes.PartitionedNode],
) -> dict[str, list[partitioned_nodes.PartitionedNode]]:
    """Return the nodes in every generated layout with MIG, by its name; others stay."""
    generated = {node.name: available_layouts.generate(node.gpus) for node in nodes}
    changed: dict[str, list[partitioned_nodes.PartitionedNode]] = {}
    for name in dict.fromkeys(name for by_name in generated.values() for name in by_name):
        goals = [
            selection.select(by_name[name], node.gpus) if name in by_name else {}
            for node, by_name in zip(nodes, generated.values(), strict=True)
        ]
        if any(goal.counts for each in goals for goal in each.values()):
            changed[name] = [
                dataclasses.replace(node, gpus=simulated_node.apply_desired(node.gpus, each)[0])
                for node, each in zip(nodes, goals, strict=True)
            ]
    return changed
