"""The simulated driver's transitions of one GPU: pure functions, in the driver's check order.

They return the GPU's new state, or raise ``Refused`` with the driver's code. The order of the
checks is part of the behaviour: callers see the first failure. Sources: ``nvml.h``,
``kernel_mig_manager.c`` of the open kernel modules, captures.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.catalogue import product_table
from mig_manager.core import model
from mig_manager.sandbox.driver import states

COMPUTE_PROFILE_COUNT = 9  # ``NVML_COMPUTE_INSTANCE_PROFILE_COUNT``


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One GPU at the moment of a call."""

    board: states.Board
    gpu: states.GpuState
    clients: tuple[states.Client, ...]
    options: states.Options
    serial: int


def set_mode(situation: Situation, mode: int) -> tuple[states.GpuState, states.Code]:
    """Change MIG mode, which drops all instances.

    Ampere resets the GPU; clients and instances prevent that, and the change stays pending. Newer
    GPUs change at once or, inferred, not at all while a client computes on them.

    Returns:
        The GPU, and the activation status: SUCCESS, IN_USE or RESET_REQUIRED.

    Raises:
        Refused: INVALID_ARGUMENT, NOT_SUPPORTED or NO_PERMISSION.
    """
    if mode not in (0, 1):
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    require_capable(situation)
    require_permission(situation.options)
    is_on = mode == 1
    pending = dataclasses.replace(situation.gpu, is_pending=is_on)
    if is_on == situation.gpu.is_enabled:
        return pending, states.Code.SUCCESS
    if not situation.board.product.mode_needs_reset:
        if _is_computing(situation.clients):
            return situation.gpu, states.Code.IN_USE
    elif situation.options.virtualization is model.Virtualization.PASSTHROUGH:
        return pending, states.Code.RESET_REQUIRED
    elif situation.clients or situation.gpu.instances:
        return pending, states.Code.IN_USE
    elif not situation.options.resets_itself:
        return pending, states.Code.RESET_REQUIRED
    else:
        pending = _without_cleared_action(pending)
    return reset(pending), states.Code.SUCCESS


def reset(gpu: states.GpuState) -> states.GpuState:
    """Return the GPU after a reset: the pending mode is active, and no instance remains."""
    return dataclasses.replace(
        gpu, is_enabled=gpu.is_pending, instances=(), attachments=gpu.attachments + 1
    )


_CLEARED_BY_RESET = frozenset({1, 4})
"""GPU reset, drain and reset (``nvmlDeviceGpuRecoveryAction_t``)."""


def _without_cleared_action(gpu: states.GpuState) -> states.GpuState:
    is_cleared = gpu.recovery_action in _CLEARED_BY_RESET
    return dataclasses.replace(gpu, recovery_action=0) if is_cleared else gpu


def reboot(board: states.Board, gpu: states.GpuState) -> states.GpuState:
    """Return the GPU after a reboot: Ampere keeps its mode (InfoROM), newer GPUs lose it.

    A reset outside a MIG mode change does the same (MIG User Guide).
    """
    is_kept = gpu.is_pending and board.product.mode_persists
    return reset(dataclasses.replace(gpu, is_pending=is_kept))


def create_gpu_instance(
    situation: Situation, profile_id: int, placement: model.Placement | None
) -> tuple[states.GpuState, states.GpuInstance]:
    """Create a GPU instance at a placement, or where the driver chooses.

    Raises:
        Refused: NO_PERMISSION, NOT_SUPPORTED (MIG is off), INVALID_ARGUMENT, IN_USE (the first
            instance of a GPU with a running process) or INSUFFICIENT_RESOURCES.
    """
    require_permission(situation.options)
    require_mig(situation)
    row = situation.board.row(profile_id)
    if placement is not None and placement not in row.placements:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    if not situation.gpu.instances and _is_computing(situation.clients):
        raise states.Refused(states.Code.IN_USE)
    place = _choose(
        row.placements if placement is None else (placement,),
        [each.placement for each in situation.gpu.instances],
        [other.placements for other in situation.board.product.profiles],
    )
    if place is None or not _has_engines(situation, row):
        raise states.Refused(states.Code.INSUFFICIENT_RESOURCES)
    instance = states.GpuInstance(
        instance_id=gpu_instance_id(
            situation.board.product, place, is_swapped=situation.board.is_swapped
        ),
        serial=situation.serial,
        profile_id=profile_id,
        placement=place,
    )
    return situation.gpu.replace_instance(None, instance), instance


