"""A config document in a file, for whoever only reads it."""

import pathlib

from mig_manager import errors

MAX_BYTES = 1 << 20
"""A ConfigMap, where such files live, holds no more (etcd's limit on a request)."""


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
            raise errors.ConfigError(f"cannot read {self._path}: {err.strerror or err}") from err
        if len(content) > MAX_BYTES:
            raise errors.ConfigError(f"{self._path} is larger than {MAX_BYTES} bytes")
        try:
            return content.decode()
        except UnicodeDecodeError as err:
            raise errors.ConfigError(
                f"{self._path} is not UTF-8: {err.reason} at byte {err.start}"
            ) from err


def read_bytes(path: pathlib.Path) -> bytes:
    """Return what is in a file, up to one byte more than a document may have."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)
