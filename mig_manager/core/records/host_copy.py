"""The copy on the host of the request's record, and of the host's entries to undo."""

import dataclasses
import json

from mig_manager.core.files import json_text
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import journals, node_entries, requests, run_status

_JOURNAL = "journal"
_FINAL = frozenset({run_status.State.SUCCESS, run_status.State.FAILED})


def to_json(record: requests.RequestRecord, journal: journals.Journal) -> str:
    """Return the text to save: a record, with the entries that no write to the Node restores."""
    data = json.loads(record.to_json())
    remaining = journal.remaining(node_entries.RunEnd.RESTORED)
    if remaining.remainder is not journals.Remainder.NOTHING:
        data[_JOURNAL] = remaining.to_json()
    return json.dumps(data)


def parse_journal(text: str) -> journals.Journal | None:
    """Return the journal in a saved text; None if it has none, or one is invalid."""
    try:
        return journals.parse_or_none(json_text.string(json_text.parse_object(text), _JOURNAL, ""))
    except ValueError:
        return None


def merge(
    on_node: journals.Journal | None,
    copy: journals.Journal | None,
    view: node_object.NodeView,
    *,
    boot_id: str,
) -> journals.Journal:
    """Merge the Node's journal, its taint and labels, and the copy on the host.

    The copy counts if the Node has no journal. The taint always counts, by its key, and labels
    that another program wrote since do not. A reset waits for no write to the Node, so the copy
    always counts for the GPUs whose persistence mode is off, until a reboot switches it off.

    Args:
        on_node: None if the Node has none, or an invalid one.
        copy: None if the host has none.
        view: The Node.
        boot_id: The boot now.
    """
    current_copy = copy if copy and not _is_outdated(copy, view) else None
    journal = on_node or current_copy or journals.NONE
    switched_off = copy.gpus.persistent_gpus if copy and copy.boot_id == boot_id else ()
    uuids = dict.fromkeys((*journal.gpus.persistent_gpus, *switched_off))
    return dataclasses.replace(
        journal,
        boot_id=journal.boot_id or (boot_id if switched_off else ""),
        node=dataclasses.replace(
            node_entries.without_foreign_labels(journal.node, view),
            has_reconfiguring_taint=well_known.RECONFIGURING_TAINT in view.taint_keys,
        ),
        gpus=dataclasses.replace(journal.gpus, persistent_gpus=tuple(uuids)),
    )


def _is_outdated(copy: journals.Journal, view: node_object.NodeView) -> bool:
    """Return whether the run of a copy has ended, or the status is about another request.

    A run has ended after a success, or a failure that is not retried.
    """
    published = run_status.published_on(view)
    if published is None:
        return view.labels.get(well_known.STATE_LABEL) == run_status.State.SUCCESS.value
    is_final = published.state in _FINAL and not published.is_retried
    return is_final or copy.key != published.key
