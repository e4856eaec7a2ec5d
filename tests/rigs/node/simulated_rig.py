"""The fake node around simulated GPUs, and what a device plugin finds on them."""

import collections
from collections.abc import Mapping
from typing import NamedTuple

from mig_manager.adapters.nvml import processes as nvml_processes
from mig_manager.core import gpu_processes, model
from mig_manager.core.objects import well_known
from mig_manager.sandbox.driver import states, transitions
from testkit import nvml_faults
from tests.rigs.node import cluster_parts, node_rig


def processes() -> dict[str, tuple[gpu_processes.GpuProcess, ...]]:
    """Return the GPU processes that the library of this process lists, as a worker would."""
    return dict(nvml_processes.inspect(None, proc_root=None).processes)


class Instance(NamedTuple):
    """A GPU instance without its id, which the driver chooses."""

    placement: model.Placement
    profile_id: int
    inside: frozenset[tuple[int, model.Placement]]
    """Profile and placement of each compute instance."""


class GpuGeometry(NamedTuple):
    """What a rollback restores of a GPU."""

    is_enabled: bool
    is_pending: bool
    instances: frozenset[Instance]


def driver_geometry(state: nvml_faults.SharedState) -> tuple[GpuGeometry, ...]:
    """Return what the driver itself has on each GPU."""
    return tuple(
        GpuGeometry(
            gpu.is_enabled,
            gpu.is_pending,
            frozenset(
                Instance(
                    gi.placement,
                    gi.profile_id,
                    frozenset((ci.profile_id, ci.placement) for ci in gi.compute_instances),
                )
                for gi in gpu.instances
            ),
        )
        for gpu in state.read().gpus
    )


def devices(state: nvml_faults.SharedState) -> dict[str, str]:
    """Return what a device plugin finds: UUID to resource name, whole GPUs where MIG is off."""
    profiles = {uuid: name.split()[1].partition("@")[0] for uuid, name in names(state).items()}
    return {
        uuid: "nvidia.com/gpu" if each == "off" else f"nvidia.com/mig-{each.replace('+', '.')}"
        for uuid, each in profiles.items()
    }


def names(state: nvml_faults.SharedState) -> dict[str, str]:
    """Return the GPU of each device with its profile and place, or ``off``, by UUID."""
    gpus = [*enumerate(zip(state.boards, state.read().gpus, strict=True))]
    return {board.uuid: f"{index}: off" for index, (board, gpu) in gpus if not gpu.is_enabled} | {
        board.mig_uuid(*each): f"{index}: {_placed_name(board, *each)}"
        for index, (board, gpu) in gpus
        for each in transitions.mig_devices(gpu)
    }


def device_name(
    board: states.Board, instance: states.GpuInstance, compute: states.ComputeInstance
) -> str:
    """Return the profile of a MIG device, such as ``1c.3g.20gb``."""
    return transitions.compute_name(board.row(instance.profile_id), compute.placement.size)


def _placed_name(
    board: states.Board, instance: states.GpuInstance, compute: states.ComputeInstance
) -> str:
    """Return the profile of a MIG device and where its GPU instance begins."""
    return f"{device_name(board, instance, compute)}@{instance.placement.start}"


def driver_devices_in_words(state: nvml_faults.SharedState) -> tuple[str, ...]:
    """Return the devices of each GPU in words, or ``off``: a table can list what they must be."""
    gpus = zip(state.boards, state.read().gpus, strict=True)
    return tuple(_gpu_in_words(board, gpu) for board, gpu in gpus)


def _gpu_in_words(board: states.Board, gpu: states.GpuState) -> str:
    is_empty = not gpu.instances
    if gpu.is_pending is not gpu.is_enabled or not (gpu.is_enabled or is_empty):
        return f"neither of its modes: {gpu}"
    if not all(instance.compute_instances for instance in gpu.instances):
        return f"without a compute instance: {gpu}"
    by_start = sorted(transitions.mig_devices(gpu), key=lambda each: each[0].placement.start)
    return " ".join(_placed_name(board, *each) for each in by_start) if gpu.is_enabled else "off"


_PLUGIN_DEPLOYED = {well_known.PLUGIN_DEPLOY_LABEL: "true"}


class SimulatedRig(node_rig.NodeRig):
    """The fake node whose plugin and pods see the simulated GPUs as they are."""

    def __init__(
        self, state: nvml_faults.SharedState, labels: Mapping[str, str] = _PLUGIN_DEPLOYED
    ) -> None:
        super().__init__(gpus=(), node_object=cluster_parts.NodeObject(labels=dict(labels)))
        self.state = state
        self.client_of: dict[str, states.Client] = {}
        """UID of a pod -> its process on a GPU."""

    def occupy(self) -> None:
        """Have a pod compute on every device."""
        for number, uuid in enumerate(sorted(devices(self.state))):
            uid = self.pods.add(f"train-{number}", devices=frozenset({uuid}))
            self.client_of[uid] = self.state.add_client(uuid, name="python")

    def advance(self) -> None:
        super().advance()
        for uid in self.client_of.keys() - self.pods.keys():
            self.state.remove_client(self.client_of.pop(uid))

    def reboot(self) -> None:
        """Reboot: instances and processes are lost; kubelet starts the daemons again."""
        self.state.reboot()
        self.client_of.clear()
        self.lose_pods()

    @property
    def plugin_devices(self) -> dict[str, frozenset[str]]:
        uuids_by_resource: dict[str, set[str]] = collections.defaultdict(set)
        for uuid, resource in devices(self.state).items():
            uuids_by_resource[resource].add(uuid)
        return {resource: frozenset(ids) for resource, ids in uuids_by_resource.items()}
