"""What the pipeline needs from the world, as protocols; adapters and fakes implement them.

Every method may block and takes its own deadline from the adapter's settings. Errors are those
of ``mig_manager.errors`` and no other.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Protocol

from mig_manager import errors
from mig_manager.core import cluster, model


class Gpus(Protocol):
    """The GPUs of this node, through NVML. Each call is one NVML session; none is held between."""

    def observe(self) -> tuple[model.Gpu, ...]:
        """Return every GPU, ascending by index.

        Raises:
            HardwareError: NVML cannot be loaded, refused, failed, or did not answer in time.
        """

    def execute(self, plan: model.Plan) -> None:
        """Run the steps of every GPU, GPUs in parallel, the steps of one GPU in order.

        Steps are idempotent. ``IN_USE`` is tried again for a bounded time. A failure on one GPU
        does not stop the others; it is raised after they have finished.

        Raises:
            HardwareError: A step failed; the message names every GPU that did, with operation
                and code (and, for IN_USE, the processes NVML knows of).
        """


class Node(Protocol):
    """Our own Node object."""

    def read(self) -> cluster.NodeView:
        """Return the node as the API has it now.

        Raises:
            ClusterError: The API refused or does not answer.
        """

    def patch(self, change: cluster.NodePatch) -> cluster.NodeView:
        """Write labels, annotations, cordon and taint in one patch; return the node after it.

        Raises:
            ClusterError: The API refused or does not answer.
        """

    def emit(self, *, reason: str, message: str, is_warning: bool) -> None:
        """Publish an Event on the node; a refusal is logged, never raised."""


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

    def evict(self, pod: cluster.Pod) -> Verdict:
        """Ask for the eviction of a pod with its own grace period, guarded by its UID.

        Raises:
            ClusterError: The API refused (FORBIDDEN) or does not answer.
        """

    def may_evict(self, pod: cluster.Pod) -> Verdict:
        """Ask what ``evict`` would answer now, and evict nobody (a dry run).

        Raises:
            ClusterError: The API refused (FORBIDDEN) or does not answer.
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


class Clock(Protocol):
    """Time as an argument, so that tests need not spend it."""

    def now_iso(self) -> str:
        """Return the wall-clock time as RFC 3339 in UTC, for people only."""

    def monotonic(self) -> float:
        """Return seconds from some fixed point, for deadlines."""

    def wait(self, seconds: float) -> None:
        """Sleep through; for waits that must not be cut short."""


class Wish(Protocol):
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


class Telemetry:
    """Hears what happens, for those who watch many nodes; never blocks and never raises.

    Its methods may be called from any thread. This one, unlike a protocol, can be made: whatever
    is not overridden is not listened to.
    """

    def attempt_began(self, number: int) -> None:
        """The worker turned to a wish for the ``number``-th time, from 1."""

    def state_published(self, state: model.State) -> None:
        """The node now says this state."""

    def phase_ended(self, phase: model.Phase, seconds: float) -> None:
        """A run left a phase."""

    def run_ended(self, state: model.State, reason: errors.Reason, seconds: float) -> None:
        """A run published how it ended."""

    def run_superseded(self) -> None:
        """A run gave way to a newer wish."""

    def outcome_lost(self, reason: errors.Reason) -> None:
        """A run could not publish how it ended, because the API refused or was silent."""

    def retry_scheduled(self, delay_s: float) -> None:
        """The same wish will be tried again."""

    def pod_evicted(self) -> None:
        """A pod was asked to leave, and the API agreed."""

    def gpus_observed(self, gpus: tuple[model.Gpu, ...]) -> None:
        """This is what there is on the GPUs now."""

    def gpu_operation_ended(self, name: str, seconds: float, *, is_good: bool) -> None:
        """All GPUs were observed, or a plan was executed."""

    def nvml_called(self, function: str, calls: int, seconds: float) -> None:
        """An NVML function was called so often, and took so long in all."""

    def layout_applied(self, name: str, content_hash: str) -> None:
        """A layout is in force and proven."""
