"""The request of a node without a record, inferred from status and labels."""

from collections.abc import Mapping

from mig_manager.core.objects import well_known
from mig_manager.core.records import journals, requests, run_status


def infer(
    published: run_status.PublishedStatus | None,
    journal: journals.Journal,
    labels: Mapping[str, str],
) -> requests.RequestRecord:
    """Infer the request from status and labels; ``requests.NONE`` if that is impossible.

    In doubt the request may not evict, so that neither a lost record nor the migration from
    NVIDIA's manager evicts a pod.

    Args:
        published: The status.
        journal: The journal of an interrupted run.
        labels: The node's labels.
    """
    layout = labels.get(well_known.CONFIG_LABEL)
    if published is None and layout and well_known.STATE_LABEL in labels:
        # NVIDIA's manager publishes no status. What its file had is unknown, and after its
        # failure, pods may have used the former layout since.
        return requests.RequestRecord(layout=layout, verified=requests.Verified(content_hash=""))
    if published is None or not published.layout:
        return requests.NONE
    is_drained = published.phase == run_status.Phase.DRAIN.value or journal.is_draining
    has_failed_early = (
        published.state is run_status.State.FAILED
        and published.phase == run_status.Phase.RESOLVE.value
        # A label that is gone shows nothing: a run after a reboot removes it.
        and labels.get(well_known.APPLIED_LABEL) in (None, published.layout)
    )
    was_verified = run_status.was_active(published) or has_failed_early
    is_verified = was_verified and journal.remainder is not journals.Remainder.CHANGE
    is_custom = bool(published.annotation_hash)
    return requests.RequestRecord(
        layout=published.layout,
        annotation_hash=published.annotation_hash,
        origin=requests.Origin.CUSTOM if is_custom else requests.Origin.LABEL,
        # The status does not show whether a program made the request.
        may_evict=not is_custom or is_drained,
        verified=requests.Verified(content_hash=published.content_hash) if is_verified else None,
        rebooted_hash=published.content_hash if published.is_rebooted else None,
    )
