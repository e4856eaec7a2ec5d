"""Measure reconfigurations through the agent, from the label to success, phase by phase.

The agent is a process of its own against the embedded API server; this process plays node, kubelet
and device plugin. A pod uses a device that is destroyed, so that every phase has work. The agent's
part is the whole time less its waits: for the driver by its latency model, and for the cluster as
observed here: for pods from their deletion to their end, for the device plugin from its new pod to
the devices in the node's status.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import tempfile
import time

from bench.speed import transitions
from mig_manager.core.layout import layout_parser, selection
from mig_manager.core.objects import well_known
from mig_manager.core.planner import planner
from mig_manager.core.records import run_status
from mig_manager.sandbox import stages
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import cluster_view, objects, sandbox_node

_SPEC = "8xA100-SXM4-40GB"
_CONFIG = """
version: v1
mig-configs:
  all-3g.20gb:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 2}}
  all-1g.5gb:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
"""
_LAYOUTS = ("all-1g.5gb", "all-3g.20gb")
_RESOURCES = {"all-1g.5gb": "nvidia.com/mig-1g.5gb", "all-3g.20gb": "nvidia.com/mig-3g.20gb"}
_NODE = sandbox_node.NodeOptions(tick_s=0.05, pod_start_s=0.2, pod_stop_s=0.1, plugin_start_s=0.3)
_POD = "train"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The course of one reconfiguration, in seconds since the label was written."""

    pending_s: float
    success_s: float
    phases: tuple[tuple[str, float], ...]  # the phases with their duration, in order
    hardware_s: float  # the driver's time, by its latency model
    cluster_s: float  # the time of pods and plugin
    processor_s: float
    """Processor time of the agent and its workers, on which the machine's load has less influence;
    it includes the simulation of the driver."""

    @property
    def waited_s(self) -> float:
        """The time for which the agent must wait."""
        return self.hardware_s + self.cluster_s

    @property
    def overhead_s(self) -> float:
        """The agent's own time."""
        return self.success_s - self.waited_s


def measure(*, repeats: int, latency: states.Latency) -> tuple[Course, ...]:
    """Reconfigure a node back and forth.

    Args:
        repeats: Number of measurements, after two more that fill caches.
        latency: The driver's.
    """
    if transitions.MEMORY.is_dir():
        tempfile.tempdir = str(transitions.MEMORY)
    courses: list[Course] = []
    options = ("--poll-interval-s", "1")
    with stages.Stage(
        _SPEC, _CONFIG, latency=latency, node_options=_NODE, agent_options=options
    ) as stage:
        names = itertools.islice(itertools.cycle(_LAYOUTS), repeats + 2)
        before = None
        for layout in names:
            if before is not None:
                stage.run_pods([(_POD, _RESOURCES[before], {})])
            courses.append(_follow(stage, layout, latency))
            before = layout
    return tuple(courses[2:])


def _follow(stage: stages.Stage, layout: str, latency: states.Latency) -> Course:
    begins: dict[str, float] = {}
    first: dict[str, float] = {}
    waits = _Waits(stage.cluster, _RESOURCES[layout])

    def note(kind: cluster_view.WatchedKind, obj: objects.JsonObject) -> None:
        if kind is cluster_view.WatchedKind.NODE:
            now = time.monotonic()
            status_text = objects.annotations(obj).get(well_known.STATUS_ANNOTATION)
            status = json.loads(status_text) if status_text else {}
            if status.get("config") == layout:
                first.setdefault(objects.labels(obj).get(well_known.STATE_LABEL, ""), now)
                begins.setdefault(str(status.get("phase")), now)

    gpus = stage.gpus.observe()
    document = layout_parser.parse(_CONFIG, source="bench")
    plan = planner.plan(gpus, selection.select(document.layout(layout), gpus))
    processor_s = _processor_s(stage)
    with contextlib.ExitStack() as stack:
        for listener in (note, waits.note):
            stack.callback(stage.cluster.listen(listener))
        since = time.monotonic()
        stage.label(layout)
        state = stage.wait_for_end(layout)
    if state is not run_status.State.SUCCESS:
        raise RuntimeError(f"{layout} ended with {stage.status()}")
    processor_s = _processor_s(stage) - processor_s
    timeline = (("until pending", since), *begins.items())
    return Course(
        pending_s=first[run_status.State.PENDING.value] - since,
        success_s=first[run_status.State.SUCCESS.value] - since,
        phases=tuple(
            (phase, end - begin) for (phase, begin), (_, end) in itertools.pairwise(timeline)
        ),
        hardware_s=transitions.limit_s(plan, latency, is_serial=False),
        cluster_s=waits.seconds,
        processor_s=processor_s,
    )


class _Waits:
    """Measures the stop of pods and the start of the plugin, as the cluster reports them."""

    def __init__(self, view: cluster_view.ClusterView, resource: str) -> None:
        self._cluster = view
        self._resource = resource
        self._old = self._pods()
        self._stopping: dict[str, float] = {}
        self._stopped_at: dict[str, float] = {}
        self._started_at: float | None = None
        self._schedulable_at: float | None = None

    @property
    def seconds(self) -> float:
        """The sum of these waits, which follow one another."""
        if self._started_at is None or self._schedulable_at is None:
            raise RuntimeError("the plugin did not start")
        stops = (self._stopped_at[uid] - since for uid, since in self._stopping.items())
        return sum(stops) + self._schedulable_at - self._started_at

    def note(self, kind: cluster_view.WatchedKind, obj: objects.JsonObject) -> None:
        """Receive a new, changed or deleted object."""
        now = time.monotonic()
        if kind is cluster_view.WatchedKind.POD:
            uid = objects.uid(obj)
            if uid not in self._pods():
                self._stopped_at.setdefault(uid, now)
            elif objects.is_terminating(obj):
                self._stopping.setdefault(uid, now)
            elif uid not in self._old and self._started_at is None:
                self._started_at = now
        elif (
            kind is cluster_view.WatchedKind.NODE
            and self._started_at is not None
            and self._schedulable_at is None
        ):
            allocatable = (obj.get("status") or {}).get("allocatable") or {}
            if int(allocatable.get(self._resource, 0)) > 0:
                self._schedulable_at = now

    def _pods(self) -> frozenset[str]:
        return frozenset(map(objects.uid, self._cluster.list(cluster_view.WatchedKind.POD)))


def _processor_s(stage: stages.Stage) -> float:
    """Return the processor time of the agent and of its workers that have ended."""
    agent = stage.machine.agent
    if agent is None:
        raise RuntimeError("the agent does not run")
    stat = pathlib.Path(f"/proc/{agent.pid}/stat").read_text(encoding="utf-8")
    # utime, stime, cutime and cstime of proc(5), which follow the name in brackets.
    ticks = stat.rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
