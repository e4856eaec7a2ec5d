"""Take over from an interrupted run, and roll back its change without evicting a pod.

Right after a failure no pod can use the new instances, because the device plugin is paused. Later,
after a crash or a failed rollback, a pod may use them. So the pods are checked first: if one would
lose its device, the GPUs stay as they are.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import attempts
from mig_manager.agent.phases import host
from mig_manager.agent.pods import device_usage, pausing, resuming
from mig_manager.change import change_recorder, rollback
from mig_manager.core import messages, model, ports, steps
from mig_manager.core.node import gpu_use, node_object, well_known
from mig_manager.core.planner import planner
from mig_manager.core.records import (
    host_copy,
    inferred_requests,
    journals,
    node_entries,
    requests,
    run_status,
)

_MAX_KEPT_CHARACTERS = 16 * 1024
"""Maximum length of a saved invalid journal: enough to inspect, and small for a Node object."""

_FINAL = frozenset({model.State.SUCCESS, model.State.FAILED})

_log = structlog.get_logger()


def shows_change(view: node_object.NodeView) -> bool:
    """Return whether the Node has the journal or the taint of a change."""
    return (
        well_known.JOURNAL_ANNOTATION in view.annotations
        or well_known.HOLD_TAINT in view.taint_keys
    )


def set_aside_unreadable_journal(
    context: attempts.NodeContext, view: node_object.NodeView
) -> None:
    """Move an invalid journal to another annotation of the Node, and report it.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    text = view.annotations.get(well_known.JOURNAL_ANNOTATION)
    if text is None:
        return
    try:
        journals.Journal.from_json(text)
    except ValueError as error:
        _log.warning("journal_unreadable", error=str(error))
        context.publisher.annotate(
            {
                well_known.JOURNAL_ANNOTATION: None,
                well_known.UNREADABLE_JOURNAL_ANNOTATION: text[:_MAX_KEPT_CHARACTERS],
            }
        )
        context.deps.node.emit(
            reason="JournalUnreadable",
            message=f"the journal of an interrupted run is invalid ({error}): labels and taint "
            "that are marked as ours are restored, and what the host has a copy of; the text is "
            f"kept in the annotation {well_known.UNREADABLE_JOURNAL_ANNOTATION}",
            is_warning=True,
        )


def find_journal(deps: ports.Dependencies, view: node_object.NodeView) -> journals.Journal:
    """Return the journal of an interrupted run, of the Node or the copy on the host.

    If the Node has lost it, or it is invalid, the host has a copy of the entries that no write to
    the Node restores. The taint is always recognized by its key, and ``resume_unlisted`` finds
    paused labels by their value; a cordon is left to people. A copy is outdated after a success or
    a failure that is not retried, and if the status is about another request.

    A reset waits for no write to the Node, so the GPUs whose persistence mode is off are always
    read from the host as well.
    """
    journal = journals.parse_or_none(view.annotations.get(well_known.JOURNAL_ANNOTATION))
    copy = host_copy.parse_journal(_read_host(deps.host_copy_file))
    if journal is not None:
        own_entries = node_entries.without_foreign_labels(journal.node, view)
        journal = dataclasses.replace(journal, node=own_entries)
    else:
        journal = copy if copy and not _is_outdated(copy, view) else journals.NONE
    has_taint = well_known.HOLD_TAINT in view.taint_keys
    node = dataclasses.replace(journal.node, has_hold_taint=has_taint)
    journal = dataclasses.replace(journal, node=node)
    if copy and copy.gpus.persistent_gpus and copy.boot_id == deps.boot_id:
        uuids = dict.fromkeys((*journal.gpus.persistent_gpus, *copy.gpus.persistent_gpus))
        gpus = dataclasses.replace(journal.gpus, persistent_gpus=tuple(uuids))
        boot_id = journal.boot_id or copy.boot_id
        journal = dataclasses.replace(journal, boot_id=boot_id, gpus=gpus)
    return journal


