"""What the pipeline needs from the world, as protocols; adapters and fakes implement them.

Every method may block and takes its own deadline from the adapter's settings. Errors are those
of ``mig_manager.errors`` and no other.
"""

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from mig_manager.core import model, steps
from mig_manager.core.host import hooks
from mig_manager.core.node import cluster, policy


class Gpus(Protocol):
    """The GPUs of this node, through NVML. Each call is one NVML session; none is held between."""

    def observe(self) -> model.ObservedGpus:
        """Return every GPU, ascending by index, and those that cannot be observed.

        Raises:
            HardwareError: NVML cannot be loaded, refused, failed, or did not answer in time; or no
                GPU at all can be observed.
        """

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        """Run the steps of every GPU, GPUs in parallel, the steps of one GPU in order.

        Steps are idempotent. ``IN_USE`` is tried again for a bounded time. A failure on one GPU
        does not stop the others; it is raised after they have finished.

        Args:
            plan: The steps.
            seen: GPUs as last observed; of those that keep their mode, what never changes is not
                asked again.

        Returns:
            The GPUs of the plan, and no others, as they are afterwards, in its order. One that
            became unreachable is no failure of the others; its message names the step.

        Raises:
            StalePlanError: Before the first step of a plan that requires idle GPUs: a GPU instance
                that it creates exists already.
            GpuInUseError: Before the first step: processes use what the plan destroys, and the
                plan requires that none does.
            HardwareError: A step failed on a GPU that can be observed; the message names every GPU
                concerned, with operation and code (and, for IN_USE, the processes NVML knows
                of).
        """


class Standby:
    """Gets ready ahead of a call of another port; this one needs no getting ready."""

    def prepare(self) -> None:
        """Begin to set up what the next call needs, in the background."""

    def expect_change(self) -> None:
        """Do so where GPUs are going to be changed, and not only looked at."""
        self.prepare()

    def dismiss(self) -> None:
        """Give back what was set up and not used."""


class Standbys(Standby):
    """Several that get ready together."""

    def __init__(self, *each: Standby) -> None:
        self._each = each

    def prepare(self) -> None:
        """See ``Standby``."""
        for standby in self._each:
            standby.prepare()

    def expect_change(self) -> None:
        """See ``Standby``."""
        for standby in self._each:
            standby.expect_change()

    def dismiss(self) -> None:
        """See ``Standby``."""
        for standby in self._each:
            standby.dismiss()


class Node(Protocol):
    """Our own Node object."""

    def read(self) -> cluster.NodeView:
        """Return the node as the API has it now.

        Raises:
            ClusterError: The API refused or does not answer.
        """

    def patch(self, change: cluster.NodePatch) -> cluster.NodeView:
        """Write labels and annotations that only this agent writes; return the node after it.

        Raises:
            ClusterError: The API refused or does not answer.
        """

    def announce(self, change: cluster.NodePatch) -> None:
        """Write as ``patch`` does, without waiting for the API and without an error.

        Whatever is read or written next waits for it, so that the order stays.
        """

    def update(self, decide: Callable[[cluster.NodeView], cluster.NodePatch]) -> cluster.NodeView:
        """Write labels, annotations, taint and cordon in one patch that depends on the node.

        Args:
            decide: Returns the patch for the node as it is; called again with the newer node
                where somebody else has written since.

        Returns:
            The node after the patch.

        Raises:
            ClusterError: The API refused or does not answer, or others write faster than we do.
        """

    def emit(self, *, reason: str, message: str, is_warning: bool) -> None:
        """Hand over an Event on the node: published soon, in order, and never waited for.

        A refusal is logged, never raised.
        """

    def flush_events(self, timeout_s: float) -> bool:
        """Wait until Events are published or refused; return False at the time-out."""


class Eviction(enum.Enum):
    """What the Eviction API answered."""

    ACCEPTED = "accepted"
    GONE = "gone"
    BLOCKED = "blocked"
    """429: a PodDisruptionBudget does not allow it now."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to the wish to evict a pod."""

    answer: Eviction
    why: str = ""
    """The server's explanation when it is BLOCKED."""
    retry_after_s: float = 0.0
    """How long the server wants not to be asked again."""


