"""What an interrupted run left on its node, read back from the journal or from its marks."""

import dataclasses

import structlog

from mig_manager.agent import record
from mig_manager.core.node import cluster
from mig_manager.core.records import status

_MAX_KEPT_CHARACTERS = 16 * 1024
"""Of a journal that makes no sense: enough to look into, and no load on the Node object."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is left."""

    journal: status.Journal | None
    """None: nothing is."""
    unreadable: str = ""
    """The journal's text if it makes no sense."""
    why_unreadable: str = ""
    """Empty: it does make sense, or there is none."""

    @property
    def set_aside(self) -> cluster.NodePatch:
        """The patch that keeps an unreadable journal elsewhere."""
        return cluster.NodePatch(
            annotations={
                cluster.JOURNAL_ANNOTATION: None,
                cluster.UNREADABLE_JOURNAL_ANNOTATION: self.unreadable[:_MAX_KEPT_CHARACTERS],
            }
        )


def find(view: cluster.NodeView) -> Found:
    """Return what an interrupted run left taken.

    Without a journal, or with one that cannot be read, that is what is marked by its very value
    (paused labels, the hold taint, a cordon with our annotation): NVIDIA's manager, whose place
    we may have taken, keeps no journal. Any other cordon may be somebody else's.
    """
    text = view.annotations.get(cluster.JOURNAL_ANNOTATION)
    why = ""
    if text is not None:
        try:
            return Found(journal=record.still_taken(status.Journal.from_json(text), view))
        except ValueError as error:
            why = str(error)
            _log.warning("journal_unreadable", error=why)
    marked = _marked(view)
    return Found(
        journal=None if marked.is_empty else marked,
        unreadable=text or "",
        why_unreadable=why,
    )


def _marked(view: cluster.NodeView) -> status.Journal:
    paused = {
        key: "true"
        for key, value in view.labels.items()
        if key.startswith(cluster.DEPLOY_LABEL_PREFIX) and value == cluster.PAUSED_VALUE
    }
    return status.Journal(
        config="",
        cordoned=view.is_unschedulable and cluster.CORDON_ANNOTATION in view.annotations,
        hold_taint=cluster.HOLD_TAINT in view.taint_keys,
        paused_labels=paused,
    )
