"""An option, declared once: its flags, variables, type, default and help.

A settings class declares each of its options as a field, with one of the functions below. The
parser, the variables of the environment, the settings themselves, ``--help``, the manual pages,
shell completion and the tables of the documentation are derived from these fields.
"""

import dataclasses
import enum
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mig_manager import errors

PREFIX = "MIG_MANAGER_"
"""Prefix of our variables of the environment, before the option's name in capitals."""
OPTIONS = "options"  # the heading in help of options without a group
# Other headings.
EVICTIONS = "evictions"
LAYOUTS = "layouts"
CHANGE = "the change"
DRIFT = "drift and faults"
MANY_NODES = "many nodes"
METRICS = "metrics and log"
HOST = "host"
GPUS = "GPUs"
TIMES = "time limits and pauses"

FILE = "FILE"
FOLDER = "FOLDER"
LAYOUT = "LAYOUT"  # a layout of the document named on the same command line
NAME = "NAME"
PRODUCT = "PRODUCT"  # a GPU product
SECONDS = "SECONDS"
SPEC = "SPEC"  # the GPUs of a simulated node

_TRUE = frozenset({"1", "t", "T", "true", "True", "TRUE"})
_FALSE = frozenset({"0", "f", "F", "false", "False", "FALSE"})
"""Values of Go's ParseBool, for which variables of NVIDIA's tools are written."""
_LAST_PORT = 65535
_MAX_DIGITS = 5
_MAX_S = 366 * 86400.0
"""A year: system calls that wait overflow on longer times, and only when they are made."""
MIN_PAUSE_S = 0.001  # a pause of 0 seconds would keep a core busy
_KEY = "option"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option or an operand of one or more commands."""

    name: str = ""  # its long name; empty: derived from the settings field
    short: str = ""  # its letter
    help: str  # its purpose, without default and variable
    metavar: str = ""
    """Stands for the value in help, and selects the completions; empty for a switch."""
    words: tuple[str, ...] = ()  # the values to choose from
    variable: str = ""  # a variable of NVIDIA's tool or of Kubernetes; it comes before ours
    parse: Callable[[str], object] = str  # raises ValueError, such as "is not a port"
    default: object = None
    default_text: str = ""  # the default in words, if it depends on the host or other options
    group: str = OPTIONS  # the heading in help
    dest: str = ""  # the name of the parsed value; empty: the long name with ``_`` for ``-``
    const: object = True  # the value of a switch
    is_operand: bool = False
    is_required: bool = False  # whether the operand must be present
    is_repeatable: bool = False
    is_value_optional: bool = False  # whether a switch may also have a value, as in Go
    has_flag: bool = True
    has_variable: bool = True

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags, the short one first."""
        long = (f"--{self.name}",) if self.has_flag and not self.is_operand else ()
        return ((f"-{self.short}",) if self.short else ()) + long

    @property
    def key(self) -> str:
        """The name of the parsed value."""
        return self.dest or self.name.replace("-", "_")

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables of the environment; the first one that is set counts."""
        derived = (PREFIX + self.key.upper(),) if self.has_variable else ()
        return ((self.variable,) if self.variable else ()) + derived

    @property
    def shown_default(self) -> str:
        """The default as help shows it; empty for a switch, and without a default."""
        is_none = self.default in (None, "", (), frozenset()) or isinstance(self.default, bool)
        if self.default_text or is_none:
            return self.default_text
        value = self.default.value if isinstance(self.default, enum.Enum) else self.default
        return f"{value:g}" if isinstance(value, float) else str(value)

    @property
    def full_help(self) -> str:
        """The help with the default and the variable."""
        default = f" (default: {self.shown_default})" if self.shown_default else ""
        return f"{self.help}{default}" + (f" [{self.variable}]" if self.variable else "")


class Source:
    """The values of a command line over variables of the environment over defaults.

    The command line is as parsed, with values as text.
    """

    def __init__(self, parsed: Mapping[str, object], environ: Mapping[str, str]) -> None:
        self.parsed = parsed
        self.environ = environ

    def get(self, option: Option) -> Any:
        """Return an option's value; UsageError if malformed. An empty variable is absent.

        A variable separates the values of a repeatable option with commas.
        """
        value = self.parsed.get(option.key)
        raw, origin = self._find(option)
        if not (raw or isinstance(value, list)):
            return option.default
        if not option.is_repeatable:
            return _parse(option, raw, origin)
        each = map(str, value) if isinstance(value, list) else raw.split(",")
        values = (_parse(option, one, origin) for one in each)
        return frozenset(values) if isinstance(option.default, frozenset) else tuple(values)

    def is_set(self, option: Option) -> bool:
        """Return whether the command line or a variable has a value."""
        return bool(self._find(option)[0])

    def effective(self, option: Option) -> tuple[str, str]:
        """Return an option's value as text, and its origin: flag, variable or ``default``."""
        raw, origin = self._find(option)
        return (raw, origin) if raw else (option.shown_default, "default")

    def field(self, settings: type, name: str) -> Any:
        """Return the value of one field of a settings class."""
        (declared,) = (each for each in dataclasses.fields(settings) if each.name == name)
        return self.get(next(_of_field(declared)))

    def values(self, settings: type) -> dict[str, Any]:
        """Return the values of all fields of a settings class that are options.

        An option that the command does not take keeps its default, even if its variable is set.
        """
        names = {option.name for option in of(settings)}
        values: dict[str, Any] = {}
        for field in dataclasses.fields(settings):
            if _KEY in field.metadata:
                option = next(_of_field(field))
                is_taken = option.name in names
                values[field.name] = self.get(option) if is_taken else option.default
        return values

    def _find(self, option: Option) -> tuple[str, str]:
        """Return the value as text, and its origin: the flag or the variable."""
        value = self.parsed.get(option.key)
        if value is not None and value is not False:
            return str(value), f"--{option.name}"
        for variable in option.variables:
            if self.environ.get(variable):
                return self.environ[variable], variable
        return "", f"--{option.name}"


