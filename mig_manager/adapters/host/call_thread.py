"""Run calls that may never return in threads, and wait for them until a deadline."""

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

_Result = TypeVar("_Result")


class CallThread(threading.Thread, Generic[_Result]):
    """A call in its own thread, which may never return."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        super().__init__(name="call", daemon=True)
        self._work = work
        self.error: BaseException | None = None
        self._result: _Result | None = None
        self.start()

    def run(self) -> None:
        """Do the work."""
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised by result()
            self.error = error

    def result(self, timeout_s: float | None = None) -> _Result:
        """Return the call's result or raise its error; TimeoutError after the deadline."""
        self.join(timeout_s)
        if self.is_alive():
            raise TimeoutError
        if self.error is not None:
            raise self.error
        return cast("_Result", self._result)


def exit_if_hung(status: int) -> None:
    """End the process at once if a call is still under way.

    The interpreter would wait for threads that the call started, and the unloading of the vendor's
    library for its locks.
    """
    if any(isinstance(thread, CallThread) for thread in threading.enumerate()):
        os._exit(status)