def destroy_gpu_instance(situation: Situation, instance: states.GpuInstance) -> states.GpuState:
    """Destroy a GPU instance that has no compute instance and no client."""
    require_permission(situation.options)
    in_use = any(client.gpu_instance_id == instance.instance_id for client in situation.clients)
    if instance.compute_instances or in_use:
        raise states.Refused(states.Code.IN_USE)
    return situation.gpu.replace_instance(instance)


def create_compute_instance(
    situation: Situation,
    instance: states.GpuInstance,
    profile_id: int,
    placement: model.Placement | None,
) -> tuple[states.GpuState, states.ComputeInstance]:
    """Create a compute instance in a GPU instance.

    Raises:
        Refused: NO_PERMISSION, NOT_SUPPORTED (no profile of this GPU instance),
            INVALID_ARGUMENT or INSUFFICIENT_RESOURCES.
    """
    require_permission(situation.options)
    rows = situation.board.row(instance.profile_id).compute
    row = compute_row(situation.board, instance, profile_id)
    if placement is not None and placement not in row.placements:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    place = _choose(
        row.placements if placement is None else (placement,),
        [each.placement for each in instance.compute_instances],
        [other.placements for other in rows],
    )
    if place is None:
        raise states.Refused(states.Code.INSUFFICIENT_RESOURCES)
    used = {compute.instance_id for compute in instance.compute_instances}
    compute = states.ComputeInstance(
        instance_id=next(number for number in range(len(used) + 1) if number not in used),
        serial=situation.serial,
        profile_id=profile_id,
        placement=place,
    )
    ordered = sorted((*instance.compute_instances, compute), key=lambda each: each.instance_id)
    changed = dataclasses.replace(instance, compute_instances=tuple(ordered))
    return situation.gpu.replace_instance(instance, changed), compute


def destroy_compute_instance(
    situation: Situation, instance: states.GpuInstance, compute: states.ComputeInstance
) -> states.GpuState:
    """Destroy a compute instance without a client."""
    require_permission(situation.options)
    ids = (instance.instance_id, compute.instance_id)
    if any((each.gpu_instance_id, each.compute_instance_id) == ids for each in situation.clients):
        raise states.Refused(states.Code.IN_USE)
    kept = tuple(other for other in instance.compute_instances if other is not compute)
    return situation.gpu.replace_instance(
        instance, dataclasses.replace(instance, compute_instances=kept)
    )


def compute_row(
    board: states.Board, instance: states.GpuInstance, profile_id: int
) -> product_table.ComputeProfile:
    """Return a compute-instance profile of a GPU instance.

    Raises:
        Refused: INVALID_ARGUMENT: NVML does not have this id. NOT_SUPPORTED: this GPU instance
            does not have it.
    """
    if not 0 <= profile_id < COMPUTE_PROFILE_COUNT:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    for row in board.row(instance.profile_id).compute:
        if row.profile_id == profile_id:
            return row
    raise states.Refused(states.Code.NOT_SUPPORTED)


def mig_devices(
    gpu: states.GpuState,
) -> tuple[tuple[states.GpuInstance, states.ComputeInstance], ...]:
    """Return the instances of every MIG device, by GPU-instance id, then compute-instance id."""
    return tuple(
        (instance, compute) for instance in gpu.instances for compute in instance.compute_instances
    )


def find_device(
    node: states.MachineState, uuid: str
) -> tuple[states.Board, states.GpuInstance | None, states.ComputeInstance | None] | None:
    """Return a GPU by its UUID, or by a MIG device's UUID with the device's instances."""
    for board, gpu in zip(states.boards_of(node), node.gpus, strict=True):
        if board.uuid == uuid:
            return board, None, None
        for instance, compute in mig_devices(gpu):
            if board.mig_uuid(instance, compute) == uuid:
                return board, instance, compute
    return None


def compute_name(row: product_table.GpuProfile, slices: int) -> str:
    """Return the name of a compute instance: its GPU instance's, unless it is only a part."""
    return row.name if slices == row.profile.gpu_slices else f"{slices}c.{row.name}"


def require_permission(options: states.Options) -> None:
    """Refuse callers that may not configure MIG."""
    if not options.permitted:
        raise states.Refused(states.Code.NO_PERMISSION)


def require_capable(situation: Situation) -> None:
    """Refuse GPUs without MIG, and GPUs of a vGPU guest, which cannot configure them."""
    is_guest = situation.options.virtualization is model.Virtualization.VGPU
    if is_guest or not situation.board.product.is_mig_capable:
        raise states.Refused(states.Code.NOT_SUPPORTED)


def require_mig(situation: Situation) -> None:
    """Refuse GPUs whose MIG mode is off."""
    require_capable(situation)
    if not situation.gpu.is_enabled:
        raise states.Refused(states.Code.NOT_SUPPORTED)


