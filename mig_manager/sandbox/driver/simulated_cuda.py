"""The process that uses a simulated MIG device, in place of one with CUDA."""

import os
import pathlib
import sys
from collections.abc import Sequence

from mig_manager.adapters import cuda
from mig_manager.adapters.host import process, subprocesses
from mig_manager.sandbox.driver import state_file


def program(state: pathlib.Path | None) -> tuple[str, ...]:
    """Return the command of the process for the GPUs in a state file; empty without one."""
    return () if state is None else subprocesses.python(__name__, str(state))


def main(argv: Sequence[str]) -> int:
    """Use the visible device of the state file in the first argument until stdin is closed."""
    path, *_ = argv
    state = state_file.SharedState(pathlib.Path(path))

    def use_device() -> str:
        uuid = process.environ()[cuda.VISIBLE_DEVICES]
        state.add_client(uuid, name="mig-manager", pid=os.getpid(), is_process=True)
        return ""

    return cuda.main((), use_device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
