"""The real agent process on a sandbox node: real HTTP, real gRPC, and pynvml or a real library."""

import contextlib
import pathlib
from typing import Any

from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.core.layout import config
from mig_manager.core.node import well_known
from mig_manager.sandbox import scenarios, stages
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import cluster_view, objects, sandbox_node
from testkit import apiserver
from tests.sandbox import library
from tests.stage import journals

PACKAGED = pathlib.Path(__file__).parents[2] / "profiles" / "mig-parted.yaml"
IMPATIENT = ("--retry-initial-s", "0.2", "--retry-max-s", "0.5")
QUICK = sandbox_node.NodeOptions(
    tick_s=0.05, pod_start_s=0.05, pod_stop_s=0.05, plugin_start_s=0.05
)
"""Each thing still takes a moment of its own, only a shorter one than people like to watch."""


class Stage(stages.Stage):
    """A quick node with an impatient agent.

    Args:
        spec: The GPUs.
        agent_options: Further options of the agent.
        text: The layout file; None: the packaged one and what stories need.
        node_options: How the node behaves.
        server: The API server; None: a plain one.
        has_library: Whether the agent has the library of a real driver, so that it may change
            the host; without it the agent simulates GPUs.
        stderr: A descriptor for the agent's output; None: a file takes it.
    """

    def __init__(
        self,
        spec: str = "2xA100-SXM4-40GB",
        *agent_options: str,
        text: str | None = None,
        node_options: sandbox_node.NodeOptions = QUICK,
        server: apiserver.ApiServer | None = None,
        has_library: bool = False,
        stderr: int | None = None,
    ) -> None:
        super().__init__(
            spec,
            config_text(spec) if text is None else text,
            latency=states.Latency(),
            agent_options=(*IMPATIENT, *agent_options),
            node_options=node_options,
            server=server,
        )
        self._has_library = has_library
        self._stderr = stderr
        self._driver = contextlib.ExitStack()

    @property
    def library(self) -> pathlib.Path:
        """The file of the driver's library."""
        return self.state_file.parent / "driver" / library.NAME

    def start_agent(self) -> None:
        if self._has_library:
            served = library.served(self.library.parent, self.state_file)
            self._driver.enter_context(served)
        if self._stderr is not None:
            self.machine.log = pathlib.Path(f"/proc/self/fd/{self._stderr}")
        super().start_agent()

    def agent_arguments(self) -> list[str]:
        arguments = super().agent_arguments()
        if self._has_library:
            at = arguments.index("--simulate-state")
            arguments[at : at + 2] = ["--library-path", str(self.library)]
        return arguments

    def stop_agent(self, *signals: int) -> int:
        status = super().stop_agent(*signals)
        self._driver.close()
        return status

    def patch(self, *, annotations: dict[str, Any] | None = None, **labels: str | None) -> None:
        """Write labels and annotations of the node in one patch."""
        named = {LABELS[name]: value for name, value in labels.items()}
        change = {"metadata": {"labels": named, "annotations": annotations or {}}}
        self.cluster.patch(cluster_view.Kind.NODE, self.node(), change)

    def assert_ends(self, layout: str, state: model.State = model.State.SUCCESS) -> None:
        """Request a layout, and wait for its end."""
        self.label(layout)
        assert self.wait_for_end(layout) is state

    def assert_nothing_taken(self, *, is_stopped: bool = False) -> None:
        """Check that the agent has restored what it takes for a change."""
        node = self.node()
        assert not (node["spec"] or {}).get("unschedulable")
        assert not (node["spec"] or {}).get("taints")
        assert well_known.PAUSED_VALUE not in objects.labels(node).values()
        journal = objects.annotations(node).get(well_known.JOURNAL_ANNOTATION)
        assert journals.lists_nothing(journal, is_stopped=is_stopped)


LABELS = {"config": well_known.CONFIG_LABEL, "partitioning": well_known.PARTITIONING_LABEL}


def gpus(spec: str) -> list[model.Gpu]:
    """Return the GPUs of a node as they come from the factory."""
    return [hardware.template(p, i) for i, p in enumerate(hardware.parse_node(spec))]


def config_text(spec: str) -> str:
    """Return the packaged layouts and those that stories need."""
    text = PACKAGED.read_text(encoding="utf-8")
    return text + scenarios.extra_layouts(gpus(spec), config.parse(text, source="packaged"))
