"""``python -m mig_manager`` and the console script."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

_FIRST_PROCESS = 1


def main() -> None:
    """Run the command line of this process and exit with its status."""
    if os.getpid() == _FIRST_PROCESS:
        # The kernel drops what process 1 of a container has no handler for (pid_namespaces(7)).
        signal.signal(signal.SIGTERM, _end)

    with _interrupts_end_process():
        from mig_manager.cli import main as cli  # noqa: PLC0415 - takes long
        from mig_manager.cli.toolkit import console  # noqa: PLC0415 - takes long

    terminal = console.Console.of_process()
    # A script that starts the interpreter passes the name by which it was called.
    called = terminal.environ.get("MIG_MANAGER_CALLED") or sys.argv[0]
    status = cli.main(sys.argv[1:], terminal, program=called.rpartition("/")[2])
    console.end_process(status)


@contextlib.contextmanager
def _interrupts_end_process() -> Iterator[None]:
    """End on Ctrl-C without the traceback of an import, unless SIGINT is handled or ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, _frame: FrameType | None) -> None:
    """End at once, as without a handler; an exception could get lost within an import."""
    os._exit(128 + number)


if __name__ == "__main__":
    main()
