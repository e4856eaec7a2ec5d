"""Resolve the requested layout or repair, observe the GPUs, and plan steps; change nothing."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import attempts
from mig_manager.agent.pods import remembering
from mig_manager.core import messages, model, steps
from mig_manager.core.files import yaml_tree
from mig_manager.core.layout import layouts, served
from mig_manager.core.planner import planner

_ABOUT_FILE = frozenset({errors.Reason.INVALID_CONFIG, errors.Reason.UNKNOWN_CONFIG})

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The requested layout."""

    layout: layouts.Layout
    warnings: tuple[yaml_tree.Diagnostic, ...] = ()  # problems that lenient parsing accepts
    is_from_owner: bool = False  # whether the owner wrote it
    observed: model.ObservedGpus | None = None
    """The GPUs, if the layout was generated from them just now."""

    def select(self, gpus: Sequence[model.Gpu]) -> Mapping[str, model.DesiredGpu]:
        """Return the desired state of its GPUs by UUID; log what lenient parsing accepts.

        Raises:
            LayoutError: The layout is for other GPUs; has the location in the file.
        """
        with layouts.located(self.layout, gpus):
            desired = layouts.select(self.layout, gpus)
        for remark in (*self.warnings, *layouts.lenient_warnings(self.layout, gpus)):
            _log.warning("config_overlooked", place=str(remark.location), problem=remark.message)
        return desired

    def plan(
        self,
        gpus: model.ObservedGpus,
        *,
        busy: frozenset[str] = frozenset(),
        ending: frozenset[str] = frozenset(),
    ) -> steps.Plan:
        """Plan the layout; ``busy`` devices are destroyed last, before them the ``ending`` ones.

        Raises:
            LayoutError: The layout is impossible on these GPUs; has the location in the file.
        """
        with layouts.located(self.layout, gpus):
            return planner.plan(gpus, layouts.select(self.layout, gpus), busy=busy, ending=ending)

    def unrestored_snapshots(
        self, gpus: model.ObservedGpus, before: model.Snapshots
    ) -> model.Snapshots:
        """Return the unreachable GPUs outside the layout, to restore later."""
        return layouts.unrestored_elsewhere(self.layout, gpus, before)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRepair:
    """GPUs to reset, whose instances then return to their placements."""

    before: model.Snapshots  # the GPUs as they were, also before an interrupted attempt
    observed: model.ObservedGpus

    def select(self, _gpus: Sequence[model.Gpu]) -> Mapping[str, model.DesiredGpu]:
        """Return the desired state of its GPUs by UUID."""
        return {
            gpu.uuid: model.DesiredGpu.of(
                gpu.current_mode or model.MigMode.DISABLED,
                collections.Counter(
                    ci.profile for gi in gpu.gpu_instances for ci in gi.compute_instances
                ),
            )
            for gpu in self.before
        }

    def plan(
        self,
        gpus: model.ObservedGpus,
        *,
        busy: frozenset[str] = frozenset(),
        ending: frozenset[str] = frozenset(),
    ) -> steps.Plan:
        """Plan the resets, or the instances of GPUs that were reset."""
        return planner.repair(gpus, self.before)

    def unrestored_snapshots(
        self, gpus: model.ObservedGpus, before: model.Snapshots
    ) -> model.Snapshots:
        """Return the unreachable GPUs, to restore later."""
        return gpus.unreachable_snapshots(before)


Target = Resolved | PlannedRepair  # what a run changes the GPUs to


def resolve(attempt: attempts.Attempt) -> Target:
    """Return the GPUs to repair, or else the requested layout.

    Raises:
        ClusterError: The pods of a GPU to repair are not known.
        ConfigError: The file or annotation cannot be read or is invalid.
        HardwareError: The GPUs must be known, and none can be observed.
        LayoutError: The layout or the annotation does not exist.
    """
    return _resolve_repair(attempt) if attempt.request.repairs else _resolve_layout(attempt)


def _resolve_repair(attempt: attempts.Attempt) -> PlannedRepair:
    gpus, unknown = remembering.remember(attempt, observe(attempt))
    uuids = attempt.request.repairs
    if unknown and (lost := [gpu for gpu in gpus.unreachable if gpu.uuid in uuids]):
        raise errors.KubeletError(
            f"the pods of {messages.list_names([*map(str, lost)])} are not known: {unknown}"
        )
    snapshots = {gpu.uuid: gpu for gpu in attempt.journal.entries.snapshot if gpu.uuid in uuids}
    now = (gpu.snapshot for gpu in gpus if gpu.uuid in uuids - snapshots.keys())
    return PlannedRepair(before=(*snapshots.values(), *now), observed=gpus)


