"""The ports of agent and command line, as protocols.

Every method may block until a deadline from the adapter's settings, and raises only errors of
``mig_manager.errors``.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from mig_manager import reasons
from mig_manager.core import gpu_processes, model, standbys, steps, timing
from mig_manager.core.files import hook_files
from mig_manager.core.fleet import slots
from mig_manager.core.node import (
    claims,
    client_table,
    evictions,
    node_object,
    pod_object,
)
from mig_manager.core.records import readiness


class Gpus(Protocol):
    """The GPUs of this node, through NVML; each call opens and closes one NVML session."""

    def observe(self) -> model.ObservedGpus:
        """Return every GPU, ascending by index, and the unreachable ones.

        Raises:
            HardwareError: NVML cannot be loaded, refuses, fails or does not answer in time, or no
                GPU is reachable.
        """

    def execute(self, plan: steps.Plan, observed: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        """Run the steps of all GPUs in parallel, the steps of one GPU in order.

        Steps are idempotent. ``IN_USE`` is retried for a bounded time. A failure on one GPU does
        not stop the others; it is raised once they have finished.

        Args:
            plan: The steps.
            observed: The last observation; constant facts of GPUs that keep their mode are reused.

        Returns:
            The plan's GPUs afterwards, in its order. The message of an unreachable one names the
            step.

        Raises:
            StalePlanError: Before the first step of a plan that requires idle GPUs: a GPU instance
                that it creates exists already.
            GpuInUseError: Before the first step of such a plan: processes use instances that it
                destroys.
            HardwareError: A step failed on a reachable GPU. The message names GPU, operation and
                code of each failure, for IN_USE also the processes that NVML lists.
        """


class Node(Protocol):
    """Our own Node object; a method raises ClusterError if the API refuses or does not answer."""

    def read(self) -> node_object.NodeView:
        """Return the node as the API has it now."""

    def latest(self, *, is_at_rest: bool = False) -> node_object.NodeView:
        """Return the node from the watch if it runs, without a request; never as before our write.

        Good enough to poll, and for decisions that ``update`` repeats. At rest a watch that has
        long been silent is enough.
        """

    def patch(self, change: node_object.NodePatch) -> node_object.NodeView:
        """Write labels and annotations that only this agent writes; return the new node."""

    def announce(self, change: node_object.NodePatch) -> None:
        """Write as ``patch`` does, but in the background and without an error.

        The next read or write waits for it, to keep the order.
        """

    def update(
        self, decide: Callable[[node_object.NodeView], node_object.NodePatch]
    ) -> node_object.NodeView:
        """Write labels, annotations and taints in one patch; return the patched node.

        ``decide`` computes the patch. After a conflict it computes it again with the newer node,
        unless that node has the patch already. The answer to our own write may have been lost.

        Raises:
            ClusterError: The API refuses or does not answer, or every attempt conflicts.
        """

    def withdraw_devices(self) -> None:
        """Report that no GPU device is allocatable, until kubelet reports the new ones.

        A refusal is logged, never raised.
        """

    def report_devices(self, counts: Mapping[str, int]) -> None:
        """Report how many devices of some resources kubelet has, as its next heartbeat would.

        A refusal is logged, never raised.
        """

    def remove_resources(self, names: Collection[str]) -> node_object.NodeView:
        """Remove resources from the node's capacity and allocatable; return the patched node.

        Kubelet restores the resources of a running device plugin with its next status update.
        """

    @property
    def has_unwritten_condition(self) -> bool:
        """Whether a condition is still to be written."""

    def set_condition(self, condition: readiness.Condition) -> None:
        """Write a condition, unless the node has it already, or lacks the default one.

        A failure is logged, never raised; see ``retry_condition``.
        """

    def retry_condition(self) -> None:
        """Write the newest conditions after failures of ``set_condition``, if any.

        Makes no request soon after a refusal.
        """

    def emit(self, *, reason: str, message: str, is_warning: bool) -> None:
        """Publish an Event on the node, in order and in the background.

        A refusal is logged, never raised.
        """

    def flush_events(self, timeout_s: float) -> bool:
        """Wait until Events are published or refused; return False at the time-out."""


class Workloads(Protocol):
    """The pods on our node; a method raises ClusterError if the API refuses or does not answer."""

    def list(self) -> pod_object.Pods:
        """Return all pods bound to our node, finished ones included."""

    def from_watch(self) -> pod_object.Pods | None:
        """Return the pods from the watch, without a request; they may be slightly outdated.

        Good enough to poll; decisions that evict or end a wait need ``list``. None without a
        watch, and from time to time to force a ``list``.
        """

    def present(self) -> pod_object.Pods:
        """Return all pods bound to our node, from the watch if there is one.

        Good enough to publish. Requests only the data that the watch lacks.
        """

    def unbound(self, bound: pod_object.Pods) -> pod_object.Pods:
        """Return the pods, besides ``bound``, to which a device of our node is allocated.

        The scheduler allocates the devices of a pod's ResourceClaims before it binds the pod. This
        lists all ResourceClaims of the cluster; without that right, no pod is returned.
        """

    def evict(self, pod: pod_object.Pod) -> evictions.EvictionResponse:
        """Evict a pod with its own grace period, guarded by its UID."""

    def can_evict(self, pod: pod_object.Pod) -> evictions.EvictionResponse:
        """Return the current answer to ``evict``, by a dry run."""

    def budgets(self, namespaces: Collection[str]) -> tuple[evictions.Budget, ...]:
        """Return the PodDisruptionBudgets of some namespaces."""

    def covered_by(self, budget: evictions.Budget) -> pod_object.Pods:
        """Return all pods that a budget covers, on any node or unscheduled."""

    def delete(self, pod: pod_object.Pod) -> None:
        """Delete a pod with its own grace period, guarded by its UID; done when it is gone.

        Budgets do not apply: for daemons, and for workloads only with a forced drain.
        """


class PodWatch(Protocol):
    """The watch of our node's pods during a change, and beyond."""

    def expect_change(self) -> None:
        """Watch from the next list of the pods on, until the end of the attempt."""

    def keep(self) -> None:
        """Watch until ``release``, whether a change is under way or not."""

    def release(self) -> None:
        """Watch only during a change, as before ``keep``."""

    def dismiss(self) -> None:
        """End the watch with the attempt, unless it is kept."""


