"""Read what interrupted runs and earlier agents left: journal, record, labels and taint."""

import structlog

from mig_manager import errors
from mig_manager.agent import node_context
from mig_manager.agent.pods import device_usage
from mig_manager.core import messages, ports
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import (
    host_copy,
    inferred_requests,
    journals,
    requests,
    run_status,
)

_MAX_KEPT_CHARACTERS = 16 * 1024
"""Maximum length of a saved invalid journal: enough to inspect, and small for a Node object."""

_log = structlog.get_logger()


def read_journal(
    context: node_context.NodeContext, view: node_object.NodeView
) -> journals.Journal:
    """Return the journal of an interrupted run, of the Node or the copy on the host.

    An invalid one is moved to another annotation of the Node. ``resume_unlisted`` finds paused
    labels that it listed; a cordon is left to people.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    text = view.annotations.get(well_known.JOURNAL_ANNOTATION)
    journal: journals.Journal | None = None
    if text is not None:
        try:
            journal = journals.Journal.from_json(text)
        except ValueError as error:
            _set_aside(context, text, error)
    copy = host_copy.parse_journal(_read_host(context.deps.host_copy_file))
    return host_copy.merge(journal, copy, view, boot_id=context.deps.boot_id)


def _set_aside(context: node_context.NodeContext, text: str, error: ValueError) -> None:
    """Move an invalid journal to another annotation of the Node, and report it."""
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


def resume_unlisted(context: node_context.NodeContext, view: node_object.NodeView) -> bool:
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


def read_saved(host_copy_file: ports.SavedText, view: node_object.NodeView) -> str:
    """Return what an agent saved on the host before the Node was registered again; else empty.

    A Node with a status is the one that an agent wrote to last.
    """
    published = run_status.published_on(view)
    return _read_host(host_copy_file) if published is None else ""


def _read_host(host_copy_file: ports.SavedText) -> str:
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
    published = run_status.published_on(view)
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
