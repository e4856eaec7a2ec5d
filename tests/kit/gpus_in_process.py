"""Simulated GPUs in this process: the start of a GPU worker takes longer than most changes."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator

import pytest

from mig_manager import errors
from mig_manager.adapters import host
from mig_manager.adapters.nvml import client, processes
from mig_manager.adapters.nvml import gpus as nvml_gpus
from mig_manager.cli.commands import doctor_facts, doctor_settings, gpu_access
from mig_manager.core import ports
from mig_manager.sandbox.driver import library as simulated
from tests.node import simulated_rig

_WORKER, _facts = vars(gpu_access.CommandAdapters)["worker_gpus"], doctor_facts.facts


@contextlib.contextmanager
def gpus() -> Iterator[None]:
    """Have the commands of the body read and change simulated GPUs without a worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_access.CommandAdapters, "worker_gpus", property(_gpus))
        patch.setattr(doctor_facts, "facts", facts)
        yield


class _Gpus(nvml_gpus.NvmlGpus):
    """The GPUs of a worker, without the worker."""

    processes = staticmethod(simulated_rig.processes)


def _gpus(adapters: gpu_access.CommandAdapters) -> ports.Gpus:
    worker: client.WorkerGpus = _WORKER.func(adapters)
    state = adapters.settings.gpus.simulate_state
    # The course kills its worker.
    if state is None or adapters.settings.command == "acceptance":
        return worker
    simulated.install(state)
    timeout_s = worker.command[worker.command.index("--in-use-timeout-s") + 1]
    return _Gpus(clock=host.SystemClock(), in_use_timeout_s=float(timeout_s))


def facts(settings: doctor_settings.DoctorSettings) -> doctor_facts.Facts:
    """Read the GPUs now, one fact after the other, and leave the others to the checks."""
    if settings.gpus.simulate_state is None:
        return _facts(settings)
    gpus = nvml_gpus.NvmlGpus(clock=host.SystemClock(), proc_root=settings.proc)
    inspect = functools.partial(
        processes.inspect, None, proc_root=settings.proc, exclude=(os.getpid(),)
    )
    observed = doctor_facts.Once(gpus.observe, what="the GPUs")
    inspection = doctor_facts.Once(inspect, what="the GPUs")
    simulated.install(settings.gpus.simulate_state)
    for fact in (observed, inspection):
        with contextlib.suppress(errors.HardwareError):
            fact.get()
    simulated.load(None)
    return dataclasses.replace(_facts(settings), gpus=observed, inspection=inspection)
