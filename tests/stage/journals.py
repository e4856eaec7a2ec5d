"""What a run leaves on a node: what its journal lists, and what it has taken."""

import dataclasses

from mig_manager.core.node import well_known
from mig_manager.core.records import journals
from mig_manager.sandbox.node import objects


def taken(node: objects.JsonObject) -> list[str]:
    """Return what a change has taken of a node; nothing, if all is well."""
    return [
        *(key for key in objects.annotations(node) if key == well_known.JOURNAL_ANNOTATION),
        *(key for key, value in objects.labels(node).items() if value == well_known.PAUSED_VALUE),
        *(["cordon"] if node["spec"].get("unschedulable") else []),
        *(taint["key"] for taint in node["spec"].get("taints") or ()),
    ]


def lists_nothing(text: str | None, *, is_stopped: bool = False) -> bool:
    """Return whether nothing is to be restored.

    Args:
        text: The annotation's value; None: the node has no journal.
        is_stopped: A stopped agent may leave the proof of the node's devices to the next one.
    """
    if text is None or not is_stopped:
        return text is None
    journal = journals.Journal.from_json(text)
    return dataclasses.replace(journal, has_plugin=False, has_dra_driver=False).is_empty
