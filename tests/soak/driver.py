"""The simulated NVML in this process, and what can be seen of it without asking our own code."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from mig_manager import errors
from mig_manager.adapters.nvml import nvml_gpus
from mig_manager.core import model, steps, timing
from mig_manager.sandbox.driver import states, transitions
from testkit import nvml_faults
from tests.rigs.node import simulated_rig


class MemoryState(nvml_faults.SharedState):
    """The state of a node that one process keeps to itself: no file, hence quick."""

    def __init__(self, spec: str, *, options: states.Options) -> None:
        self._lock = threading.RLock()
        self._node = states.first_boot(spec, options)
        self._own_instruments = nvml_faults.Instruments()

    def read(self) -> states.MachineState:
        return self._node

    def _write(self, node: states.MachineState) -> None:
        self._node = node

    def _instruments(self) -> nvml_faults.Instruments:
        return self._own_instruments

    def _edit_instruments(
        self, change: Callable[[nvml_faults.Instruments], nvml_faults.Instruments]
    ) -> None:
        with self._lock:
            self._own_instruments = change(self._own_instruments)

    @contextmanager
    def _exclusively(self, suffix: str) -> Iterator[None]:
        with self._lock:
            yield


class OneByOne:
    """The real adapter, one GPU after the other, so that each sequence can be played again."""

    def __init__(self, gpus: nvml_gpus.NvmlGpus) -> None:
        self._gpus = gpus

    def observe(self) -> model.ObservedGpus:
        return self._gpus.observe()

    def execute(self, plan: steps.Plan, observed: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        failures: list[errors.HardwareError] = []
        changed: list[model.Gpu] = []
        with self._gpus._session_for(plan, {gpu.uuid: gpu for gpu in observed}):
            pass
        for gpu in plan.gpus:
            try:
                changed += self._gpus.execute(steps.Plan(gpus=(gpu,)), observed)
            except errors.HardwareError as error:
                failures.append(error)
        if failures:
            raise nvml_gpus._join_failures(failures) from failures[0]
        return model.ObservedGpus(changed)


def real_adapter(clock: timing.Clock) -> OneByOne:
    """Return the adapter over whatever library is loaded."""
    return OneByOne(nvml_gpus.NvmlGpus(in_use_timeout_s=2.0, clock=clock))


def device_counts(state: nvml_faults.SharedState, index: int) -> collections.Counter[str] | None:
    """Return the compute instances of a GPU by name; None while MIG is off."""
    gpu = simulated_rig.driver_gpus(state)[index]
    if gpu.current_mode is not model.MigMode.ENABLED:
        return None
    return collections.Counter(
        str(ci.profile) for gi in gpu.gpu_instances for ci in gi.compute_instances
    )


def remove_behind_back(
    state: nvml_faults.SharedState, number: int, *, spared: Collection[str]
) -> bool:
    """Destroy an instance that no process holds, as a person with nvidia-smi could.

    Args:
        state: The node.
        number: Picks one of those that there are.
        spared: Devices that pods have, even if they do not use them yet.
    """
    node = state.read()
    free = [
        (index, instance)
        for index, gpu in enumerate(node.gpus)
        for instance in gpu.instances
        if not any(
            client.gpu_uuid == state.boards[index].uuid
            and client.gpu_instance_id in (None, instance.instance_id)
            for client in node.clients
            if client.kind is states.ClientKind.COMPUTE
        )
        and not any(
            state.boards[index].mig_uuid(instance, compute) in spared
            for compute in instance.compute_instances
        )
    ]
    if not free:
        return False
    index, instance = free[number % len(free)]
    _put(state, index, node.gpus[index].replace_instance(instance))
    return True


def add_behind_back(state: nvml_faults.SharedState, number: int, *, is_orphan: bool) -> bool:
    """Create an instance where there is room; as an orphan, without compute instance."""
    node = state.read()
    index = number % len(node.gpus)
    board = state.boards[index]
    for row in board.product.profiles[number % 3 :]:
        now = transitions.Situation(
            board=board,
            gpu=node.gpus[index],
            clients=node.clients_of(board.uuid),
            options=node.options,
            serial=node.next_serial,
        )
        try:
            gpu, instance = transitions.create_gpu_instance(now, row.profile_id, None)
            if not is_orphan:
                spanning = max(row.compute, key=lambda compute: compute.slices)
                gpu, _ = transitions.create_compute_instance(
                    dataclasses.replace(now, gpu=gpu), instance, spanning.profile_id, None
                )
        except states.Refused:
            continue
        _put(state, index, gpu)
        return True
    return False


def _put(state: nvml_faults.SharedState, index: int, gpu: states.GpuState) -> None:
    state.update(lambda node: node.with_gpu(index, gpu))
