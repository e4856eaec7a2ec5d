"""The GPUs of a sandbox node as its programs use them."""

from collections.abc import Callable
from typing import Protocol

from mig_manager.core import model


class NodeGpus(Protocol):
    """What a device plugin and a CUDA process can do with the GPUs."""

    def observe(self) -> tuple[model.Gpu, ...]:
        """Return every GPU, ascending by index.

        Raises:
            HardwareError: NVML refused or failed.
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
