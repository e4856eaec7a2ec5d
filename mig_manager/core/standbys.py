"""Prepare worker processes and watches before a call needs them."""

from typing import Protocol


class Standby(Protocol):
    """Prepares the next call of another port."""

    def prepare(self) -> None:
        """Start to prepare the next call, in the background."""

    def expect_change(self) -> None:
        """Prepare for a change of GPUs, not only for an observation."""
        self.prepare()

    def dismiss(self) -> None:
        """Release unused preparations."""


class Standbys(Standby):
    """Several standbys as one, or none."""

    def __init__(self, *each: Standby) -> None:
        self._each = each

    def prepare(self) -> None:
        """Prepare each."""
        for standby in self._each:
            standby.prepare()

    def expect_change(self) -> None:
        """Prepare each for a change."""
        for standby in self._each:
            standby.expect_change()

    def dismiss(self) -> None:
        """Release each."""
        for standby in self._each:
            standby.dismiss()
