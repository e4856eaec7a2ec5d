"""What a run leaves on a node."""

import dataclasses

from mig_manager.core.node import well_known
from mig_manager.core.records import journals
from mig_manager.sandbox.node import objects


def taken(node: objects.JsonObject, *, is_stopped: bool = False) -> list[str]:
    """Return what a change has taken of a node; nothing, if all is well.

    A stopped agent may leave the proof of the node's devices to the next one.
    """
    text = objects.annotations(node).get(well_known.JOURNAL_ANNOTATION)
    if text is not None and is_stopped:
        journal = journals.Journal.from_json(text)
        if dataclasses.replace(journal, has_plugin=False, has_dra_driver=False).is_empty:
            text = None
    return [
        *([f"journal {text}"] if text is not None else []),
        *(key for key, value in objects.labels(node).items() if value == well_known.PAUSED_VALUE),
        *(["cordon"] if node["spec"].get("unschedulable") else []),
        *(taint["key"] for taint in node["spec"].get("taints") or ()),
    ]
