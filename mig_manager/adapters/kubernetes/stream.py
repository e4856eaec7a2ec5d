"""One open watch: lines of JSON from a response that may go on for minutes.

A watch must end in three ways that a plain read loop does not give: when the server is silent
for too long, when another thread wants it to stop, and when an event is too large to be a Node.
"""

from collections.abc import Iterator
from typing import Any, Self

import urllib3

from mig_manager.adapters.kubernetes import api_errors

_CHUNK = 1 << 16
MAX_LINE = 8 << 20
"""Bytes; etcd refuses objects above 1.5 MiB by default, so a longer line is not an event."""


class WatchStream(Iterator[dict[str, Any]]):
    """The events of one watch request, as ``{"type": ..., "object": ...}``.

    Iteration ends when the server ends the watch, which it does at its timeout. BOOKMARK events
    are delivered like all others.
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
                silent for too long, broke the connection, or sent something else than events.
        """
        while True:
            line = self._take_line()
            if line is None:
                raise StopIteration
            if line.strip():
                return self._parse(line)

    def interrupt(self) -> None:
        """End the watch from any thread; a read that waits returns at once."""
        self._is_interrupted = True
        try:
            self._response.shutdown()
        except (OSError, RuntimeError, ValueError):
            # Closed meanwhile, which is all we wanted.
            return

    def close(self) -> None:
        """Give the connection up; a half-read one cannot serve another request."""
        self._response.close()

    def _take_line(self) -> bytes | None:
        """Return the next line, or None at the end of the stream."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > MAX_LINE:
                raise api_errors.no_answer(
                    self._request, f"an event of more than {MAX_LINE} bytes"
                )
            chunk = self._read()
            if not chunk:
                self._check_end()
                return None
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _read(self) -> bytes:
        try:
            # As it comes: we ask for nothing packed, and what is may be small and unpack to much.
            return self._response.read1(_CHUNK, decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as err:
            if self._is_interrupted:
                return b""
            raise api_errors.no_answer(self._request, str(err)) from err

    def _check_end(self) -> None:
        if self._buffer.strip() and not self._is_interrupted:
            raise api_errors.no_answer(self._request, "the stream ends in the middle of an event")
        self._buffer.clear()

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            event = api_errors.decode(line)
        except ValueError as err:
            raise api_errors.no_answer(self._request, f"not an event: {err}") from err
        if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
            raise api_errors.no_answer(self._request, "not an event")
        if event.get("type") == "ERROR":
            raise api_errors.stream_error(self._request, event["object"])
        return event
