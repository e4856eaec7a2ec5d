"""The GPU worker of a simulated node, with the simulated driver in place of NVIDIA's."""

import contextlib
import functools
import pathlib
import sys
from collections.abc import Sequence

from mig_manager.adapters.host import subprocesses
from mig_manager.adapters.nvml import worker


def program(state: pathlib.Path | str | None) -> tuple[str, ...]:
    """Return the command of a worker for the GPUs in a state file; empty without one."""
    return () if state is None else subprocesses.python(__name__, str(state))


def main(argv: Sequence[str]) -> int:
    """Run a worker on the state file in the first argument; return the exit status."""
    state, *arguments = argv
    return worker.main(arguments, load_driver=functools.partial(_load, pathlib.Path(state)))


def _load(state: pathlib.Path) -> None:
    from mig_manager.sandbox.driver import simulated_nvml  # noqa: PLC0415 - only in a worker

    simulated = simulated_nvml.install(state)
    # A real driver has its state in memory.
    with contextlib.suppress(FileNotFoundError):
        _ = simulated.state.boards


if __name__ == "__main__":
    worker.end(main(sys.argv[1:]))
