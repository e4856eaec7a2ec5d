"""``mig-manager demo --nodes``: a rollout that fails, its undo, and a node that follows demand.

Every node has its own agent, and ``rollout`` and ``partitioner`` are the real commands.
"""

import contextlib
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mig_manager.adapters import host
from mig_manager.core import timestamps
from mig_manager.core.display import styles
from mig_manager.core.fleet import fleet_nodes, node_reports, overview
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import pod_parser, well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox import demo, demo_layouts, ending, machines, scenarios, stages
from mig_manager.sandbox.node import cluster_view, manifests, objects

SPEC = "2xA100-SXM4-40GB"
_POOL = "kubernetes.io/os=linux"
_GUARDED = "gpu-2"
_ON_DEMAND = "gpu-5"
_GUARDED_OPTIONS = ("--drain-timeout-s", "2", "--retry-initial-s", "300")
"""Options of the node that evicts no pod. Others have the time that they need, on any machine."""
_DRAW_S = 0.2
_EVENTS = 6  # below the nodes in the live view


def run(
    options: demo.DemoOptions,
    count: int,
    *,
    say: Callable[[str], None],
    style: styles.Style,
    is_live: bool,
) -> int:
    """Play the scenario on ``count`` nodes, at least five; return 0 if all checks pass, else 1.

    ``is_live`` shows the nodes all the time, and not only at the end.

    Raises:
        UsageError: The spec is invalid.
        NotReadyError: A part of the stage did not start.
        Exception: From ``say``.
    """
    names = [f"gpu-{number}" for number in range(1, count + 1)]
    stage = stages.Stage(
        options.node,
        options.layouts_with(demo_layouts.ONE_SLICE),
        latency=options.latency,
        agent_options=("--custom-layouts",),
        own_options={_GUARDED: _GUARDED_OPTIONS},
        names=names,
    )
    title = f"{count} nodes with {options.spec} each (simulated)"
    say(style.paint(style.fit(title), styles.Tone.STRONG))
    say(demo.STARTING)
    with ending.on_signals(stage.fail), stage:
        demo.publish_layouts(stage)
        with _NodeBoard(stage, say, style, is_live=is_live).shown() as board:
            checks = _FleetScenario(stage, names, board).play()
        say("\n".join(board.nodes()))
        demo.say_checks(checks, say=say, style=style)
        next_steps = _suggestions(options, count)
        demo.say_next(stage, options, next_steps, who="The nodes stay", say=say, style=style)
    return 0 if all(checks.values()) else 1


def _suggestions(options: demo.DemoOptions, count: int) -> Sequence[tuple[str, str]]:
    """Return pairs of a purpose and a command."""
    if not options.is_kept:
        again = f"mig-manager demo --nodes {count}{options.simulating(SPEC)} --keep"
        return (("the same, with the nodes kept up for kubectl", again),)
    layout = demo_layouts.smallest_everywhere(options.gpus)
    return (
        ("all nodes", "kubectl mig status"),
        ("a live view of them", "kubectl mig top"),
        ("what a layout costs on every node", f"kubectl mig plan {layout} -l {_POOL}"),
        (
            f"a rollout, until the budget on {_GUARDED} blocks it",
            f"mig-manager rollout {layout} -l {_POOL} --pause-on-failure",
        ),
    )


