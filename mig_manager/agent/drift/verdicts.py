"""Judge a drift check by the last run and the checks since; this asks and changes nothing."""

import dataclasses
import enum
from collections.abc import Callable, Hashable

from mig_manager import reasons
from mig_manager.agent import outcomes
from mig_manager.agent.drift import checks
from mig_manager.core import model
from mig_manager.core.node.devices import device_ids, schedulable
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import applied_gpus, run_status

_MAX_FAILED_CHECKS = 3  # failed checks in a row before unknown readiness is published


class Verdict(enum.Enum):
    """The result of a check, compared with the last run and the checks since."""

    CHANGED = "a failed run may now succeed, or a GPU was lost or is back"
    UNKNOWN = "it is unknown whether the layout is active, or the run has failed"
    RELOADED = "the driver was reloaded, and the layout is restored as after a reboot"
    DRIFTED = "the layout is not active"
    STALE = "the layout is active, and the plugin or driver has other devices"
    ACTIVE_AGAIN = "the layout is active, and the Node did not show that"
    ACTIVE = "the layout is active"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DriftMemory:
    """The last run, and what the drift checks since have observed."""

    outcome: outcomes.Outcome  # of the run
    baseline: Hashable  # facts on which the outcome depended
    failed_checks: int = 0  # in a row: no GPU could be observed
    was_driver_away: bool = False  # in one of these checks
    is_unknown: bool = False  # whether it is published that no GPU can be observed
    description: str = ""
    """Words for the drift, by the last check or a run; empty: no drift is published."""
    has_phantoms: bool = False
    """Whether phantom devices were published that the agent may not remove."""

    @property
    def is_drifted(self) -> bool:
        """Whether a drift is published. No check follows one that begins a run instead."""
        return bool(self.description)

    @property
    def max_failed_checks(self) -> int:
        """How many checks in a row may fail before that is published.

        The driver may be away for ten minutes, as during its upgrade.
        """
        return outcomes.MAX_QUICK_ATTEMPTS if self.was_driver_away else _MAX_FAILED_CHECKS

    @property
    def awaits_driver(self) -> bool:
        """Whether to check soon: until the layout is back, pods may get whole GPUs."""
        return self.was_driver_away and 0 < self.failed_checks < self.max_failed_checks

    @staticmethod
    def after(outcome: outcomes.Outcome, gpus: model.ObservedGpus) -> "DriftMemory":
        """Return the memory after a run with this outcome; ``gpus`` are of the first check."""
        is_drifted = outcome.reason is reasons.Reason.DRIFTED
        last = outcome.gpus_after_failure
        return DriftMemory(
            outcome=outcome,
            baseline=_deciding_facts(gpus if last is None else last),
            description=outcome.description if is_drifted else "",
        )


def compare(
    observation: checks.Observation,
    memory: DriftMemory,
    *,
    applied: applied_gpus.GpuFingerprints | None,
    view: node_object.NodeView,
    is_stale: Callable[[], bool],
) -> Verdict:
    """Compare a check with the run and the checks before.

    Args:
        observation: The GPUs now, compared with the layout.
        memory: The last run, and the checks since.
        applied: The layout as applied; None if it is not known.
        view: The Node as last reported.
        is_stale: Asks whether the plugin or driver advertises other devices than the GPUs have;
            called only if the Node or the GPUs let suspect that.
    """
    gpus, outcome = observation.gpus, memory.outcome
    is_success = outcome.state is run_status.State.SUCCESS
    is_drifted = outcome.reason is reasons.Reason.DRIFTED
    if is_success:
        lost = {gpu.index for gpu in gpus.unreachable}
        # Without the layout, a run can apply nothing.
        is_known = observation.error is None or (bool(gpus) and not observation.is_file_unusable)
        has_changed = is_known and lost != {gpu.index for gpu in outcome.verified_gpus.unreachable}
    else:
        has_changed = not is_drifted and _deciding_facts(gpus) != memory.baseline
    if has_changed:
        return Verdict.CHANGED
    if observation.is_active is None or not (is_success or is_drifted):
        return Verdict.UNKNOWN
    if observation.is_active:
        if _is_suspect(observation, memory, applied, view) and is_stale():
            return Verdict.STALE
        was_unsure = memory.is_drifted or memory.is_unknown
        is_shown = memory.has_phantoms or shows(view, run_status.State.SUCCESS)
        return Verdict.ACTIVE if is_shown and not was_unsure else Verdict.ACTIVE_AGAIN
    # All GPUs lack instances and can get the layout.
    is_empty = observation.plan is not None and not (
        observation.missing or any(gpu.gpu_instances for gpu in gpus)
    )
    was_reloaded = memory.was_driver_away and not memory.is_drifted and is_empty
    return Verdict.RELOADED if was_reloaded else Verdict.DRIFTED


def shows(view: node_object.NodeView, state: run_status.State) -> bool:
    """Return whether the Node has this state; another manager may have written a different one."""
    published = run_status.published_on(view)
    is_labelled = view.labels.get(well_known.STATE_LABEL) == state.value
    return is_labelled and published is not None and published.state is state


def _is_suspect(
    observation: checks.Observation,
    memory: DriftMemory,
    applied: applied_gpus.GpuFingerprints | None,
    view: node_object.NodeView,
) -> bool:
    """Return whether the plugin may advertise other devices than the active layout has."""
    gpus, outcome = observation.gpus, memory.outcome
    # The same instances may have another place.
    differs = applied is None or not applied.has_same(gpus)
    # Without a plan, a run can verify only what the last one did.
    may_run = observation.plan is not None or (observation.is_file_unusable and not differs)
    # Another program may have destroyed instances and created equal ones, or changed a GPU outside
    # the layout.
    has_others = device_ids.expected_ids(gpus) != device_ids.expected_ids(outcome.verified_gpus)
    lacks_devices = schedulable.has_too_few(gpus, view)
    is_success = outcome.state is run_status.State.SUCCESS
    is_suspect = is_success and (differs or has_others or lacks_devices)
    return may_run and (memory.is_drifted or is_suspect)


def _deciding_facts(gpus: model.ObservedGpus) -> Hashable:
    """Return the facts that decide the outcome of a run."""
    return tuple(
        (
            gpu.uuid,
            gpu.current_mode,
            gpu.pending_mode,
            gpu.recovers_by_reset,
            frozenset((info.profile, info.placements) for info in gpu.profiles or ()),
            frozenset(
                (gi.profile, gi.placement, len(gi.compute_instances)) for gi in gpu.gpu_instances
            ),
        )
        for gpu in gpus
    )
