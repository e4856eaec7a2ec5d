"""Fakes at the ports: one small node in memory, whose every port call can be made to fail."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

from mig_manager import errors
from mig_manager.core import model, ports, steps
from mig_manager.core.node import claims as dra
from mig_manager.core.node import (
    clients,
    evictions,
    pod_object,
    policies,
    schedulable,
    selectors,
    well_known,
)
from tests.node import fake_ports
from tests.unit import samples


class FakeClock:
    """Time that passes only by waiting; each wait lets the node live a little."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.on_wait: list[Callable[[], object]] = []

    def now_iso(self, *, after_s: float = 0.0) -> str:
        return f"T{self.now_s + after_s:.2f}"

    def monotonic(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return 1e9 + self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += max(seconds, 0.001)
        for callback in self.on_wait:
            callback()


class FakeRequest:
    """A request that is superseded at its n-th check, or never."""

    def __init__(
        self, clock: FakeClock, *, ends_at: int | None = None, replaced: bool = False
    ) -> None:
        self._clock = clock
        self._ends_at = ends_at
        self._replaced = replaced
        self.asked = 0
        self.ends_when: Callable[[], bool] = lambda: False

    def check(self) -> None:
        self.asked += 1
        is_over = self._ends_at is not None and self.asked >= self._ends_at
        if is_over or self.ends_when():
            raise errors.Superseded(
                "test", is_replaced=self._replaced, is_stopping=not self._replaced
            )

    def wait(self, seconds: float) -> None:
        self._clock.wait(seconds)
        self.check()

    def pause(self, seconds: float) -> None:
        self.wait(seconds)


class FakeExclusion:
    """A lock that others hold for as many tries as they like."""

    def __init__(self, *, refusals: int = 0) -> None:
        self.refusals = refusals
        self.is_locked = False
        self.descriptions: list[str] = []

    @contextlib.contextmanager
    def hold(self, doing: str) -> Iterator[None]:
        if self.refusals:
            self.refusals -= 1
            raise errors.LockedError("another manager is at work: agent")
        self.descriptions.append(doing)
        self.is_locked = True
        try:
            yield
        finally:
            self.is_locked = False


class FakeConfig:
    def __init__(self, text: str, *, name: str = "test.yaml") -> None:
        self.text = text
        self.name = name

    def read(self) -> str:
        return self.text


@dataclasses.dataclass
class FakeBudget:
    """A PodDisruptionBudget of the namespace ``default`` whose controller is immediate."""

    name: str
    app: str
    """It covers the pods with this value of the label ``app``."""
    replicas: int
    max_unavailable: int

    def observed(self, rig: "NodeRig") -> evictions.Budget:
        """Return it with its status as it is now."""
        ready = [
            pod
            for pod in (*rig.pods.values(), *rig.elsewhere.values())
            if self.covers(pod) and pod.is_ready and not pod.is_terminating
        ]
        desired = self.replicas - self.max_unavailable
        return evictions.Budget(
            namespace="default",
            name=self.name,
            selector=selectors.parse_selector(f"app={self.app}"),
            allowed=max(0, len(ready) - desired),
            healthy=len(ready),
            desired=desired,
        )

    def covers(self, pod: pod_object.Pod) -> bool:
        return pod.labels.get("app") == self.app


@dataclasses.dataclass
class NodeRig:
    """The whole node: GPUs, pods, plugin, labels; state is public for the tests to look at."""

    gpus: tuple[model.Gpu, ...]
    lost: set[str] = dataclasses.field(default_factory=set)
    clock: FakeClock = dataclasses.field(default_factory=FakeClock)
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    annotations: dict[str, str] = dataclasses.field(default_factory=dict)
    is_unschedulable: bool = False
    has_hold_taint: bool = False
    taints: set[str] = dataclasses.field(default_factory=set)
    """Keys of other taints."""
    condition: dict[str, str] | None = None
    """``MigReady`` as the node has it."""
    recovery_condition: dict[str, str] | None = None
    """``GpuRecoveryNeeded`` as the node has it."""
    conditions: list[str] = dataclasses.field(default_factory=list)
    """The reasons of ``MigReady``, one for each write."""
    pods: dict[str, pod_object.Pod] = dataclasses.field(default_factory=dict)
    watched: Callable[[], tuple[pod_object.Pod, ...] | None] = lambda: None
    """The pods as a watch reports them; None: there is no watch."""
    assigned: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    unlisted: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    """Name of a pod that only kubelet lists -> its devices."""
    claims: set[str] = dataclasses.field(default_factory=set)
    """UIDs of pods that hold a GPU by ResourceClaim."""
    budgets: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name of a pod -> why it must not be evicted."""
    disruption_budgets: list["FakeBudget"] = dataclasses.field(default_factory=list)
    elsewhere: dict[str, pod_object.Pod] = dataclasses.field(default_factory=dict)
    """Pods of other nodes, and unscheduled ones."""
    retry_after_s: float = 0.0
    deploy_daemons: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Deploy label -> whether its pod becomes ready."""
    loose_daemons: set[str] = dataclasses.field(default_factory=set)
    """Names of daemons that only the hold taint keeps away."""
    controller_away_until_s: float = 0.0
    """When the DaemonSet controller is back, which stops and starts the daemons."""
    policy: policies.Policy = dataclasses.field(default_factory=policies.Policy)
    extra_clients: str = ""
    messages: list[str] = dataclasses.field(default_factory=list)
    """Of the events."""
    statuses: list[str] = dataclasses.field(default_factory=list)
    schedulable: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    withdrawn: Mapping[str, frozenset[str]] | None = None
    """What was schedulable when the agent last withdrew it; kubelet has not reported since."""
    phantoms: dict[str, int] = dataclasses.field(default_factory=dict)
    """Capacity that kubelet has forgotten, because its one update without it was lost."""
    unhealthy: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    """Devices that the plugin has registered and calls unhealthy."""
    kubelet_is_silent: bool = False
    kubelet_lists_from_s: float = 0.0
    """Before it, a kubelet that has just started lists no pod."""
    listed_from_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """UID of a starting pod -> when kubelet lists its devices."""
    plugin_is_broken: bool = False
    plugin_waiting: pod_object.Waiting | None = None
    """Why kubelet cannot start the container of a broken plugin."""
    plugin_is_gated: bool = True
    has_dra_driver: bool = False
    dra_is_gated: bool = True
    dra_is_broken: bool = False
    slices: tuple[dra.Slice, ...] | None = ()
    """What the DRA driver has published; None: the API does not list it."""
    log: list[str] = dataclasses.field(default_factory=list)
    states: list[str] = dataclasses.field(default_factory=list)
    events: list[str] = dataclasses.field(default_factory=list)
    on_call: Callable[[], object] = lambda: None
    failing: dict[int, BaseException] = dataclasses.field(default_factory=dict)
    """Index into ``log`` -> the error that this call raises."""
    refusing: dict[str, Exception] = dataclasses.field(default_factory=dict)
    """Name of a port call -> the error that each of them raises, for as long as it stands here."""
    losing: dict[int, Exception] = dataclasses.field(default_factory=dict)
    """Index into ``log`` -> the error that answers this patch although it was carried out."""
    step_error: Callable[[steps.Step], Exception | None] = lambda _step: None
    services: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Name of a service of the host -> whether it runs."""
    broken_services: set[str] = dataclasses.field(default_factory=set)
    gpu_users: str = ""
    """Who uses what a plan destroys; empty: no process does."""
    mode_waits: bool = False
    """Whether a MIG mode change waits for a reset or a reboot."""
    has_reset: bool = False
    may_reboot: bool = False
    reset_only: set[str] = dataclasses.field(default_factory=set)
    """UUIDs that a reset must name, no more and no less; empty: any."""
    reset_refusal: str = ""
    """Why no GPU is reset; empty: they are."""
    after_reset: model.RecoveryAction = model.RecoveryAction.NONE
    """The recovery action of a GPU after its repair."""
    boot_id: str = "boot-1"
    reboot_refusal: str = ""
    reboots: int = 0
    slots: ports.Slots | None = None
    refreshed: int = 0
    has_persistence: bool = False
    """Whether GPUs have persistence mode, without which they are reset."""
    refuses_persistence: bool = False
    """Whether it cannot be switched on."""
    without_persistence: set[str] = dataclasses.field(default_factory=set)
    """GPUs that have lost it."""
    saved: list[str] = dataclasses.field(default_factory=list)
    """What was kept for the next boot."""
    request_text: str | None = None
    """What the host keeps of the request."""
    hooks: str = ""
    missing_hooks: set[str] = dataclasses.field(default_factory=set)
    broken_hooks: set[str] = dataclasses.field(default_factory=set)
    hooks_broken_once: set[str] = dataclasses.field(default_factory=set)
    """Commands that fail the next time."""
    hooked: list[str] = dataclasses.field(default_factory=list)
    """Commands of the hooks that have run, failed ones included."""
    hook_environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of the last one."""
    owes_exit: bool = False
    """Whether hooks of the start have run, and those of the end have not."""
    executed: list[steps.Step] = dataclasses.field(default_factory=list)
    _serial: int = 0

    def __post_init__(self) -> None:
        self.clock.on_wait.append(self.live)

    # -- the node's own life -------------------------------------------------------------

    def live(self) -> None:
        """Let terminating pods go, and the DaemonSet controller and the plugin do their work."""
        for uid, pod in list(self.pods.items()):
            # Kubelet ends a pod with claims only once the driver has unprepared them.
            has_let_go = pod.claimed_ids is None or self.driver_runs
            if pod.is_terminating and has_let_go:
                del self.pods[uid]
                self.assigned.pop(uid, None)
            elif pod.phase == "Pending" and self.clock.now_s >= self.listed_from_s.get(
                uid, math.inf
            ):
                self.pods[uid] = dataclasses.replace(pod, phase="Running")
        if not self.is_controller_away:
            self.stop_daemons()
            self._start_daemons()

    @property
    def is_controller_away(self) -> bool:
        return self.clock.now_s < self.controller_away_until_s

    def stop_daemons(self) -> None:
        """Stop the daemons whose labels the node has not."""
        if not self.is_controller_away:
            for uid, pod in list(self.pods.items()):
                if any(self.labels.get(key) != value for key, value in pod.node_selector.items()):
                    self.pods[uid] = dataclasses.replace(pod, is_terminating=True)

    def _start_daemons(self) -> None:
        # No daemon starts on a node with a taint that it does not tolerate.
        if self.has_hold_taint:
            return
        names = self.pod_names
        for key, is_ready in self.deploy_daemons.items():
            name = key.rpartition(".")[2]
            if self.labels.get(key) == "true" and name not in names:
                self.add_pod(
                    name,
                    labels={"app": name},
                    node_selector={key: "true"},
                    owner_kind="DaemonSet",
                    is_ready=is_ready,
                    # Monitors of a DRA cluster have every GPU by a claim with admin access.
                    claimed_ids=frozenset() if name.endswith("-dra") else None,
                )
        for name in self.loose_daemons - names:
            self.add_pod(name, labels={"app": name}, owner_kind="DaemonSet")
        if self._plugin_is_wanted() and not self._plugins():
            self.start_plugin()
        is_selected = self.labels.get(dra.DEPLOY_LABEL) == "true" or not self.dra_is_gated
        if self.has_dra_driver and is_selected and not self.drivers:
            self.start_driver()

    def _plugins(self) -> list[pod_object.Pod]:
        return [pod for pod in self.pods.values() if clients.is_device_plugin(pod)]

    def _plugin_is_wanted(self) -> bool:
        is_selected = self.labels.get(well_known.PLUGIN_DEPLOY_LABEL) == "true"
        return is_selected or not self.plugin_is_gated

    def start_plugin(self) -> None:
        """Start a device plugin: it sees the GPUs as they are now, and never again."""
        gated = {well_known.PLUGIN_DEPLOY_LABEL: "true"} if self.plugin_is_gated else {}
        self.add_pod(
            "nvidia-device-plugin",
            labels={"app": "nvidia-device-plugin-daemonset"},
            node_selector=gated,
            owner_kind="DaemonSet",
            mounts_plugin_sockets=True,
            is_ready=not self.plugin_is_broken,
            waiting=self.plugin_waiting,
        )
        if not self.plugin_is_broken:
            self.schedulable = {"nvidia.com/gpu": schedulable.expected_devices(self.gpus)[0]}

    @property
    def drivers(self) -> list[pod_object.Pod]:
        return [pod for pod in self.pods.values() if dra.is_driver(pod)]

    @property
    def driver_runs(self) -> bool:
        return any(pod.is_ready and not pod.is_terminating for pod in self.drivers)

    def start_driver(self) -> None:
        """Start a DRA driver: it publishes the GPUs as they are now, and never again."""
        self.add_pod(
            "nvidia-dra-driver-kubelet-plugin",
            container_names=("gpus",),
            node_selector={dra.DEPLOY_LABEL: "true"} if self.dra_is_gated else {},
            owner_kind="DaemonSet",
            mounts_driver_sockets=True,
            is_ready=not self.dra_is_broken,
        )
        if self.dra_is_broken:
            return
        uuids = sorted(schedulable.expected_devices(self.gpus)[0])
        self.slices = (
            dra.Slice(
                name=f"node-a-gpu.nvidia.com-{self._serial}",
                pool="node-a",
                generation=self._serial,
                count=1,
                uuids={f"gpu-{number}": uuid for number, uuid in enumerate(uuids)},
                for_machines=frozenset(),
            ),
        )

    @property
    def pod_names(self) -> set[str]:
        return {pod.name for pod in self.pods.values()}

    def add_pod(
        self, name: str, *, devices: frozenset[str] = frozenset(), **fields: object
    ) -> str:
        self._serial += 1
        uid = f"uid-{self._serial}"
        pod = samples.pod(
            name,
            uid=uid,
            gpu_resources={"nvidia.com/gpu": len(devices)} if devices else {},
            node_name="node-a",
        )
        self.pods[uid] = dataclasses.replace(pod, **fields)  # type: ignore[arg-type]
        if devices:
            self.assigned[uid] = devices
        return uid

    def called(self, name: str) -> None:
        self.log.append(name)
        self.on_call()
        error = self.failing.get(len(self.log) - 1) or self.refusing.get(name)
        if error is not None:
            raise error

    # -- ports, each in its own little class because their methods share names -----------

    @property
    def node(self) -> "fake_ports.FakeNode":
        return fake_ports.FakeNode(self)

    @property
    def workloads(self) -> "fake_ports.FakeWorkloads":
        return fake_ports.FakeWorkloads(self)

    @property
    def allocations(self) -> "fake_ports.FakeAllocations":
        return fake_ports.FakeAllocations(self)

    @property
    def published(self) -> "fake_ports.FakeSlices | None":
        return fake_ports.FakeSlices(self) if self.has_dra_driver else None

    def restart_machine(self) -> None:
        """Reboot: pending modes are active, and no instance is left on the GPUs."""
        self.boot_id = f"boot-{int(self.boot_id.removeprefix('boot-')) + 1}"
        self.gpus = tuple(
            dataclasses.replace(gpu, current_mode=gpu.pending_mode, gpu_instances=())
            for gpu in self.gpus
        )
        self.schedulable = {}
        self.pods.clear()
        self.assigned.clear()
        self.live()

    @property
    def host(self) -> "fake_ports.FakeHost":
        return fake_ports.FakeHost(self)

    @property
    def request_file(self) -> "fake_ports.FakeRequestFile":
        return fake_ports.FakeRequestFile(self)

    @property
    def programs(self) -> "fake_ports.FakeHooks":
        return fake_ports.FakeHooks(self)

    @property
    def hardware(self) -> "fake_ports.FakeGpus":
        return fake_ports.FakeGpus(self)