def _is_outdated(copy: journals.Journal, view: node_object.NodeView) -> bool:
    """Return whether the journal on the Node has ended, although its copy on the host remains."""
    published = run_status.parse_or_none(view.annotations.get(well_known.STATUS_ANNOTATION))
    if published is None:
        return view.labels.get(well_known.STATE_LABEL) == model.State.SUCCESS.value
    is_final = published.state in _FINAL and not published.is_retried
    return is_final or copy.key != published.key


def resume_unlisted(context: attempts.NodeContext, view: node_object.NodeView) -> bool:
    """Resume the GPU clients whose deploy label has our paused value, but is in no journal.

    At its end, NVIDIA's driver manager writes back the values from its start, also over a label
    that was resumed meanwhile (k8s-driver-manager, ``rescheduleGPUOperatorComponents``). NVIDIA's
    manager pauses with the same value and keeps no journal, so such labels are left to it
    while it runs.

    Returns:
        Whether no such label remains.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    if not journals.unlisted_pauses(view):
        return True
    if others := device_usage.foreign_managers(context.deps, context.deps.workloads.list()):
        _log.warning("pauses_left_to_foreign_manager", managers=others)
        return False

    def decide(view: node_object.NodeView) -> node_object.NodePatch:
        return node_object.NodePatch(labels=dict.fromkeys(journals.unlisted_pauses(view), "true"))

    if keys := journals.unlisted_pauses(context.publisher.update(decide)):
        names = messages.list_names(
            [key.removeprefix(well_known.DEPLOY_LABEL_PREFIX) for key in keys]
        )
        message = f"resumed {names}: paused for a MIG change that is not under way"
        context.deps.node.emit(reason="Recovered", message=message, is_warning=False)
    return True


def has_ended(journal: journals.Journal, view: node_object.NodeView) -> bool:
    """Return whether the run ended and its snapshot only waits for an unreachable GPU."""
    published = run_status.parse_or_none(view.annotations.get(well_known.STATUS_ANNOTATION))
    return not journal.needs_undo or (
        run_status.was_active(published) and journal.has_only_gpu_entries
    )


def read_saved(host_copy_file: ports.KeptText, view: node_object.NodeView) -> str:
    """Return what an agent saved on the host before the Node was registered again; else empty.

    A Node with a status is the one that an agent wrote to last.
    """
    published = run_status.parse_or_none(view.annotations.get(well_known.STATUS_ANNOTATION))
    return _read_host(host_copy_file) if published is None else ""


def _read_host(host_copy_file: ports.KeptText) -> str:
    """Return what an agent saved on the host; empty if nothing, or if it cannot be read."""
    try:
        return host_copy_file.read() or ""
    except errors.ConfigError as error:
        _log.warning("request_not_read", error=error.message)
        return ""


def find_record(
    saved: str, view: node_object.NodeView, journal: journals.Journal
) -> requests.RequestRecord:
    """Return the record of the request that an earlier agent served; ``NONE`` without one.

    Without a valid record on the Node, or ``saved`` on the host, status and labels decide, so that
    no pod is evicted.
    """
    published = run_status.parse_or_none(view.annotations.get(well_known.STATUS_ANNOTATION))
    record = _parse_record(view.annotations.get(well_known.REQUEST_ANNOTATION))
    record = record or _parse_record(saved)
    if record is None:
        record = inferred_requests.infer(published, journal, view.labels)
    return record


def _parse_record(text: str | None) -> requests.RequestRecord | None:
    if not text:
        return None
    try:
        return requests.RequestRecord.from_json(text)
    except ValueError as error:
        _log.warning("request_unreadable", error=str(error))
        return None


def can_roll_back(
    attempt: attempts.Attempt,
    now: model.ObservedGpus,
    snapshot: Sequence[model.GpuSnapshot],
) -> bool:
    """Return whether a snapshot can be restored without taking a device from a pod.

    Raises:
        ClusterError: The API refused or does not answer, or kubelet does not.
        HardwareError: The driver does not list the processes of pods whose devices no GPU has.
        Superseded: Another layout is requested, or the agent stops.
    """
    try:
        plan = planner.restore(now, snapshot)
        return not device_usage.name_users(attempt, plan, now)
    except errors.LayoutError as error:
        _log.warning("rollback_impossible", error=error.message)
        return False


def restore_persistence(attempt: attempts.Attempt, gpus: model.ObservedGpus) -> None:
    """Switch on the persistence mode that a killed agent switched off for a reset.

    The journal keeps the GPUs where that fails, is not allowed, or that are unreachable.
    """
    uuids = attempt.recorder.journal.gpus.persistent_gpus
    present = [gpu for gpu in gpus if gpu.uuid in uuids]
    if present and attempt.deps.reset and attempt.deps.reset.restore_persistence(present):
        change_recorder.record_persistence(
            attempt.recorder, [gpu.uuid for gpu in present], is_on=True
        )


def roll_back(attempt: attempts.Attempt) -> str:
    """Restore the snapshot and the persistence mode in the journal, if no pod is affected.

    Returns:
        The result as part of a sentence; empty if there was nothing to do.
    """
    snapshot = attempt.recorder.journal.gpus.snapshot
    if not (snapshot or attempt.recorder.journal.gpus.persistent_gpus):
        return ""
    try:
        now = attempt.deps.gpus.observe()
        attempt.recorder.set_status(observed_gpus=now)
        restore_persistence(attempt, now)
        # Instances that others create from now on must not count as the change's.
        snapshot = planner.trim(now, snapshot)
        attempt.recorder.set_journal(gpus=attempt.recorder.journal.gpus.with_snapshot(snapshot))
        change = attempt.transaction(
            require_unused=functools.partial(device_usage.require_unallocated, attempt.deps)
        )
        plan = planner.restore(now, snapshot)
        if plan.is_empty:
            return change.conclude(rollback.verify_without_steps(now, snapshot)).message
        uninterrupted = dataclasses.replace(attempt, cancel=Uninterrupted(attempt.deps))
        _require_unused(uninterrupted, plan, now)
        # Else a pod that is bound after the last check could get a device to be destroyed.
        message = "undoing an interrupted change"
        tainted = dataclasses.replace(attempt.recorder.journal.node, has_hold_taint=True)
        attempt.recorder.enter(model.Phase.ROLL_BACK, message, node=tainted)
        usage = gpu_use.Usage(
            pods=pausing.await_admission(uninterrupted, attempt.deps.workloads.list()),
            assigned=None,
            extra_clients=device_usage.read_extra_clients(attempt.deps),
        )
        pausing.pause_clients(uninterrupted, plan, usage)
        restart = pausing.pause_driver(uninterrupted, plan, usage)
        try:
            # From now on kubelet cannot assign a device.
            _require_unused(uninterrupted, plan, now)
            # If they cannot be stopped, the GPUs may still be idle.
            with contextlib.suppress(errors.ConfigError, errors.HostError):
                host.stop_services(attempt, attempt.deps.service_names(), plan)
            result = change.roll_back(snapshot, requires_idle=True)
        finally:
            # An API failure must not hide the reason; the end of the run resumes the rest.
            with contextlib.suppress(errors.ClusterError):
                resuming.resume_advertisers(attempt, restart)
    except errors.MigManagerError as error:
        _log.warning("older_rollback_failed", reason=error.reason.value, error=error.message)
        return f"the interrupted change could not be rolled back: {error.message}"
    return result.message


def _require_unused(attempt: attempts.Attempt, plan: steps.Plan, now: model.ObservedGpus) -> None:
    pods = device_usage.name_users(attempt, plan, now)
    if pods:
        raise errors.DrainError(f"pods use devices that would be removed: {pods}")


class Uninterrupted:
    """Implements ``ports.Cancellation`` for work that no request supersedes, like a rollback."""

    def __init__(self, deps: ports.Dependencies) -> None:
        self._deps = deps

    def check(self) -> None:
        """Report that work goes on."""
        self._deps.telemetry.still_working()

    def wait(self, seconds: float) -> None:
        """Sleep."""
        self._deps.telemetry.still_working()
        self._deps.clock.wait(seconds)

    def pause(self, seconds: float) -> None:
        """Sleep."""
        self.wait(seconds)
