"""The published reasons why runs end or commands fail, and what to do about each."""

import dataclasses
import enum
from typing import NamedTuple


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
        "Correct the layout file at the named line; the agent reads it again.",
        at_shell="Correct the file at the named line, or name another file.",
    ),
    Reason.UNKNOWN_CONFIG: _ReasonFacts(
        "Request a layout that 'kubectl mig layouts' lists, or add this one to the layout file.",
        at_shell=CommandRemedy(
            "Name a layout that {} lists, or a file that has this one: -f FILE.", "validate"
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
