"""Programs in pods: NVIDIA's device plugin, and processes that use GPUs.

The plugin behaves as k8s-device-plugin v0.20: it enumerates the GPUs once, at its start, and
advertises these devices until it ends. Its health watcher is an NVML client of every GPU. Some
layouts make it exit, which kubelet turns into CrashLoopBackOff.
"""

import contextlib
import dataclasses
import enum
import functools
import logging
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from mig_manager import errors
from mig_manager.core import model, profile_name
from mig_manager.sandbox.driver import state_file, states, transitions
from mig_manager.sandbox.node import device_manager

_log = logging.getLogger(__name__)

_GPU = "nvidia.com/gpu"


class Strategy(enum.Enum):
    """``MIG_STRATEGY`` of NVIDIA's device plugin: how GPUs and MIG devices become resources."""

    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MigDevice:
    """A MIG device in the device plugin's enumeration."""

    uuid: str
    profile: model.Profile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU in the device plugin's enumeration."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    is_mig_capable: bool
    is_mig_enabled: bool
    mig_devices: tuple[MigDevice, ...]
    """By GPU instance id, then compute instance id; a bare GPU instance has none."""


class SimulatedGpus:
    """GPUs as a device plugin or a CUDA process uses them, over the simulated NVML's file."""

    def __init__(self, path: pathlib.Path) -> None:
        self._state = state_file.SharedState(path)

    def observe(self) -> tuple[Gpu, ...]:
        """Return the GPUs except lost ones, ascending by index."""
        node = self._state.read()
        return tuple(
            Gpu(
                index=board.index,
                uuid=board.uuid,
                name=board.product.name,
                memory_mib=board.product.memory_mib,
                is_mig_capable=board.product.is_mig_capable,
                is_mig_enabled=gpu.is_enabled,
                mig_devices=tuple(
                    _mig_device(board, instance, compute)
                    for instance, compute in transitions.mig_devices(gpu)
                ),
            )
            for board, gpu in zip(self._state.boards, node.gpus, strict=True)
            if not gpu.is_lost
        )

    def hold(self, uuid: str, *, process: str, computes: bool) -> Callable[[], None]:
        """Become a client of a GPU or MIG device; return the release, which may be repeated.

        A client that computes prevents the destruction of its instance; a client that only
        watches prevents a change of MIG mode.

        Raises:
            HardwareError: The device does not exist.
        """
        kind = states.ClientKind.COMPUTE if computes else states.ClientKind.MONITOR
        try:
            client = self._state.add_client(uuid, name=process, kind=kind)
        except LookupError as error:
            raise errors.HardwareError(str(error), reason=errors.Reason.NVML_ERROR) from error
        return functools.partial(self._state.remove_client, client)

    def reboot(self) -> None:
        """Reboot the machine, which drops clients and MIG devices."""
        self._state.reboot()


def _mig_device(
    board: states.Board, instance: states.GpuInstance, compute: states.ComputeInstance
) -> MigDevice:
    row = board.row(instance.profile_id)
    slices = next(c.slices for c in row.compute if c.profile_id == compute.profile_id)
    profile = dataclasses.replace(profile_name.parse(row.name), compute_slices=slices)
    return MigDevice(uuid=board.mig_uuid(instance, compute), profile=profile)


class ExitedError(Exception):
    """The program exited with a failure; the text is its last message."""


class NotStartedError(Exception):
    """The container runtime could not start the program."""


class Program(Protocol):
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
        """Let it act; ExitedError: it exited with a failure."""

    def stop(self) -> None:
        """End it, if it runs."""


class DeviceUser:
    """A process that uses devices from start to stop: a CUDA workload, or a monitor.

    Every start calls ``device_ids``.
    """

    next_at = None

    def __init__(
        self,
        *,
        gpus: SimulatedGpus,
        name: str,
        device_ids: Callable[[], Iterable[str]],
        computes: bool,
    ) -> None:
        self._gpus = gpus
        self._name = name
        self._device_ids = device_ids
        self._computes = computes
        self._clients = contextlib.ExitStack()

    def start(self, now: float) -> None:
        """Open the devices.

        Raises:
            NotStartedError: A device does not exist, because a stale plugin advertised it.
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

    def stop(self) -> None:
        """Close the devices."""
        self._clients.close()


class Plugin:
    """The device plugin, which enumerates the GPUs ``start_s`` after its container's start."""

    def __init__(
        self,
        *,
        gpus: SimulatedGpus,
        manager: device_manager.DeviceManager,
        strategy: Strategy,
        start_s: float,
    ) -> None:
        self._gpus = gpus
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
            gpus = self._gpus.observe()
            enumeration = enumerate_devices(gpus, self._strategy)
            for gpu in gpus:
                self._clients.callback(
                    self._gpus.hold(gpu.uuid, process="nvidia-device-plugin", computes=False)
                )
        except errors.HardwareError as error:
            self._clients.close()
            raise ExitedError(str(error)) from error
        for warning in enumeration.warnings:
            _log.warning("device plugin: %s", warning)
        self._manager.register(enumeration.resources)
        self._registered = tuple(enumeration.resources)

    def stop(self) -> None:
        """Release the GPUs and disconnect from kubelet."""
        self.next_at = None
        self._clients.close()
        # Once only: a successor may have registered the same resources before another call.
        self._manager.disconnect(self._registered)
        self._registered = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Enumeration:
    """The plugin's resources, and its warnings."""

    resources: Mapping[str, tuple[str, ...]]
    """Device ids by resource name; empty: the plugin waits and registers nothing."""
    warnings: tuple[str, ...] = ()


def enumerate_devices(gpus: Sequence[Gpu], strategy: Strategy) -> Enumeration:
    """Turn GPUs and MIG devices into resources; ExitedError: they make the plugin exit."""
    resources: dict[str, list[str]] = {}
    warnings: list[str] = []
    if strategy is Strategy.SINGLE and any(gpu.is_mig_enabled for gpu in gpus):
        _check_single(gpus)
        resources[_GPU] = [device.uuid for gpu in gpus for device in gpu.mig_devices]
    elif strategy is Strategy.MIXED:
        for gpu in gpus:
            if not gpu.is_mig_enabled:
                resources.setdefault(_GPU, []).append(gpu.uuid)
            elif not gpu.mig_devices:
                warnings.append(f"MIG is enabled on GPU {gpu.index} without any MIG device")
            for device in gpu.mig_devices:
                resources.setdefault(_resource_of(device.profile), []).append(device.uuid)
    else:
        resources[_GPU] = [gpu.uuid for gpu in gpus]
    filled = {name: tuple(ids) for name, ids in resources.items() if ids}
    return Enumeration(resources=filled, warnings=tuple(warnings))


def _check_single(gpus: Sequence[Gpu]) -> None:
    if not all(gpu.is_mig_enabled for gpu in gpus):
        raise ExitedError("strategy single: MIG is enabled on some GPUs only")
    empty = [str(gpu.index) for gpu in gpus if not gpu.mig_devices]
    if empty:
        raise ExitedError(
            f"strategy single: MIG is enabled without any MIG device on GPU {', '.join(empty)}"
        )
    profiles = {device.profile for gpu in gpus for device in gpu.mig_devices}
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