class Workloads(Protocol):
    """The pods on our node."""

    def list(self) -> tuple[cluster.Pod, ...]:
        """Return all pods bound to our node, finished ones included.

        Raises:
            ClusterError: The API refused or does not answer.
        """

    def watched(self) -> tuple[cluster.Pod, ...] | None:
        """Return the same as a watch told of them, without a request; it may lag behind.

        Enough to wait on. What ends a wait, and whatever costs somebody something, needs ``list``.

        Returns:
            None where no watch tells of them now, and from time to time in any case.
        """

    def evict(self, pod: cluster.Pod) -> Verdict:
        """Ask for the eviction of a pod with its own grace period, guarded by its UID.

        Raises:
            ClusterError: The API refused (FORBIDDEN) or does not answer.
        """

    def can_evict(self, pod: cluster.Pod) -> Verdict:
        """Ask what ``evict`` would answer now, and evict nobody (a dry run).

        Raises:
            ClusterError: The API refused (FORBIDDEN) or does not answer.
        """

    def budgets(self, namespaces: Collection[str]) -> tuple[policy.Budget, ...]:
        """Return the PodDisruptionBudgets of some namespaces.

        Raises:
            ClusterError: The API refused (FORBIDDEN) or does not answer.
        """

    def covered(self, budget: policy.Budget) -> tuple[cluster.Pod, ...]:
        """Return all pods that a budget covers, on whatever node, and unscheduled ones.

        Raises:
            ClusterError: The API refused or does not answer.
        """

    def delete(self, pod: cluster.Pod) -> None:
        """Delete a pod with its own grace period, guarded by its UID; done when it is gone.

        No budget is asked: for daemons, and for workloads only where the node's owner says so.

        Raises:
            ClusterError: The API refused or does not answer.
        """


class DeviceAllocations(Protocol):
    """Kubelet's PodResources API."""

    def assigned(self) -> tuple[cluster.PodDevices, ...]:
        """Return which pod holds which devices.

        Raises:
            ClusterError: With POD_RESOURCES_UNAVAILABLE when kubelet cannot be asked.
        """

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        """Return the healthy device ids by resource name, in use or not.

        Raises:
            ClusterError: With POD_RESOURCES_UNAVAILABLE when kubelet cannot be asked.
        """


class ConfigSource(Protocol):
    """The config document, wherever it is kept."""

    @property
    def name(self) -> str:
        """What errors call it: the file name, or ``<stdin>``."""

    def read(self) -> str:
        """Return its text as it is now.

        Raises:
            ConfigError: It is missing, unreadable, too large, or not UTF-8.
        """


