"""Fakes at the ports: one small node in memory, whose every port call can be made to fail."""

import contextlib
import dataclasses
import json
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from mig_manager import errors
from mig_manager.core import host_files, model, ports, steps
from mig_manager.core.node import clients, cluster, policy, resources
from mig_manager.core.node import policy as policies
from mig_manager.core.planner import planner
from tests.sandbox import driver_rules


class FakeClock:
    """Time that passes only by waiting; each wait lets the node live a little."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.on_wait: list[Callable[[], None]] = []

    def now_iso(self, *, after_s: float = 0.0) -> str:
        return f"T{self.now_s + after_s:.2f}"

    def monotonic(self) -> float:
        return self.now_s

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

    def observed(self, rig: "NodeRig") -> policy.Budget:
        """Return it with its status as it is now."""
        ready = [
            pod
            for pod in (*rig.pods.values(), *rig.elsewhere.values())
            if self.covers(pod) and pod.is_ready and not pod.is_terminating
        ]
        desired = self.replicas - self.max_unavailable
        return policy.Budget(
            namespace="default",
            name=self.name,
            selector=(
                policy.Requirement(
                    key="app", operator=policy.Operator.IN, values=frozenset({self.app})
                ),
            ),
            allowed=max(0, len(ready) - desired),
            healthy=len(ready),
            desired=desired,
        )

    def covers(self, pod: cluster.Pod) -> bool:
        return pod.labels.get("app") == self.app


@dataclasses.dataclass
class NodeRig:
    """The whole node: GPUs, pods, plugin, labels; state is public for the tests to look at."""

    gpus: tuple[model.Gpu, ...]
    lost: set[str] = dataclasses.field(default_factory=set)
    """UUIDs of GPUs that have fallen off the bus."""
    clock: FakeClock = dataclasses.field(default_factory=FakeClock)
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    annotations: dict[str, str] = dataclasses.field(default_factory=dict)
    is_unschedulable: bool = False
    has_hold_taint: bool = False
    pods: dict[str, cluster.Pod] = dataclasses.field(default_factory=dict)
    watched: Callable[[], tuple[cluster.Pod, ...] | None] = lambda: None
    """The pods as a watch reports them; None: there is no watch."""
    assigned: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    claims: set[str] = dataclasses.field(default_factory=set)
    """UIDs of pods that hold a GPU by ResourceClaim."""
    budgets: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name of a pod -> why it must not be evicted."""
    disruption_budgets: list["FakeBudget"] = dataclasses.field(default_factory=list)
    elsewhere: dict[str, cluster.Pod] = dataclasses.field(default_factory=dict)
    """Pods of other nodes, and unscheduled ones."""
    retry_after_s: float = 0.0
    deploy_daemons: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Deploy label -> whether its pod becomes ready."""
    loose_daemons: set[str] = dataclasses.field(default_factory=set)
    """Names of daemons that only the hold taint keeps away."""
    policy: policies.Policy = dataclasses.field(default_factory=policies.Policy)
    """What the node's owner wants; tests hand it to the pipeline."""
    extra_clients: str = ""
    """The owner's table of daemons; tests hand it to the pipeline."""
    messages: list[str] = dataclasses.field(default_factory=list)
    """Of the events."""
    statuses: list[str] = dataclasses.field(default_factory=list)
    """Messages of the status annotation, in order."""
    schedulable: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    unhealthy: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    """Devices that the plugin has registered and calls unhealthy."""
    kubelet_is_silent: bool = False
    plugin_is_broken: bool = False
    plugin_is_gated: bool = True
    log: list[str] = dataclasses.field(default_factory=list)
    states: list[str] = dataclasses.field(default_factory=list)
    events: list[str] = dataclasses.field(default_factory=list)
    on_call: Callable[[], None] = lambda: None
    """Called after each port call is logged."""
    failing: dict[int, Exception] = dataclasses.field(default_factory=dict)
    """Index into ``log`` -> the error that this call raises."""
    refusing: dict[str, Exception] = dataclasses.field(default_factory=dict)
    """Name of a port call -> the error that each of them raises, for as long as it stands here."""
    losing: dict[int, Exception] = dataclasses.field(default_factory=dict)
    """Index into ``log`` -> the error that answers this patch although it was carried out."""
    step_error: Callable[[steps.Step], Exception | None] = lambda _step: None
    services: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Name of a service of the host -> whether it runs."""
    broken_services: set[str] = dataclasses.field(default_factory=set)
    """Those that neither start nor stop."""
    gpu_users: str = ""
    """Who uses what a plan destroys; empty: no process does."""
    mode_waits: bool = False
    """Whether a MIG mode change waits for a reset or a reboot."""
    has_reset: bool = False
    may_reboot: bool = False
    """What the node's owner allows; tests hand it to the pipeline."""
    reset_only: set[str] = dataclasses.field(default_factory=set)
    """UUIDs that a reset must name, no more and no less; empty: any."""
    reset_refusal: str = ""
    """Why no GPU is reset; empty: they are."""
    boot_id: str = "boot-1"
    reboot_refusal: str = ""
    reboots: int = 0
    """How often a reboot was asked for."""
    slots: ports.Slots | None = None
    """The owner's budget for nodes under change; tests hand it to the pipeline."""
    refreshed: int = 0
    """How often the device files were brought up to date."""
    saved: list[str] = dataclasses.field(default_factory=list)
    """What was kept for the next boot."""
    hooks: str = ""
    """The owner's hooks file; tests hand it to the pipeline."""
    missing_hooks: set[str] = dataclasses.field(default_factory=set)
    """Commands that are not there."""
    broken_hooks: set[str] = dataclasses.field(default_factory=set)
    """Commands that fail."""
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
        for uid in [uid for uid, pod in self.pods.items() if pod.is_terminating]:
            del self.pods[uid]
            self.assigned.pop(uid, None)
        self._start_daemons()
        if self._plugin_is_wanted() and not self._plugins():
            self.start_plugin()

    def _start_daemons(self) -> None:
        names = {pod.name for pod in self.pods.values()}
        # The DaemonSet controller starts no pod on a node with a taint that it does not tolerate.
        if self.has_hold_taint:
            return
        for key, is_ready in self.deploy_daemons.items():
            name = key.rpartition(".")[2]
            if self.labels.get(key) == "true" and name not in names:
                self.add_pod(
                    name,
                    labels={"app": name},
                    node_selector={key: "true"},
                    owner_kind="DaemonSet",
                    is_ready=is_ready,
                )
        for name in self.loose_daemons - names:
            self.add_pod(name, labels={"app": name}, owner_kind="DaemonSet")

    def _plugins(self) -> list[cluster.Pod]:
        return [pod for pod in self.pods.values() if clients.is_device_plugin(pod)]

    def _plugin_is_wanted(self) -> bool:
        is_selected = self.labels.get(cluster.PLUGIN_DEPLOY_LABEL) == "true"
        return not self.has_hold_taint and (is_selected or not self.plugin_is_gated)

    def start_plugin(self) -> None:
        """Start a device plugin: it sees the GPUs as they are now, and never again."""
        gated = {cluster.PLUGIN_DEPLOY_LABEL: "true"} if self.plugin_is_gated else {}
        self.add_pod(
            "nvidia-device-plugin",
            labels={"app": "nvidia-device-plugin-daemonset"},
            node_selector=gated,
            owner_kind="DaemonSet",
            mounts_plugin_sockets=True,
            is_ready=not self.plugin_is_broken,
        )
        if not self.plugin_is_broken:
            self.schedulable = {"nvidia.com/gpu": resources.expected_devices(self.gpus)[0]}

    def add_pod(
        self, name: str, *, devices: frozenset[str] = frozenset(), **fields: object
    ) -> str:
        """Add a running pod; return its UID."""
        self._serial += 1
        uid = f"uid-{self._serial}"
        pod = cluster.Pod(
            namespace="default",
            name=name,
            uid=uid,
            phase="Running",
            labels={},
            node_selector={},
            owner_kind=None,
            is_mirror=False,
            is_ready=True,
            is_terminating=False,
            gpu_resources={"nvidia.com/gpu": len(devices)} if devices else {},
            container_names=("main",),
            node_name="node-a",
        )
        self.pods[uid] = dataclasses.replace(pod, **fields)  # type: ignore[arg-type]
        if devices:
            self.assigned[uid] = devices
        return uid

    def called(self, name: str) -> None:
        """Log a port call, or fail it."""
        self.log.append(name)
        self.on_call()
        error = self.failing.get(len(self.log) - 1) or self.refusing.get(name)
        if error is not None:
            raise error

    # -- ports, each in its own little class because their methods share names -----------

    @property
    def node(self) -> "FakeNode":
        return FakeNode(self)

    @property
    def workloads(self) -> "FakeWorkloads":
        return FakeWorkloads(self)

    @property
    def allocations(self) -> "FakeAllocations":
        return FakeAllocations(self)

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
    def host(self) -> "FakeHost":
        return FakeHost(self)

    @property
    def programs(self) -> "FakeHooks":
        return FakeHooks(self)

    @property
    def hardware(self) -> "FakeGpus":
        return FakeGpus(self)


