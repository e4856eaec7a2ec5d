"""``python -m mig_manager`` and the console script."""

import sys
import threading

from mig_manager import cli, console


def main() -> None:
    """Run the command line of this process and exit with its status."""
    terminal = console.Console.of_process()
    # A script that starts the interpreter can say what it was called by itself.
    called = terminal.environ.get("MIG_MANAGER_CALLED") or sys.argv[0]
    status = cli.main(sys.argv[1:], terminal, program=called.rpartition("/")[2])
    if threading.active_count() > 1:
        from mig_manager.adapters import gpu_thread  # noqa: PLC0415 - not for `--help`

        gpu_thread.leave(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
