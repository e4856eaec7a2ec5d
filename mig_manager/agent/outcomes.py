"""How runs end, and how that is told."""

import dataclasses
import enum
from collections.abc import Hashable, Iterable, Sequence

from mig_manager import errors
from mig_manager.core import messages, model, steps


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


class Finding(enum.Enum):
    """What a look found."""

    AS_BEFORE = "as before"
    DRIFTED = "drifted"
    STILL_DRIFTED = "still drifted"
    BACK = "back"
    """The layout is in force again although nobody here did it."""
    CHANGED = "changed"
    """A run that had failed for good may now end otherwise, or a GPU was lost or is back."""


class Next(enum.Enum):
    """What is due after a look."""

    REST = "rest"
    HEAL = "heal"
    """A run that makes nobody leave."""
    RUN = "run"
    """A run like any other."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen."""

    is_applied: bool | None
    """Whether the layout is in force; None: it could not be told."""
    hardware: Hashable
    """Equal as long as the GPUs are, or fail to be observed, as they did."""
    unreachable: frozenset[int] | None = None
    """Indices of the unreachable GPUs; None: no GPU could be observed."""


def sight(gpus: Sequence[model.Gpu], plan: steps.Plan) -> Sight:
    """Return what there is to compare of an observation."""
    return Sight(
        is_applied=plan.is_empty,
        hardware=tuple(_fingerprint(gpu) for gpu in gpus),
        unreachable=_indices(model.unreachable(gpus)),
    )


def blind(error: errors.MigManagerError, gpus: Sequence[model.Gpu] = ()) -> Sight:
    """Return what there is to compare where the GPUs or the plan could not be had."""
    seen = tuple(_fingerprint(gpu) for gpu in gpus)
    return Sight(
        is_applied=None,
        hardware=(error.reason, seen),
        unreachable=_indices(model.unreachable(gpus)) if gpus else None,
    )


def _indices(gpus: Iterable[model.UnreachableGpu]) -> frozenset[int]:
    return frozenset(gpu.index for gpu in gpus)


class Lookout:
    """Remembers what was seen since the last run ended."""

    def __init__(self) -> None:
        self._ended: Outcome | None = None
        self._baseline: Hashable = None
        self._is_drifted = False

    def judge(self, ended: Outcome, seen: Sight) -> Finding:
        """Compare a look with how the last run ended and with the looks since.

        Args:
            ended: How the last run ended; the same object as long as no other has.
            seen: What was seen now.
        """
        if ended is not self._ended:
            self._ended = ended
            self._baseline = seen.hardware
            self._is_drifted = ended.reason is errors.Reason.DRIFTED
        is_other_node = seen.unreachable not in (None, _indices(ended.unreachable))
        if ended.state is model.State.SUCCESS and is_other_node:
            # A GPU was lost, or is back: the layout is due on it, or its loss is to be published.
            return Finding.CHANGED
        if ended.state is model.State.SUCCESS or ended.reason is errors.Reason.DRIFTED:
            return self._drift(seen.is_applied)
        # The first look after a failure is what the next ones are compared with.
        return Finding.AS_BEFORE if seen.hardware == self._baseline else Finding.CHANGED

    def _drift(self, is_applied: bool | None) -> Finding:  # noqa: FBT001 - one question
        if is_applied is None:
            return Finding.AS_BEFORE
        was_drifted, self._is_drifted = self._is_drifted, not is_applied
        if is_applied:
            return Finding.BACK if was_drifted else Finding.AS_BEFORE
        return Finding.STILL_DRIFTED if was_drifted else Finding.DRIFTED


def _fingerprint(gpu: model.Gpu) -> Hashable:
    return (
        gpu.uuid,
        gpu.current_mode,
        gpu.pending_mode,
        frozenset((info.profile, info.placements) for info in gpu.profiles or ()),
        frozenset(
            (gi.profile, gi.placement, len(gi.compute_instances)) for gi in gpu.gpu_instances
        ),
    )