class NodeLock(Protocol):
    """Lets one manager at a time change the GPUs of this node: agent, boot unit or a person."""

    def hold(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Keep every other manager off while the context lasts.

        Args:
            doing: What for, told to whoever is kept off.

        Raises:
            LockedError: On entering, at once: another manager is at work; says which.
        """


class Slots(Protocol):
    """The cluster's slots for nodes under change; a node takes one before it is disrupted."""

    def take(self) -> str:
        """Take a slot if one is to be had, and keep it until ``release``; ours stays ours.

        Returns:
            Why there is none now and who has them, for people; empty: one is held.

        Raises:
            ClusterError: The API refused or does not answer; one may be held all the same.
        """

    def check(self) -> None:
        """Return if no other node can have our slot now, nor in the next half minute.

        Raises:
            NotReadyError: With SLOTS_TAKEN: it may.
        """

    def release(self) -> None:
        """Give back whatever our node holds; what the API does not take back now expires."""


class JournalStore(Protocol):
    """Where the journal is kept without a cluster: one text, replaced as a whole."""

    def read(self) -> str | None:
        """Return the journal, or None when nothing is under way.

        Raises:
            ConfigError: It is there and cannot be read.
        """

    def write(self, text: str) -> None:
        """Replace the journal; on the disk before this returns.

        Raises:
            ConfigError: It cannot be written; the former one is still there.
        """

    def clear(self) -> None:
        """Remove the journal; done when there is none.

        Raises:
            ConfigError: It cannot be removed.
        """

    def set_aside(self) -> str:
        """Move a journal that makes no sense out of the way; return where it is kept.

        Raises:
            ConfigError: It cannot be moved.
        """


class GpuReset(Protocol):
    """Resets GPUs whose new MIG mode waits for that."""

    def reset(self, gpus: Sequence[model.Gpu]) -> None:
        """Reset exactly these GPUs; done when the command has succeeded for each.

        Raises:
            HostError: IN_USE when somebody holds one, named as far as that can be told;
                RESET_REQUIRED when one was refused for another reason; REBOOT_REQUIRED when this
                machine cannot reset it at all.
        """


class Reboot(Protocol):
    """Reboots the machine."""

    def request(self, why: str) -> None:
        """Ask for a reboot and return at once; the signal to end comes soon after.

        Raises:
            HostError: REBOOT_REQUIRED: it was refused; says by whom.
        """


class HostServices(Protocol):
    """The machine's own services, through its init system."""

    def running(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return those that are active or starting, and what would be stopped along with them.

        Returns:
            Services in the order in which to stop them.

        Raises:
            HostError: HOST_SERVICE_FAILED: the init system does not answer, or something would be
                stopped along that could not be started again.
        """

    def stop(self, name: str) -> None:
        """Stop a service and wait until it has; done when it is not running.

        Raises:
            HostError: HOST_SERVICE_FAILED: it did not stop in time, or must not be stopped.
        """

    def may_have_stopped(self, name: str, listed: Collection[str]) -> bool:
        """Tell whether a service is one of those listed, or is stopped along with one.

        Raises:
            HostError: HOST_SERVICE_FAILED: the init system does not answer.
        """

    def start(self, name: str) -> bool:
        """Start a service and wait until it has; done when it is running.

        Returns:
            Whether it was not running before.

        Raises:
            HostError: HOST_SERVICE_FAILED: it failed, with what the init system says.
        """


class DeviceFiles(Protocol):
    """What containers need on the host beside the instances: device nodes and CDI specs."""

    def refresh(self) -> None:
        """Bring them up to date with the GPUs; skips what this machine does not have.

        Raises:
            HostError: DEVICE_FILES_FAILED: a tool failed, with what it said.
        """


class Hooks(Protocol):
    """The owner's programs around a change."""

    @property
    def variables(self) -> Mapping[str, str]:
        """What each of them is told of the change, beside the layout's name."""

    def read(self) -> hooks.Table:
        """Return which there are now.

        Raises:
            ConfigError: The file cannot be read or breaks the format.
        """

    def missing(self, hook: hooks.Hook) -> str:
        """Return why a hook's program cannot be run here, as far as that can be told unrun."""

    def run(
        self,
        point: hooks.Point,
        hook: hooks.Hook,
        environment: Mapping[str, str],
        *,
        check: Callable[[], object],
    ) -> None:
        """Run a hook to its end; nothing of it is left afterwards.

        Args:
            point: Which point it belongs to.
            hook: The hook.
            environment: All of its variables.
            check: Called all the while; what it raises ends the hook.

        Raises:
            HostError: HOOK_FAILED: it could not be run, failed, or took too long; with place and
                what it said last.
        """


class VerifiedLayouts(Protocol):
    """Where the last layout that was proven in force is kept over a reboot."""

    def save(self, text: str) -> None:
        """Replace it; on the disk before this returns.

        Raises:
            ConfigError: It cannot be written.
        """

    def read(self) -> str | None:
        """Return it; None when none was ever proven.

        Raises:
            ConfigError: It is there and cannot be read.
        """


class Cancellation(Protocol):
    """Tells a run whether it is still wanted; only phases that can be undone for free ask."""

    def check(self) -> None:
        """Return if the run is still wanted.

        Raises:
            Superseded: A newer wish, a removed wish or a shutdown.
        """

    def wait(self, seconds: float) -> None:
        """Sleep, and wake at once when the run is no longer wanted.

        Raises:
            Superseded: A newer wish, a removed wish or a shutdown.
        """

    def pause(self, seconds: float) -> None:
        """Sleep between two looks at the cluster: as ``wait``, but less if there may be news.

        Raises:
            Superseded: A newer wish, a removed wish or a shutdown.
        """
