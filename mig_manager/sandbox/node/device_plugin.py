"""Programs in pods: NVIDIA's device plugin, and processes that use GPUs.

The plugin behaves as k8s-device-plugin v0.20: it enumerates the GPUs once, at its start, and
advertises these devices until it ends. Its health watcher is an NVML client of every GPU. Some
layouts make it exit, which kubelet turns into CrashLoopBackOff.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from mig_manager.core import model, profile_name
from mig_manager.core.node.devices import resources, strategies
from mig_manager.sandbox.driver import state_file, states, transitions
from mig_manager.sandbox.node import device_manager


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnumeratedGpu:
    """A GPU in the device plugin's enumeration."""

    index: int
    uuid: str
    is_mig_enabled: bool
    mig_devices: Mapping[str, model.Profile]
    """By UUID; ordered by GPU instance id, then compute instance id. A bare GPU instance has
    none."""


def enumerate_gpus(state: state_file.SharedState) -> tuple[EnumeratedGpu, ...]:
    """Return the GPUs as a program in a pod sees them: except lost ones, ascending by index."""
    node = state.read()
    return tuple(
        EnumeratedGpu(
            index=board.index,
            uuid=board.uuid,
            is_mig_enabled=gpu.is_enabled,
            mig_devices={
                board.mig_uuid(instance, compute): _profile(board, instance, compute)
                for instance, compute in transitions.mig_devices(gpu)
            },
        )
        for board, gpu in zip(state.boards, node.gpus, strict=True)
        if not gpu.is_lost
    )


def _profile(
    board: states.Board, instance: states.GpuInstance, compute: states.ComputeInstance
) -> model.Profile:
    row = board.row(instance.profile_id)
    slices = next(c.slices for c in row.compute if c.profile_id == compute.profile_id)
    return dataclasses.replace(profile_name.parse(row.name), compute_slices=slices)


class ExitedError(Exception):
    """The program exited with a failure; the text is its last message."""


class NotStartedError(Exception):
    """The container runtime could not start the program."""


class PodProgram(Protocol):
    """The containers of one pod as one program; used by one thread."""

    @property
    def next_at(self) -> float | None:
        """When to poll it, in monotonic seconds; None: never."""

    def start(self, now: float) -> None:
        """Start, or restart after its end.

        Raises:
            NotStartedError: The container runtime cannot start it.
        """

    def poll(self, now: float) -> None:
        """Let it act; ExitedError if it exited with a failure."""

    def stop(self) -> None:
        """End it, if it runs."""


class DeviceUser:
    """A process that uses devices from start to stop: a CUDA workload, or a monitor.

    A client that computes prevents the destruction of its instance; a client that only watches
    prevents a change of MIG mode. Every start calls ``device_ids``.
    """

    next_at = None

    def __init__(
        self,
        *,
        state: state_file.SharedState,
        name: str,
        device_ids: Callable[[], Iterable[str]],
        kind: states.ClientKind,
    ) -> None:
        self._state = state
        self._name = name
        self._device_ids = device_ids
        self._kind = kind
        self._clients = contextlib.ExitStack()

    def start(self, now: float) -> None:
        """Open the devices.

        Raises:
            NotStartedError: A device does not exist, because a stale plugin advertised it.
        """
        try:
            for uuid in self._device_ids():
                client = self._state.add_client(uuid, name=self._name, kind=self._kind)
                self._clients.callback(self._state.remove_client, client)
        except LookupError as error:
            self._clients.close()
            raise NotStartedError(str(error)) from error

    def poll(self, now: float) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Close the devices."""
        self._clients.close()


class Plugin:
    """The device plugin, which enumerates the GPUs ``start_s`` after its container's start."""

    def __init__(
        self,
        *,
        state: state_file.SharedState,
        manager: device_manager.DeviceManager,
        strategy: strategies.Strategy,
        start_s: float,
    ) -> None:
        self._state = state
        self._manager = manager
        self._strategy = strategy
        self._start_s = start_s
        self.next_at: float | None = None
        """When it enumerates the GPUs; None: it has, or does not run."""
        self._clients = contextlib.ExitStack()
        self._registered: tuple[str, ...] = ()

    def start(self, now: float) -> None:
        """Begin to start up."""
        self.next_at = now + self._start_s

    def poll(self, now: float) -> None:
        """Enumerate and register once the start-up time has passed.

        Raises:
            ExitedError: The layout, or the driver, makes the plugin exit.
        """
        if self.next_at is None or now < self.next_at:
            return
        self.next_at = None
        try:
            gpus = enumerate_gpus(self._state)
            devices = enumerate_devices(gpus, self._strategy)
            for gpu in gpus:
                client = self._state.add_client(
                    gpu.uuid, name="nvidia-device-plugin", kind=states.ClientKind.MONITOR
                )
                self._clients.callback(self._state.remove_client, client)
        except LookupError as error:
            self._clients.close()
            raise ExitedError(str(error)) from error
        self._manager.register(devices)
        self._registered = tuple(devices)

    def stop(self) -> None:
        """Release the GPUs and disconnect from kubelet."""
        self.next_at = None
        self._clients.close()
        # Once only: a successor may have registered the same resources before another call.
        self._manager.disconnect(self._registered)
        self._registered = ()


def enumerate_devices(
    gpus: Sequence[EnumeratedGpu], strategy: strategies.Strategy
) -> dict[str, tuple[str, ...]]:
    """Return device ids by resource name; if there are none, the plugin registers nothing.

    Raises:
        ExitedError: These GPUs make the plugin exit.
    """
    devices: dict[str, list[str]] = {}
    if strategy is strategies.Strategy.SINGLE and any(gpu.is_mig_enabled for gpu in gpus):
        _check_single(gpus)
        devices[resources.GPU] = [uuid for gpu in gpus for uuid in gpu.mig_devices]
    elif strategy is strategies.Strategy.MIXED:
        for gpu in gpus:
            if not gpu.is_mig_enabled:
                devices.setdefault(resources.GPU, []).append(gpu.uuid)
            for uuid, profile in gpu.mig_devices.items():
                devices.setdefault(_resource_of(profile), []).append(uuid)
    else:
        devices[resources.GPU] = [gpu.uuid for gpu in gpus]
    return {name: tuple(ids) for name, ids in devices.items() if ids}


def _check_single(gpus: Sequence[EnumeratedGpu]) -> None:
    if not all(gpu.is_mig_enabled for gpu in gpus):
        raise ExitedError("strategy single: MIG is enabled on some GPUs only")
    empty = [str(gpu.index) for gpu in gpus if not gpu.mig_devices]
    if empty:
        raise ExitedError(
            f"strategy single: MIG is enabled without any MIG device on GPU {', '.join(empty)}"
        )
    profiles = {profile for gpu in gpus for profile in gpu.mig_devices.values()}
    if len(profiles) > 1:
        names = ", ".join(sorted(map(str, profiles)))
        raise ExitedError(f"strategy single: MIG devices differ: {names}")


def _resource_of(profile: model.Profile) -> str:
    name = str(profile)
    if "c." in name:
        raise ExitedError(
            f"MIG profile {name} does not match any resource pattern of strategy mixed"
        )
    # The plugin's spelling (k8s-device-plugin, addMIGResources), not the agent's.
    return "nvidia.com/mig-" + name.replace("+", ".")
