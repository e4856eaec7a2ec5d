"""``python -m mig_manager`` and the console script."""

import os
import signal
import sys

from mig_manager import early_interrupts

_FIRST_PROCESS = 1


def main() -> None:
    """Run the command line of this process and exit with its status."""
    if os.getpid() == _FIRST_PROCESS:
        # The kernel drops what process 1 of a container has no handler for (pid_namespaces(7)).
        signal.signal(signal.SIGTERM, early_interrupts.end)

    with early_interrupts.end_process():
        from mig_manager.cli import main as cli  # noqa: PLC0415 - takes long
        from mig_manager.cli.toolkit import console  # noqa: PLC0415 - takes long

    terminal = console.Console.of_process()
    # A script that starts the interpreter passes the name by which it was called.
    called = terminal.environ.get("MIG_MANAGER_CALLED") or sys.argv[0]
    status = cli.main(sys.argv[1:], terminal, program=called.rpartition("/")[2])
    console.end_process(status)


if __name__ == "__main__":
    main()
