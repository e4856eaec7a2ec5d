"""What a look at GPUs at rest means: nothing, a drift, a drift that is over, or new hardware."""

import dataclasses
import enum
from collections.abc import Hashable, Iterable, Sequence

from mig_manager import errors
from mig_manager.agent import outcomes
from mig_manager.core import model


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


def sight(gpus: Sequence[model.Gpu], plan: model.Plan) -> Sight:
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
        self._ended: outcomes.Outcome | None = None
        self._baseline: Hashable = None
        self._is_drifted = False

    def judge(self, ended: outcomes.Outcome, seen: Sight) -> Finding:
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
