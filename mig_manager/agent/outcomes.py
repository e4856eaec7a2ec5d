"""How runs end, and how that is told."""

import dataclasses

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.text import messages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    state: model.State
    reason: errors.Reason
    message: str
    """For people, remedy included."""
    is_unfinished: bool = False
    """Whether GPUs or services of the host are still neither as wanted nor as before."""
    keeps_closed: bool = False
    """Whether the node stays closed until the next try, because its drain has begun."""
    unreachable: tuple[model.UnreachableGpu, ...] = ()
    """GPUs that the layout could not be applied to; it is, once they are back."""

    @property
    def should_retry(self) -> bool:
        """Whether another try may succeed by itself, at the wish or at what is left."""
        return self.state is model.State.FAILED and (
            self.reason.is_transient or self.is_unfinished
        )


class Drifted(errors.MigManagerError):
    """The layout can only come back if pods leave, and nobody asked for that."""

    def __init__(self, name: str, pods: tuple[str, ...]) -> None:
        super().__init__(_drift_told(name, pods), reason=errors.Reason.DRIFTED)


def drifted(name: str, pods: tuple[str, ...]) -> Outcome:
    """Return the outcome of a look that found another layout than the one proven before.

    Args:
        name: That layout.
        pods: Who keeps it from coming back; nobody, or nobody was asked.
    """
    return failed(errors.Reason.DRIFTED, _drift_told(name, pods))


def _drift_told(name: str, pods: tuple[str, ...]) -> str:
    held = (
        f"; it cannot come back while pods hold what must go: {messages.listed(pods)}"
        if pods
        else ""
    )
    return f"the GPUs no longer have layout {name}, and nobody here changed them{held}"


def succeeded(
    name: str, reason: errors.Reason, what: str, *, gpus: model.ObservedGpus, more: str = ""
) -> Outcome:
    """Return the outcome of a layout in force on all GPUs that can be reached."""
    missing = "".join(
        f" {gpu.sentence}; the layout is applied to it once it is back."
        for gpu in gpus.unreachable
    )
    return Outcome(
        state=model.State.SUCCESS,
        reason=reason,
        message=f"Layout {name} {what}.{more}{missing}",
        unreachable=gpus.unreachable,
    )


def failed(
    reason: errors.Reason,
    message: str,
    *,
    is_unfinished: bool = False,
    keeps_closed: bool = False,
) -> Outcome:
    """Return the outcome of a failure, with its remedy."""
    text = message.rstrip(".") + "."
    if reason.remedy:
        text = f"{text} {reason.remedy}"
    return Outcome(
        state=model.State.FAILED,
        reason=reason,
        message=messages.fit(text, messages.LONGEST_BYTES),
        is_unfinished=is_unfinished,
        keeps_closed=keeps_closed,
    )