class FakeNode:
    def __init__(self, rig: NodeRig) -> None:
        self._rig = rig

    def read(self) -> cluster.NodeView:
        self._rig.called("node.read")
        return self._view()

    def _view(self) -> cluster.NodeView:
        rig = self._rig
        return cluster.NodeView(
            name="node-a",
            uid="node-uid",
            labels=dict(rig.labels),
            annotations=dict(rig.annotations),
            is_unschedulable=rig.is_unschedulable,
            taint_keys=frozenset({cluster.HOLD_TAINT} if rig.has_hold_taint else ()),
            allocatable={name: len(ids) for name, ids in rig.schedulable.items()},
            capacity={
                name: len(ids | rig.unhealthy.get(name, frozenset()))
                for name, ids in rig.schedulable.items()
            },
        )

    def patch(self, change: cluster.NodePatch) -> cluster.NodeView:
        # As over HTTP: what depends on the node is written only for the node that was decided for.
        assert change.hold_taint is None
        assert change.unschedulable is None
        self._rig.called("node.patch")
        return self._write(change)

    def announce(self, change: cluster.NodePatch) -> None:
        with contextlib.suppress(errors.ClusterError):
            self.patch(change)

    def update(self, decide: Callable[[cluster.NodeView], cluster.NodePatch]) -> cluster.NodeView:
        view = self._view()
        while True:
            change = decide(view)
            self._rig.called("node.patch")
            if self._view() == view:
                return self._write(change)
            self._rig.called("node.read")
            view = self._view()

    def _write(self, change: cluster.NodePatch) -> cluster.NodeView:
        rig = self._rig
        _merge(rig.labels, change.labels)
        _merge(rig.annotations, change.annotations)
        if change.unschedulable is not None:
            rig.is_unschedulable = change.unschedulable
        if change.hold_taint is not None:
            rig.has_hold_taint = change.hold_taint
        text = change.annotations.get(cluster.STATUS_ANNOTATION)
        if text:
            rig.statuses.append(str(json.loads(text)["message"]))
        state = change.labels.get(cluster.STATE_LABEL)
        if state and (not rig.states or rig.states[-1] != state):
            rig.states.append(state)
        _drop_gated(rig)
        lost = rig.losing.get(len(rig.log) - 1)
        if lost is not None:
            raise lost
        return self._view()

    def emit(self, *, reason: str, message: str, is_warning: bool) -> None:
        self._rig.events.append(reason)
        self._rig.messages.append(message)

    def flush_events(self, timeout_s: float) -> bool:
        return True


