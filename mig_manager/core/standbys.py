"""Prepare worker processes before a call needs them."""

from typing import Protocol


class Standby(Protocol):
    """Prepares the next call of another port."""

    def prepare(self) -> None:
        """Start to prepare the next call, in the background."""

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

    def dismiss(self) -> None:
        """Release each."""
        for standby in self._each:
            standby.dismiss()
