"""The end of what a child writes to stderr, so that no flood of it fills the memory."""

import contextlib
import os
import select
import threading

_KEPT_BYTES = 16 * 1024
_JOIN_TIMEOUT_S = 2.0


class Tail:
    """A pipe with a thread at its end, which also ends when the child does not."""

    def __init__(self) -> None:
        """Open the pipe and begin to read it.

        Raises:
            OSError: There is no descriptor left.
            RuntimeError: There is no thread left.
        """
        self._reader, self.writer = os.pipe()
        self._kept = bytearray()
        self._is_closing = False
        self._thread = threading.Thread(target=self._drain, name="gpu-worker-stderr", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._reader)
            os.close(self.writer)
            raise

    def close(self) -> str:
        """Return what was kept of what the child has written up to the first call of this."""
        if not self._is_closing:
            self._is_closing = True
            # Wakes the thread: a child that cannot be killed never closes its end.
            with contextlib.suppress(OSError):
                os.write(self.writer, b"\n")
            os.close(self.writer)
            self._thread.join(_JOIN_TIMEOUT_S)
        return bytes(self._kept).decode(errors="replace").strip()

    def _drain(self) -> None:
        with os.fdopen(self._reader, "rb", buffering=0) as stream:
            while chunk := stream.read(_KEPT_BYTES):
                self._kept += chunk
                del self._kept[:-_KEPT_BYTES]
                if self._is_closing and not _has_more(stream.fileno()):
                    return


def _has_more(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(events & select.POLLIN for _, events in poll.poll(0))
