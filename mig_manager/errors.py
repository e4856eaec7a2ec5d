"""Every error that mig-manager raises on purpose, and the published reasons.

Each adapter translates its library's exceptions into these.
"""

import dataclasses
import enum
from typing import NamedTuple

_NOT_FOUND, _CONFLICT = 404, 409
_SERVER_ERRORS = 500  # first HTTP status of a server error (RFC 9110, section 15.6)


class Reason(enum.Enum):
    """Why a run ended; the values are a public contract, stable for alerting."""

    APPLIED = "Applied"
    ALREADY_APPLIED = "AlreadyApplied"
    INVALID_CONFIG = "InvalidConfig"
    UNKNOWN_CONFIG = "UnknownConfig"
    NO_CUSTOM_LAYOUT = "NoCustomLayout"
    CUSTOM_LAYOUTS_OFF = "CustomLayoutsOff"
    UNKNOWN_PROFILE = "UnknownProfile"
    NO_GPU_MATCHES = "NoGpuMatches"
    NOT_MIG_CAPABLE = "NotMigCapable"
    DOES_NOT_FIT = "DoesNotFit"
    INVALID_CHECKPOINT = "InvalidCheckpoint"
    USAGE = "Usage"
    DRAIN_TIMEOUT = "DrainTimeout"
    DRAIN_STALLED = "DrainStalled"
    PODS_RETURN = "PodsReturn"
    IN_USE = "InUse"
    RESET_REQUIRED = "ResetRequired"
    REBOOT_REQUIRED = "RebootRequired"
    GPU_NEEDS_RESET = "GpuNeedsReset"
    HOST_SERVICE_FAILED = "HostServiceFailed"
    DEVICE_FILES_FAILED = "DeviceFilesFailed"
    HOOK_FAILED = "HookFailed"
    PLUGIN_NOT_READY = "PluginNotReady"
    NOT_ALLOCATABLE = "NotAllocatable"
    PHANTOM_DEVICES = "PhantomDevices"
    STRATEGY_MISMATCH = "StrategyMismatch"
    VERIFY_FAILED = "VerifyFailed"
    INSUFFICIENT_RESOURCES = "InsufficientResources"
    NO_PERMISSION = "NoPermission"
    NOT_SUPPORTED = "NotSupported"
    DRIVER_NOT_LOADED = "DriverNotLoaded"
    DRIVER_LIBRARY_MISMATCH = "DriverLibraryMismatch"
    GPU_LOST = "GpuLost"
    GPU_UNREACHABLE = "GpuUnreachable"
    NVML_TIMEOUT = "NvmlTimeout"
    NVML_ERROR = "NvmlError"
    FORBIDDEN = "Forbidden"
    API_UNAVAILABLE = "ApiUnavailable"
    API_ERROR = "ApiError"
    POD_RESOURCES_UNAVAILABLE = "PodResourcesUnavailable"
    LOCKED = "Locked"
    FOREIGN_MANAGER = "ForeignManager"
    SLOTS_TAKEN = "SlotsTaken"
    DRIFTED = "Drifted"
    INTERRUPTED = "Interrupted"
    INTERNAL = "Internal"

    @property
    def _facts(self) -> "_ReasonFacts":
        return _FACTS.get(self, _ReasonFacts())

    @property
    def remedy(self) -> str:
        """The remedy on a node with an agent: one line, or empty."""
        return self._facts.on_node

    @property
    def remedy_at_shell(self) -> "Remedy":
        """The remedy for the user of a command, which is not retried."""
        return self._facts.at_shell or self.remedy

    @property
    def is_transient(self) -> bool:
        """Whether a retry can succeed without a change by a person."""
        return self._facts.is_transient

    @property
    def is_mode_pending(self) -> bool:
        """Whether a MIG mode is pending until a reset or a reboot."""
        return self in {Reason.RESET_REQUIRED, Reason.REBOOT_REQUIRED}


