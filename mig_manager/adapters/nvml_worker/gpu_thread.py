"""GPU work in a thread, for commands that only look: quick to start, and never in the way.

A call into a hung driver does not return, and while the main thread is in it, Python hears no
signal. Here the main thread only waits, with a deadline. The thread cannot be ended and is left
behind, so the process must then end without waiting for anything: see ``is_stuck``.
"""

import concurrent.futures
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from mig_manager import errors
from mig_manager.core import model, ports, steps

_Result = TypeVar("_Result")

_NAME = "gpu-call"


class ThreadGpus:
    """Implements ``ports.Gpus``: each call of other GPUs in a thread of its own.

    Nothing should be executed this way that cannot be left half done; ``gpu_child.WorkerGpus``
    can end what hangs.

    Args:
        gpus: They do the work.
        timeout_s: How long a call may take before it is given up.
    """

    def __init__(self, gpus: ports.Gpus, *, timeout_s: float) -> None:
        self._gpus = gpus
        self._timeout_s = timeout_s

    def observe(self) -> model.ObservedGpus:
        """Return every GPU, ascending by index.

        Raises:
            HardwareError: What the other GPUs raise; NVML_TIMEOUT when they do not answer.
        """
        return self._call(self._gpus.observe)

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        """Run the steps of every GPU, and return those of the plan afterwards.

        Raises:
            HardwareError: As ``observe``; after NVML_TIMEOUT the steps may still go on.
        """
        return self._call(functools.partial(self._gpus.execute, plan, seen))

    def _call(self, work: Callable[[], _Result]) -> _Result:
        answer = started(work)
        if not concurrent.futures.wait([answer], self._timeout_s).done:
            raise errors.HardwareError(
                f"NVML gave no answer within {self._timeout_s:g} s",
                reason=errors.Reason.NVML_TIMEOUT,
            )
        return answer.result()


def started(work: Callable[[], _Result]) -> concurrent.futures.Future[_Result]:
    """Begin work that may never return, in a thread that nobody has to wait for."""
    answer: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            answer.set_exception(error)

    threading.Thread(target=run, name=_NAME, daemon=True).start()
    return answer


def is_stuck() -> bool:
    """Tell whether a call that was given up is still under way."""
    return any(thread.name == _NAME for thread in threading.enumerate())


def leave(status: int) -> None:
    """End the process at once when a call is stuck.

    The interpreter would wait for the threads that the call has started, and the vendor's library
    unloads in an orderly way only where its own locks are free. What was written is flushed by
    whoever wrote it.
    """
    if is_stuck():
        os._exit(status)
