"""The console scripts ``kubectl-mig`` and ``kubectl_complete-mig``, in one file if need be."""

import pathlib
import sys

from mig_manager.cli import console
from mig_manager.kubectl import app

_COMPLETER = "kubectl_complete-mig"
"""What kubectl looks for on the PATH to complete the arguments of the plugin ``mig``."""


def main() -> None:
    """Run the command line of this process and exit with its status."""
    if pathlib.Path(sys.argv[0]).name.startswith(_COMPLETER):
        complete()
    sys.exit(app.main(sys.argv[1:], console.Console.of_process("kubectl-mig")))


def complete() -> None:
    """Answer kubectl's question how the command line may go on."""
    from mig_manager.kubectl import arguments  # noqa: PLC0415 - not for the plugin itself

    sys.exit(arguments.main(sys.argv[1:], console.Console.of_process("kubectl-mig")))


if __name__ == "__main__":
    main()