@dataclasses.dataclass(frozen=True, slots=True)
class CommandRemedy:
    """A remedy that names a command of ``mig-manager``: options depend on what its user typed."""

    text: str  # ``{}`` stands for the command
    command: str

    def __str__(self) -> str:
        return self.text.format(f"'mig-manager {self.command}'")


Remedy = str | CommandRemedy


class _ReasonFacts(NamedTuple):
    """Facts about a reason: its remedies, and whether it can pass."""

    on_node: str = ""  # the remedy on a node with an agent
    at_shell: Remedy = ""
    """The remedy for a command, where the other one mentions the agent or the cluster."""
    is_transient: bool = False


_FACTS = {
    Reason.INVALID_CONFIG: _ReasonFacts(
        "Correct the config document at the named line; the agent reads it again.",
        at_shell="Correct the file at the named line, or name another file.",
    ),
    Reason.UNKNOWN_CONFIG: _ReasonFacts(
        "Request a layout that 'kubectl mig layouts' lists, or add this one to the config file.",
        at_shell=CommandRemedy(
            "Name a layout that {} lists, or add this one to the file.", "validate"
        ),
    ),
    Reason.NO_CUSTOM_LAYOUT: _ReasonFacts(
        "Write annotation and label in one patch, as 'kubectl mig apply' does.",
    ),
    Reason.CUSTOM_LAYOUTS_OFF: _ReasonFacts(
        "Switch them on (--custom-layouts), or request a layout that 'kubectl mig layouts' lists.",
    ),
    Reason.UNKNOWN_PROFILE: _ReasonFacts(
        "Use a profile of this GPU; 'kubectl mig layouts NODE' draws the layouts that fit.",
        at_shell=CommandRemedy("Use a profile of this GPU; {} lists them.", "status"),
    ),
    Reason.NO_GPU_MATCHES: _ReasonFacts(
        "Request a layout that 'kubectl mig layouts NODE' draws, or correct this one's "
        "device-filter or devices.",
        at_shell=CommandRemedy(
            "Name a layout for these GPUs, or correct this one's device-filter or devices; "
            "{} shows PCI ids.",
            "status",
        ),
    ),
    Reason.NOT_MIG_CAPABLE: _ReasonFacts(
        "Restrict the layout to MIG-capable GPUs with a device-filter.",
    ),
    Reason.DOES_NOT_FIT: _ReasonFacts(
        "Request fewer or smaller instances; 'kubectl mig layouts NODE' draws what fits.",
        at_shell=CommandRemedy(
            "Request fewer or smaller instances; {} shows what fits.", "validate"
        ),
    ),
    Reason.INVALID_CHECKPOINT: _ReasonFacts(
        "Restore a checkpoint of this node's GPUs; 'mig-manager checkpoint' takes one.",
    ),
    Reason.USAGE: _ReasonFacts("See 'mig-manager --help'."),
    Reason.DRAIN_TIMEOUT: _ReasonFacts(
        "Free the named pods (see their PodDisruptionBudgets), or raise --drain-timeout-s.",
        is_transient=True,
    ),
    Reason.DRAIN_STALLED: _ReasonFacts(
        "Make room for the named pods, or raise their replicas or their PodDisruptionBudget; the "
        "label of the former layout removes the taint.",
        is_transient=True,
    ),
    Reason.PODS_RETURN: _ReasonFacts(
        "Remove the toleration that admits these pods to the tainted node, or scale their "
        "controllers down; then request the layout again.",
    ),
    Reason.IN_USE: _ReasonFacts(
        "Stop the processes that use the GPU; the agent retries.",
        at_shell="Stop the processes that use the GPU, then run the command again.",
        is_transient=True,
    ),
    Reason.RESET_REQUIRED: _ReasonFacts(
        "Reset the GPU or reboot the node; the pending MIG mode then takes effect.",
    ),
    Reason.REBOOT_REQUIRED: _ReasonFacts(
        "Reboot the node, or allow the agent to (--with-reboot); the pending MIG mode is kept.",
        at_shell="Reboot the node; the pending MIG mode is kept.",
    ),
    Reason.GPU_NEEDS_RESET: _ReasonFacts(
        "Look for Xid errors in the kernel log; reset the GPU when it is idle, or reboot.",
    ),
    Reason.HOST_SERVICE_FAILED: _ReasonFacts(
        "Read the service's log (journalctl -u) on the node.",
        is_transient=True,
    ),
    Reason.DEVICE_FILES_FAILED: _ReasonFacts(
        "Read the message of the named tool; containers may not see the new devices.",
        is_transient=True,
    ),
    Reason.HOOK_FAILED: _ReasonFacts(
        "Read the hook's output in the log, or correct the hooks file at the named line.",
        is_transient=True,
    ),
    Reason.PLUGIN_NOT_READY: _ReasonFacts(
        "Check the pod of the device plugin, or DRA driver, on this node.",
        is_transient=True,
    ),
    Reason.NOT_ALLOCATABLE: _ReasonFacts(
        "Read the log of the device plugin, or DRA driver; the new devices are not allocatable.",
        is_transient=True,
    ),
    Reason.PHANTOM_DEVICES: _ReasonFacts(
        "Grant the agent patch on nodes/status, or remove the resources with the kubectl command "
        "in the message.",
        is_transient=True,
    ),
    Reason.STRATEGY_MISMATCH: _ReasonFacts(
        "Request a layout that fits the device plugin's MIG strategy, or change the strategy.",
        is_transient=True,
    ),
    Reason.VERIFY_FAILED: _ReasonFacts(
        "Another program may be changing MIG instances; stop it.",
        is_transient=True,
    ),
    Reason.INSUFFICIENT_RESOURCES: _ReasonFacts(
        "Another program may be creating MIG instances; stop it.",
        is_transient=True,
    ),
    Reason.NO_PERMISSION: _ReasonFacts("Run as root, or with NVIDIA_MIG_CONFIG_DEVICES=all."),
    Reason.NOT_SUPPORTED: _ReasonFacts("Check that driver, GPU and virtualization support MIG."),
    Reason.DRIVER_NOT_LOADED: _ReasonFacts(
        "Load the NVIDIA driver; the agent retries.",
        at_shell="Load the NVIDIA driver, or name where it is (--driver-root, such as "
        "/run/nvidia/driver), then run the command again.",
        is_transient=True,
    ),
    Reason.DRIVER_LIBRARY_MISMATCH: _ReasonFacts(
        "Restart the pod to get the library of the loaded driver; on a host, reboot.",
    ),
    Reason.GPU_LOST: _ReasonFacts(
        "The GPU fell off the bus, where no reset reaches it: drain and reboot the node; if the "
        "GPU stays lost, switch the power off and on, or replace it.",
        is_transient=True,
    ),
    Reason.GPU_UNREACHABLE: _ReasonFacts(
        "Read the kernel log for the named GPU (NVRM: Xid), then reset it or reboot the node.",
        is_transient=True,
    ),
    Reason.NVML_TIMEOUT: _ReasonFacts(
        "The driver does not answer; read the kernel log.",
        is_transient=True,
    ),
    Reason.NVML_ERROR: _ReasonFacts("Read the driver's kernel log.", is_transient=True),
    Reason.FORBIDDEN: _ReasonFacts(
        "Grant the agent's ServiceAccount the rules in deploy/.",
        is_transient=True,
    ),
    Reason.API_UNAVAILABLE: _ReasonFacts(
        "Check the connection to the Kubernetes API; the agent retries.",
        at_shell="Check the Kubernetes API, then run the command again.",
        is_transient=True,
    ),
    Reason.API_ERROR: _ReasonFacts("Read the message of the Kubernetes API.", is_transient=True),
    Reason.POD_RESOURCES_UNAVAILABLE: _ReasonFacts(
        "Mount kubelet's pod-resources directory into the agent; where kubelet answers, end the "
        "pods that the message names.",
        is_transient=True,
    ),
    Reason.LOCKED: _ReasonFacts(
        "Wait for the other manager to finish, or stop it.", is_transient=True
    ),
    Reason.FOREIGN_MANAGER: _ReasonFacts(
        "Run one manager of this node's GPUs: remove the other, or remove the label.",
        is_transient=True,
    ),
    Reason.SLOTS_TAKEN: _ReasonFacts(
        "No action needed: the agent continues when a slot is free.",
        is_transient=True,
    ),
    Reason.DRIFTED: _ReasonFacts(
        "Apply the layout again (see --heal-drift), or find the program that changed the GPUs.",
    ),
    Reason.INTERNAL: _ReasonFacts(
        "This is a bug in mig-manager; please report it with the log.",
        is_transient=True,
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A place in a text; lines and columns count from 1. Line 0: the source is not a text."""

    source: str  # file name as the user gave it, or ``<stdin>``
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


class MigManagerError(Exception):
    """An error with a reason, from which its remedy follows."""

    def __init__(
        self,
        problem: str,
        *,
        reason: Reason,
        location: Location | None = None,
        remedy: Remedy = "",
        others: tuple[str, ...] = (),
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.additions: tuple[str, ...] = ()
        self.reason = reason
        self.location = location  # where a document is wrong, or requests the impossible
        self.own_remedy = remedy
        """Replaces the reason's remedy: for the user of a command, or of a NotReadyError."""
        self.others = others  # messages of the document's later errors

    @property
    def place(self) -> str:
        """The place in the document, with which the message begins; empty if unknown."""
        return str(self.location or "")

    @property
    def text(self) -> str:
        """The message without the place."""
        return "; ".join((self.problem, *self.additions))

    @property
    def message(self) -> str:
        """One sentence for a person, without the remedy."""
        return f"{self.place}: {self.text}" if self.place else self.text

    def add(self, more: str) -> None:
        """Append to the message."""
        self.additions += (more,)

    def __str__(self) -> str:
        return self.message


class UsageError(MigManagerError):
    """A command line, setting or environment variable that cannot be used."""

    def __init__(self, message: str, *, remedy: Remedy = "") -> None:
        super().__init__(message, reason=Reason.USAGE, remedy=remedy)


class UnknownCommandError(UsageError):
    """A command that does not exist; its exit status differs from other wrong usage."""


class ConfigError(MigManagerError):
    """A config document that breaks its format, or that cannot be read and has no location."""

    def __init__(
        self,
        message: str,
        *,
        location: Location | None = None,
        remedy: Remedy = "",
        others: tuple[str, ...] = (),
    ) -> None:
        unreadable = "" if location else "Check the file's path and rights, or name another file."
        super().__init__(
            message,
            reason=Reason.INVALID_CONFIG,
            location=location,
            remedy=remedy or unreadable,
            others=others,
        )


class CheckpointError(MigManagerError):
    """A checkpoint that breaks its format, or that does not fit these GPUs."""

    def __init__(self, message: str, *, location: Location | None = None) -> None:
        super().__init__(message, reason=Reason.INVALID_CHECKPOINT, location=location)


class LayoutError(MigManagerError):
    """A well-formed layout that is unknown, matches no GPU, or cannot fit one.

    As far as known, it has the location in the config document, the GPU that cannot have the
    layout, and the profile that the GPU lacks, such as ``1g.5gb``.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: Reason,
        location: Location | None = None,
        gpu_uuid: str = "",
        profile: str = "",
        remedy: Remedy = "",
    ) -> None:
        super().__init__(message, reason=reason, location=location, remedy=remedy)
        self.gpu_uuid = gpu_uuid
        self.profile = profile


class HardwareError(MigManagerError):
    """NVML refused or failed, or the GPUs are not as they should be."""

    def __init__(
        self,
        message: str,
        *,
        reason: Reason,
        operation: str = "",
        gpu: str = "",
        code: int | None = None,
        remedy: Remedy = "",
    ) -> None:
        super().__init__(message, reason=reason, remedy=remedy)
        self.operation = operation  # the NVML function, such as ``nvmlDeviceCreateGpuInstance``
        self.gpu = gpu  # index and UUID as text; empty if no GPU is concerned
        self.code = code  # the NVML return value; None if NVML was not called
        self._place = ""

    @property
    def place(self) -> str:
        """The GPU that the message is about, if it begins with it."""
        return self._place

    def begin_with(self, gpu: str, *, doing: str = "") -> None:
        """Begin the message with its GPU and the failed action."""
        self.gpu = self._place = gpu
        if doing:
            self.problem = f"{doing}: {self.problem}"


class GpuInUseError(HardwareError):
    """Processes or pods use, or may use, devices that a plan changes; no step was run."""

    def __init__(
        self, message: str, *, reason: Reason = Reason.IN_USE, remedy: Remedy = ""
    ) -> None:
        super().__init__(message, reason=reason, remedy=remedy)


class MissingGpusError(MigManagerError):
    """The driver no longer lists GPUs that it listed when the layout was verified."""

    def __init__(self, message: str, gpus: tuple[str, ...]) -> None:
        super().__init__(message, reason=Reason.DRIFTED)
        self.gpus = gpus  # their names


class StalePlanError(HardwareError):
    """Instances that a plan creates exist already; no step was run."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=Reason.VERIFY_FAILED)


class ClusterError(MigManagerError):
    """The Kubernetes API (or kubelet) refused or failed."""

    def __init__(
        self,
        message: str,
        *,
        reason: Reason,
        status: int | None = None,
        retry_after_s: float | None = None,
        remedy: Remedy = "",
    ) -> None:
        super().__init__(message, reason=reason, remedy=remedy)
        self.status = status  # the HTTP status; None: no answer
        self.retry_after_s = retry_after_s  # how long the server asks to wait

    @property
    def is_conflict(self) -> bool:
        """Whether the object exists already, or was changed or created by another writer."""
        return self.status == _CONFLICT

    @property
    def is_not_found(self) -> bool:
        """Whether the object, or its kind, does not exist."""
        return self.status == _NOT_FOUND

    @property
    def may_be_done(self) -> bool:
        """Whether the request may have been executed: only a refusal excludes that.

        RFC 9110, section 15: the server did not execute a request that it answers with 4xx.
        """
        return self.status is None or self.status >= _SERVER_ERRORS


class KubeletError(ClusterError):
    """Kubelet does not say which pods have which devices."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=Reason.POD_RESOURCES_UNAVAILABLE)


class DrainError(MigManagerError):
    """Affected pods were not evicted before the deadline.

    DRAIN_STALLED means that evicted pods have no room elsewhere, and PODS_RETURN that successors
    start on the tainted node. If pods were evicted, the node stays tainted until the next attempt
    (``keeps_taint``): their successors would start here.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: Reason = Reason.DRAIN_TIMEOUT,
        keeps_taint: bool = False,
    ) -> None:
        super().__init__(message, reason=reason)
        self.keeps_taint = keeps_taint


class NotReadyError(MigManagerError):
    """The node or its devices were not ready before a deadline."""


class HostError(MigManagerError):
    """The machine refused or failed; the message names the GPU, service or tool, and its output.

    IN_USE: processes use a GPU that must be reset. REBOOT_REQUIRED: a reset does not help.
    """


class LockedError(MigManagerError):
    """Another manager has the lock of this node's GPUs."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=Reason.LOCKED)


class SupersededBy(enum.Enum):
    """Why a run was superseded, which determines the next step."""

    OTHER_LAYOUT = "a run for another layout"
    SAME_LAYOUT = "a run for the same layout"
    NO_LAYOUT = "no run: nothing is requested any more"
    STOP = "the end of the process"


class Superseded(Exception):  # noqa: N818 - control flow, not a failure
    """The request was replaced or withdrawn, or the process shuts down: undo, and return."""

    def __init__(self, why: str, by: SupersededBy) -> None:
        super().__init__(why)
        self.why = why
        self.by = by

    def add(self, more: str) -> None:
        """Append to the reason why the run ends."""
        self.why = "; ".join(filter(None, (self.why, more)))


class Rebooting(Superseded):
    """The machine reboots for this run: the journal stays, and the restore waits."""

    def __init__(self, why: str) -> None:
        super().__init__(why, SupersededBy.STOP)
