"""The GPUs of a sandbox node as its programs see and hold them.

Programs read the simulated node's state itself and not through NVML: pynvml knows one library per
process, and a fault that a test injects shall strike the code under test, not the scenery.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Protocol

from mig_manager import errors
from mig_manager.core import model, profile
from mig_manager.sandbox.driver import identities, statefile, states


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MigDevice:
    """A compute instance as the device plugin sees it."""

    uuid: str
    profile: model.Profile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeenGpu:
    """One GPU as the device plugin sees it."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    is_mig_capable: bool
    is_mig_enabled: bool
    mig_devices: tuple[MigDevice, ...]
    """By GPU instance id, then compute instance id; a bare GPU instance has none."""


class NodeGpus(Protocol):
    """What a device plugin and a CUDA process can do with the GPUs."""

    def observe(self) -> tuple[SeenGpu, ...]:
        """Return every GPU, ascending by index.

        Raises:
            HardwareError: The driver refused or failed.
        """

    def hold(self, uuid: str, *, process: str, computes: bool) -> Callable[[], None]:
        """Become a client of a GPU or MIG device.

        Args:
            uuid: Of the GPU or MIG device.
            process: Name of the process.
            computes: Whether it computes, which keeps an instance from being destroyed, or only
                watches, which keeps a GPU from changing its MIG mode.

        Returns:
            How to let go; calling it again does nothing.

        Raises:
            HardwareError: There is no such device.
        """

    def reboot(self) -> None:
        """Go through a reboot of the machine: no clients, no MIG devices."""


class SimulatedGpus:
    """Implements ``NodeGpus`` over the state file of the simulated NVML.

    Args:
        state_file: As the simulated NVML has it.
    """

    def __init__(self, state_file: pathlib.Path) -> None:
        self._state = statefile.SharedState(state_file)

    def observe(self) -> tuple[SeenGpu, ...]:
        """Return every GPU that is not lost, ascending by index."""
        node = self._state.read()
        return tuple(
            _seen(board, gpu)
            for board, gpu in zip(self._state.boards, node.gpus, strict=True)
            if not gpu.is_lost
        )

    def hold(self, uuid: str, *, process: str, computes: bool) -> Callable[[], None]:
        """Become a client of a GPU or MIG device; see ``NodeGpus``.

        Raises:
            HardwareError: There is no such device.
        """
        kind = states.ClientKind.COMPUTE if computes else states.ClientKind.MONITOR
        try:
            client = self._state.add_client(uuid, name=process, kind=kind)
        except LookupError as error:
            raise errors.HardwareError(str(error), reason=errors.Reason.NVML_ERROR) from error
        return functools.partial(self._state.remove_client, client)

    def reboot(self) -> None:
        """Go through a reboot of the machine; MIG mode stays where it does on such a GPU."""
        self._state.reboot()


def _seen(board: identities.Board, gpu: states.GpuState) -> SeenGpu:
    return SeenGpu(
        index=board.index,
        uuid=board.uuid,
        name=board.product.name,
        memory_mib=board.product.memory_mib,
        is_mig_capable=board.product.is_mig_capable,
        is_mig_enabled=gpu.is_enabled,
        mig_devices=tuple(
            MigDevice(
                uuid=board.mig_uuid(instance, compute),
                profile=_profile(board, instance, compute),
            )
            for instance in gpu.instances
            for compute in instance.compute_instances
        ),
    )


def _profile(
    board: identities.Board,
    instance: states.GpuInstance,
    compute: states.ComputeInstance,
) -> model.Profile:
    row = board.row(instance.profile_id)
    slices = next(c.slices for c in row.compute if c.profile_id == compute.profile_id)
    return dataclasses.replace(profile.parse(row.name), compute_slices=slices)