def _merge(target: dict[str, str], change: Mapping[str, str | None]) -> None:
    for key, value in change.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value


def _drop_gated(rig: NodeRig) -> None:
    for uid, pod in list(rig.pods.items()):
        if any(rig.labels.get(key) != value for key, value in pod.node_selector.items()):
            rig.pods[uid] = dataclasses.replace(pod, is_terminating=True)


class FakeWorkloads:
    def __init__(self, rig: NodeRig) -> None:
        self._rig = rig

    def list(self) -> tuple[cluster.Pod, ...]:
        self._rig.called("workloads.list")
        return tuple(self._rig.pods.values())

    def watched(self) -> tuple[cluster.Pod, ...] | None:
        return self._rig.watched()

    def evict(self, pod: cluster.Pod) -> ports.Verdict:
        self._rig.called("workloads.evict")
        if pod.uid not in self._rig.pods:
            return ports.Verdict(answer=ports.Eviction.GONE)
        verdict = self._verdict(pod)
        if verdict.answer is ports.Eviction.ACCEPTED:
            self._end(pod)
        return verdict

    def can_evict(self, pod: cluster.Pod) -> ports.Verdict:
        self._rig.called("workloads.can_evict")
        return self._verdict(pod)

    def budgets(self, namespaces: Collection[str]) -> tuple[policy.Budget, ...]:
        self._rig.called("workloads.budgets")
        known = self._rig.disruption_budgets if "default" in namespaces else ()
        return tuple(budget.observed(self._rig) for budget in known)

    def covered(self, budget: policy.Budget) -> tuple[cluster.Pod, ...]:
        self._rig.called("workloads.covered")
        (ours,) = (one for one in self._rig.disruption_budgets if one.name == budget.name)
        pods = (*self._rig.pods.values(), *self._rig.elsewhere.values())
        return tuple(pod for pod in pods if ours.covers(pod))

    def _verdict(self, pod: cluster.Pod) -> ports.Verdict:
        why = self._rig.budgets.get(pod.name, "")
        guards = [one for one in self._rig.disruption_budgets if one.covers(pod)]
        if len(guards) > 1:
            why = "more than one budget"
        elif guards and not guards[0].observed(self._rig).allowed:
            why = f"budget {guards[0].name} is used up"
        if not why:
            return ports.Verdict(answer=ports.Eviction.ACCEPTED)
        return ports.Verdict(
            answer=ports.Eviction.BLOCKED, why=why, retry_after_s=self._rig.retry_after_s
        )

    def delete(self, pod: cluster.Pod) -> None:
        self._rig.called("workloads.delete")
        self._end(pod)

    def _end(self, pod: cluster.Pod) -> None:
        if pod.uid in self._rig.pods:
            self._rig.pods[pod.uid] = dataclasses.replace(pod, is_terminating=True)


