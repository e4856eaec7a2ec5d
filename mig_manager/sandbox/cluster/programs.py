"""What runs in a sandbox pod: a process that holds devices, or another program."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol

from mig_manager import errors
from mig_manager.sandbox.cluster import nodeoptions


class ExitedError(Exception):
    """The program ended by itself with a failure; the text is its last word."""


class NotStartedError(Exception):
    """The container runtime could not start the program."""


class Program(Protocol):
    """The containers of one pod as one program; used by one thread."""

    @property
    def due(self) -> float | None:
        """When it wants to be polled, in monotonic seconds; None: not at all."""

    def start(self, now: float) -> None:
        """Start, or start again after it has ended.

        Raises:
            NotStartedError: The container runtime cannot start it.
        """

    def poll(self, now: float) -> None:
        """Let it do what is due.

        Raises:
            ExitedError: It ended with a failure.
        """

    def stop(self, now: float) -> None:
        """End it; done when it does not run."""


class Holder:
    """A process that holds devices from start to stop: a CUDA workload, or a monitor.

    Args:
        gpus: The node's hardware.
        name: Name of the process, as NVML shows it.
        device_ids: UUIDs of GPUs and MIG devices; asked for at each start.
        computes: Whether it computes or only watches.
    """

    def __init__(
        self,
        *,
        gpus: nodeoptions.NodeGpus,
        name: str,
        device_ids: Callable[[], Iterable[str]],
        computes: bool,
    ) -> None:
        self._gpus = gpus
        self._name = name
        self._device_ids = device_ids
        self._computes = computes
        self._clients = contextlib.ExitStack()

    @property
    def due(self) -> float | None:
        """Never: nothing happens in it by itself."""
        return None

    def start(self, now: float) -> None:
        """Open the devices.

        Raises:
            NotStartedError: A device does not exist, as when a stale plugin advertised it.
        """
        try:
            for uuid in self._device_ids():
                self._clients.callback(
                    self._gpus.hold(uuid, process=self._name, computes=self._computes)
                )
        except errors.HardwareError as error:
            self._clients.close()
            raise NotStartedError(str(error)) from error

    def poll(self, now: float) -> None:
        """Do nothing."""

    def stop(self, now: float) -> None:
        """Close the devices."""
        self._clients.close()
