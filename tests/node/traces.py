"""What a change has left on a node at rest."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mig_manager.core.node import node_object, well_known
from mig_manager.core.records import journals

_NONE: dict[str, Any] = {
    each.name: getattr(kind, each.name)
    for kind in (journals.NONE.node, journals.NONE.host, journals.NONE.gpus)
    for each in dataclasses.fields(kind)
}
ENTRIES = tuple(_NONE)
UNVERIFIED_ADVERTISERS = ("has_plugin", "has_dra_driver")
"""Entries for advertisers of devices: a stopped agent may leave their verification to the next."""


def remaining(
    view: node_object.NodeView,
    *pending_entries: str,
    is_cordoned: bool = False,
    deployed: Mapping[str, str] | None = None,
) -> list[str]:
    """Return what a change has left on a node; nothing, if all is well.

    Args:
        view: The node.
        pending_entries: Entries of the journal that may stay for the next attempt.
        is_cordoned: Whether a person cordoned the node.
        deployed: Its deploy labels as their owner has them; None: only none is paused.
    """
    text = view.annotations.get(well_known.JOURNAL_ANNOTATION)
    journal = journals.Journal.from_json(text) if pending_entries and text else journals.NONE
    kept = journal.with_entries(**{name: _NONE[name] for name in pending_entries})
    # An agent removes only the taint that its journal lists.
    is_tainted = "hold_taint" in pending_entries and journal.node.hold_taint and journal.draining
    labels = deploy_labels(view.labels)
    is_paused = well_known.PAUSED_VALUE in labels.values()
    return [
        *([f"journal {text}"] if not kept.is_empty or (text and journal.is_empty) else []),
        *([f"paused {labels}"] if is_paused or deployed not in (None, labels) else []),
        *(["cordon"] if view.is_unschedulable is not is_cordoned else []),
        *(["taint"] if (well_known.HOLD_TAINT in view.taint_keys) is not is_tainted else []),
    ]


def deploy_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that deploy GPU clients."""
    prefix = well_known.DEPLOY_LABEL_PREFIX
    return {key: value for key, value in labels.items() if key.startswith(prefix)}
