"""An answer that goes into a file of the user's: replaced as a whole, or not at all."""

import contextlib
import os
import pathlib
import stat
import tempfile

from mig_manager import errors


def write(path: pathlib.Path, text: str) -> None:
    """Write a text; a regular file keeps its mode, and others such as a pipe are written to.

    Args:
        path: The file; a link is followed. Its folder must be there.
        text: Its new content.

    Raises:
        UsageError: It cannot be written; the former content is still there.
    """
    try:
        mode = _mode(path)
        if mode is not None and not stat.S_ISREG(mode):
            # By its own name: what /dev/stdout leads to may have none that can be opened.
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(strict=False), text, mode)
    except OSError as error:
        raise errors.UsageError(f"cannot write {path}: {error.strerror or error}") from error


def _mode(target: pathlib.Path) -> int | None:
    try:
        return target.stat().st_mode
    except FileNotFoundError:
        return None


def _replace(target: pathlib.Path, text: str, mode: int | None) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    fresh = pathlib.Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), _new_mode() if mode is None else stat.S_IMODE(mode))
        fresh.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def _new_mode() -> int:
    """Return the mode of a new file: as the user's mask has it, not as a secret."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
