"""``python -m mig_manager`` and the console script."""

import sys
import threading

from mig_manager import cli, console


def main() -> None:
    """Run the command line of this process and exit with its status."""
    status = cli.main(sys.argv[1:], console.Console.of_process())
    if threading.active_count() > 1:
        from mig_manager.adapters import gpu_thread  # noqa: PLC0415 - not for `--help`

        gpu_thread.leave(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
