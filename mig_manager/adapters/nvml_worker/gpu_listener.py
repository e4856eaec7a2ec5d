"""The GPU listener: a process that says when somebody changes MIG, until it is ended.

The composition root of the child behind ``adapters.gpu_events``: nothing comes in on stdin but its
end, and lines of ``adapters.gpu_news`` go out on what was stdout. It lives as long as the agent
rests, so it imports what it needs and no more.
"""

import argparse
import os
import pathlib
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from mig_manager import errors
from mig_manager.adapters.nvml import nvml_events
from mig_manager.adapters.nvml_worker import gpu_news, gpu_process

_STDIN = 0
_WAIT_S = 60.0
"""For one call into the driver; what happens meanwhile ends it."""
_BURST_S = 0.1
"""One ``nvidia-smi`` command changes many instances: what comes this soon is one piece of news."""


def main(argv: Sequence[str] | None = None) -> int:
    """Tell of changes until stdin ends or the parent dies.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        0 when nobody listens any more; 1 when there is nothing to tell, which was told.
    """
    parser = argparse.ArgumentParser(
        prog="mig_manager.adapters.nvml_worker.gpu_listener", description=__doc__
    )
    gpu_process.add_arguments(parser)
    arguments = parser.parse_args(argv)
    news = gpu_process.claim_stdout()
    gpu_process.end_with_parent()
    threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
    if arguments.simulate_state is not None:
        _simulate(arguments.simulate_state)
    try:
        _listen(arguments.library_path, arguments.driver_root, news)
    except errors.HardwareError as error:
        _tell(news, gpu_news.Failed(reason=error.reason, message=error.message))
        return 1
    except BrokenPipeError:
        return 0


def _listen(library_path: str | None, driver_roots: Sequence[str], news: int) -> NoReturn:
    with nvml_events.listening(library_path, driver_roots) as changes:
        _tell(news, gpu_news.Watching(gpus=len(changes.gpus), of=changes.of))
        while True:
            changed = _burst(changes)
            if changed:
                _tell(news, gpu_news.Changed(gpus=changed))


def _burst(changes: nvml_events.MigChanges) -> tuple[str, ...]:
    """Return the GPUs that were changed at about the same time; none when none was so far."""
    found: list[str] = []
    told = changes.wait(_WAIT_S)
    deadline = time.monotonic() + _BURST_S
    while told is not None:
        found.append(told)
        left_s = deadline - time.monotonic()
        told = changes.wait(left_s) if left_s > 0 else None
    return tuple(dict.fromkeys(found))


def _tell(news: int, what: gpu_news.News) -> None:
    os.write(news, gpu_news.encode(what))


def _end_with_stdin() -> None:
    """End this process when the other side of stdin is closed.

    At once and without a word to NVML, because a call that waits in the driver cannot be called
    off; the kernel gives back what a process holds.
    """
    # Not sys.stdin: its lock, held here, would abort an interpreter that ends by itself.
    while os.read(_STDIN, 1):
        pass
    os._exit(0)


def _simulate(state: str) -> None:
    from mig_manager.sandbox import nvml as simulated  # noqa: PLC0415 - not for real GPUs

    simulated.install(pathlib.Path(state))


if __name__ == "__main__":
    sys.exit(main())
