"""One value at a time, from a command line over environment variables over a default."""

import enum
import math
import pathlib
from collections.abc import Mapping
from typing import TypeVar

from mig_manager import errors

_Choice = TypeVar("_Choice", bound=enum.Enum)

_TRUE = frozenset({"1", "t", "T", "true", "True", "TRUE"})
_FALSE = frozenset({"", "0", "f", "F", "false", "False", "FALSE"})
"""What Go's ParseBool takes, because the peer's variables are written for it."""

_LAST_PORT = 65535

_MOST_DIGITS = 5

_MOST_S = 366 * 86400.0
"""A year. The system's waits fail, and not at the start, for times beyond what they can count."""


class Source:
    """Reads one value at a time: the option if given, else its variable, else the default."""

    def __init__(self, options: Mapping[str, object], environ: Mapping[str, str]) -> None:
        self._options = options
        self._environ = environ

    def text(self, name: str, *, variable: str = "", default: str = "") -> str:
        """Return a text; an empty variable counts as absent."""
        return self._find(name, variable)[0] or default

    def switch(self, name: str, *, variable: str = "", default: bool = False) -> bool:
        """Return a yes or no.

        Raises:
            UsageError: The variable is neither.
        """
        text, origin = self._find(name, variable)
        if not text:
            return default
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        raise errors.UsageError(f"{origin}: {text!r} is neither true nor false")

    def seconds(
        self, name: str, *, variable: str = "", default: float, least: float = 0.0
    ) -> float:
        """Return a duration of at least ``least`` seconds.

        Raises:
            UsageError: It is not a number, too small, or more than a year.
        """
        text, origin = self._find(name, variable)
        try:
            value = float(text) if text else default
        except ValueError:
            value = math.nan
        if not least <= value <= _MOST_S:
            raise errors.UsageError(
                f"{origin}: {text!r} is not a number of seconds from {least:g} to {_MOST_S:g}"
            )
        return value

    def count(self, name: str, *, variable: str = "", default: int = 0) -> int:
        """Return a number of things.

        Raises:
            UsageError: It is not a whole number from 0 to 99999.
        """
        text, origin = self._find(name, variable)
        if not text:
            return default
        # Before it is read: long numbers take long.
        if len(text) > _MOST_DIGITS or not (text.isascii() and text.isdigit()):
            raise errors.UsageError(f"{origin}: {text!r} is not a whole number from 0 to 99999")
        return int(text)

    def port(self, name: str, *, variable: str = "") -> int:
        """Return a TCP port; 0 when none is given.

        Raises:
            UsageError: It is no port.
        """
        text, origin = self._find(name, variable)
        if not text:
            return 0
        # Before it is read: long numbers take long.
        is_short = len(text) <= len(str(_LAST_PORT)) and text.isascii() and text.isdigit()
        if not is_short or int(text) > _LAST_PORT:
            raise errors.UsageError(f"{origin}: {text!r} is not a port from 0 to {_LAST_PORT}")
        return int(text)

    def choice(
        self, name: str, kind: type[_Choice], *, variable: str = "", default: _Choice
    ) -> _Choice:
        """Return one of an enumeration's values.

        Raises:
            UsageError: It is none of them.
        """
        text, origin = self._find(name, variable)
        if not text:
            return default
        known = {str(member.value): member for member in kind}
        if text not in known:
            raise errors.UsageError(f"{origin}: {text!r} is not one of {', '.join(known)}")
        return known[text]

    def path(self, name: str, *, variable: str = "") -> pathlib.Path | None:
        """Return a path, or None when none is given.

        Raises:
            UsageError: It begins with the ``~`` of a user who has no home.
        """
        text, origin = self._find(name, variable)
        try:
            return pathlib.Path(text).expanduser() if text else None
        except RuntimeError as error:
            raise errors.UsageError(f"{origin}: {text!r} names no home directory") from error

    def is_given(self, name: str, *, variable: str = "") -> bool:
        """Tell whether option or variable has a value."""
        return bool(self._find(name, variable)[0])

    def _find(self, name: str, variable: str) -> tuple[str, str]:
        """Return the value as text, and where it came from."""
        option = self._options.get(name.replace("-", "_"))
        if option is not None and option is not False:
            return str(option), f"--{name}"
        own = "MIG_MANAGER_" + name.upper().replace("-", "_")
        for candidate in filter(None, (variable, own)):
            if self._environ.get(candidate):
                return self._environ[candidate], candidate
        return "", f"--{name}"
