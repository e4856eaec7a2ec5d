"""Take over what an interrupted run left, and roll its change back without evicting a pod.

Right after a failure no pod can use what the change created, because the device plugin is paused.
Later, after a crash or a failed rollback, one may. So the pods are checked first, and where one
would lose its device the GPUs stay as they are.
"""

import contextlib
import dataclasses
from collections.abc import Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import job as jobs
from mig_manager.agent import publish
from mig_manager.agent.pods import survey
from mig_manager.change import transaction
from mig_manager.core import model, ports, steps
from mig_manager.core.node import clients, cluster
from mig_manager.core.planner import planner
from mig_manager.core.records import journals, requests, status

_MAX_KEPT_CHARACTERS = 16 * 1024
"""Of an invalid journal: enough to inspect, and no load on the Node object."""

_log = structlog.get_logger()


def find_journal(
    node: ports.Node, publisher: publish.Publisher, view: cluster.NodeView
) -> journals.Journal:
    """Return what an interrupted run left on the node, if anything.

    An invalid journal is set aside. Without a valid one, the result is what its value marks:
    paused labels, and the taint. NVIDIA's manager, which this agent may have replaced, keeps no
    journal. A cordon belongs to people.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    text = view.annotations.get(cluster.JOURNAL_ANNOTATION)
    if text is not None:
        try:
            return journals.without_foreign_labels(journals.Journal.from_json(text), view)
        except ValueError as error:
            _log.warning("journal_unreadable", error=str(error))
            publisher.annotate(
                {
                    cluster.JOURNAL_ANNOTATION: None,
                    cluster.UNREADABLE_JOURNAL_ANNOTATION: text[:_MAX_KEPT_CHARACTERS],
                }
            )
            node.emit(
                reason="JournalUnreadable",
                message=f"the journal of an interrupted run is invalid ({error}): labels and "
                "taint that are marked as ours are restored; the text is kept in the annotation "
                f"{cluster.UNREADABLE_JOURNAL_ANNOTATION}",
                is_warning=True,
            )
    return journals.Journal(
        config="",
        hold_taint=cluster.HOLD_TAINT in view.taint_keys,
        paused_labels={
            key: "true"
            for key, value in view.labels.items()
            if key.startswith(cluster.DEPLOY_LABEL_PREFIX) and value == cluster.PAUSED_VALUE
        },
    )


def has_ended(journal: journals.Journal, view: cluster.NodeView) -> bool:
    """Check whether a run has ended: its snapshot waits for an unreachable GPU to be back."""
    published = status.read_or_none(view.annotations.get(cluster.STATUS_ANNOTATION))
    return journal.is_restored or (
        status.was_active(published) and dataclasses.replace(journal, snapshot=()).is_restored
    )


def find_record(
    request_file: ports.KeptText | None,
    view: cluster.NodeView,
    journal: journals.Journal,
) -> requests.Request:
    """Return the record of the request that an earlier agent has served; ``NONE`` without one.

    A record that names another request than the status is older than it: an agent of a version
    without records has served the node since. Then the status decides.
    """
    published = status.read_or_none(view.annotations.get(cluster.STATUS_ANNOTATION))
    record = _parsed(view.annotations.get(cluster.REQUEST_ANNOTATION))
    if record is None and published is None and request_file is not None:
        try:
            record = _parsed(request_file.read())
        except errors.ConfigError as error:
            _log.warning("request_not_read", error=error.message)
    elif record is None or _is_older(record, published):
        applied = view.labels.get(cluster.APPLIED_LABEL, "")
        record = requests.of_status(published, journal, applied)
    return record or requests.NONE


def _parsed(text: str | None) -> requests.Request | None:
    if not text:
        return None
    try:
        return requests.Request.from_json(text)
    except ValueError as error:
        _log.warning("request_unreadable", error=str(error))
        return None


def _is_older(record: requests.Request, published: status.PublishedStatus | None) -> bool:
    # A status that names no request is of a run that ended without one. An agent that keeps
    # records may have died between a record and the first status of its run.
    if published is None or not published.config or published.keeps_request:
        return False
    return record.key != (published.config, published.annotation_hash)


def is_possible(
    deps: ports.Dependencies,
    now: Sequence[model.Gpu],
    snapshot: Sequence[model.GpuSnapshot],
) -> bool:
    """Check whether a snapshot can be restored without taking a device from a pod.

    Raises:
        ClusterError: The API refused or does not answer.
        HardwareError: The driver does not list the processes of pods whose devices no GPU has.
    """
    try:
        return not _affected(deps, planner.restore(now, snapshot), now)
    except errors.LayoutError as error:
        _log.warning("rollback_impossible", error=error.message)
        return False


def rollback_target(job: jobs.Job, gpus: model.ObservedGpus) -> tuple[model.GpuSnapshot, ...]:
    """Return what a rollback restores of GPUs that an interrupted change has begun to change."""
    before = job.taken.journal.snapshot
    if not before or is_possible(job.deps, gpus, before):
        return before
    # Then the layout from before that change cannot be back either.
    job.taken.note(applied="")
    return gpus.missing(before)


def restore_persistence(job: jobs.Job, gpus: model.ObservedGpus) -> None:
    """Switch on the persistence mode that a killed agent switched off for a reset."""
    uuids = job.taken.journal.persistent_gpus
    if uuids and job.deps.reset:
        job.deps.reset.restore_persistence([gpu for gpu in gpus if gpu.uuid in uuids])
    job.taken.note(persistent_gpus=())


def roll_back(job: jobs.Job) -> str:
    """Restore the snapshot in the journal, if there is one and no pod is affected.

    Returns:
        How it went, as a part of a sentence; empty when there was nothing to do.
    """
    snapshot = job.taken.journal.snapshot
    if not snapshot:
        return ""
    try:
        now = job.deps.gpus.observe()
        job.progress.note(gpus=now)
        restore_persistence(job, now)
        change = job.transaction()
        plan = planner.restore(now, snapshot)
        if plan.is_empty:
            result = transaction.without_steps(now, snapshot)
            return change.conclude(result).message if result.is_complete else result.message
        _require_unused(job.deps, plan, now)
        job.taken.begin_rollback()
        pods = job.deps.workloads.list()
        paused = job.clients.pause(plan, pods, job.taken, Uninterrupted(job.deps))
        try:
            # From now on kubelet cannot assign a device.
            _require_unused(job.deps, plan, now)
            result = change.roll_back(snapshot, requires_idle=True)
            if result.is_complete:
                job.progress.note(gpus=job.deps.gpus.observe())
        finally:
            # An API that fails now must not hide the reason; the end of the run resumes the rest.
            with contextlib.suppress(errors.ClusterError):
                job.clients.resume_plugin(paused, job.taken)
    except errors.MigManagerError as error:
        _log.warning("older_rollback_failed", reason=error.reason.value, error=error.message)
        return f"the interrupted change could not be rolled back: {error.message}"
    return result.message


def _require_unused(deps: ports.Dependencies, plan: steps.Plan, now: Sequence[model.Gpu]) -> None:
    pods = _affected(deps, plan, now)
    if pods:
        raise errors.DrainError(f"pods use devices that would be removed: {pods}")


def _affected(deps: ports.Dependencies, plan: steps.Plan, now: Sequence[model.Gpu]) -> str:
    """Name the pods that use, or may use, what a plan destroys."""
    usage = survey.usage_now(deps.workloads.list, deps.allocations, now, deps.processes)
    return usage.named(usage.users(clients.affected_ids(plan, now)))


class Uninterrupted:
    """Implements ``ports.Cancellation`` for what no request supersedes, such as a rollback."""

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
