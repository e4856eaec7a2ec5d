"""Sandbox nodes with real agents on the real API server, whose pods the real scheduler binds."""

import collections
import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from mig_manager.adapters.kubernetes import api
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox import machines, stages
from mig_manager.sandbox.driver import state_file, states
from mig_manager.sandbox.node import (
    cluster_view,
    control_plane,
    objects,
    sandbox_node,
)
from tests.rigs import waiting
from tests.rigs.cluster import account_rights, api_servers, deploy_files, envtest
from tests.rigs.stage import device_watch

PARTITIONER = account_rights.Account(namespace="mig-manager", name="mig-manager-partitioner")
PARTITIONER_USER = f"system:serviceaccount:{PARTITIONER.namespace}:{PARTITIONER.name}"
_CONTROLLERS = control_plane.sync_nodes, control_plane.sync_daemon_sets
"""The scheduler is the real one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """What the nodes are like."""

    names: Sequence[str]
    spec: str = "8xA100-SXM4-40GB"
    layouts: str  # the layout file that the agents serve
    latency: states.Latency = states.REALISTIC
    options: sandbox_node.NodeOptions = dataclasses.field(
        default_factory=lambda: sandbox_node.NodeOptions(tick_s=0.25)
    )
    agent_options: Sequence[str] = ()
    folder: pathlib.Path | None = None  # where the logs stay; None: they go with the nodes


class Nodes(stages.Stage):
    """The nodes of a cluster with a real API server; use ``running``."""

    def __init__(self, shape: NodeShape, real: api_servers.EnvtestCluster) -> None:
        super().__init__(
            shape.spec,
            shape.layouts,
            latency=shape.latency,
            agent_options=shape.agent_options,
            node_options=dataclasses.replace(shape.options, controllers=_CONTROLLERS),
            names=shape.names,
        )
        self._logs = shape.folder
        self._real = real

    def connect(self, exits: contextlib.ExitStack, folder: pathlib.Path) -> stages.Connection:
        logs = self._logs or folder
        self.partitioner_log = logs / "partitioner.log"
        for machine in self.machines:
            machine.log_to(logs / machine.log.name)
        exits.callback(self._real.clear)
        self._real.grant(account_rights.SHIPPED)
        people = self._real.server.kubeconfig(folder / "people", token=envtest.ADMIN_TOKEN)
        return stages.Connection(
            kubeconfig=people,
            people=api.KubeApi.connect(kubeconfig=str(people)),
            components=api.KubeApi.connect(kubeconfig=str(people)),
        )

    def arguments(self, machine: machines.Machine) -> list[str]:
        path = self.config_file.with_name(f"{machine.name}.kubeconfig")
        config = self._real.kubeconfig(path, account_rights.MANAGER, node=machine.name)
        return machine.arguments(self.config_file, config, self._agent_options)

    def watched_nodes(self) -> list[device_watch.WatchedNode]:
        """Return the nodes for a watch of their devices."""
        return [
            device_watch.WatchedNode(
                name=machine.name,
                state=state_file.SharedState(machine.state_file),
                kubelet=sandbox.devices,
            )
            for machine, sandbox in zip(self.machines, self.sandboxes, strict=True)
        ]

    def set_labels(self, labels: Mapping[str, Mapping[str, str]]) -> None:
        """Set labels of nodes, by node."""
        for name, changed in labels.items():
            node = self.cluster.node(name)
            assert node is not None
            self.cluster.patch(
                cluster_view.WatchedKind.NODE, node, {"metadata": {"labels": changed}}
            )

    def apply(self, layouts: Mapping[str, str], *, within_s: float = 120.0) -> None:
        """Request a layout of each node; return when all are active and schedulable."""
        runs = self.runs().total() + len(layouts)
        self.set_labels(
            {name: {well_known.CONFIG_LABEL: layout} for name, layout in layouts.items()}
        )
        for name, layout in layouts.items():
            is_active = functools.partial(self._is_active, name, layout)
            waiting.until(is_active, f"{layout} on {name}", within_s=within_s)
        # An agent logs the end of a run after it has published it.
        waiting.until(lambda: self.runs().total() >= runs, "the end of the runs")

    def runs(self) -> collections.Counter[str]:
        """Return how the agents' runs have ended so far: how many with which reason."""
        lines = (
            json.loads(line)
            for machine in self.machines
            for line in machine.log.read_text(encoding="utf-8").splitlines(keepends=True)
            # An agent may be writing its last one.
            if '"run_finished"' in line and line[-1] == "\n"
        )
        return collections.Counter(str(line["reason"]) for line in lines)

    def partitioner(self, *options: str) -> machines.Process:
        """Start a replica of the partitioner."""
        config = self._real.kubeconfig(self.config_file.with_name("partitioner"), PARTITIONER)
        return machines.Process(
            "partitioner", "--kubeconfig", str(config), *options, log=self.partitioner_log
        )

    def opt_in(self) -> None:
        """Let the partitioner change all nodes."""
        opted_in = {well_known.PARTITIONING_LABEL: well_known.ON_DEMAND}
        self.set_labels({machine.name: opted_in for machine in self.machines})

    def _is_active(self, name: str, layout: str) -> bool:
        node = self.cluster.node(name) or {}
        labels, status = objects.labels(node), objects.annotations(node)
        assert labels.get(well_known.STATE_LABEL) != run_status.State.FAILED.value, status
        is_applied = labels.get(well_known.APPLIED_LABEL) == layout
        return is_applied and labels.get(well_known.STATE_LABEL) == run_status.State.SUCCESS.value


@contextlib.contextmanager
def installed_partitioner(real: api_servers.EnvtestCluster) -> Iterator[None]:
    """Give the partitioner what its manifests give it, its Deployment aside."""
    manifest = deploy_files.manifest_objects("partitioner/partitioner.yaml")
    made = [obj for obj in manifest if obj["kind"] != "Deployment"]
    for obj in made:
        real.kube.post(deploy_files.collection(obj), obj)
    try:
        right = "coordination.k8s.io", "leases", "create"
        waiting.until(lambda: real.may(PARTITIONER, right, PARTITIONER.namespace), "its rights")
        yield
    finally:
        for obj in made:
            real.kube.delete(f"{deploy_files.collection(obj)}/{PARTITIONER.name}")


@contextlib.contextmanager
def running(real: api_servers.EnvtestCluster, shape: NodeShape) -> Iterator[Nodes]:
    """Run nodes, agents and kube-scheduler; at the end the cluster is cleared."""
    with Nodes(shape, real) as nodes, real.server.scheduling():
        yield nodes