class _FleetScenario:
    """What people do on the running nodes, and what must come of it."""

    def __init__(self, stage: stages.Stage, names: Sequence[str], board: "_NodeBoard") -> None:
        self._stage = stage
        self._names = names
        self._board = board

    def play(self) -> scenarios.Checks:
        self._populate()
        return self._roll_out() | self._undo() | self._follow_demand()

    def _populate(self) -> None:
        """Apply a layout to every node, and fill it with pods; a budget guards one node's pods."""
        self._board.say(
            f"kubectl label node --all {well_known.CONFIG_LABEL}={demo_layouts.BALANCED}"
        )
        for name in self._names:
            self._patch(name, {"labels": {well_known.CONFIG_LABEL: demo_layouts.BALANCED}})
        self._wait_applied(demo_layouts.BALANCED, self._names)
        sizes = sorted(self._stage.allocatable())[-2:]
        for name in self._names:
            for size in sizes:
                for number in range(self._stage.allocatable()[size]):
                    self._run_pod(f"{scenarios.pod_name(size)}-{number}-of-{name}", size, on=name)
        self._stage.guard({"matchLabels": {"node": _GUARDED}})
        self._wait_running(len(self._names) * sum(self._stage.allocatable()[s] for s in sizes))

    def _roll_out(self) -> scenarios.Checks:
        before = self._devices()
        status = self._command("rollout", demo_layouts.ONE_SLICE, "--pause-on-failure")
        failed = self._with_label(well_known.STATE_LABEL, run_status.State.FAILED.value)
        changed = self._with_label(well_known.APPLIED_LABEL, demo_layouts.ONE_SLICE)
        after = self._devices()
        unchanged = [pod for pod in before if before[pod] == after.get(pod)]
        evicted = before.keys() - after.keys()
        return {
            f"the rollout stopped at {_GUARDED}, whose budget allows no eviction": (
                status != 0 and failed == [_GUARDED]
            ),
            f"it evicted one pod on each changed node: {', '.join(changed)}": (
                bool(changed) and len(evicted) == len(changed)
            ),
            f"{len(unchanged)} of {len(before)} pods kept their devices through the rollout": (
                len(unchanged) + len(evicted) == len(before)
            ),
        }

    def _undo(self) -> scenarios.Checks:
        status = self._command("rollout", "undo")
        self._wait_applied(demo_layouts.BALANCED, self._names)
        return {f"after the undo every node has {demo_layouts.BALANCED} again": status == 0}

    def _follow_demand(self) -> scenarios.Checks:
        """Let the partitioner change a node for pods whose devices no node has."""
        label = {well_known.PARTITIONING_LABEL: well_known.ON_DEMAND}
        self._board.say(f"kubectl delete pod -l node={_ON_DEMAND}")
        pods = self._stage.workloads()
        deleted = {name for name, pod in pods.items() if objects.node_name(pod) == _ON_DEMAND}
        for name in deleted:
            self._stage.cluster.delete(cluster_view.WatchedKind.POD, pods[name])
        self._stage.wait(lambda: deleted.isdisjoint(self._stage.workloads()), "end of the pods")
        self._board.say(f"kubectl label node {_ON_DEMAND} {'='.join(*label.items())}")
        self._patch(_ON_DEMAND, {"labels": label})
        biggest = max(
            (info.profile for info in self._stage.gpus.observe()[0].profiles or ()),
            key=lambda profile: (profile.gpu_slices, -len(profile.attributes)),
        )
        resource = resources.of_profile(biggest) or resources.GPU
        self._board.say(f"two pods that want a {biggest}, and mig-manager partitioner --mode act")
        pending = [f"{scenarios.pod_name(resource)}-{number}" for number in range(2)]
        for name in pending:
            self._run_pod(name, resource)
        partitioner = self._start(
            "partitioner", "--mode", "act", "--quiet-s", "0.5", "--cooldown-s", "1"
        )
        try:
            self._wait_running(len(self._stage.workloads()))
            self._wait_applied(well_known.CUSTOM_LAYOUT, [_ON_DEMAND])
        finally:
            partitioner.end()
        placed = {objects.node_name(self._stage.workloads()[name]) for name in pending}
        return {
            f"the pending pods run on {_ON_DEMAND}, repartitioned for them": placed == {_ON_DEMAND}
        }

    # -- actions of people -------------------------------------------------------------------

    def _command(self, *arguments: str) -> int:
        """Run one of our commands on all nodes; return its exit status."""
        arguments = (*arguments, "-l", _POOL)
        self._board.say(shlex.join(["mig-manager", *arguments]))
        process = self._start(*arguments)
        try:
            self._stage.wait(lambda: process.has_ended, f"end of {arguments[0]}")
        finally:
            status = process.end()
        return status

    def _start(self, command: str, *arguments: str) -> machines.Process:
        return machines.Process(
            command,
            *arguments,
            *("--kubeconfig", str(self._stage.kubeconfig)),
            log=self._stage.config_file.with_name(f"{command}.log"),
            group=self._stage.group,
        )

    def _run_pod(self, name: str, resource: str, *, on: str = "") -> None:
        pod = manifests.gpu_pod(name, resource, labels={"node": on} if on else {})
        if on:
            pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": on}
        self._stage.cluster.create(cluster_view.WatchedKind.POD, pod)

    def _patch(self, name: str, metadata: Mapping[str, Any]) -> None:
        node = self._stage.cluster.node(name) or {}
        self._stage.cluster.patch(cluster_view.WatchedKind.NODE, node, {"metadata": metadata})

    # -- state -------------------------------------------------------------------------------

    def _with_label(self, key: str, value: str) -> list[str]:
        return [name for name in self._names if self._label(name, key) == value]

    def _label(self, name: str, key: str) -> str:
        return objects.labels(self._stage.cluster.node(name) or {}).get(key, "")

    def _devices(self) -> dict[str, frozenset[str]]:
        """Return the devices of every pod, as the kubelets report them."""
        return {
            pod.name: pod.device_ids
            for machine in self._stage.machines
            for pod in self._stage.assigned_devices(machine)
            if pod.device_ids
        }

    def _wait_applied(self, layout: str, names: Sequence[str]) -> None:
        labels = {
            well_known.APPLIED_LABEL: layout,
            well_known.STATE_LABEL: run_status.State.SUCCESS.value,
        }

        def are_applied() -> bool:
            return all(self._label(name, key) == labels[key] for name in names for key in labels)

        self._stage.wait(are_applied, f"{layout} on every node")

    def _wait_running(self, count: int) -> None:
        def are_running() -> bool:
            return sum(map(objects.is_ready, self._stage.workloads().values())) == count

        self._stage.wait(are_running, f"{count} running pods")


