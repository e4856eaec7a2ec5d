"""A node with everything on it, for one agent process and its successor."""

import contextlib
import dataclasses
import json
import pathlib
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Self

from mig_manager.adapters.kubernetes import api
from mig_manager.core.host import hooks
from mig_manager.core.node import cluster, resources
from mig_manager.sandbox.driver import library as simulated
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import cluster_view, node_options, objects, sandbox_node
from testkit import apiserver, nvml_faults
from tests.crash import agent_process, forkserver, scenarios

NAME = "n1"
WAIT_S = 60.0
_POLL_S = 0.01
_QUICK = node_options.NodeOptions(
    name=NAME, tick_s=0.02, pod_start_s=0.01, pod_stop_s=0.01, plugin_start_s=0.01
)
_MONITOR = "dcgm-exporter"
_CLIENT_LABELS = {
    f"{cluster.DEPLOY_LABEL_PREFIX}gpu-feature-discovery": "true",
    f"{cluster.DEPLOY_LABEL_PREFIX}dcgm": "false",
}
"""One that is paused and restored, and one that an administrator disabled."""
_BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"

Serials = Mapping[str, tuple[int, int]]
"""MIG UUID to the serials of the instances behind it: the same slot keeps its UUID when it is
destroyed and created again, its serial does not."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a node has before the scenario begins, as an agent left it."""

    gpus: tuple[states.GpuState, ...]
    next_serial: int
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodWithDevices:
    """A pod and what it had before the agent began."""

    name: str
    uid: str
    device_ids: frozenset[str]


