"""The process that started a worker, as the worker sees it."""

import ctypes
import os
import pickle
import select
import signal
import threading
from typing import Any

from mig_manager.adapters.host import worker_messages

_PR_SET_PDEATHSIG = 1
"""An option of ``prctl(2)``: the signal that ends a child when its parent has ended."""


class Parent:
    """A worker's end of the pipes to the process that started it.

    Stdout is for messages; the output of libraries goes to stderr. The kernel ends this process
    with its parent: no worker of one agent may run beside the next agent.
    """

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)
        killed = ctypes.c_ulong(signal.SIGKILL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, killed, 0, 0, 0)

    def is_there(self) -> bool:
        """Return whether the parent can read; the request of a killed parent is still there."""
        poller = select.poll()
        poller.register(self._out, 0)
        return not any(events & select.POLLERR for _, events in poller.poll(0))

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; None if the parent is gone, or sent none in time."""
        if timeout_s is not None:
            poller = select.poll()
            poller.register(0, select.POLLIN)
            if not poller.poll(timeout_s * 1000):
                return None
        length = _read(worker_messages.LENGTH.size)
        if length is None:
            return None
        message = _read(*worker_messages.LENGTH.unpack(length))
        return None if message is None else pickle.loads(message)  # noqa: S301 - see ``worker_messages``

    def send(self, message: object) -> None:
        """Send a message; BrokenPipeError if the parent is gone."""
        rest = memoryview(worker_messages.encode(message))
        while rest:
            rest = rest[os.write(self._out, rest) :]

    def end_with_stdin(self) -> None:
        """End this process, in the middle of any call, as soon as the parent closes its stdin."""

        def wait() -> None:
            # Not sys.stdin: its lock would abort an interpreter that ends by itself meanwhile.
            while os.read(0, 1):
                pass
            os._exit(0)

        threading.Thread(target=wait, name="stdin", daemon=True).start()


def _read(size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(0, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
