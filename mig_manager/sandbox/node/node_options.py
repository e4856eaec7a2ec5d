"""How a sandbox node behaves: names, strategies and how long things take."""

import dataclasses
import enum
import functools
import pathlib
from collections.abc import Callable, Mapping

from mig_manager import errors
from mig_manager.core import model, profile_name
from mig_manager.sandbox.driver import state_file, states, transitions


class Strategy(enum.Enum):
    """``MIG_STRATEGY`` of NVIDIA's device plugin: how GPUs and MIG devices become resources."""

    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


class DeployStyle(enum.Enum):
    """How the device plugin came to the cluster, which decides how it can be paused."""

    GPU_OPERATOR = "gpu-operator"
    """A DaemonSet that the label ``nvidia.com/gpu.deploy.device-plugin=true`` lets in."""
    PLAIN = "plain"
    """NVIDIA's static manifest: no label, a toleration for ``nvidia.com/gpu`` and no other."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options of one sandbox node; durations in seconds."""

    name: str = "sandbox-node"
    strategy: Strategy = Strategy.MIXED
    deploy_style: DeployStyle = DeployStyle.GPU_OPERATOR
    tick_s: float = 10.0
    """How often kubelet writes the node's status; 10 is kubelet's nodeStatusUpdateFrequency."""
    pod_start_s: float = 0.2
    """From the binding of a pod to its containers running."""
    pod_stop_s: float = 0.1
    """What a pod needs to stop unless its annotation says otherwise."""
    plugin_start_s: float = 0.3
    """From the start of the plugin's container to its look at the GPUs and its registration."""
    crash_backoff_s: float = 10.0
    """First pause before a crashed container starts again; doubles up to ``crash_backoff_max_s``.
    10 and 300 are kubelet's."""
    crash_backoff_max_s: float = 300.0
    forget_resource_s: float = 300.0
    """How long after the plugin went its resources keep their capacity; 300 is kubelet's."""
    pod_resources_socket: pathlib.Path | None = None
    """Where to serve PodResources; at most 107 bytes. None: do not serve."""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Node labels beside those of kubelet and GPU feature discovery."""
    is_control_plane: bool = True
    """Whether it also plays scheduler and DaemonSet controller, as one node per cluster does."""


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


class SimulatedGpus:
    """What a device plugin and a CUDA process can do with GPUs, over the simulated NVML's file."""

    def __init__(self, path: pathlib.Path) -> None:
        self._state = state_file.SharedState(path)

    def observe(self) -> tuple[SeenGpu, ...]:
        """Return every GPU that is not lost, ascending by index."""
        node = self._state.read()
        return tuple(
            SeenGpu(
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
        """Become a client of a GPU or MIG device; return how to let go, which may be repeated.

        One that computes keeps an instance from being destroyed, one that only watches keeps a
        GPU from changing its MIG mode.

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
        """Go through a reboot of the machine: no clients, no MIG devices."""
        self._state.reboot()


def _mig_device(
    board: states.Board, instance: states.GpuInstance, compute: states.ComputeInstance
) -> MigDevice:
    row = board.row(instance.profile_id)
    slices = next(c.slices for c in row.compute if c.profile_id == compute.profile_id)
    profile = dataclasses.replace(profile_name.parse(row.name), compute_slices=slices)
    return MigDevice(uuid=board.mig_uuid(instance, compute), profile=profile)