class FakeAllocations:
    def __init__(self, rig: NodeRig) -> None:
        self._rig = rig

    def assigned(self) -> tuple[cluster.PodDevices, ...]:
        self._answer("allocations.assigned")
        return tuple(
            cluster.PodDevices(
                namespace="default",
                name=self._rig.pods[uid].name,
                device_ids=self._rig.assigned.get(uid, frozenset()),
                claim_drivers=frozenset(
                    {cluster.GPU_CLAIM_DRIVER} if uid in self._rig.claims else ()
                ),
            )
            for uid in self._rig.pods
            if uid in self._rig.assigned or uid in self._rig.claims
        )

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        self._answer("allocations.allocatable")
        return self._rig.schedulable

    def _answer(self, name: str) -> None:
        self._rig.called(name)
        if self._rig.kubelet_is_silent:
            raise errors.ClusterError("no socket", reason=errors.Reason.POD_RESOURCES_UNAVAILABLE)


class FakeGpus:
    def __init__(self, rig: NodeRig) -> None:
        self._rig = rig

    def observe(self) -> model.ObservedGpus:
        self._rig.called("gpus.observe")
        return seen_of(self._rig.gpus, self._rig.lost)

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        self._rig.called("gpus.execute")
        if plan.requires_idle and self._rig.gpu_users:
            raise errors.GpuInUseError(f"GPU 0 is in use by {self._rig.gpu_users}")
        failed: list[Exception] = []
        for gpu_plan in plan.gpus:
            try:
                self._execute_on_one(gpu_plan)
            except errors.MigManagerError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return of_plan(self._rig.gpus, plan, self._rig.lost)

    def _execute_on_one(self, plan: steps.GpuPlan) -> None:
        for step in plan.steps:
            error = self._rig.step_error(step)
            if error is not None:
                raise error
            if step.gpu_uuid in self._rig.lost:
                return
            self._rig.executed.append(step)
            if isinstance(step, steps.SetMode) and self._rig.mode_waits:
                self._put_off(step)
            self._rig.gpus = tuple(
                apply_step(gpu, step) if gpu.uuid == step.gpu_uuid else gpu
                for gpu in self._rig.gpus
            )

    def _put_off(self, step: steps.SetMode) -> None:
        self._rig.gpus = tuple(
            dataclasses.replace(gpu, pending_mode=step.mode) if gpu.uuid == step.gpu_uuid else gpu
            for gpu in self._rig.gpus
        )
        (ours,) = (gpu for gpu in self._rig.gpus if gpu.uuid == step.gpu_uuid)
        if ours.pending_mode is not ours.current_mode:
            raise errors.HardwareError(
                "the mode waits for a reset", reason=errors.Reason.RESET_REQUIRED
            )


