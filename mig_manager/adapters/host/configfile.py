"""A config document in a file, for whoever only reads it."""

import os
import pathlib

from mig_manager import errors

MAX_BYTES = 1 << 20
"""A ConfigMap, where such files live, holds no more (etcd's limit on a request)."""


_HOMES = ("/root", "/home", "/run/user")
"""What ``ProtectHome=`` hides (systemd.exec(5))."""


class ConfigFile:
    """A config document in a file; implements ``ports.ConfigSource``."""

    def __init__(self, path: str | pathlib.Path) -> None:
        self._path = pathlib.Path(path)

    @property
    def name(self) -> str:
        """The path as it was given."""
        return str(self._path)

    def read(self) -> str:
        """Return the file's text as it is now.

        Raises:
            ConfigError: It is missing, unreadable, larger than 1 MiB, or not UTF-8.
        """
        try:
            content = read_bytes(self._path)
        except OSError as err:
            why = f"{err.strerror or err}{_hint(self._path)}"
            raise errors.ConfigError(f"cannot read {self._path}: {why}") from err
        if len(content) > MAX_BYTES:
            raise errors.ConfigError(f"{self._path} is larger than {MAX_BYTES} bytes")
        try:
            return content.decode()
        except UnicodeDecodeError as err:
            raise errors.ConfigError(
                f"{self._path} is not UTF-8: {err.reason} at byte {err.start}"
            ) from err


def _hint(path: pathlib.Path) -> str:
    """Return why a file may be there and yet not for us; empty where nothing says so."""
    for home in _HOMES:
        if path.absolute().is_relative_to(home) and _is_hidden(home):
            return (
                f"; below systemd, ProtectHome= of the unit hides {home}: put the file in "
                "/etc/mig-manager"
            )
    return ""


def _is_hidden(folder: str) -> bool:
    """Tell whether a folder is empty to us, or closed, as ProtectHome= makes it."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except OSError:
        return True


def read_bytes(path: pathlib.Path) -> bytes:
    """Return what is in a file, up to one byte more than a document may have."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)
