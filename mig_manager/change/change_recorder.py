"""The port that records a change in its journal, for the run after a kill."""

import dataclasses
from collections.abc import Collection
from typing import Protocol, Unpack

from mig_manager.core import model, steps
from mig_manager.core.records import journals, run_status


class ChangeRecorder(Protocol):
    """Writes the journal of a change to a file or to the Node."""

    @property
    def journal(self) -> journals.Journal:
        """The journal as it is now."""

    def begin_execution(self, before: model.Snapshots, plan: steps.Plan) -> object:
        """Write the snapshot that a rollback restores, before a plan is executed.

        Called again when a later plan of the same change affects more.

        Raises:
            MigManagerError: The journal cannot be written; nothing may be executed.
        """

    def begin_rollback(self) -> object:
        """Report that a rollback begins; must not raise ``MigManagerError``."""

    def set_status(self, **fields: Unpack[run_status.Fields]) -> object:
        """Change fields of the status; the next patch publishes them, and a file has no status."""

    def set_journal(self, **fields: Unpack[journals.Fields]) -> object:
        """Change entries; a file is written at once, and the Node with its next patch.

        Raises:
            MigManagerError: A snapshot that must be kept cannot be written.
        """

    def announce(self, **fields: Unpack[journals.Fields]) -> object:
        """Change entries and write them now; must not raise ``MigManagerError``."""


def record_persistence(recorder: ChangeRecorder, uuids: Collection[str], *, is_on: bool) -> None:
    """Record that the persistence mode of GPUs will be switched off, or is on again."""
    gpus = recorder.journal.gpus
    others = [uuid for uuid in gpus.persistent_gpus if uuid not in uuids]
    switched_off = (*others, *(() if is_on else uuids))
    recorder.announce(gpus=dataclasses.replace(gpus, persistent_gpus=switched_off))
