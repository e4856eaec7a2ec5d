"""One open watch request: lines of JSON from a response that may last for minutes.

It ends with an error when the server is silent for too long or an event is too large to be a
Kubernetes object, and quietly when another thread interrupts it.
"""

from collections.abc import Iterator
from typing import Any, Self

import urllib3

from mig_manager.adapters.kubernetes import api_errors

_CHUNK = 1 << 16
_MAX_LINE = 8 << 20
"""Bytes; etcd refuses objects above 1.5 MiB by default, so a longer line is not an event."""


class WatchStream(Iterator[dict[str, Any]]):
    """The events of one watch request, as ``{"type": ..., "object": ...}``, BOOKMARKs included.

    Iteration ends when the server ends the watch, which it does at its timeout.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, *, request: str) -> None:
        self._response = response
        self._request = request
        self._buffer = bytearray()
        self._is_interrupted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __next__(self) -> dict[str, Any]:
        """Wait for the next event.

        Raises:
            ApiError: The server sent an ERROR event (410: the resource version is too old), was
                silent for too long, broke the connection, or sent something other than events.
        """
        while True:
            line = self._read_line()
            if line is None:
                raise StopIteration
            if line.strip():
                return self._parse(line)

    def interrupt(self) -> None:
        """End the watch from any thread; a blocked read returns at once."""
        self._is_interrupted = True
        try:
            self._response.shutdown()
        except (OSError, RuntimeError, ValueError):
            # It was closed meanwhile.
            return

    def close(self) -> None:
        """Close the connection: after a partial read it cannot serve another request."""
        self._response.close()

    def _read_line(self) -> bytes | None:
        """Return the next line, or None at the end of the stream."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > _MAX_LINE:
                raise self._error(f"an event of more than {_MAX_LINE} bytes")
            chunk = self._read()
            if not chunk:
                if self._buffer.strip() and not self._is_interrupted:
                    raise self._error("the stream ends in the middle of an event")
                self._buffer.clear()
                return None
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _read(self) -> bytes:
        try:
            # Not decoded: we ask for no compression, and a small packed body may unpack to much.
            return self._response.read1(_CHUNK, decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            if self._is_interrupted:
                return b""
            raise self._error(str(error)) from error

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            event = api_errors.decode(line)
        except ValueError as error:
            raise self._error(f"not an event: {error}") from error
        if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
            raise self._error("not an event")
        if event.get("type") == "ERROR":
            raise api_errors.watch_error(self._request, event["object"])
        return event

    def _error(self, detail: str) -> api_errors.ApiError:
        return api_errors.no_answer(self._request, detail)
