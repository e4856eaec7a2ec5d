"""Sandbox nodes with real agents on the real API server, whose pods the real scheduler binds."""

import collections
import contextlib
import dataclasses
import functools
import json
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mig_manager.adapters.kubernetes import api
from mig_manager.core import model
from mig_manager.core.node import well_known
from mig_manager.sandbox import machines
from mig_manager.sandbox.driver import library, state_file, states
from mig_manager.sandbox.node import (
    cluster_view,
    control_plane,
    objects,
    sandbox_node,
)
from tests import waiting
from tests.cluster import clusters, device_watch, envtest

PARTITIONER = clusters.Account(namespace="mig-manager", name="mig-manager-partitioner")
PARTITIONER_USER = f"system:serviceaccount:{PARTITIONER.namespace}:{PARTITIONER.name}"
_CONTROLLERS = control_plane.sync_nodes, control_plane.sync_daemon_sets
"""The scheduler is the real one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the nodes are like."""

    names: Sequence[str]
    spec: str = "8xA100-SXM4-40GB"
    layouts: str
    """The config document that the agents serve."""
    latency: states.Latency = states.REALISTIC
    options: sandbox_node.NodeOptions = dataclasses.field(
        default_factory=lambda: sandbox_node.NodeOptions(tick_s=0.25)
    )
    agent_options: Sequence[str] = ()
    folder: pathlib.Path | None = None
    """Where the logs stay; None: they go with the nodes."""


class Nodes:
    """The nodes of a cluster; use ``running``."""

    def __init__(
        self,
        shape: Shape,
        view: cluster_view.ClusterView,
        folder: pathlib.Path,
        real: clusters.Real,
    ) -> None:
        self.view = view
        self._folder = folder
        self.partitioner_log = (shape.folder or folder) / "partitioner.log"
        self._real = real
        # The controllers serve the nodes together, so they run on one of them.
        others = dataclasses.replace(shape.options, controllers=())
        first = dataclasses.replace(shape.options, controllers=_CONTROLLERS)
        self.machines = [
            machines.Machine(name, folder, others if number else first)
            for number, name in enumerate(shape.names)
        ]
        for machine in self.machines:
            machine.log = (shape.folder or folder) / machine.log.name
        self.sandboxes: dict[str, sandbox_node.SandboxNode] = {}

    def watched(self) -> list[device_watch.Node]:
        """Return the nodes for a watch of their devices."""
        return [
            device_watch.Node(
                name=machine.name,
                state=state_file.SharedState(machine.state_file),
                kubelet=self.sandboxes[machine.name].devices,
            )
            for machine in self.machines
        ]

    def label(self, labels: Mapping[str, Mapping[str, str]]) -> None:
        """Set labels of nodes, by node."""
        for name, changed in labels.items():
            node = self.view.node(name)
            assert node is not None
            self.view.patch(cluster_view.Kind.NODE, node, {"metadata": {"labels": changed}})

    def apply(self, layouts: Mapping[str, str], *, within_s: float = 120.0) -> None:
        """Request a layout of each node; return when all are active and schedulable."""
        runs = self.runs().total() + len(layouts)
        self.label({name: {well_known.CONFIG_LABEL: layout} for name, layout in layouts.items()})
        for name, layout in layouts.items():
            is_active = functools.partial(self._is_active, name, layout)
            waiting.until(is_active, f"{layout} on {name}", within_s=within_s)
        # An agent logs the end of a run after it has published it.
        waiting.until(lambda: self.runs().total() >= runs, "the end of the runs")

    def status(self, name: str) -> Mapping[str, Any]:
        """Return the status that the agent of a node has published; empty before the first."""
        node = self.view.node(name)
        text = objects.annotations(node).get(well_known.STATUS_ANNOTATION) if node else None
        return json.loads(text) if text else {}

    def runs(self) -> collections.Counter[str]:
        """Return how the agents' runs have ended so far: how many with which reason."""
        lines = (
            json.loads(line)
            for machine in self.machines
            for line in machine.log.read_text(encoding="utf-8").splitlines()
            if '"run_finished"' in line
        )
        return collections.Counter(str(line["reason"]) for line in lines)

    def partitioner(self, *options: str) -> machines.Process:
        """Start a replica of the partitioner."""
        config = self._real.kubeconfig(self._folder / "partitioner", PARTITIONER)
        return machines.Process(
            "partitioner", "--kubeconfig", str(config), *options, log=self.partitioner_log
        )

    def opt_in(self) -> None:
        """Let the partitioner change all nodes."""
        opted_in = {well_known.PARTITIONING_LABEL: well_known.ON_DEMAND}
        self.label({machine.name: opted_in for machine in self.machines})

    def _is_active(self, name: str, layout: str) -> bool:
        node = self.view.node(name)
        labels = objects.labels(node) if node else {}
        assert labels.get(well_known.STATE_LABEL) != model.State.FAILED.value, self.status(name)
        is_applied = labels.get(well_known.APPLIED_LABEL) == layout
        return is_applied and labels.get(well_known.STATE_LABEL) == model.State.SUCCESS.value


@contextlib.contextmanager
def installed_partitioner(real: clusters.Real) -> Iterator[None]:
    """Give the partitioner what its manifests give it, its Deployment aside."""
    manifest = clusters.shipped("partitioner/partitioner.yaml")
    made = [obj for obj in manifest if obj["kind"] != "Deployment"]
    for obj in made:
        real.kube.post(clusters.collection(obj), obj)
    try:
        right = "coordination.k8s.io", "leases", "create"
        waiting.until(lambda: real.may(PARTITIONER, right, PARTITIONER.namespace), "its rights")
        yield
    finally:
        for obj in made:
            real.kube.delete(f"{clusters.collection(obj)}/{PARTITIONER.name}")


@contextlib.contextmanager
def running(real: clusters.Real, shape: Shape) -> Iterator[Nodes]:
    """Run nodes, agents and kube-scheduler; at the end the cluster is cleared."""
    with contextlib.ExitStack() as exits:
        # Sockets have short paths.
        folder = pathlib.Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="mig-")))
        exits.callback(real.clear)
        real.grant(clusters.SHIPPED)
        people = real.server.kubeconfig(folder / "people", token=envtest.ADMIN_TOKEN)
        connection = api.KubeApi.connect(kubeconfig=str(people))
        view = exits.enter_context(cluster_view.ClusterView(connection))
        nodes = Nodes(shape, view, folder, real)
        layouts = folder / "layouts.yaml"
        layouts.write_text(shape.layouts, encoding="utf-8")
        for machine in nodes.machines:
            driver = states.Options(latency=shape.latency, seed=machine.name)
            library.create(shape.spec, machine.state_file, options=driver)
            nodes.sandboxes[machine.name] = machine.start(exits, view)
        for machine in nodes.machines:
            has_devices = functools.partial(_has_devices, view, machine.name)
            waiting.until(has_devices, f"the devices of {machine.name}")
            config = real.kubeconfig(folder / machine.name, clusters.OURS, node=machine.name)
            machine.start_agent(machine.arguments(layouts, config, shape.agent_options))
            exits.callback(machine.stop_agent)
        exits.enter_context(real.server.scheduling())
        yield nodes


def _has_devices(view: cluster_view.ClusterView, name: str) -> bool:
    node = view.node(name)
    return node is not None and sum(objects.devices(node).values()) > 0
