"""The journal on the Node: what an interrupted run left, and the patches that restore it."""

import dataclasses

import structlog

from mig_manager.core.node import cluster
from mig_manager.core.records import status

_MAX_KEPT_CHARACTERS = 16 * 1024
"""Of an invalid journal: enough to inspect, and no load on the Node object."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an interrupted run left on the node."""

    journal: status.Journal | None
    """None: nothing."""
    invalid_text: str = ""
    """The annotation's text if it is invalid."""
    error: str = ""
    """Why it is invalid; empty: it is valid or missing."""

    @property
    def set_aside(self) -> cluster.NodePatch:
        """The patch that moves an invalid journal to another annotation."""
        return cluster.NodePatch(
            annotations={
                cluster.JOURNAL_ANNOTATION: None,
                cluster.UNREADABLE_JOURNAL_ANNOTATION: self.invalid_text[:_MAX_KEPT_CHARACTERS],
            }
        )


def find(view: cluster.NodeView) -> Found:
    """Return what an interrupted run left on the node.

    Without a valid journal, that is what its value marks: paused labels, the taint, a cordon with
    our annotation. NVIDIA's manager, which this agent may have replaced, keeps no journal. Any
    other cordon may belong to a person.
    """
    text = view.annotations.get(cluster.JOURNAL_ANNOTATION)
    problem = ""
    if text is not None:
        try:
            return Found(journal=without_foreign_labels(status.Journal.from_json(text), view))
        except ValueError as error:
            problem = str(error)
            _log.warning("journal_unreadable", error=problem)
    marked = status.Journal(
        config="",
        cordoned=view.is_unschedulable and cluster.CORDON_ANNOTATION in view.annotations,
        hold_taint=cluster.HOLD_TAINT in view.taint_keys,
        paused_labels={
            key: "true"
            for key, value in view.labels.items()
            if key.startswith(cluster.DEPLOY_LABEL_PREFIX) and value == cluster.PAUSED_VALUE
        },
    )
    return Found(
        journal=None if marked.is_empty else marked, invalid_text=text or "", error=problem
    )


def restoring(journal: status.Journal) -> cluster.NodePatch:
    """Return the patch that restores everything a journal lists, and nothing else."""
    labels: dict[str, str | None] = dict(journal.paused_labels)
    if journal.plugin_config:
        labels[cluster.PLUGIN_CONFIG_LABEL] = journal.plugin_config.before
    if journal.applied and not journal.snapshot:
        labels[cluster.APPLIED_LABEL] = journal.applied
    return dataclasses.replace(reopening(journal), labels=labels)


def reopening(journal: status.Journal) -> cluster.NodePatch:
    """Return the patch that removes the taint; ``cordoned`` is from agents of older versions."""
    return cluster.NodePatch(
        annotations={cluster.CORDON_ANNOTATION: None} if journal.cordoned else {},
        unschedulable=False if journal.cordoned else None,
        hold_taint=False if journal.hold_taint else None,
    )


def without_foreign_labels(journal: status.Journal, view: cluster.NodeView) -> status.Journal:
    """Return the journal without the labels that another program wrote since."""
    paused = {
        key: value
        for key, value in journal.paused_labels.items()
        if view.labels.get(key) == cluster.PAUSED_VALUE
    }
    changed = journal.plugin_config
    is_ours = changed and view.labels.get(cluster.PLUGIN_CONFIG_LABEL) == changed.now
    return dataclasses.replace(
        journal, paused_labels=paused, plugin_config=changed if is_ours else None
    )
