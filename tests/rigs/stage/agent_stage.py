"""The real agent process on a sandbox node: real HTTP, real gRPC, and pynvml or a real library."""

import contextlib
import http.client
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import parser

from mig_manager.adapters.kubernetes import api
from mig_manager.core.layout import layout_parser
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox import demo_layouts, machines, stages
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import cluster_view, sandbox_node
from testkit import apiserver
from tests.rigs.cluster import api_servers, envtest
from tests.rigs.driver import c_library
from tests.rigs.node import gpu_values, unrestored

PACKAGED = pathlib.Path(__file__).parents[3] / "profiles" / "mig-parted.yaml"
_IMPATIENT = ("--retry-initial-s", "0.2", "--retry-max-s", "0.5")
PATIENT = ("--retry-initial-s", "600", "--retry-max-s", "600")
"""For tests that look at the end of an attempt, which the next one would write over."""
QUICK = sandbox_node.NodeOptions(
    tick_s=0.05, pod_start_s=0.05, pod_stop_s=0.05, plugin_start_s=0.05
)
"""Each thing still takes a moment of its own, only a shorter one than people like to watch."""
NODE_PATH = f"/api/v1/nodes/{stages.NODE_NAME}"


class AgentStage(stages.Stage):
    """A quick node with an impatient agent.

    Args:
        spec: The GPUs.
        agent_options: Further options of the agent.
        text: The layout file; None: the packaged one and what stories need.
        node_options: How the node behaves.
        has_library: Whether the agent has the library of a real driver, so that it may change
            the host; without it the agent simulates GPUs.
        stderr: A descriptor for the agent's output; None: a file takes it.
        credentials: For an API server that runs already; None: the stage starts its own.
    """

    server: apiserver.ApiServer

    def __init__(
        self,
        spec: str = "2xA100-SXM4-40GB",
        *agent_options: str,
        text: str | None = None,
        node_options: sandbox_node.NodeOptions = QUICK,
        has_library: bool = False,
        stderr: int | None = None,
        credentials: api_servers.Credentials | None = None,
    ) -> None:
        super().__init__(
            spec,
            _config_text(spec) if text is None else text,
            latency=states.Latency(),
            agent_options=(*_IMPATIENT, *agent_options),
            node_options=node_options,
            server=apiserver.ApiServer(),
        )
        self._credentials = credentials
        self._has_library = has_library
        self._stderr = stderr
        self._driver = contextlib.ExitStack()

    def connect(self, exits: contextlib.ExitStack, folder: pathlib.Path) -> stages.Connection:
        if self._credentials is None:
            return super().connect(exits, folder)
        people = str(self._credentials.people)
        return stages.Connection(
            kubeconfig=self._credentials.agent,
            people=api.KubeApi.connect(kubeconfig=people),
            components=api.KubeApi.connect(kubeconfig=people),
        )

    @property
    def library(self) -> pathlib.Path:
        """The file of the driver's library."""
        return self.machine.state_file.parent / "driver" / c_library.NAME

    def start_agent(self) -> None:
        if self._has_library:
            served = c_library.serve(self.library.parent, self.machine.state_file)
            self._driver.enter_context(served)
        if self._stderr is not None:
            self.machine.log_to(pathlib.Path(f"/proc/self/fd/{self._stderr}"))
        super().start_agent()

    def arguments(self, machine: machines.Machine) -> list[str]:
        arguments = super().arguments(machine)
        if self._has_library:
            at = arguments.index("--simulate-state")
            arguments[at : at + 2] = ["--library-path", str(self.library)]
        return arguments

    def stop_agent(self, *signals: int) -> int:
        status = super().stop_agent(*signals)
        self._driver.close()
        return status

    def wait(self, holds: Callable[[], bool], what: str, *, timeout_s: float = 180.0) -> None:
        """Wait as the demo does, but longer: other tests may keep the processors busy."""
        super().wait(holds, what, timeout_s=timeout_s)

    def lines(self) -> list[dict[str, Any]]:
        """Return what the agent has logged, without a line that it is still writing."""
        text = self.machine.log.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def wait_for_listener(self) -> None:
        """Wait until the agent listens for events of GPUs, after its run."""

        def is_listening() -> bool:
            events = [line["event"] for line in self.lines()]
            return "run_finished" in events and events[-1] == "gpu_events_watched"

        self.wait(is_listening, "the listener")

    def patch(self, *, annotations: Mapping[str, Any] | None = None, **labels: str | None) -> None:
        """Write labels and annotations of the node in one patch."""
        named = {_LABELS[name]: value for name, value in labels.items()}
        change = {"metadata": {"labels": named, "annotations": annotations or {}}}
        self.cluster.patch(cluster_view.WatchedKind.NODE, self.node(), change)

    def apply_layout(
        self, layout: str, state: run_status.State = run_status.State.SUCCESS
    ) -> Mapping[str, Any]:
        """Request a layout, and check how that ends.

        Returns:
            The status at the end, which a retry may replace at once.
        """
        self.label(layout)
        status = self.wait_for_status(layout)
        assert status["state"] == state.value, status
        return status

    def fail_to_apply(self, layout: str) -> Mapping[str, Any]:
        """Request a layout that must fail; return the status when it has."""
        return self.apply_layout(layout, run_status.State.FAILED)

    def unrestored_on_node(self, *, is_stopped: bool = False, **owners: Any) -> list[str]:
        """List what a change has not restored on the Node; empty if all is restored.

        ``owners``: what its owner wants, as for ``unrestored.on_node``.
        """
        view = node_object.parse_node(self.api.get(NODE_PATH))
        # A stopped agent may leave the verification of devices to the next.
        pending_entries = ("advertisers",) if is_stopped else ()
        return unrestored.on_node(view, *pending_entries, **owners)

    def assert_restored(self) -> None:
        """Check that the agent has restored what it changes for a while."""
        assert self.unrestored_on_node() == []


class ObservedStage(AgentStage):
    """The same with an agent that serves health and metrics."""

    def __init__(self, spec: str, *agent_options: str, **how: Any) -> None:
        (self._port,) = envtest.free_ports(1)
        served = ("--health-address", "127.0.0.1", "--health-port", str(self._port))
        super().__init__(spec, *served, *agent_options, **how)

    def start_agent(self) -> None:
        super().start_agent()
        self.wait(lambda: self.ask("/readyz")[0] == http.HTTPStatus.OK, "a ready agent")

    def ask(self, path: str) -> tuple[int, str]:
        """Return status and text; 0 while the port is closed."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path)
            except ConnectionRefusedError:
                return 0, ""
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def series(self, name: str) -> dict[str, float]:
        """Return the values of one metric by its labels' values."""
        _, text = self.ask("/metrics")
        return {
            ",".join(value for _, value in sorted(sample.labels.items())): sample.value
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"mig_manager_{name}"
        }


_LABELS = {"config": well_known.CONFIG_LABEL, "partitioning": well_known.PARTITIONING_LABEL}


def _config_text(spec: str) -> str:
    """Return the packaged layouts and those that stories need."""
    text = PACKAGED.read_text(encoding="utf-8")
    return text + demo_layouts.render(
        gpu_values.gpus_of(spec), layout_parser.parse(text, source="packaged")
    )
