"""A node with everything on it, for one agent process and its successor."""

import contextlib
import dataclasses
import pathlib
import signal
from collections.abc import Mapping
from typing import NamedTuple

from mig_manager.core.files import hook_files
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import well_known
from mig_manager.sandbox import stages
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import cluster_view, objects, sandbox_node
from testkit import nvml_faults
from tests.crash import agent_main, agent_process, changes
from tests.rigs import layout_table
from tests.rigs.cluster import monitors
from tests.rigs.node import simulated_rig, unrestored
from tests.rigs.stage import agent_stage

_QUICK = sandbox_node.NodeOptions(
    tick_s=0.02, pod_start_s=0.01, pod_stop_s=0.01, plugin_start_s=0.01
)
_CLIENT_LABELS = {
    f"{well_known.DEPLOY_LABEL_PREFIX}gpu-feature-discovery": "true",
    f"{well_known.DEPLOY_LABEL_PREFIX}dcgm": "false",
}
"""One that is paused and restored, and one that an administrator disabled."""
_MONITOR_LABEL = f"{well_known.DEPLOY_LABEL_PREFIX}dcgm-exporter"

Serials = Mapping[str, tuple[int, int]]
"""MIG UUID to the serials of the instances behind it: an instance that is created again in the
same place has the same UUID, and another serial."""


class Start(NamedTuple):
    """What a node has before the change begins, as an agent left it."""

    gpus: tuple[states.GpuState, ...]
    next_serial: int
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


class PodWithDevices(NamedTuple):
    """A pod and what it had before the agent began."""

    name: str
    uid: str
    device_ids: frozenset[str]
    devices: frozenset[str]  # the same by GPU, profile and place


