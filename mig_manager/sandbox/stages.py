"""The stage of the demo: API server, sandbox nodes, and real agents in processes of their own."""

import contextlib
import dataclasses
import json
import pathlib
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from mig_manager import errors, reasons
from mig_manager.adapters import host, pod_resources
from mig_manager.adapters.kubernetes import api
from mig_manager.adapters.nvml import nvml_gpus
from mig_manager.core import timing
from mig_manager.core.objects import pod_object, well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox import guard, machines
from mig_manager.sandbox.apiserver import server as api_server
from mig_manager.sandbox.driver import simulated_nvml, state_file, states
from mig_manager.sandbox.node import cluster_view, manifests, objects, sandbox_node

NODE_NAME = "sandbox"
_BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
BUDGET = "keep-them-all"
_TIMEOUT_S = 180.0
_POLL = timing.Backoff(first_s=0.5, max_s=0.5)
_QUICK = sandbox_node.NodeOptions(tick_s=0.25)
"""A real kubelet's status tick is ten seconds: too long for a demonstration."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How the parts of a stage reach its API server."""

    kubeconfig: pathlib.Path  # of the agents
    people: api.KubeApi
    components: cluster_view.Server  # for the simulated components


class Stage:
    """The nodes of a cluster, with an agent on every one; a context manager.

    Args:
        spec: The GPUs of a node, such as ``8xA100-SXM4-40GB``.
        config_text: The layout file of the agents.
        latency: Durations of the driver's calls.
        agent_options: Further options of the agents.
        own_options: Further options of single agents, by the node's name.
        node_options: How the nodes behave; the name is set here.
        server: The API server to start; None: a plain one.
        names: Of the nodes. The methods without a machine are about the first one.
    """

    def __init__(  # noqa: PLR0913 - the differences between stages
        self,
        spec: str,
        config_text: str,
        *,
        latency: states.Latency,
        agent_options: Sequence[str] = (),
        own_options: Mapping[str, Sequence[str]] | None = None,
        node_options: sandbox_node.NodeOptions = _QUICK,
        server: api_server.ApiServer | None = None,
        names: Sequence[str] = (NODE_NAME,),
    ) -> None:
        self._names = names
        self._spec = spec
        self._config_text = config_text
        self._latency = latency
        self._agent_options = agent_options
        self._own_options = own_options or {}
        self._node_options = node_options
        self.server = server or api_server.ApiServer()
        self._exits = contextlib.ExitStack()
        self.changed = threading.Event()
        self._failure: Exception | None = None
        self.gpus = nvml_gpus.NvmlGpus(clock=host.SystemClock())

    def __enter__(self) -> Self:
        """Start everything; return when the plugin's devices are schedulable.

        Raises:
            NotReadyError: A part did not start in time.
            UsageError: The spec is invalid, or files cannot be written.
        """
        try:
            with contextlib.ExitStack() as exits:
                self._start(exits)
                self._exits = exits.pop_all()
        except OSError as error:
            raise _no_room(error) from error
        return self

    def __exit__(self, *_exc: object) -> None:
        try:
            self._exits.close()
        except OSError as error:
            raise _no_room(error) from error

    def _start(self, exits: contextlib.ExitStack) -> None:
        folder = pathlib.Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="mig-")))
        self.group = exits.enter_context(guard.guarding(folder))
        """The process group of the started processes; it ends with this process."""
        self.config_file = folder / "config.yaml"
        self.config_file.write_text(self._config_text, encoding="utf-8")
        # The controllers serve the nodes together, so they run on the first one.
        others = dataclasses.replace(self._node_options, controllers=())
        self.machines = [
            machines.Machine(name, folder, others if index else self._node_options)
            for index, name in enumerate(self._names)
        ]
        self.machine = self.machines[0]
        for index, machine in enumerate(self.machines):
            seed = machine.name if index else ""
            driver = states.Options(latency=self._latency, seed=seed)
            state_file.SharedState(machine.state_file).create(self._spec, options=driver)
        simulated_nvml.install(self.machine.state_file)
        exits.callback(simulated_nvml.load, None)
        connection = self.connect(exits, folder)
        self.kubeconfig, self.api = connection.kubeconfig, connection.people
        exits.callback(self.api.close)
        self.cluster = exits.enter_context(cluster_view.ClusterView(connection.components))
        exits.callback(self.cluster.listen(lambda *_: self.changed.set()))
        self.sandboxes = [
            machine.start(exits, self.cluster, lambda error: self.fail(_no_room(error)))
            for machine in self.machines
        ]
        exits.callback(self.stop_agent)
        self.start_agent()
        for machine in self.machines[1:]:
            exits.callback(machine.stop_agent)
            machine.start_agent(self.arguments(machine), self.group)

        def have_devices() -> bool:
            views = (self.cluster.node(name) or {} for name in self._names)
            return all(sum(objects.devices(view).values()) > 0 for view in views)

        self.wait(have_devices, "the device plugin's devices")

    def connect(self, exits: contextlib.ExitStack, folder: pathlib.Path) -> Connection:
        """Start the API server."""
        exits.enter_context(api_server.serve(self.server))
        return Connection(
            kubeconfig=self.server.kubeconfig(folder / "kubeconfig"),
            people=api.KubeApi.at(self.server.url),
            components=self.server.url,
        )

    def arguments(self, machine: machines.Machine) -> list[str]:
        """Return the command line of a node's agent, from its first option on."""
        node_options = self._own_options.get(machine.name, ())
        further = "--poll-interval-s", "0.2", *self._agent_options, *node_options
        return machine.arguments(self.config_file, self.kubeconfig, further)

    def start_agent(self) -> None:
        """Start the agent, which must not be running."""
        self.machine.start_agent(self.arguments(self.machine), self.group)

    def stop_agent(self, signal_number: int = signal.SIGTERM) -> int:
        """End the agent and return its exit status; SIGKILL follows if it lingers."""
        return self.machine.stop_agent(signal_number)

    def wait(self, holds: Callable[[], bool], what: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        """Wait until a condition on the cluster holds.

        Raises:
            NotReadyError: The condition did not hold in time; the message names ``what``.
            Exception: The argument of ``fail``.
        """
        wait = timing.Wait(
            clock=host.SystemClock(), timeout_s=timeout_s, sleep=self.changed.wait, backoff=_POLL
        )
        for is_last in wait.tries():
            # Before the check: a change during the check causes another one.
            self.changed.clear()
            if self._failure is not None:
                raise self._failure
            if holds():
                return
            agents = [each.agent for each in self.machines if each.agent is not None]
            stopped = [each for each in agents if each.has_ended]
            if stopped or is_last:
                lines = (each.last_line or "none" for each in (*stopped, *agents))
                line = next(lines, "none, for it has not been started")
                when = "before the agent ended" if stopped else f"within {timeout_s:g} s"
                raise errors.NotReadyError(
                    f"no {what} {when}; the agent's last log line: {line}",
                    reason=reasons.Reason.INTERNAL,
                )

    def fail(self, error: Exception) -> None:
        """Make ``wait`` raise an error of another thread, now or at its next call."""
        self._failure = self._failure or error
        self.changed.set()

    # -- state ---------------------------------------------------------------------------

    def node(self) -> objects.JsonObject:
        """Return the Node object of the first node."""
        return self.cluster.node(self.machine.name) or {"metadata": {"name": self.machine.name}}

    def allocatable(self) -> dict[str, int]:
        """Return the allocatable GPU resources of the first node."""
        return {name: n for name, n in objects.devices(self.node()).items() if n}

    def status(self) -> Mapping[str, Any]:
        """Return the status annotation of the first node; empty before its agent's first run."""
        text = objects.annotations(self.node()).get(well_known.STATUS_ANNOTATION)
        return json.loads(text) if text else {}

    def workloads(self) -> dict[str, objects.JsonObject]:
        """Return the pods that are neither finished nor daemons, by name."""
        return {
            objects.name(pod): pod
            for pod in self.cluster.list(cluster_view.WatchedKind.POD)
            if not objects.is_finished(pod) and not objects.controller(pod)
        }

    def devices_by_pod(self) -> dict[str, frozenset[str]]:
        """Return the devices of every pod of the first node, by the pod's name."""
        return {pod.name: pod.device_ids for pod in self.assigned_devices(self.machine)}

    def assigned_devices(self, machine: machines.Machine) -> tuple[pod_object.PodDevices, ...]:
        """Return the pods of a node with their devices, as its kubelet reports them."""
        return pod_resources.PodResources(str(machine.socket)).assigned_devices()

    # -- actions of people ---------------------------------------------------------------

    def label(self, layout: str | None) -> None:
        """Request a layout as ``kubectl label node`` does; None removes the label."""
        change = {"metadata": {"labels": {well_known.CONFIG_LABEL: layout}}}
        self.cluster.patch(cluster_view.WatchedKind.NODE, self.node(), change)

    def wait_for_end(self, layout: str) -> run_status.State:
        """Wait for the end of a run for ``layout``, and return its state."""
        return run_status.State(str(self.wait_for_status(layout)["state"]))

    def wait_for_status(self, layout: str) -> Mapping[str, Any]:
        """Wait for the end of a run for ``layout``; return its status, which a retry replaces."""
        status: Mapping[str, Any] = {}

        def has_ended() -> bool:
            nonlocal status
            status = self.status()
            return status.get("config") == layout and "finishedAt" in status

        self.wait(has_ended, f"end of the run for {layout}")
        return status

    def guard(self, selector: Mapping[str, Any]) -> None:
        """Create a PodDisruptionBudget that allows no eviction of the selected pods."""
        self.api.post(
            _BUDGETS,
            {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": {"name": BUDGET, "namespace": "default"},
                "spec": {"maxUnavailable": 0, "selector": selector},
            },
        )

    def unguard(self) -> None:
        """Delete that budget."""
        self.api.delete(f"{_BUDGETS}/{BUDGET}")

    def run_pods(self, pods: Sequence[tuple[str, str, Mapping[str, str]]]) -> None:
        """Create pods, as (name, resource, labels), and wait until all of them run."""
        for name, resource, labels in pods:
            self.cluster.create(
                cluster_view.WatchedKind.POD, manifests.gpu_pod(name, resource, labels=labels)
            )
        names = {name for name, _, _ in pods}
        self.wait(
            lambda: names <= {n for n, pod in self.workloads().items() if objects.is_ready(pod)},
            "running pods",
        )


def _no_room(error: OSError) -> errors.UsageError:
    why = error.strerror or str(error)
    return errors.UsageError(
        f"cannot write the files of the simulated node: {why}",
        remedy="Set TMPDIR to a folder with room.",
    )