def _resolve_layout(attempt: attempts.Attempt) -> Resolved:
    request = attempt.request
    if request.custom:
        # The file has no part in it.
        attempt.deps.telemetry.config_read(is_usable=True)
        layout, warnings = request.custom.layout(is_lenient=attempt.limits.is_lenient)
        resolved = Resolved(layout=layout, warnings=warnings, is_from_owner=True)
    else:
        resolved = _resolve_named(attempt)
    layout = resolved.layout
    rebooted = attempt.journal.record.rebooted_hash
    is_same = not resolved.is_from_owner or rebooted in ("", layout.content_hash)
    was_rebooted = bool(attempt.journal.entries.rebooted_from) or (
        rebooted is not None and is_same
    )
    attempt.journal.note_status(
        config_hash=layout.content_hash,
        is_from_owner=resolved.is_from_owner,
        origin=layout.origin,
        is_rebooted=was_rebooted,
    )
    return resolved


def _resolve_named(attempt: attempts.Attempt) -> Resolved:
    """Return the layout of the file, or a generated one; report whether the file has it."""
    name = attempt.request.config
    is_usable = False
    gpus: model.ObservedGpus | None = None

    def observe_and_note() -> model.ObservedGpus:
        nonlocal gpus
        gpus = observe(attempt)
        return gpus

    try:
        layout, warnings = served.find(name, attempt.layout_file, attempt.limits, observe_and_note)
        is_from_owner = not (layout.is_generated or attempt.limits.has_default_layouts)
        verified = attempt.journal.record.verified
        is_other = verified is not None and verified.config_hash != layout.content_hash
        if verified and verified.is_from_owner and is_other and not is_from_owner:
            raise errors.LayoutError(
                f"{attempt.deps.configs.name} no longer has layout '{name}', which was applied; "
                "a generated layout of that name is not applied without a new request",
                reason=errors.Reason.UNKNOWN_CONFIG,
            )
        is_usable = True
    finally:
        attempt.deps.telemetry.config_read(is_usable=is_usable)
    return Resolved(layout=layout, warnings=warnings, is_from_owner=is_from_owner, observed=gpus)


def note_content(attempt: attempts.Attempt, resolved: Resolved, gpus: model.ObservedGpus) -> None:
    """Record the layout's content, which may end the verification of an earlier one."""
    record = attempt.journal.record.with_content(
        resolved.layout.content_hash,
        layouts.goal_hashes(resolved.layout, gpus),
        is_from_owner=resolved.is_from_owner,
    )
    attempt.journal.note_record(record)


def is_about_file(attempt: attempts.Attempt, error: errors.MigManagerError) -> bool:
    """Return whether an error is that the file is unusable or lacks the layout."""
    return error.reason in _ABOUT_FILE and attempt.request.custom is None


def keep_verified(attempt: attempts.Attempt, error: errors.MigManagerError) -> model.ObservedGpus:
    """Return the GPUs if they have the verified layout, although the file now lacks it.

    Otherwise a typo in the file would fail every node, although their layouts are active.

    Raises:
        MigManagerError: ``error``, unless it is about the file and the layout is active.
    """
    verified, then = attempt.journal.record.verified, attempt.journal.record.applied
    if not (
        is_about_file(attempt, error)
        and attempt.journal.entries.has_nothing_to_undo
        and verified
        and verified.is_as_applied
        and then
    ):
        raise error
    gpus = observe(attempt)
    if not then.has_same(gpus):
        raise error
    attempt.journal.note_status(
        config_hash=verified.config_hash,
        is_from_owner=verified.is_from_owner,
        config_problem=error.message,
    )
    _log.warning("config_not_used", reason=error.reason.value, error=error.message)
    message = f"{messages.with_full_stop(error.message)} {error.reason.remedy}"
    attempt.deps.node.emit(reason=error.reason.value, message=message, is_warning=True)
    return gpus


def observe_once(attempt: attempts.Attempt, target: Target) -> model.ObservedGpus:
    """Return the GPUs observed for the target, or observe them.

    Raises:
        HardwareError: No GPU can be observed.
    """
    return observe(attempt) if target.observed is None else target.observed


def observe(attempt: attempts.Attempt) -> model.ObservedGpus:
    """Observe the GPUs.

    Raises:
        HardwareError: No GPU can be observed; from the second attempt on the message says so.
    """
    try:
        gpus = attempt.deps.gpus.observe()
    except errors.HardwareError as error:
        attempt.journal.note_status(gpus=model.ObservedGpus())
        if not attempt.is_first:
            number = attempt.request.attempt
            error.add(f"no GPU can be observed at attempt {number} either")
        raise
    attempt.journal.note_status(gpus=gpus)
    return gpus


def observe_at_end(attempt: attempts.Attempt) -> model.ObservedGpus:
    """Observe the GPUs as a failed run left them; if that fails, return none and note none.

    Then the last observation still shows the modes that the run left pending.
    """
    try:
        gpus = attempt.deps.gpus.observe()
    except errors.HardwareError:
        return model.NO_GPUS
    attempt.journal.note_status(gpus=gpus)
    return gpus
