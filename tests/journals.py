"""What a journal lists once a run has ended."""

import dataclasses

from mig_manager.core.records import journals


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
