"""The copy on the host of the request's record, and of the host's entries to undo."""

import json

from mig_manager.core.files import json_text
from mig_manager.core.records import journals, node_entries, requests

_JOURNAL = "journal"


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
