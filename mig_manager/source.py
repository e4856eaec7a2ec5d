"""One value at a time, from a command line over environment variables over a default."""

import enum
import math
import pathlib
import re
from collections.abc import Mapping
from typing import TypeVar

from mig_manager import errors

_Choice = TypeVar("_Choice", bound=enum.Enum)

_TRUE = frozenset({"1", "t", "T", "true", "True", "TRUE"})
_FALSE = frozenset({"", "0", "f", "F", "false", "False", "FALSE"})
"""What Go's ParseBool takes, because the peer's variables are written for it."""

_MAX_PORT = 65535


class Source:
    """Reads one value at a time: the option if given, else its variable, else the default."""

    def __init__(self, options: Mapping[str, object], environ: Mapping[str, str]) -> None:
        self._options = options
        self._environ = environ

    def text(self, name: str, *, variable: str = "", default: str = "") -> str:
        """Return a text; an empty variable counts as absent, an empty option does not."""
        return self._find(name, variable)[0] or default

    def switch(self, name: str, *, variable: str = "") -> bool:
        """Return a yes or no.

        Raises:
            UsageError: The variable is neither.
        """
        text, origin = self._find(name, variable)
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
            UsageError: It is not a number, too small, or not finite.
        """
        text, origin = self._find(name, variable)
        try:
            value = float(text) if text else default
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least):
            raise errors.UsageError(
                f"{origin}: {text!r} is not a number of seconds from {least:g} on"
            )
        return value

    def port(self, name: str, *, variable: str = "", default: int = 0) -> int:
        """Return a TCP port, or 0.

        Raises:
            UsageError: It is not a port.
        """
        text, origin = self._find(name, variable)
        if not text:
            return default
        if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > _MAX_PORT:
            raise errors.UsageError(f"{origin}: {text!r} is not a TCP port")
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
        """Return a path, or None when none is given."""
        text = self.text(name, variable=variable)
        return pathlib.Path(text).expanduser() if text else None

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
