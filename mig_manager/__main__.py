"""``python -m mig_manager`` and the console script."""

import sys

from mig_manager import cli, console


def main() -> None:
    """Run the command line of this process and exit with its status."""
    sys.exit(cli.main(sys.argv[1:], console.Console.of_process()))


if __name__ == "__main__":
    main()
