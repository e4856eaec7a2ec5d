"""Replicas of the partitioner on the embedded API server, with nodes whose agents are played."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mig_manager import reasons
from mig_manager.core import model
from mig_manager.core.layout import custom_layouts, layout_parser, selection
from mig_manager.core.node.devices import device_classes, resources
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning import demand
from mig_manager.core.planner import planner
from mig_manager.core.records import run_status
from mig_manager.partitioner import main, partitioner_settings
from mig_manager.sandbox.apiserver import kinds
from mig_manager.sandbox.node import objects
from testkit import apiserver
from tests.rigs import api_objects, waiting
from tests.rigs.cluster import dra_driver, mortal_api, watch_rig
from tests.rigs.node import fakes, gpu_values, samples
from tests.rigs.shell import commandline

TERM_S = 70.0
"""After so long the Lease of a killed leader is taken, and nodes are out of their cooldown."""
QUIET_S = 2.0
SOON_S = QUIET_S + 1
_LONG_S = 60.0  # from here on the steps are of five seconds, still shorter than a leader's pause


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replica:
    """One replica; tests call its steps."""

    service: main.Replica
    kube: mortal_api.MortalApi

    @property
    def leads(self) -> bool:
        return self.service.leader.may_write


class PartitionerRig:
    """A cluster with nodes of A100 GPUs, and replicas of the partitioner."""

    def __init__(self, server: apiserver.ApiServer) -> None:
        self.server = server
        self.clock = fakes.FakeClock()
        self.replicas: list[Replica] = []
        self.gpus: dict[str, tuple[model.Gpu, ...]] = {}
        self.in_use: dict[str, dict[str, frozenset[model.Placement]]] = {}
        self.by_claims: set[str] = set()
        """Nodes with NVIDIA's DRA driver instead of the device plugin."""
        self.agents_ahead_s = 0.0
        """How far the clocks of the agents are ahead of the replicas'."""

    # -- the cluster --------------------------------------------------------------------------

    def add_node(
        self,
        name: str = "n1",
        *,
        gpus: int = 1,
        layout: str = "7g.40gb",
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Add an opted-in node at rest, each of whose GPUs has one idle instance."""
        mig = gpu_values.gpus_of(f"{gpus}xA100-SXM4-40GB", {layout: 1})
        self.gpus[name] = mig
        self.in_use[name] = {gpu.uuid: frozenset() for gpu in mig}
        on_demand = {
            well_known.PARTITIONING_LABEL: well_known.ON_DEMAND,
            well_known.CONFIG_LABEL: "all-7g.40gb",
            well_known.STATE_LABEL: "success",
            "nvidia.com/mig.strategy": "mixed",
        }
        published = self._annotations(name, "all-7g.40gb", ago_s=3600)
        node = api_objects.a_node(name, {**on_demand, **(labels or {})}, annotations=published)
        node["status"] |= self._status(name)
        # As many providers taint GPU nodes.
        node["spec"] = {"taints": [{"key": resources.GPU, "effect": "NoSchedule"}]}
        self.server.store.create(node)

    def add_nodes(self, *names: str) -> None:
        for name in names:
            self.add_node(name)

    def _annotations(
        self,
        name: str,
        layout: str,
        state: run_status.State = run_status.State.SUCCESS,
        *,
        ago_s: float = 0,
        took_s: float = 0,
        **members: str | None,
    ) -> dict[str, str]:
        ended_at, began_at = (
            self.clock.now_iso(after_s=self.agents_ahead_s - age_s)
            for age_s in (ago_s, ago_s + took_s)
        )
        times = {"startedAt": began_at, "finishedAt": ended_at}
        if layout == well_known.CUSTOM_LAYOUT:
            requested = custom_layouts.CustomRequest(
                node_name=name, text=self.requested_layout(name)
            )
            members["annotationHash"] = requested.annotation_hash
        text = api_objects.a_status(layout, state, **times | members)
        return api_objects.annotations_of_agent(
            self.gpus[name], status_text=text, in_use=self.in_use[name], at=ended_at
        )

    def _status(self, name: str) -> api_objects.Object:
        by_plugin = {} if name in self.by_claims else resources.counts(self.gpus[name])
        amounts = {key: str(count) for key, count in by_plugin.items()}
        amounts |= {"cpu": "64", "memory": "512Gi", "pods": "500"}
        return {"allocatable": amounts, "capacity": amounts}

    def add_pods(self, *names: str, profile: str = "1g.5gb", **labels: str) -> None:
        """Add pods that the scheduler has found no node for."""
        for name in names:
            # As the admission plugin ExtendedResourceToleration does.
            spec = {"tolerations": [{"key": resources.GPU, "operator": "Exists"}]}
            limits = {f"nvidia.com/mig-{profile}": 1}
            pod = api_objects.a_pod(name, labels, node="", limits=limits, spec=spec)
            self.server.store.create(pod)

    def publish_devices(self, name: str) -> None:
        """Play the DRA driver: list the devices of a node."""
        devices = dra_driver.devices(self.gpus[name])
        listed = api_objects.a_resource_slice(*devices, node=name)
        self.server.store.remove((kinds.SLICES.plural, "", objects.name(listed)))
        self.server.create(listed)

    def add_classes(self, *profiles: str) -> None:
        """Add DeviceClasses by which limits of these profiles are served."""
        for profile in map(samples.profile, profiles):
            made = device_classes.of_profile(profile)
            assert made is not None
            self.server.create(device_classes.manifest(profile, made))

    def bind(self, pod: str, node: str) -> None:
        change = {"spec": {"nodeName": node}, "status": {"phase": "Running", "conditions": None}}
        self.server.merge(kinds.PODS, pod, change, namespace="default")

    def end(self, pod: str, phase: str) -> None:
        self.server.merge(kinds.PODS, pod, {"status": {"phase": phase}}, namespace="default")

    def publish(self, name: str) -> None:
        """Play the agent: publish the use of its GPUs again."""
        published = self._annotations(name, "all-7g.40gb", ago_s=3600)
        self.server.merge(kinds.NODES, name, {"metadata": {"annotations": published}})

    def answer(
        self, name: str, *, reason: reasons.Reason = reasons.Reason.APPLIED, took_s: float = 0
    ) -> None:
        """Play the agent: apply the custom layout that is requested, or fail."""
        text = self.node(name)["metadata"]["annotations"][well_known.LAYOUT_ANNOTATION]
        (layout,) = layout_parser.parse(text, source="annotation").layouts.values()
        gpus = self.gpus[name]
        state = (
            run_status.State.SUCCESS
            if reason is reasons.Reason.APPLIED
            else run_status.State.FAILED
        )
        if state is run_status.State.SUCCESS:
            plan = planner.plan(gpus, selection.select(layout, gpus))
            self.gpus[name] = gpu_values.execute(gpus, plan)
        published = self._annotations(
            name,
            well_known.CUSTOM_LAYOUT,
            state,
            took_s=took_s,
            configHash=layout.content_hash,
            reason=reason.value,
        )

        def change(obj: api_objects.Object) -> None:
            obj["metadata"]["annotations"] |= published
            obj["metadata"]["labels"][well_known.STATE_LABEL] = state.value
            obj["status"] |= self._status(name)

        self.server.modify(kinds.NODES, name, change)

    def begin(self, name: str) -> None:
        """Play the agent: begin a run."""
        state, key = run_status.State.PENDING, well_known.STATUS_ANNOTATION
        published = self._annotations(name, well_known.CUSTOM_LAYOUT, state, finishedAt=None)
        metadata = {
            "annotations": {key: published[key]},
            "labels": {well_known.STATE_LABEL: state.value},
        }
        self.server.merge(kinds.NODES, name, {"metadata": metadata})

    def touch(self, name: str) -> None:
        """Write something to a node that does not matter, as kubelet does."""
        beat = {"example.com/beat": str(self.clock.now_s)}
        self.server.merge(kinds.NODES, name, {"metadata": {"annotations": beat}})

    # -- the partitioner ----------------------------------------------------------------------

    def replica(self, name: str = "a", **options: str) -> Replica:
        """Start a replica that steps only when a test says so."""
        kube = mortal_api.MortalApi.at(
            self.server.url, token=name, request_timeout_s=60.0, sleep=lambda _seconds: None
        )
        settings = partitioner_settings.PartitionerSettings.read(
            {"command": "partitioner", "mode": "act", "quiet_s": str(QUIET_S)} | options, {}
        )
        service = main.Replica(
            settings, kube, identity=name, clock=self.clock, watch_times=watch_rig.BRISK
        )
        service.cluster.start()
        replica = Replica(service=service, kube=kube)
        self.replicas.append(replica)
        return replica

    def stepping_replica(self, **options: str) -> Replica:
        """Start a replica, and let time pass until it has decided about the pods of now."""
        replica = self.replica(**options)
        self.pass_time(SOON_S, replica)
        return replica

    def kill(self, replica: Replica) -> None:
        """End a replica without a word."""
        self.replicas.remove(replica)
        replica.service.cluster.close()
        replica.kube.close()

    def sync(self, *replicas: Replica) -> None:
        """Wait until replicas have seen the cluster as it is."""
        for each in replicas:
            waiting.until(lambda: self._is_up_to_date(each), "a replica's watches")  # noqa: B023

    def _is_up_to_date(self, replica: Replica) -> bool:
        cluster = replica.service.cluster
        versions = {node.name: node.version for node in cluster.reported.items()}
        there = {
            each["metadata"]["name"]: each["metadata"]["resourceVersion"]
            for each in self.server.objects(kinds.NODES)
        }
        pods = set(filter(None, map(demand.parse, self.server.objects(kinds.PODS))))
        return cluster.is_current and versions == there and set(cluster.pods.items()) == pods

    def pass_time(self, seconds: float, *replicas: Replica) -> None:
        """Let time pass in steps, in which these replicas see the cluster and step."""
        step_s = 5 if seconds > _LONG_S else 1
        for _ in range(math.ceil(seconds / step_s)):
            self.clock.now_s += step_s
            for each in replicas:
                self.sync(each)
                each.service.loop.step()
            assert sum(each.leads for each in self.replicas) <= 1

    # -- what can be seen ---------------------------------------------------------------------

    def node(self, name: str = "n1") -> api_objects.Object:
        return self.server.get(kinds.NODES, name)

    def requested_layout(self, name: str = "n1") -> str | None:
        """Return the layout in a node's annotation."""
        text: str | None = self.node(name)["metadata"]["annotations"].get(
            well_known.LAYOUT_ANNOTATION
        )
        return text

    def requested_node(self) -> str:
        """Return the only node with a layout in its annotation."""
        (name,) = filter(self.requested_layout, self.gpus)
        return name

    def patches(self) -> list[apiserver.LoggedRequest]:
        return self.server.log.requests(verb="patch")

    def events(self, reason: str = "") -> list[api_objects.Object]:
        """Return the Events with a reason, or all, the oldest first: their names have hashes."""
        every = sorted(self.server.objects(kinds.EVENTS), key=lambda each: each["firstTimestamp"])
        return [each for each in every if reason in ("", each["reason"])]

    def metric(self, replica: Replica, name: str, **labels: str) -> float:
        """Return the value of a metric, without the namespace in its name."""
        registry = replica.service.metrics.registry
        value = registry.get_sample_value(f"mig_manager_partitioner_{name}", labels)
        assert value is not None, name
        return value


@contextlib.contextmanager
def serving(server: apiserver.ApiServer | None = None) -> Iterator[PartitionerRig]:
    """A rig whose replicas end with the block."""
    with apiserver.serve(server or apiserver.ApiServer(bookmark_period_s=0.05)) as running:
        rig = PartitionerRig(running)
        try:
            yield rig
        finally:
            running.clear_faults()
            for each in list(rig.replicas):
                rig.kill(each)


def simulate(
    shell: commandline.Shell,
    nodes: Sequence[Mapping[str, Any]],
    pods: Sequence[Mapping[str, Any]],
    *options: str,
) -> commandline.Answer:
    """Give nodes and pods to the command in files."""
    files = [
        shell.file(json.dumps({"kind": "List", "items": items}), name)
        for name, items in (("nodes.json", nodes), ("pods.json", pods))
    ]
    return shell("partitioner", "--simulate", *files, *options)
