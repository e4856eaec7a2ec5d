"""Layout files named on a command line, or written to standard input."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mig_manager import errors, reasons
from mig_manager.cli.toolkit import console

if TYPE_CHECKING:
    from mig_manager.core.layout import layout_documents


def read(
    terminal: console.Console, name: str, *, source: str = "", is_lenient: bool = False
) -> "layout_documents.Document":
    """Parse a layout file, or standard input for ``-``; messages call it ``source``.

    Raises:
        ConfigError: It cannot be read, or is invalid.
    """
    from mig_manager.adapters.host import files  # noqa: PLC0415 - not for every command
    from mig_manager.core.files import yaml_text  # noqa: PLC0415 - loads YAML
    from mig_manager.core.layout import layout_parser  # noqa: PLC0415 - loads YAML

    if name != "-":
        file = files.SourceFile(name)
        return layout_parser.parse(file.read(), source=source or name, is_lenient=is_lenient)
    try:
        # Read one character more than allowed, so that a longer file is refused.
        text = terminal.stdin.read(yaml_text.MAX_CHARACTERS + 1)
    except (OSError, UnicodeError) as error:
        raise errors.ConfigError(f"cannot read standard input: {error}") from error
    return layout_parser.parse(text, source="<stdin>", is_lenient=is_lenient)


@contextlib.contextmanager
def explaining_names(names: Iterable[str]) -> Iterator[None]:
    """Explain an unknown layout that has the name of a file.

    Raises:
        UsageError: A layout is unknown, and a file has one of the names.
    """
    try:
        yield
    except errors.LayoutError as error:
        # Not Path.is_file, which raises OSError for a name that no file can have.
        file = next(filter(os.path.isfile, names), None)
        if file is None or error.reason is not reasons.Reason.UNKNOWN_CONFIG:
            raise
        raise errors.UsageError(f"'{file}' is a file: write -f {file}") from error