class DeviceAllocations(Protocol):
    """Kubelet's PodResources API.

    Each method raises KubeletError if kubelet does not answer.
    """

    def assigned_devices(self) -> tuple[pod_object.PodDevices, ...]:
        """Return the devices of each pod."""

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        """Return the healthy device ids by resource name, in use or not.

        A replica of a shared device has an id of its own, with ``::`` and a number at the end.
        """


class ResourceSlices(Protocol):
    """The devices of our node that NVIDIA's DRA driver advertises.

    A method raises ClusterError if the API refuses or does not answer.
    """

    def list(self) -> tuple[claims.Slice, ...] | None:
        """Return the driver's slices; None if the API lacks the resource or forbids to list it."""

    def withdraw(self) -> tuple[claims.Slice, ...]:
        """Delete the slices, and return them; a new driver pod publishes others.

        A refusal is logged, never raised.
        """


class ConfigSource(Protocol):
    """The config document."""

    @property
    def name(self) -> str:
        """Its name in errors: the file name, or ``<stdin>``."""

    def read(self) -> str:
        """Return its text; ConfigError if it is missing, unreadable, too large, or not UTF-8."""


class NodeLock(Protocol):
    """The lock of this node's GPUs: one agent, boot unit or command changes them at a time."""

    def hold(
        self, doing: str, *, changes_gpus: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Hold the lock in the context; other managers read its purpose (``doing``).

        They also read whether its owner ``changes_gpus``, or only observes them.

        Raises:
            LockedError: On entering, at once: another manager, which it names, has the lock.
        """


class Slots(Protocol):
    """The cluster's slots for nodes under change; a node takes one before its drain."""

    def take(self) -> slots.Denial | None:
        """Take a free slot until ``release``; return why none is free, and None with a slot.

        The node may also have a slot after a ClusterError.
        """

    def check(self) -> None:
        """Raise NotReadyError SLOTS_TAKEN if another node may take the slot within 30 seconds."""

    def release(self) -> None:
        """Release this node's slot; if the API does not answer, the slot expires."""


class KeptText(Protocol):
    """A text that the host keeps over a reboot, replaced as a whole.

    Each method raises ConfigError if the file cannot be accessed.
    """

    def read(self) -> str | None:
        """Return the text; None if there is none."""

    def save(self, text: str) -> None:
        """Replace the text, on disk before this returns; after an error the old one stays."""


class KeptFile(KeptText, Protocol):
    """A kept text that can end, or be invalid."""

    def clear(self) -> None:
        """Remove the text, if any."""

    def set_aside(self) -> str:
        """Rename the file of an invalid text; return the new path."""


class Reboot(Protocol):
    """Reboots the node; each method raises HostError REBOOT_REQUIRED if that is refused."""

    def check(self) -> None:
        """Check whether a reboot is allowed, before pods are evicted for it."""

    def request(self, why: str) -> None:
        """Request a reboot and return at once; SIGTERM follows soon."""


class RecordPersistence(Protocol):
    """Records which GPUs a reset has without persistence mode."""

    def __call__(self, uuids: Collection[str], *, is_on: bool) -> object:
        """Record that the persistence mode of GPUs will be switched off, or is on again."""


class GpuReset(Protocol):
    """Resets GPUs with a pending MIG mode, or with a fault."""

    def reset(
        self,
        gpus: Sequence[model.Gpu],
        record_persistence: RecordPersistence,
        *,
        is_repair: bool = False,
    ) -> None:
        """Reset exactly these GPUs, and wait until it is done.

        Without ``is_repair``, a GPU without a pending mode or with instances is refused.

        ``record_persistence`` is called before a persistence mode is switched off, and once it is
        on again.

        Raises:
            HostError: IN_USE: processes use a GPU; the message names the known ones.
                RESET_REQUIRED: the reset of a GPU was refused for another reason. REBOOT_REQUIRED:
                this machine cannot reset a GPU.
        """

    def restore_persistence(self, gpus: Sequence[model.Gpu]) -> bool:
        """Switch persistence mode on; a failure is logged. Return whether it is on."""


class HostServices(Protocol):
    """The machine's own services, through its init system.

    Each method raises HostError HOST_SERVICE_FAILED, with the init system's message, if it fails
    or does not answer in time.
    """

    def running(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the active and starting ones, and the units that stop with them, in stop order.

        A unit that stops with them and cannot be started again is an error.
        """

    def stop(self, name: str) -> None:
        """Stop a service, if it runs, and wait until it has stopped."""

    def may_have_stopped(self, name: str, listed: Collection[str]) -> bool:
        """Return whether a service is listed, or stops with a listed one."""

    def start(self, name: str) -> bool:
        """Start a service and wait until it runs; return False if it was running before."""


class Hooks(Protocol):
    """The owner's programs around a change."""

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables for all hooks, besides the layout's name."""

    def read(self) -> hook_files.Table:
        """Return the current hooks; ConfigError if the file cannot be read or is invalid."""

    def missing(self, hook: hook_files.Hook) -> str:
        """Return why a hook's program cannot run here; empty if it can."""

    def run(
        self,
        point: hook_files.Point,
        hook: hook_files.Hook,
        environment: Mapping[str, str],
        *,
        check: Callable[[], object],
    ) -> None:
        """Run a hook to its end, and kill every process that it leaves behind.

        ``check`` is called repeatedly; its exceptions end the hook.

        Raises:
            HostError: HOOK_FAILED, with the hook's location and last output: it cannot run, fails,
                or takes too long.
        """


class Cancellation(Protocol):
    """Interrupts a run by ``Superseded``; only phases that can be undone check it."""

    def check(self) -> None:
        """Raise ``Superseded`` if the run is superseded."""

    def wait(self, seconds: float) -> None:
        """Sleep, and wake at once if the run is superseded."""

    def pause(self, seconds: float) -> None:
        """Sleep between two polls of the cluster; may wake early after a change."""


class Telemetry:
    """Receives events from any thread, without blocking; does nothing unless overridden."""

    def attempt_began(self, number: int) -> None:
        """The ``number``-th attempt at a request began, from 1."""

    def state_published(self, state: model.State) -> None:
        """This state was published on the node."""

    def phase_ended(self, phase: model.Phase, seconds: float) -> None:
        """A run left a phase."""

    def run_ended(self, state: model.State, reason: reasons.Reason, seconds: float) -> None:
        """A run published its outcome."""

    def run_superseded(self) -> None:
        """A newer request superseded a run."""

    def outcome_lost(self, reason: reasons.Reason) -> None:
        """A run published no outcome, because the API refused or did not answer."""

    def retry_scheduled(self, delay_s: float) -> None:
        """The request will be retried."""

    def still_working(self) -> None:
        """The loop is in a wait or an operation with a deadline of its own."""

    def pod_evicted(self) -> None:
        """The API accepted an eviction or a deletion."""

    def gpus_observed(self, gpus: model.ObservedGpus) -> None:
        """The GPUs were observed."""

    def xid_reported(self, uuid: str, xid: int) -> None:
        """The driver reported a critical error of a GPU."""

    def repair_ended(self, *, is_good: bool) -> None:
        """The repair of a GPU ended."""

    def gpu_operation_ended(self, name: str, seconds: float, *, is_good: bool) -> None:
        """All GPUs were observed, or a plan was executed."""

    def steps_began(self, plan: steps.Plan) -> None:
        """The steps of a plan are about to be executed, on all GPUs at the same time."""

    def step_ended(self, gpu_index: int) -> None:
        """A step of a GPU succeeded."""

    def nvml_called(self, function: str, calls: int, seconds: float) -> None:
        """An NVML function was called ``calls`` times."""

    def layout_applied(self, name: str, content_hash: str) -> None:
        """A layout is active and verified."""

    def config_read(self, *, is_usable: bool) -> None:
        """The layout file was read for the requested layout."""

    def nothing_requested(self) -> None:
        """No layout is requested any more."""

    def drift_found(self, *, is_drifted: bool) -> None:
        """The GPUs were compared with the layout that was applied."""

    def phantoms_found(self, advertised: Mapping[str, int], *, are_removed: bool) -> None:
        """The node was checked for phantom devices: their number by resource."""

    def use_observed(
        self, gpus: model.ObservedGpus, in_use: Mapping[str, frozenset[model.Placement]]
    ) -> None:
        """The instances in use were determined, by UUID of the GPU, as far as known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The adapters that the agent's pipeline works with."""

    gpus: Gpus
    node: Node
    workloads: Workloads
    allocations: DeviceAllocations
    slices: ResourceSlices
    configs: ConfigSource
    clock: timing.Clock
    lock: NodeLock
    verified_layout_file: KeptText  # keeps the verified layout for the next boot
    request_file: KeptText  # keeps a copy of the request's record and the journal
    telemetry: Telemetry = dataclasses.field(default_factory=Telemetry)
    standby: standbys.Standby = dataclasses.field(default_factory=standbys.Standbys)
    """Prepares worker processes before the GPUs are observed or changed."""
    boot_id: str = ""  # differs after each reboot
    reset: GpuReset | None = None  # None: the agent may not reset GPUs
    reboot: Reboot | None = None  # None: the agent may not reboot the node
    services: HostServices | None = None  # None: the agent may not stop host services
    service_names: Callable[[], tuple[str, ...]] = tuple
    """The host services that use GPUs, in the order in which they are stopped."""
    refresh_files: Callable[[], object] = lambda: None
    """Brings device nodes and CDI specs up to date, if no other program writes them; raises
    HostError DEVICE_FILES_FAILED."""
    hooks: Hooks | None = None
    own_pod_uid: str | None = None  # None: the agent does not run in a pod
    is_advertiser: bool = False
    """Whether ``gpus`` advertises the devices on the node; kubelet does not know them."""
    write_layouts: Callable[[str], bool] | None = None
    """Publishes the document of the node's layouts; None: only an annotation lists them."""
    slots: Slots | None = None  # None: no limit on the nodes that change at the same time
    extra_clients: Callable[[], tuple[client_table.ExtraClient, ...]] = tuple
    """Returns the GPU clients beside NVIDIA's; raises ConfigError if their file is invalid."""
    pod_watch: PodWatch | None = None  # None: pods are not watched
    processes: Callable[[], gpu_processes.Processes] | None = None
    """Returns the GPU processes by UUID, or raises HardwareError; None: they are unknown."""