class CrashStage(agent_stage.AgentStage):
    """The stage with short time limits, for agents that can be struck.

    Args:
        change: What is done on it.
        start: What it begins with; None: a node as it comes.
    """

    def __init__(self, change: changes.ProcessChange, start: Start | None) -> None:
        labels = _CLIENT_LABELS | ({_MONITOR_LABEL: "true"} if change.has_monitor else {})
        super().__init__(
            change.spec,
            text=layout_table.document(layout_table.LAYOUTS),
            node_options=dataclasses.replace(
                _QUICK, labels=labels | dict(start.labels if start else {})
            ),
        )
        self.change = change
        self._start_with = start
        self._agents = 0

    def connect(self, exits: contextlib.ExitStack, folder: pathlib.Path) -> stages.Connection:
        """Bring the GPUs to the start before anything on the node sees them."""
        self.state = nvml_faults.SharedState(self.machine.state_file)
        if (start := self._start_with) is not None:
            self.state.update(
                lambda now: dataclasses.replace(
                    now, gpus=start.gpus, next_serial=start.next_serial
                )
            )
            for fault in self.change.faults:
                self.state.add_fault(fault)
        return super().connect(exits, folder)

    def start_agent(self) -> None:
        """Populate the node; agents come with ``spawn``."""
        start, change = self._start_with, self.change
        self.patch(annotations=start.annotations if start else {})
        if change.has_monitor:
            self.cluster.create(cluster_view.WatchedKind.DAEMON_SET, monitors.daemon_set())
        self.wait(self.is_offering, "the first devices")
        if start is not None:
            self._run_workloads()
        if change.has_monitor:
            self.wait(
                lambda: any(
                    objects.annotations(pod).get(objects.MONITORS) and objects.is_ready(pod)
                    for pod in self.cluster.list(cluster_view.WatchedKind.POD)
                ),
                "the monitor",
            )
        if change.is_cordoned:
            self.api.patch(agent_stage.NODE_PATH, {"spec": {"unschedulable": True}})
        self.deploy_labels = unrestored.deploy_labels(objects.labels(self.node()))
        self.serials_before = self.serials()

    def _run_workloads(self) -> None:
        pods = []
        for resource, ids in self.sandboxes[0].devices.allocatable().items():
            is_gpu = resource == resources.GPU
            short = resource.partition("/")[2]
            for number in range(self.change.whole_gpu_pods if is_gpu else len(ids)):
                name = f"{short.replace('.', '-')}-{number}"
                pods.append((name, resource, {"resource": short}))
        if self.change.guarded_resource:
            labels = {"resource": self.change.guarded_resource.partition("/")[2]}
            self.guard({"matchLabels": labels})
        self.run_pods(pods)
        in_use, names = (
            self.devices_by_pod(),
            layout_table.device_names(simulated_rig.driver_gpus(self.state)),
        )
        self.pods = tuple(
            PodWithDevices(
                name, objects.uid(pod), in_use[name], frozenset(names[id_] for id_ in in_use[name])
            )
            for name, pod in self.ready_pods().items()
        )

    def devices_in_words(self) -> layout_table.Gpus:
        """Return what the driver has on the GPUs, in the words of the layout table."""
        return layout_table.devices_in_words(simulated_rig.driver_gpus(self.state))

    def node(self) -> objects.JsonObject:
        """Return the Node object as the API has it."""
        return self.api.get(agent_stage.NODE_PATH)

    def phase(self) -> str:
        """Return the phase that the node says it is in; before its first run it says none."""
        return str(self.status().get("phase") or "none")

    def slots_in_use(self) -> list[str]:
        """Return the names of the Leases that nodes hold."""
        return [
            objects.name(lease)
            for lease in self.api.get("/apis/coordination.k8s.io/v1/leases")["items"]
            if lease["spec"].get("holderIdentity")
        ]

    def awaits_exit_hooks(self) -> bool:
        """Return whether start hooks ran and no exit hook after them."""
        log = self.machine.state_file.with_name("hooked")
        ran = log.read_text(encoding="utf-8").split() if log.exists() else []
        return bool(ran) and ran[-1] != hook_files.Point.APPLY_EXIT.value

    def ready_pods(self) -> dict[str, objects.JsonObject]:
        """Return the workloads that are up, by name."""
        return {
            name: pod
            for name, pod in self.workloads().items()
            if objects.is_ready(pod) and not objects.is_terminating(pod)
        }

    def devices_by_pod(self) -> dict[str, frozenset[str]]:
        """Return which pod holds which devices, by name, as kubelet has it."""
        return {pod.name: pod.device_ids for pod in self.sandboxes[0].devices.allocations()}

    def is_offering(self) -> bool:
        """Return whether kubelet and the node offer all that exists, and nothing else."""
        schedulable = self.sandboxes[0].devices.allocatable()
        ids = [id_ for each in schedulable.values() for id_ in each]
        counts = {name: len(each) for name, each in schedulable.items() if each}
        existing = sorted(simulated_rig.devices(self.state))
        return sorted(ids) == existing and self.allocatable() == counts

    def serials(self) -> Serials:
        """Return the MIG devices that exist, each with what distinguishes it from a later one."""
        return {
            board.mig_uuid(instance, compute): (instance.serial, compute.serial)
            for board, gpu in zip(self.state.boards, self.state.read().gpus, strict=True)
            for instance in gpu.instances
            for compute in instance.compute_instances
        }

    def reboot(self) -> None:
        """Reboot the machine, which cures whatever was wrong with its GPUs."""
        self.state.clear_faults()
        self.sandboxes[0].reboot()

    def cut_journal(self) -> None:
        """Cut the journal short, if the node has one."""
        text = objects.annotations(self.node()).get(well_known.JOURNAL_ANNOTATION)
        if text is not None:
            cut = {well_known.JOURNAL_ANNOTATION: text[: len(text) // 2]}
            self.patch(annotations=cut)

    def spawn(
        self,
        *,
        strike_at: str | None = None,
        strike_with: signal.Signals = signal.SIGKILL,
        has_worker: bool = False,
    ) -> agent_process.AgentProcess:
        """Start an agent, to be struck at a moment if one is given."""
        self._agents += 1
        options = {
            "node_name": stages.NODE_NAME,
            "config_file": str(self.config_file),
            "kubeconfig": str(self.kubeconfig),
            "pod_resources_socket": str(self.machine.socket),
            "simulate_state": str(self.machine.state_file),
            "retry_initial_s": "0.1",
            "retry_max_s": "0.2",
            "poll_interval_s": "0.05",
            "plugin_timeout_s": "10",
            "monitor_timeout_s": "10",
            "in_use_timeout_s": "5",
            "drift_check_interval_s": "0",
            **dict(self.change.options),
        }
        if self.change.has_hooks:
            # A program at each point notes that it ran.
            log, file = (
                self.machine.state_file.with_name(name) for name in ("hooked", "hooks.yaml")
            )
            lines = [
                f"  {point.value}: [{{command: /bin/sh, args: [-c, echo {point.value} >> {log}]}}]"
                for point in hook_files.Point
            ]
            file.write_text("\n".join(["hooks:", *lines]), encoding="utf-8")
            options["hooks_file"] = str(file)
        agent = agent_process.AgentProcess(
            agent_main.Arguments(
                options=options,
                moments=str(self.machine.state_file.with_name(f"moments-{self._agents}")),
                log=str(self._log_of(self._agents)),
                strike_at=strike_at,
                strike_with=int(strike_with),
                has_worker=has_worker,
            )
        )
        self._exits.callback(agent.kill)
        return agent

    def _log_of(self, number: int) -> pathlib.Path:
        return self.machine.state_file.with_name(f"agent-{number}.log")

    def logs(self) -> str:
        logs = (self._log_of(number + 1) for number in range(self._agents))
        return "\n--\n".join(log.read_text(errors="replace") for log in logs)