class FakeHost:
    """Implements the ports of the machine underneath, all in one."""

    def __init__(self, rig: NodeRig) -> None:
        self._rig = rig

    def running(self, names: Sequence[str]) -> tuple[str, ...]:
        self._rig.called("host.running")
        return tuple(name for name in names if self._rig.services.get(name))

    def stop(self, name: str) -> None:
        self._switch(name, "host.stop", is_on=False)

    def may_have_stopped(self, name: str, listed: Collection[str]) -> bool:
        return name in listed

    def start(self, name: str) -> bool:
        was_down = not self._rig.services.get(name)
        self._switch(name, "host.start", is_on=True)
        return was_down

    def _switch(self, name: str, call: str, *, is_on: bool) -> None:
        self._rig.called(call)
        if name in self._rig.broken_services:
            raise errors.HostError(
                f"{name} does not answer", reason=errors.Reason.HOST_SERVICE_FAILED
            )
        self._rig.services[name] = is_on

    def reset(self, gpus: Sequence[model.Gpu]) -> None:
        self._rig.called("host.reset")
        if self._rig.reset_refusal:
            raise errors.HostError(self._rig.reset_refusal, reason=errors.Reason.RESET_REQUIRED)
        chosen = {gpu.uuid for gpu in gpus}
        assert not self._rig.reset_only or chosen == self._rig.reset_only
        self._rig.gpus = tuple(
            dataclasses.replace(gpu, current_mode=gpu.pending_mode, gpu_instances=())
            if gpu.uuid in chosen
            else gpu
            for gpu in self._rig.gpus
        )

    def request(self, why: str) -> None:
        assert why
        self._rig.called("host.reboot")
        if self._rig.reboot_refusal:
            raise errors.HostError(self._rig.reboot_refusal, reason=errors.Reason.REBOOT_REQUIRED)
        self._rig.reboots += 1

    def refresh(self) -> None:
        self._rig.called("host.refresh")
        self._rig.refreshed += 1

    def save(self, text: str) -> None:
        self._rig.called("host.save")
        self._rig.saved.append(text)

    def read(self) -> str | None:
        return self._rig.saved[-1] if self._rig.saved else None


def of_plan(
    gpus: Iterable[model.Gpu], plan: steps.Plan, lost: Collection[str] = ()
) -> model.ObservedGpus:
    """Return the GPUs that a plan is about, in its order."""
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    return seen_of((by_uuid[gpu_plan.gpu_uuid] for gpu_plan in plan.gpus), lost)


def seen_of(gpus: Iterable[model.Gpu], lost: Collection[str]) -> model.ObservedGpus:
    """Return GPUs as they are observed where some have fallen off the bus."""
    each = tuple(gpus)
    return model.ObservedGpus(
        (gpu for gpu in each if gpu.uuid not in lost),
        (unreachable(gpu) for gpu in each if gpu.uuid in lost),
    )


def unreachable(gpu: model.Gpu) -> model.UnreachableGpu:
    """Return a GPU that has fallen off the bus, as the driver reports it."""
    return model.UnreachableGpu(
        index=gpu.index,
        uuid=gpu.uuid,
        pci_address=gpu.pci_address,
        pci_device_id=gpu.pci_device_id,
        reason=errors.Reason.GPU_LOST,
        code=15,
        message="nvmlDeviceGetHandleByIndex answered 'GPU is lost'",
    )


