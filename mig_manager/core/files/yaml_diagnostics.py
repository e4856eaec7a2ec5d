"""Errors and warnings about a document, each at its location."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

from mig_manager import errors


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnostic:
    """One sentence about one location."""

    location: errors.Location
    message: str

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"


class Diagnostics:
    """Collects diagnostics while a document is parsed."""

    def __init__(self, *, is_lenient: bool = False) -> None:
        self.is_lenient = is_lenient  # dubious content passes with a warning, as in mig-parted
        self.errors: list[errors.ConfigError] = []
        self.warnings: list[Diagnostic] = []
        self.extensions: list[Diagnostic] = []  # content that mig-parted would refuse or ignore

    def doubt(self, location: errors.Location, problem: str, *, passes: str) -> None:
        """Record an error about dubious content; if lenient, a warning how it ``passes``."""
        if self.is_lenient:
            self.warnings.append(Diagnostic(location, f"{problem} ({passes})"))
        else:
            self.errors.append(errors.ConfigError(problem, location=location))

    @contextlib.contextmanager
    def continuing(self) -> Iterator[None]:
        """Record the body's ConfigError, and continue after the body."""
        try:
            yield
        except errors.ConfigError as error:
            self.errors.append(error)

    def raise_errors(self) -> None:
        """Raise the document's first error, if it has any; the error has the others' messages."""
        if self.errors:
            first, *others = sorted(self.errors, key=lambda each: _position(each.location))
            raise errors.ConfigError(
                first.text,
                location=first.location,
                remedy=first.own_remedy,
                others=tuple(dict.fromkeys(other.message for other in others)),
            )

    def extend(self, location: errors.Location, message: str) -> None:
        """Record content that only mig-manager understands."""
        self.extensions.append(Diagnostic(location, message))


def in_order(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return diagnostics by location, without the repetitions from aliases."""
    unique = dict.fromkeys(diagnostics)
    return tuple(sorted(unique, key=lambda each: _position(each.location)))


def _position(location: errors.Location | None) -> tuple[int, int]:
    return (location.line, location.column) if location else (0, 0)
