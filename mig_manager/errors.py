"""Every error that mig-manager raises on purpose.

Each adapter translates its library's exceptions into these.
"""

import dataclasses
import enum

from mig_manager import reasons

_NOT_FOUND, _CONFLICT = 404, 409
_SERVER_ERRORS = 500  # first HTTP status of a server error (RFC 9110, section 15.6)


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
        reason: reasons.Reason,
        location: Location | None = None,
        remedy: reasons.Remedy = "",
        others: tuple[str, ...] = (),
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.additions: tuple[str, ...] = ()
        self.reason = reason
        self.location = location  # where a document is wrong, or requests the impossible
        self.own_remedy = remedy  # replaces the reason's, for the user of a command
        self.others = others  # messages of the document's later errors

    @property
    def remedy_on_node(self) -> str:
        """The remedy on a node with an agent: one line, or empty."""
        return self.reason.remedy

    @property
    def remedy_at_shell(self) -> reasons.Remedy:
        """The remedy for the user of a command, which is not retried."""
        return self.own_remedy or self.reason.remedy_at_shell

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

    def __init__(self, message: str, *, remedy: reasons.Remedy = "") -> None:
        super().__init__(message, reason=reasons.Reason.USAGE, remedy=remedy)


class UnknownCommandError(UsageError):
    """A command that does not exist; its exit status differs from other wrong usage."""


class ConfigError(MigManagerError):
    """A layout file that breaks its format, or that cannot be read and has no location."""

    def __init__(
        self,
        message: str,
        *,
        location: Location | None = None,
        remedy: reasons.Remedy = "",
        others: tuple[str, ...] = (),
    ) -> None:
        unreadable = "" if location else "Check the file's path and rights, or name another file."
        super().__init__(
            message,
            reason=reasons.Reason.INVALID_CONFIG,
            location=location,
            remedy=remedy or unreadable,
            others=others,
        )


class CheckpointError(MigManagerError):
    """A checkpoint that breaks its format, or that does not fit these GPUs."""

    def __init__(self, message: str, *, location: Location | None = None) -> None:
        super().__init__(message, reason=reasons.Reason.INVALID_CHECKPOINT, location=location)


class LayoutError(MigManagerError):
    """A well-formed layout that is unknown, matches no GPU, or cannot fit one.

    As far as known, it has the location in the layout file, the GPU that cannot have the
    layout, and the profile that the GPU lacks, such as ``1g.5gb``.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: reasons.Reason,
        location: Location | None = None,
        gpu_uuid: str = "",
        profile: str = "",
        remedy: reasons.Remedy = "",
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
        reason: reasons.Reason,
        operation: str = "",
        gpu: str = "",
        code: int | None = None,
        remedy: reasons.Remedy = "",
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
        self,
        message: str,
        *,
        reason: reasons.Reason = reasons.Reason.IN_USE,
        remedy: reasons.Remedy = "",
    ) -> None:
        super().__init__(message, reason=reason, remedy=remedy)


class MissingGpusError(MigManagerError):
    """The driver no longer lists GPUs that it listed when the layout was verified."""

    def __init__(self, message: str, gpus: tuple[str, ...]) -> None:
        super().__init__(message, reason=reasons.Reason.DRIFTED)
        self.gpus = gpus  # their names


class OutdatedPlanError(HardwareError):
    """Instances that a plan creates exist already; no step was run."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=reasons.Reason.VERIFY_FAILED)


class ClusterError(MigManagerError):
    """The Kubernetes API refused or failed."""

    def __init__(
        self,
        message: str,
        *,
        reason: reasons.Reason,
        status: int | None = None,
        retry_after_s: float | None = None,
        remedy: reasons.Remedy = "",
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
    def is_not_served(self) -> bool:
        """Whether the API does not serve the object or its kind, or not to us."""
        return self.is_not_found or self.reason is reasons.Reason.FORBIDDEN

    @property
    def may_be_done(self) -> bool:
        """Whether the request may have been executed: only a refusal excludes that.

        RFC 9110, section 15: the server did not execute a request that it answers with 4xx.
        """
        return self.status is None or self.status >= _SERVER_ERRORS


class KubeletError(MigManagerError):
    """Kubelet does not say which pods have which devices."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=reasons.Reason.POD_RESOURCES_UNAVAILABLE)


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
        reason: reasons.Reason = reasons.Reason.DRAIN_TIMEOUT,
        keeps_taint: bool = False,
    ) -> None:
        super().__init__(message, reason=reason)
        self.keeps_taint = keeps_taint


class NotReadyError(MigManagerError):
    """The node or its devices were not ready before a deadline; ``remedy`` is for the node."""

    @property
    def remedy_on_node(self) -> str:
        """The remedy on this node: one line, or empty."""
        return str(self.own_remedy) or super().remedy_on_node


class HostError(MigManagerError):
    """The machine refused or failed; the message names the GPU, service or tool, and its output.

    IN_USE: processes use a GPU that must be reset. REBOOT_REQUIRED: a reset does not help.
    """


class LockedError(MigManagerError):
    """Another manager has the lock of this node's GPUs."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=reasons.Reason.LOCKED)


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
