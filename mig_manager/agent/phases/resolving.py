"""Resolve the requested layout or repair, and observe the GPUs; change nothing."""

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts
from mig_manager.agent.phases import targets
from mig_manager.agent.pods import unreachable_gpus
from mig_manager.core import messages, model
from mig_manager.core.layout import available_layouts, selection
from mig_manager.core.records import journals

_ABOUT_FILE = frozenset({reasons.Reason.INVALID_CONFIG, reasons.Reason.UNKNOWN_CONFIG})

_log = structlog.get_logger()


def resolve(attempt: attempts.Attempt) -> targets.Target:
    """Return the GPUs to repair, or else the requested layout.

    Raises:
        ClusterError: The API refused or does not answer.
        ConfigError: The file or annotation cannot be read or is invalid.
        HardwareError: The GPUs must be known, and none can be observed.
        KubeletError: The pods of a GPU to repair are not known.
        LayoutError: The layout or the annotation does not exist.
    """
    return _resolve_repair(attempt) if attempt.is_repair else _resolve_layout(attempt)


def _resolve_repair(attempt: attempts.Attempt) -> targets.RepairTarget:
    gpus, unknown = unreachable_gpus.recall_verified(attempt, observe_and_record(attempt))
    uuids = attempt.options.uuids_to_repair
    if unknown and (lost := [gpu for gpu in gpus.unreachable if gpu.uuid in uuids]):
        raise errors.KubeletError(
            f"the pods of {messages.list_names([*map(str, lost)])} are not known: {unknown}"
        )
    snapshots = {gpu.uuid: gpu for gpu in attempt.journal.gpus.snapshots if gpu.uuid in uuids}
    now = (gpu.snapshot for gpu in gpus if gpu.uuid in uuids - snapshots.keys())
    return targets.RepairTarget(before=(*snapshots.values(), *now), observed=gpus)


def _resolve_layout(attempt: attempts.Attempt) -> targets.LayoutTarget:
    request = attempt.request
    if request.custom:
        # The file has no part in it.
        attempt.deps.telemetry.layout_file_read(is_usable=True)
        layout, warnings = request.custom.layout(is_lenient=attempt.settings.is_lenient)
        target = targets.LayoutTarget(layout=layout, warnings=warnings, is_from_owner=True)
    else:
        target = _resolve_named(attempt)
    layout = target.layout
    rebooted = attempt.record.rebooted_hash
    is_same = not target.is_from_owner or rebooted in ("", layout.content_hash)
    was_rebooted = bool(attempt.journal.node.rebooted_from) or (rebooted is not None and is_same)
    attempt.recorder.set_status(
        content_hash=layout.content_hash,
        is_from_owner=target.is_from_owner,
        origin=layout.origin,
        is_rebooted=was_rebooted,
    )
    return target


def _resolve_named(attempt: attempts.Attempt) -> targets.LayoutTarget:
    """Return the layout of the file, or a generated one; report whether the file has it."""
    name = attempt.request.layout
    is_usable = False
    gpus: model.ObservedGpus | None = None

    def observe_for_layout() -> model.ObservedGpus:
        nonlocal gpus
        gpus = observe_and_record(attempt)
        return gpus

    try:
        layout, warnings = available_layouts.find(
            name, attempt.layout_file, attempt.settings, observe_for_layout
        )
        is_from_owner = not (layout.is_generated or attempt.settings.has_default_layouts)
        verified = attempt.record.verified
        is_other = verified is not None and verified.content_hash != layout.content_hash
        if verified and verified.is_from_owner and is_other and not is_from_owner:
            raise errors.LayoutError(
                f"{attempt.deps.layout_source.name} no longer has layout '{name}', which was "
                "applied; a generated layout of that name is not applied without a new request",
                reason=reasons.Reason.UNKNOWN_CONFIG,
            )
        is_usable = True
    finally:
        attempt.deps.telemetry.layout_file_read(is_usable=is_usable)
    return targets.LayoutTarget(
        layout=layout, warnings=warnings, is_from_owner=is_from_owner, observed=gpus
    )


def record_content(
    attempt: attempts.Attempt, target: targets.LayoutTarget, gpus: model.ObservedGpus
) -> None:
    """Record the layout's content, which may end the verification of an earlier one."""
    record = attempt.record.with_content(
        target.layout.content_hash,
        selection.desired_hashes(target.layout, gpus),
        is_from_owner=target.is_from_owner,
    )
    attempt.recorder.set_record(record)
    if attempt.request.custom:
        # A layout for many nodes may name the GPUs of the others.
        absent = selection.absent_uuids(target.layout, gpus)
        attempt.recorder.set_status(absent_uuids=absent)


def is_about_file(attempt: attempts.Attempt, error: errors.MigManagerError) -> bool:
    """Return whether an error is that the file is unusable or lacks the layout."""
    return error.reason in _ABOUT_FILE and attempt.request.custom is None


def keep_verified(attempt: attempts.Attempt, error: errors.MigManagerError) -> model.ObservedGpus:
    """Return the GPUs if they have the verified layout, although the file now lacks it.

    Otherwise a typo in the file would fail every node, although their layouts are active.

    Raises:
        MigManagerError: ``error``, unless it is about the file and the layout is active. Also if a
            GPU is back that an earlier change has not restored: the end of the run restores it.
    """
    record = attempt.record
    verified, applied = record.verified, record.applied_fingerprints
    if not (
        is_about_file(attempt, error)
        and attempt.journal.remainder is not journals.Remainder.CHANGE
        and verified
        and verified.is_as_applied
        and applied
    ):
        raise error
    gpus = observe_and_record(attempt)
    if not (applied.has_same(gpus) and attempt.journal.gpus.are_unreachable(gpus)):
        raise error
    attempt.recorder.set_status(
        content_hash=verified.content_hash,
        is_from_owner=verified.is_from_owner,
        file_problem=error.message,
    )
    _log.warning("config_not_used", reason=error.reason.value, error=error.message)
    message = f"{messages.with_full_stop(error.message)} {error.reason.remedy}"
    attempt.deps.node.emit(reason=error.reason.value, message=message, is_warning=True)
    return gpus


def observed_for(attempt: attempts.Attempt, target: targets.Target) -> model.ObservedGpus:
    """Return the GPUs observed for the target, or observe them.

    Raises:
        HardwareError: No GPU can be observed.
    """
    return observe_and_record(attempt) if target.observed is None else target.observed


def observe_and_record(attempt: attempts.Attempt) -> model.ObservedGpus:
    """Observe the GPUs, and record them in the status of the run.

    Raises:
        HardwareError: No GPU can be observed; from the second attempt on the message says so.
    """
    try:
        gpus = attempt.deps.gpus.observe()
    except errors.HardwareError as error:
        attempt.recorder.set_status(observed_gpus=model.NO_GPUS)
        if not attempt.is_first:
            number = attempt.options.attempt
            error.add(f"no GPU can be observed at attempt {number} either")
        raise
    attempt.recorder.set_status(observed_gpus=gpus)
    return gpus


def observe_at_end(attempt: attempts.Attempt) -> model.ObservedGpus:
    """Observe the GPUs as a failed run left them; if that fails, return and record none.

    Then the last observation still shows the modes that the run left pending.
    """
    try:
        gpus = attempt.deps.gpus.observe()
    except errors.HardwareError:
        return model.NO_GPUS
    attempt.recorder.set_status(observed_gpus=gpus)
    return gpus