class FakeHooks:
    """Implements ``ports.Hooks``."""

    variables: Mapping[str, str] = {"MIG_PARTED_HOOKS_FILE": "hooks.yaml"}

    def __init__(self, rig: NodeRig) -> None:
        self._rig = rig

    def read(self) -> host_files.Table:
        self._rig.called("hooks.read")
        return host_files.parse_hooks(self._rig.hooks, source="hooks.yaml")

    def missing(self, hook: host_files.Hook) -> str:
        is_missing = hook.command in self._rig.missing_hooks
        return f"{hook.location}: program {hook.command} is not found" if is_missing else ""

    def run(
        self,
        point: host_files.Point,
        hook: host_files.Hook,
        environment: Mapping[str, str],
        *,
        check: Callable[[], object],
    ) -> None:
        self._rig.called("hooks.run")
        check()
        self._rig.hooked.append(hook.command)
        self._rig.hook_environment = environment
        if hook.command in self._rig.broken_hooks:
            raise errors.HostError(f"{hook.command} failed", reason=errors.Reason.HOOK_FAILED)
        if point in (host_files.Point.APPLY_START, host_files.Point.APPLY_EXIT):
            self._rig.owes_exit = point is host_files.Point.APPLY_START


def apply_step(gpu: model.Gpu, step: steps.Step) -> model.Gpu:
    """Do one step to an observed GPU.

    Raises:
        ImpossibleStepError: The driver would refuse it.
    """
    driver_rules.check(gpu, step)
    instances = gpu.gpu_instances
    kept: list[model.GpuInstance]
    match step:
        case steps.SetMode():
            return dataclasses.replace(
                gpu, current_mode=step.mode, pending_mode=step.mode, gpu_instances=()
            )
        case steps.DestroyComputeInstance():
            kept = [_without(gi, step) for gi in instances]
        case steps.DestroyGpuInstance():
            kept = [gi for gi in instances if gi.instance_id != step.gpu_instance_id]
        case steps.CreateGpuInstance():
            kept = [
                *instances,
                model.GpuInstance(
                    instance_id=1 + max((gi.instance_id for gi in instances), default=0),
                    profile=step.profile,
                    profile_id=step.profile_id,
                    placement=step.placement,
                    compute_instances=(),
                ),
            ]
        case steps.CreateComputeInstance():
            kept = [_with(gpu, gi, step) for gi in instances]
    kept.sort(key=lambda gi: gi.placement)
    return dataclasses.replace(gpu, gpu_instances=tuple(kept))


def _without(gi: model.GpuInstance, step: steps.DestroyComputeInstance) -> model.GpuInstance:
    if gi.instance_id != step.gpu_instance_id:
        return gi
    staying = tuple(c for c in gi.compute_instances if c.instance_id != step.compute_instance_id)
    return dataclasses.replace(gi, compute_instances=staying)


def _with(
    gpu: model.Gpu, gi: model.GpuInstance, step: steps.CreateComputeInstance
) -> model.GpuInstance:
    if gi.placement != step.gpu_instance_placement:
        return gi
    number = len(gi.compute_instances)
    created = model.ComputeInstance(
        instance_id=number,
        profile=step.profile,
        placement=step.placement,
        uuid=mig_uuid(f"{gpu.index}-{gi.placement}-{step.profile}-{number}"),
    )
    return dataclasses.replace(gi, compute_instances=(*gi.compute_instances, created))


def mig_uuid(name: str) -> str:
    """Return the UUID of a MIG device, the same one for the same name."""
    return f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, name)}"


def brought_to(gpus: tuple[model.Gpu, ...], wanted: model.DesiredGpu) -> tuple[model.Gpu, ...]:
    """Return the GPUs with ``wanted`` applied to each."""
    for step in planner.plan(gpus, {gpu.uuid: wanted for gpu in gpus}).steps:
        gpus = tuple(apply_step(g, step) if g.uuid == step.gpu_uuid else g for g in gpus)
    return gpus
