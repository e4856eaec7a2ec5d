"""What the cluster in memory has of the node: the Node object, pods, and budgets for them."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from mig_manager.core import model
from mig_manager.core.node import eviction_rules
from mig_manager.core.node.daemons import clients
from mig_manager.core.node.devices import claims
from mig_manager.core.objects import pod_object, selectors, well_known
from mig_manager.core.records import inventory_codec, journals
from tests.rigs.node import fakes, parts, samples


@dataclasses.dataclass(slots=True)
class NodeObject:
    """The Node object, and what was published on it so far, in order."""

    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    annotations: dict[str, str] = dataclasses.field(default_factory=dict)
    uid: str = "node-uid"
    is_unschedulable: bool = False
    has_reconfiguring_taint: bool = False
    taints: set[str] = dataclasses.field(default_factory=set)  # keys of other taints
    ready_condition: dict[str, str] | None = None  # ``MigReady`` as the node has it
    recovery_condition: dict[str, str] | None = None  # ``GpuRecoveryNeeded`` as the node has it

    states: list[str] = dataclasses.field(default_factory=list)
    status_messages: list[str] = dataclasses.field(default_factory=list)
    ready_reasons: list[str] = dataclasses.field(default_factory=list)  # those of ``MigReady``
    events: list[str] = dataclasses.field(default_factory=list)  # their reasons
    event_messages: list[str] = dataclasses.field(default_factory=list)

    @property
    def status(self) -> dict[str, Any]:
        """The status that the agent published, empty before the first."""
        text = self.annotations.get(well_known.STATUS_ANNOTATION, "{}")
        status: dict[str, Any] = json.loads(text)
        return status

    @property
    def is_plugin_paused(self) -> bool:
        return self.labels.get(well_known.PLUGIN_DEPLOY_LABEL) == well_known.PAUSED_VALUE

    @property
    def published_gpus(self) -> model.ObservedGpus:
        return inventory_codec.from_json(self.annotations[well_known.GPUS_ANNOTATION])

    @property
    def journal(self) -> journals.Journal:
        return journals.Journal.from_json(self.annotations[well_known.JOURNAL_ANNOTATION])

    @property
    def request_record(self) -> dict[str, Any]:
        """What the agent noted about the request that it serves."""
        record: dict[str, Any] = json.loads(self.annotations[well_known.REQUEST_ANNOTATION])
        return record

    def forget_past(self) -> None:
        for notes in (
            self.states,
            self.status_messages,
            self.ready_reasons,
            self.events,
            self.event_messages,
        ):
            notes.clear()


class Pods(dict[str, pod_object.Pod]):
    """The pods on the node, by UID."""

    def __init__(self, kubelet: parts.Kubelet, clock: fakes.FakeClock) -> None:
        super().__init__()
        self.watched: Callable[[], pod_object.Pods | None] = lambda: None
        """The pods as a watch reports them; None: there is no watch."""
        self.elsewhere: dict[str, pod_object.Pod] = {}
        """Pods of other nodes, and unscheduled ones."""
        self.serial = 0
        self._kubelet = kubelet
        self._clock = clock

    def add(self, name: str, *, devices: frozenset[str] = frozenset(), **fields: object) -> str:
        self.serial += 1
        uid = f"uid-{self.serial}"
        self[uid] = samples.pod(
            name,
            uid=uid,
            gpu_resources={"nvidia.com/gpu": len(devices)} if devices else {},
            node_name="node-a",
        )
        self.change(uid, **fields)
        if devices:
            self._kubelet.devices_by_pod[uid] = devices
        return uid

    def change(self, uid: str, **fields: object) -> None:
        self[uid] = dataclasses.replace(self[uid], **fields)  # type: ignore[arg-type]

    def terminate(self, uid: str) -> None:
        """Begin the grace period of a pod; one that has finished is gone at once."""
        pod = self[uid]
        if pod.is_finished:
            self.remove(uid)
        elif not pod.is_terminating:
            ends_by_s = self._clock.unix_s() + pod.grace_s
            self.change(uid, is_terminating=True, ends_by_s=ends_by_s)

    def remove(self, uid: str) -> None:
        """Remove a pod that has ended, and free its devices."""
        del self[uid]
        self._kubelet.devices_by_pod.pop(uid, None)

    def remove_if(self, has_ended: Callable[[pod_object.Pod], bool]) -> None:
        for pod in [*filter(has_ended, self.values())]:
            self.remove(pod.uid)

    @property
    def names(self) -> set[str]:
        return {pod.name for pod in self.values()}

    def uid_of(self, name: str) -> str:
        (uid,) = (uid for uid, pod in self.items() if pod.name == name)
        return uid

    @property
    def everywhere(self) -> pod_object.Pods:
        return (*self.values(), *self.elsewhere.values())

    @property
    def plugins(self) -> list[pod_object.Pod]:
        return [*filter(clients.is_device_plugin, self.values())]

    @property
    def dra_drivers(self) -> list[pod_object.Pod]:
        return [*filter(claims.is_driver, self.values())]

    @property
    def has_dra_driver(self) -> bool:
        """Whether one of them is NVIDIA's DRA driver, and works."""
        return any(pod.is_ready and not pod.is_terminating for pod in self.dra_drivers)


@dataclasses.dataclass(slots=True)
class Disruptions:
    """What the API server says to evictions."""

    refusals: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name of a pod -> why it must not be evicted."""
    budgets: list["Budget"] = dataclasses.field(default_factory=list)
    retry_after_s: float = 0.0


@dataclasses.dataclass(slots=True)
class Budget:
    """A PodDisruptionBudget whose controller is immediate."""

    name: str
    app: str  # it covers the pods with this value of the label ``app``
    replicas: int
    max_unavailable: int
    namespace: str = "default"

    def with_status(self, pods: pod_object.Pods) -> eviction_rules.Budget:
        """Return it with its status where these are the pods of the cluster."""
        ready = [
            pod for pod in pods if self.covers(pod) and pod.is_ready and not pod.is_terminating
        ]
        desired = self.replicas - self.max_unavailable
        return eviction_rules.Budget(
            namespace=self.namespace,
            name=self.name,
            selector=selectors.parse_selector(f"app={self.app}"),
            allowed=max(0, len(ready) - desired),
            healthy=len(ready),
            desired=desired,
        )

    def covers(self, pod: pod_object.Pod) -> bool:
        return pod.namespace == self.namespace and pod.labels.get("app") == self.app
