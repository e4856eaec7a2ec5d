"""The GPU inspector: a process that tells once what NVML says of driver and processes, and ends.

The composition root of the child behind ``adapters.gpu_inspection``: one JSON object on what was
stdout. A driver that hangs or crashes takes this process with it and no other.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from mig_manager import errors
from mig_manager.adapters.nvml import processes as gpu_processes
from mig_manager.adapters.nvml_worker import gpu_process


def main(argv: Sequence[str] | None = None) -> int:
    """Tell what there is to tell, be it an error.

    Args:
        argv: Arguments without the program's name; None takes those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="mig_manager.adapters.nvml_worker.gpu_inspector", description=__doc__
    )
    gpu_process.add_arguments(parser)
    parser.add_argument("--proc-root", type=pathlib.Path, help="where processes are looked for")
    given = parser.parse_args(argv)
    answers = gpu_process.claim_stdout()
    gpu_process.end_with_parent()
    if given.simulate_state is not None:
        from mig_manager.sandbox import nvml  # noqa: PLC0415 - not for real GPUs

        nvml.install(pathlib.Path(given.simulate_state))
    with os.fdopen(answers, "w", encoding="utf-8") as stream:
        json.dump(_told(given), stream)
    return 0


def _told(given: argparse.Namespace) -> dict[str, object]:
    try:
        found = gpu_processes.inspect(
            given.library_path,
            driver_roots=given.driver_root,
            proc_root=given.proc_root,
            but=(os.getpid(), os.getppid()),
        )
    except errors.HardwareError as error:
        return {"error": error.message, "reason": error.reason.value}
    return dataclasses.asdict(found)


if __name__ == "__main__":
    sys.exit(main())
