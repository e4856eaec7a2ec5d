"""Simulated GPUs in this process: the start of a GPU worker takes longer than most changes."""

import contextlib
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from mig_manager.adapters import host
from mig_manager.adapters.nvml import nvml_gpus, processes, worker_client
from mig_manager.core import gpu_processes, model, steps
from mig_manager.sandbox.driver import simulated_nvml, simulated_worker

_LOCK = threading.Lock()


def replace(adapter: Any) -> Any:
    """Return simulated GPUs without their worker; any other adapter as it is."""
    if (
        isinstance(adapter, worker_client.WorkerGpus)
        and simulated_worker.__name__ in adapter.command
    ):
        return _Gpus(command=adapter.command, timeout_s=adapter.timeout_s)
    return adapter


class _Gpus(worker_client.WorkerGpus):
    """The GPUs of a worker, without the worker."""

    def observe(self) -> model.ObservedGpus:
        with self._driver() as gpus:
            return gpus.observe()

    def execute(self, plan: steps.Plan, observed: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        with self._driver() as gpus:
            return gpus.execute(plan, observed)

    def inspect(self) -> gpu_processes.Inspection:
        with self._driver():
            return processes.inspect(None, proc_root=None)

    @contextlib.contextmanager
    def _driver(self) -> Iterator[nvml_gpus.NvmlGpus]:
        """Load the simulated driver, which all threads of this process share."""
        state = self.command[self.command.index("serve") - 1]
        timeout_s = self.command[self.command.index("--in-use-timeout-s") + 1]
        with _LOCK:
            simulated_nvml.install(pathlib.Path(state))
            yield nvml_gpus.NvmlGpus(clock=host.SystemClock(), in_use_timeout_s=float(timeout_s))
