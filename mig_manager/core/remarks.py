"""What a reader of a document has to say besides what it read.

A strict reader refuses what would not do what its author meant; a lenient one lets it pass as the
peer does, and remarks on it. Both remark on what the peer would not understand.
"""

import dataclasses
from collections.abc import Iterable

from mig_manager import errors


@dataclasses.dataclass(frozen=True, slots=True)
class Remark:
    """One sentence about one place."""

    location: errors.Location
    message: str

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"


class Remarks:
    """Collects remarks while a document is read.

    Attributes:
        is_lenient: Whether what is dubious passes.
        warnings: What passed and does not do what it seems to.
        extensions: What is good here and would be refused, or ignored, by the peer.
    """

    def __init__(self, *, is_lenient: bool = False) -> None:
        """Start without any."""
        self.is_lenient = is_lenient
        self.warnings: list[Remark] = []
        self.extensions: list[Remark] = []

    def doubt(self, location: errors.Location, problem: str, *, passes: str) -> None:
        """Refuse something dubious, or let it pass with a warning.

        Args:
            location: Where it is.
            problem: What is wrong with it, and what would be right.
            passes: What it means when it passes.

        Raises:
            ConfigError: It does not pass.
        """
        if not self.is_lenient:
            raise errors.ConfigError(problem, location=location)
        self.warnings.append(Remark(location, f"{problem} ({passes})"))

    def extend(self, location: errors.Location, what: str) -> None:
        """Remark on something that only we understand."""
        self.extensions.append(Remark(location, what))


def in_order(found: Iterable[Remark]) -> tuple[Remark, ...]:
    """Return remarks by their places; what a document repeats by an alias is told once."""
    unique = dict.fromkeys(found)
    return tuple(sorted(unique, key=lambda each: (each.location.line, each.location.column)))
