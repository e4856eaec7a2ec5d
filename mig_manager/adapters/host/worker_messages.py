"""Messages between a process and its workers: pickled values, each after its length.

Both ends are this package at one version, and no other process can write to the pipes, so pickle
is safe. Workers import little.
"""

import pickle
import struct
from collections.abc import Callable
from typing import Any

from mig_manager import errors

MAX_BYTES = 64 * 2**20
"""Larger than any message, and smaller than four bytes of text read as a length."""
LENGTH = struct.Struct(">I")  # the length before a message


def encode(message: object) -> bytes:
    """Return a message with its length."""
    data = pickle.dumps(message)
    return LENGTH.pack(len(data)) + data


def attempt(work: Callable[[], object]) -> tuple[object, object]:
    """Do the work of a worker; return its result as a message for ``result``."""
    try:
        return work(), None
    except errors.MigManagerError as error:
        # Exceptions with keyword arguments cannot be pickled.
        return None, (type(error), vars(error))


def result(message: tuple[Any, Any]) -> Any:
    """Return the result of a worker's ``attempt``, or raise its error."""
    value, failure = message
    if failure is None:
        return value
    kind, attributes = failure
    error: errors.MigManagerError = kind.__new__(kind, attributes["problem"])
    vars(error).update(attributes)
    raise error
