"""The fake node around simulated GPUs, and what a device plugin finds on them."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from mig_manager.adapters.nvml import processes as nvml_processes
from mig_manager.catalogue import hardware
from mig_manager.core import gpu_processes, model
from mig_manager.core.objects import well_known
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.rigs import layout_table
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


def driver_gpus(state: nvml_faults.SharedState) -> tuple[model.Gpu, ...]:
    """Return the GPUs as the driver itself has them: no function of NVML is called."""
    gpus = zip(state.boards, state.read().gpus, strict=True)
    return tuple(driver_gpu(board, gpu) for board, gpu in gpus)


def driver_gpu(board: states.Board, gpu: states.GpuState) -> model.Gpu:
    """Return one GPU as the driver has it in a state."""
    return dataclasses.replace(
        hardware.template(board.product, board.index),
        uuid=board.uuid,
        current_mode=_mode(is_enabled=gpu.is_enabled),
        pending_mode=_mode(is_enabled=gpu.is_pending),
        gpu_instances=tuple(
            _gpu_instance(board, instance)
            for instance in sorted(gpu.instances, key=lambda each: each.placement)
        ),
    )


def _mode(*, is_enabled: bool) -> model.MigMode:
    return model.MigMode.ENABLED if is_enabled else model.MigMode.DISABLED


def _gpu_instance(board: states.Board, instance: states.GpuInstance) -> model.GpuInstance:
    profile = board.row(instance.profile_id).profile
    return model.GpuInstance(
        instance_id=instance.instance_id,
        profile=profile,
        profile_id=instance.profile_id,
        placement=instance.placement,
        compute_instances=tuple(
            model.ComputeInstance(
                instance_id=compute.instance_id,
                profile=dataclasses.replace(profile, compute_slices=compute.placement.size),
                placement=compute.placement,
                uuid=board.mig_uuid(instance, compute),
            )
            for compute in instance.compute_instances
        ),
    )


def devices(state: nvml_faults.SharedState) -> dict[str, str]:
    """Return what a device plugin finds: UUID to resource name, whole GPUs where MIG is off."""
    names = layout_table.device_names(driver_gpus(state))
    profiles = {uuid: name.split()[1].partition("@")[0] for uuid, name in names.items()}
    return {
        uuid: "nvidia.com/gpu" if each == "off" else f"nvidia.com/mig-{each.replace('+', '.')}"
        for uuid, each in profiles.items()
    }


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