class Stage:
    """The node of one case; use with ``with``.

    Args:
        scenario: What is on it.
        start: What it begins with; None: a node as it comes.
        forks: Starts the agents.
    """

    def __init__(
        self,
        scenario: scenarios.Scenario,
        start: Start | None,
        forks: forkserver.ForkServer,
    ) -> None:
        self.scenario = scenario
        self._start = start
        self._forks = forks
        self._exits = contextlib.ExitStack()
        self._changed = threading.Event()
        self._agents = 0

    def __enter__(self) -> Self:
        """Return when devices and pods are there and stable."""
        with contextlib.ExitStack() as exits:
            self._set_up(exits)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._exits.close()

    def _set_up(self, exits: contextlib.ExitStack) -> None:
        self._folder = pathlib.Path(exits.enter_context(tempfile.TemporaryDirectory()))
        self._state_file = self._folder / "gpus.json"
        simulated.create(self.scenario.spec, self._state_file)
        self.state = nvml_faults.SharedState(self._state_file)
        (self._folder / "config.yaml").write_text(scenarios.CONFIG, encoding="utf-8")
        self._write_hooks()
        server = exits.enter_context(apiserver.serve())
        server.kubeconfig(self._folder / "kubeconfig")
        self.api = exits.enter_context(contextlib.closing(api.KubeApi.at(server.url)))
        self._view = exits.enter_context(cluster_view.ClusterView(server.url))
        exits.callback(self._view.listen(lambda _kind, _obj: self._changed.set()))
        if self._start is not None:
            self._restore(self._start)
        options = dataclasses.replace(
            _QUICK, pod_resources_socket=self._folder / "pr.sock", labels=self._node_labels()
        )
        self.sandbox = exits.enter_context(
            sandbox_node.SandboxNode(
                server.url, self._state_file, options=options, cluster=self._view
            )
        )
        self._populate()
        self._deploy_labels_before = self._deploy_labels()
        self.serials_before = self.serials()

    def _write_hooks(self) -> None:
        """Have a program at each point note that it ran."""
        lines = ["hooks:"]
        for point in hooks.Point:
            script = f"echo {point.value} >> {self._folder}/hooked"
            lines.append(f"  {point.value}: [{{command: /bin/sh, args: [-c, {script}]}}]")
        (self._folder / "hooks.yaml").write_text("\n".join(lines), encoding="utf-8")

    def owes_hooks(self) -> bool:
        """Return whether hooks of the start ran that no hook of the end has followed."""
        log = self._folder / "hooked"
        ran = log.read_text(encoding="utf-8").split() if log.exists() else []
        return bool(ran) and ran[-1] != hooks.Point.APPLY_EXIT.value

    def _restore(self, start: Start) -> None:
        self.state.update(
            lambda now: (
                dataclasses.replace(now, gpus=start.gpus, next_serial=start.next_serial),
                None,
            )
        )
        for fault in self.scenario.faults:
            self.state.add_fault(fault)

    def _node_labels(self) -> dict[str, str]:
        labels = dict(_CLIENT_LABELS)
        if self.scenario.has_monitor:
            labels[cluster.DEPLOY_LABEL_PREFIX + _MONITOR] = "true"
        return labels | dict(self._start.labels if self._start else {})

    def _populate(self) -> None:
        metadata = {"annotations": dict(self._start.annotations if self._start else {})}
        self.patch({"metadata": metadata, "spec": {"unschedulable": None}})
        if self.scenario.has_monitor:
            self._view.create(cluster_view.Kind.DAEMON_SET, objects.monitor_daemon_set())
        self.wait(lambda: bool(self.existing()) and self.is_offering(), "the first devices")
        if self._start is not None:
            self._run_pods()
        if self.scenario.has_monitor:
            self.wait(self._has_monitor, "the monitor")
        if self.scenario.is_cordoned:
            self.patch({"spec": {"unschedulable": True}})

    def _run_pods(self) -> None:
        counts: dict[str, int] = {}
        for resource, ids in self.sandbox.devices.allocatable().items():
            is_gpu = resource == resources.GPU
            counts[resource] = self.scenario.whole_gpu_pods if is_gpu else len(ids)
        for resource, count in counts.items():
            for number in range(count):
                name = f"{resource.partition('/')[2].replace('.', '-')}-{number}"
                labels = {"resource": resource.partition("/")[2]}
                pod = objects.gpu_pod(name, resource, labels=labels)
                self._view.create(cluster_view.Kind.POD, pod)
        if self.scenario.guarded:
            self.api.post(_BUDGETS, _budget(self.scenario.guarded))
        wanted = sum(counts.values())
        self.wait(lambda: len(self.ready_pods()) == wanted, "the pods")
        devices = self.devices_by_pod()
        self.pods = tuple(
            PodWithDevices(name=name, uid=objects.uid(pod), device_ids=devices[name])
            for name, pod in self.ready_pods().items()
        )

    # -- what there is --------------------------------------------------------------------

    def node(self) -> objects.JsonObject:
        """Return the Node object as the API has it."""
        return self.api.get(f"/api/v1/nodes/{NAME}")

    def status(self) -> Mapping[str, object]:
        """Return the status annotation; empty when there is none."""
        text = objects.annotations(self.node()).get(cluster.STATUS_ANNOTATION)
        found: Mapping[str, object] = json.loads(text) if text else {}
        return found

    def phase(self) -> str:
        """Return the phase that the node says it is in; before its first run it says none."""
        return str(self.status().get("phase") or "none")

    def _deploy_labels(self) -> dict[str, str]:
        return {
            key: value
            for key, value in objects.labels(self.node()).items()
            if key.startswith(cluster.DEPLOY_LABEL_PREFIX)
        }

    def are_deploy_labels_as_before(self) -> bool:
        """Return whether every client may run that might run before."""
        return self._deploy_labels() == self._deploy_labels_before

    def ready_pods(self) -> dict[str, objects.JsonObject]:
        """Return the workloads that are up, by name."""
        return {
            objects.name(pod): pod
            for pod in self._view.list(cluster_view.Kind.POD)
            if not objects.controller(pod)
            and objects.is_ready(pod)
            and not objects.is_terminating(pod)
        }

    def devices_by_pod(self) -> dict[str, frozenset[str]]:
        """Return which pod holds which devices, by name, as kubelet has it."""
        return {pod.name: pod.device_ids for pod in self.sandbox.devices.assigned()}

    def _has_monitor(self) -> bool:
        return any(
            objects.annotations(pod).get(objects.MONITORS) and objects.is_ready(pod)
            for pod in self._view.list(cluster_view.Kind.POD)
        )

    def existing(self) -> frozenset[str]:
        """Return every device of the GPUs that a plugin can offer."""
        gpus = node_options.SimulatedGpus(self._state_file).observe()
        whole = {gpu.uuid for gpu in gpus if not gpu.is_mig_enabled}
        return frozenset(whole | {d.uuid for gpu in gpus for d in gpu.mig_devices})

    def is_offering(self) -> bool:
        """Return whether kubelet and the node offer all that exists, and nothing else."""
        allocatable = self.sandbox.devices.allocatable()
        ids = [id_ for each in allocatable.values() for id_ in each]
        shown = (self.node().get("status") or {}).get("allocatable") or {}
        counts = {
            name: int(count)
            for name, count in shown.items()
            if name.startswith(cluster.RESOURCE_PREFIX) and int(count)
        }
        return sorted(ids) == sorted(self.existing()) and counts == {
            name: len(each) for name, each in allocatable.items() if each
        }

    def serials(self) -> Serials:
        """Return the MIG devices that exist, each with what distinguishes it from a later one."""
        return {
            board.mig_uuid(instance, compute): (instance.serial, compute.serial)
            for board, gpu in zip(self.state.boards, self.state.read().gpus, strict=True)
            for instance in gpu.instances
            for compute in instance.compute_instances
        }

    # -- what people and machines do --------------------------------------------------------

    def patch(self, change: Mapping[str, object]) -> None:
        """Merge a change into the node."""
        self.api.patch(f"/api/v1/nodes/{NAME}", change, kind=api.PatchType.MERGE)

    def label(self, layout: str | None) -> None:
        """Request a layout; None removes the label."""
        self.patch({"metadata": {"labels": {cluster.CONFIG_LABEL: layout}}})

    def reboot(self) -> None:
        """Reboot the machine, which cures whatever was wrong with its GPUs."""
        self.state.clear_faults()
        self.sandbox.reboot()

    def spoil_journal(self) -> None:
        """Cut the journal short, if there is one."""
        text = objects.annotations(self.node()).get(cluster.JOURNAL_ANNOTATION)
        if text is not None:
            spoilt = {cluster.JOURNAL_ANNOTATION: text[: len(text) // 2]}
            self.patch({"metadata": {"annotations": spoilt}})

    # -- the agent ----------------------------------------------------------------------------

    def start_agent(
        self,
        *,
        strike_at: str | None = None,
        strike_with: signal.Signals = signal.SIGKILL,
        has_worker: bool = False,
    ) -> "Agent":
        """Start an agent, to be struck at a point if one is given."""
        self._agents += 1
        points = self._folder / f"points-{self._agents}"
        order = agent_process.Order(
            options=self._agent_options(),
            points=str(points),
            log=str(self._folder / f"agent-{self._agents}.log"),
            strike_at=strike_at,
            strike_with=int(strike_with),
            has_worker=has_worker,
        )
        process = self._forks.start(order)
        self._exits.callback(process.kill)
        return Agent(process, points)

    def _agent_options(self) -> dict[str, str]:
        return {
            "node_name": NAME,
            "config_file": str(self._folder / "config.yaml"),
            "kubeconfig": str(self._folder / "kubeconfig"),
            "pod_resources_socket": str(self._folder / "pr.sock"),
            "simulate_state": str(self._state_file),
            "retry_initial_s": "0.1",
            "retry_max_s": "0.2",
            "poll_interval_s": "0.05",
            "plugin_timeout_s": "10",
            "monitor_timeout_s": "10",
            "in_use_timeout_s": "5",
            "drift_check_interval_s": "0",
            **dict(self.scenario.options),
            **(
                {"hooks_file": str(self._folder / "hooks.yaml")} if self.scenario.has_hooks else {}
            ),
        }

    def last_words(self) -> str:
        """Return what all agents have logged."""
        texts = [
            self._folder.joinpath(f"agent-{number + 1}.log").read_text(errors="replace")
            for number in range(self._agents)
        ]
        return "\n--\n".join(texts)

    def wait(self, holds: Callable[[], bool], what: str, *, timeout_s: float = WAIT_S) -> None:
        """Wait until something holds."""
        assert self.comes_true(holds, timeout_s), f"waited in vain for {what}"

    def comes_true(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something holds; return whether it did in time."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() >= deadline:
                return False
            self._changed.wait(_POLL_S)
            self._changed.clear()
        return True


class Agent:
    """An agent process and the points that it has come to."""

    def __init__(self, process: forkserver.Agent, points: pathlib.Path) -> None:
        self.process = process
        self._points = points

    def points(self) -> list[str]:
        """Return the points in their order."""
        try:
            return self._points.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []

    @property
    def has_served(self) -> bool:
        """Whether it waits: for the next request, or for its next retry."""
        points = self.points()
        return f"{agent_process.IDLE} #2" in points or f"{agent_process.RETRY} #1" in points


def _budget(resource: str) -> objects.JsonObject:
    labels = {"resource": resource.partition("/")[2]}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "keep-them", "namespace": "default"},
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": labels}},
    }