class _NodeBoard:
    """Shows nodes and events: in a live view at a terminal, as lines elsewhere."""

    def __init__(
        self,
        stage: stages.Stage,
        say: Callable[[str], None],
        style: styles.Style,
        *,
        is_live: bool,
    ) -> None:
        self._stage = stage
        self._say = say
        self._style = style
        self._is_live = is_live
        self._clock = host.SystemClock()
        self._began_s = self._clock.monotonic()
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._outcomes: dict[str, tuple[str, str]] = {}
        self._changed = threading.Event()
        self._is_over = threading.Event()

    @contextlib.contextmanager
    def shown(self) -> Iterator["_NodeBoard"]:
        """Show nodes and events in the context."""
        stop = self._stage.cluster.listen(self._receive)
        drawing = threading.Thread(target=self._draw, name="board")
        if self._is_live:
            drawing.start()
        try:
            yield self
        finally:
            stop()
            self._is_over.set()
            self._changed.set()
            if self._is_live:
                drawing.join()

    def say(self, text: str) -> None:
        """Show an action of a person."""
        self._add("you", text, styles.Tone.STRONG)

    def nodes(self) -> list[str]:
        """Return the present nodes in lines."""
        listed = self._stage.cluster.list(cluster_view.WatchedKind.NODE)
        now = timestamps.parse(self._clock.now_iso())
        parsed = sorted(map(fleet_nodes.parse, listed), key=lambda node: node.name)
        pods = map(pod_parser.parse, self._stage.cluster.list(cluster_view.WatchedKind.POD))
        assert now is not None  # noqa: S101 - our own format
        if not all(node.gpus_text for node in parsed):
            return ["  The agents are starting."]
        present = overview.Overview(
            reports=[node_reports.of(node, now) for node in parsed],
            pods=[pod for pod in pods if pod.gpu_resources],
        )
        return overview.draw(present, style=self._style)

    def _receive(self, kind: cluster_view.WatchedKind, obj: objects.JsonObject) -> None:
        """Show an added, changed or deleted object; raises nothing."""
        try:
            if kind is cluster_view.WatchedKind.NODE:
                self._receive_node(fleet_nodes.parse(obj))
            self._changed.set()
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self._stage.fail(error)

    def _receive_node(self, node: fleet_nodes.FleetNode) -> None:
        last_run = node.status
        if last_run is None:
            return
        outcome = last_run.state.value, last_run.reason
        with self._lock:
            is_known = self._outcomes.get(node.name) == outcome
            self._outcomes[node.name] = outcome
        if is_known:
            return
        tone = {
            run_status.State.SUCCESS: styles.Tone.GOOD,
            run_status.State.FAILED: styles.Tone.BAD,
        }.get(last_run.state, styles.Tone.PLAIN)
        self._add(node.name, f"{last_run.state.value}: {last_run.message}", tone)

    def _add(self, who: str, text: str, tone: styles.Tone) -> None:
        at = f"{self._clock.monotonic() - self._began_s:7.2f} s"
        line = f"{at}  {who:<6}  {text}"
        text = self._style.fit(line, further=" " * 19)
        with self._lock:
            self._lines += [self._style.paint(each, tone) for each in text.split("\n")]
            if not self._is_live:
                self._say(text)
        self._changed.set()

    def _draw(self) -> None:
        """Draw the view at every change until the end, then erase it."""
        drawn: list[str] = []
        try:
            while True:
                self._changed.clear()
                if self._is_over.is_set():
                    self._say(styles.redraw((), height=len(drawn)))
                    self._say("\n".join(self._lines))
                    return
                with self._lock:
                    events = self._lines[-_EVENTS:]
                lines = [*self.nodes(), "", *events]
                rows = shutil.get_terminal_size().lines
                lines = lines[: max(rows - 2, 1)]
                self._say(styles.redraw(lines, height=len(drawn)))
                drawn = lines
                self._changed.wait()
                self._is_over.wait(_DRAW_S)
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self._stage.fail(error)
