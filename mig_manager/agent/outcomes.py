"""How a run of the pipeline ended, with its message for people."""

import dataclasses

from mig_manager import errors
from mig_manager.core import messages, model
from mig_manager.core.records import status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    state: model.State
    reason: errors.Reason
    message: str
    """For people, remedy included."""
    is_unfinished: bool = False
    """Whether GPUs or host services are still neither as requested nor as before."""
    keeps_closed: bool = False
    """Whether the node stays closed until the next attempt, because its drain has begun."""
    gpus: model.ObservedGpus = model.NO_GPUS
    """The GPUs as verified; none after a failure. The layout is applied to unreachable ones once
    they are back."""

    @property
    def should_retry(self) -> bool:
        """Whether another attempt may succeed without anything being changed by a person."""
        return self.state is model.State.FAILED and (
            self.reason.is_transient or self.is_unfinished
        )


def succeeded(
    name: str, reason: errors.Reason, what: str, *, gpus: model.ObservedGpus, more: str = ""
) -> Outcome:
    """Return the outcome of a layout that is active on all reachable GPUs."""
    missing = "".join(
        f" {gpu.sentence}; the layout is applied to it once it is back."
        for gpu in gpus.unreachable
    )
    return Outcome(
        state=model.State.SUCCESS,
        reason=reason,
        message=f"Layout {name} {what}.{more}{missing}",
        gpus=gpus,
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


def failed_run(
    reason: errors.Reason, *parts: str, journal: status.Journal, gpus: model.ObservedGpus
) -> Outcome:
    """Return the outcome of a failed run, with unreachable GPUs and what remains to restore."""
    message = "; ".join(filter(None, parts))
    lost = () if reason is errors.Reason.GPU_UNREACHABLE else gpus.unreachable
    return failed(
        reason,
        "; ".join((message, *(gpu.sentence for gpu in lost if gpu.message not in message))),
        is_unfinished=not journal.remaining.is_empty,
        # Evicted pods must not start here again before the others have left.
        keeps_closed=journal.draining and reason.is_transient,
    )