def _is_computing(clients: Sequence[states.Client]) -> bool:
    """Return whether a client has memory or channels on the GPU, or uses an instance."""
    return any(
        client.kind is states.ClientKind.COMPUTE or client.gpu_instance_id is not None
        for client in clients
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResetResult:
    """The result of a reset command."""

    refused: Mapping[int, states.Code] = dataclasses.field(default_factory=dict)
    """Codes by index, for GPUs that cannot be reset; empty: all were reset."""
    missing: tuple[int, ...] = ()  # GPUs that must be reset in the same command

    @property
    def code(self) -> states.Code:
        """The first refusal; SUCCESS if all were reset."""
        return next(iter(self.refused.values()), states.Code.SUCCESS)


def reset_gpus(
    node: states.MachineState, indices: Sequence[int]
) -> tuple[states.MachineState, ResetResult]:
    """Reset GPUs, given by index, in one command; one refusal leaves all unchanged."""
    boards = states.boards_of(node)
    refused = {
        index: code
        for index in indices
        if (code := _refusal(node, boards[index])) is not states.Code.SUCCESS
    }
    if refused:
        return node, ResetResult(refused=refused)
    groups = [group for group in node.options.linked_gpus if set(group) & set(indices)]
    missing = sorted({index for group in groups for index in group} - set(indices))
    if missing:
        alone = dict.fromkeys(indices, states.Code.NOT_SUPPORTED)
        return node, ResetResult(refused=alone, missing=tuple(missing))
    for index in indices:
        gpu = reboot(boards[index], node.gpus[index])
        node = node.with_gpu(index, _without_cleared_action(gpu))
    return node, ResetResult()


def _refusal(node: states.MachineState, board: states.Board) -> states.Code:
    daemon = states.ClientKind.PERSISTENCE_DAEMON
    if node.gpus[board.index].is_lost:
        return states.Code.GPU_IS_LOST
    if not node.options.permitted:
        return states.Code.NO_PERMISSION
    resettable = (model.Virtualization.NONE, model.Virtualization.HOST)
    if node.options.virtualization not in resettable:
        return states.Code.NOT_SUPPORTED
    if any(client.kind is not daemon for client in node.clients_of(board.uuid)):
        return states.Code.IN_USE
    return states.Code.SUCCESS


# -- the driver's choices -------------------------------------------------------------------------
#
# NVIDIA's chooser for GPU instances is closed. Its twin for compute instances is in the open
# kernel modules (``kmigmgrGetFreeCTSId``: take what reduces the remaining capacity the least), and
# the same rule reproduces every published sequence of GPU-instance placements we know of.


def _choose(
    candidates: Iterable[model.Placement],
    used: Sequence[model.Placement],
    profiles: Sequence[Sequence[model.Placement]],
) -> model.Placement | None:
    """Return the free placement that keeps most placements of all profiles free; lowest first.

    The driver does not plan ahead: it strands slices that another order would have kept, so
    mig-manager chooses placements itself. ``profiles``: the placements of every profile.
    """

    def count_free(place: model.Placement) -> int:
        after = (*used, place)
        return sum(_is_free(other, after) for placements in profiles for other in placements)

    free = [place for place in candidates if _is_free(place, used)]
    return max(free, key=lambda place: (count_free(place), -place.start), default=None)


def _is_free(place: model.Placement, used: Iterable[model.Placement]) -> bool:
    return not any(place.overlaps(other) for other in used)


def _has_engines(situation: Situation, row: product_table.GpuProfile) -> bool:
    """Return whether the media engines allow one more instance."""
    pool = model.Engines.pool(each.engines for each in situation.board.product.profiles)
    used = [
        situation.board.row(instance.profile_id).engines for instance in situation.gpu.instances
    ]
    return model.Engines.total([*used, row.engines]).within(pool)


def gpu_instance_id(
    product: product_table.Product, placement: model.Placement, *, is_swapped: bool
) -> int:
    """Return the id of the GPU instance at a placement: the driver's swizzId.

    The whole GPU is 0, its halves are 1-2, quarters 3-6, eighths 7-14. On a swapped board of the
    seven-slice kind, placements keep their coordinates while ids count the other half first.
    Source: id ranges of ``kmigmgr_ga100.c``, mapping from captures of both kinds of board.
    """
    parts = product.memory_slices // placement.size
    index = placement.start // placement.size
    if is_swapped and product.grid is product_table.Grid.SEVEN_SLICE:
        index ^= parts // 2
    return parts - 1 + index