def _parse(option: Option, raw: str, origin: str) -> Any:
    try:
        return option.parse(raw)
    except ValueError as error:
        raise errors.UsageError(f"{origin}: {raw!r} {error}") from error


@functools.cache
def of(settings: type) -> tuple[Option, ...]:
    """Return the options of a settings class, in the order of help.

    If the class has names in ``takes``, these are its options. Otherwise all declared ones are,
    and inherited fields follow the class's own.

    Raises:
        LookupError: No option has one of these names.
    """
    takes: tuple[str, ...] = getattr(settings, "takes", ())
    fields = {field.name: field for field in dataclasses.fields(settings)}
    own_first = dict.fromkeys((*filter(fields.get, settings.__annotations__), *fields))
    declared = {option.name: option for name in own_first for option in _of_field(fields[name])}
    if unknown := set(takes) - declared.keys():
        raise LookupError(f"{settings.__name__} declares no option {', '.join(sorted(unknown))}")
    return tuple(declared[name] for name in takes or declared)


def _of_field(field: dataclasses.Field[Any]) -> Iterator[Option]:
    for each in field.metadata.get(_KEY, ()):
        yield each if each.name else dataclasses.replace(each, name=field.name.replace("_", "-"))
    yield from field.metadata.get("nested", ())


# -- fields of settings classes ------------------------------------------------------------------


def declare(*variants: Option) -> Any:
    """Declare a field by options that set it; the first one has the default."""
    return dataclasses.field(default=variants[0].default, metadata={_KEY: variants})


def declare_from(source: type | tuple[Option, ...], *names: str, group: str = "") -> Any:
    """Declare a field that is computed from other options.

    ``source`` is these options, or the settings class that declares them. The command line has the
    options with these long ``names``, or all. Without ``group`` they keep their heading in help.
    """
    options = tuple(
        dataclasses.replace(each, group=group or each.group)
        for each in (of(source) if isinstance(source, type) else source)
        if not names or each.name in names
    )
    return dataclasses.field(metadata={"nested": options})


def text(meaning: str, *, metavar: str = NAME, default: str | None = None, **more: Any) -> Any:
    """Declare a text."""
    return declare(Option(help=meaning, metavar=metavar, default=default, **more))


def switch(meaning: str, *, default: bool = False, **more: Any) -> Any:
    """Declare a switch: true or false, as Go's ParseBool reads them."""
    return declare(Option(help=meaning, parse=parse_switch, default=default, **more))


def seconds(
    meaning: str,
    *,
    default: float | None,
    minimum: float = 0.0,
    maximum: float = _MAX_S,
    **more: Any,
) -> Any:
    """Declare a duration in seconds, by default up to a year."""

    def parse(value: str) -> float:
        try:
            # To Python, 1_0 and the digits of other scripts are numbers too.
            number = float(value) if value.isascii() and "_" not in value else math.nan
        except ValueError:
            number = math.nan
        if not minimum <= number <= maximum:
            raise ValueError(f"is not a number of seconds from {minimum:g} to {maximum:.10g}")
        return number

    return declare(Option(help=meaning, metavar=SECONDS, parse=parse, default=default, **more))


def count(
    meaning: str,
    *,
    metavar: str = "NUMBER",
    minimum: int = 0,
    maximum: int = 99999,
    what: str = "whole number",
    default: int = 0,
    **more: Any,
) -> Any:
    """Declare a whole number; the default may be less than the least that a user can name."""

    def parse(value: str) -> int:
        # Checked before the conversion: long numbers take long.
        is_short = len(value) <= _MAX_DIGITS and value.isascii() and value.isdigit()
        if not is_short or not minimum <= int(value) <= maximum:
            raise ValueError(f"is not a {what} from {minimum} to {maximum}")
        return int(value)

    return declare(Option(help=meaning, metavar=metavar, parse=parse, default=default, **more))


def port(meaning: str, **more: Any) -> Any:
    """Declare a TCP port; 0 is none."""
    return count(meaning, metavar="PORT", maximum=_LAST_PORT, what="port", **more)


def path(meaning: str, *, default: pathlib.Path | None = None, **more: Any) -> Any:
    """Declare a path, with ``~`` for a home directory."""

    def parse(value: str) -> pathlib.Path:
        try:
            return pathlib.Path(value).expanduser()
        except RuntimeError as error:
            raise ValueError("names no home directory") from error

    return declare(
        Option(help=meaning, parse=parse, default=default, **({"metavar": FILE} | more))
    )


def choice(meaning: str, *, metavar: str, default: enum.Enum, **more: Any) -> Any:
    """Declare one of an enumeration's values."""
    return declare(choosing(meaning, metavar=metavar, default=default, **more))


def choosing(
    meaning: str, *, metavar: str, default: enum.Enum, words: tuple[str, ...] = (), **more: Any
) -> Option:
    """Return the option for one of an enumeration's values: of ``words``, or of all."""
    choices = words or tuple(str(each.value) for each in type(default))
    by_word = {word: type(default)(word) for word in choices}

    def parse(value: str) -> enum.Enum:
        if value not in by_word:
            raise ValueError(f"is not one of {', '.join(by_word)}")
        return by_word[value]

    return Option(
        help=meaning, metavar=metavar, words=choices, parse=parse, default=default, **more
    )


def parse_switch(value: str) -> bool:
    """Return a truth value; ValueError if it is neither true nor false."""
    if value in _TRUE or value in _FALSE:
        return value in _TRUE
    raise ValueError("is neither true nor false")
