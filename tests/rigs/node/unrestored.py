"""What a change has not restored on a node at rest."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import journals, node_entries

_Entries = TypeVar("_Entries", node_entries.NodeEntries, journals.HostEntries, journals.GpuEntries)


def on_node(
    view: node_object.NodeView,
    *pending_entries: str,
    is_cordoned: bool = False,
    deployed: Mapping[str, str] | None = None,
) -> list[str]:
    """List what a change has not restored on the Node; empty if all is restored.

    Args:
        view: The node.
        pending_entries: Entries of the journal that may stay for the next attempt.
        is_cordoned: Whether a person cordoned the node.
        deployed: Its deploy labels as their owner has them; None: only none is paused.
    """
    text = view.annotations.get(well_known.JOURNAL_ANNOTATION)
    journal = journals.Journal.from_json(text) if pending_entries and text else journals.NONE
    kinds = (journal.node, journal.host, journal.gpus)
    known_entries = {each.name for kind in kinds for each in dataclasses.fields(kind)}
    assert known_entries.issuperset(pending_entries), f"no such entries: {pending_entries}"
    kept = dataclasses.replace(
        journal,
        node=_without(journal.node, journals.NONE.node, pending_entries),
        host=_without(journal.host, journals.NONE.host, pending_entries),
        gpus=_without(journal.gpus, journals.NONE.gpus, pending_entries),
    )
    # An agent removes only the taint that its journal lists.
    is_tainted = (
        "has_reconfiguring_taint" in pending_entries
        and journal.node.has_reconfiguring_taint
        and journal.is_draining
    )
    labels = deploy_labels(view.labels)
    is_paused = well_known.PAUSED_VALUE in labels.values()
    nothing = journals.Remainder.NOTHING
    is_kept = kept.remainder is not nothing or bool(text and journal.remainder is nothing)
    return [
        *([f"journal {text}"] if is_kept else []),
        *([f"paused {labels}"] if is_paused or deployed not in (None, labels) else []),
        *(["cordon"] if view.is_unschedulable is not is_cordoned else []),
        *(
            ["taint"]
            if (well_known.RECONFIGURING_TAINT in view.taint_keys) is not is_tainted
            else []
        ),
    ]


def _without(entries: _Entries, empty: _Entries, names: Sequence[str]) -> _Entries:
    """Return the entries of one kind without those of the names."""
    kind = [each.name for each in dataclasses.fields(empty)]
    return dataclasses.replace(
        entries, **{name: getattr(empty, name) for name in names if name in kind}
    )


def deploy_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that deploy GPU clients."""
    prefix = well_known.DEPLOY_LABEL_PREFIX
    return {key: value for key, value in labels.items() if key.startswith(prefix)}
