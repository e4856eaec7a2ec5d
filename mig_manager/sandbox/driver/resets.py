"""What ``nvidia-smi --gpu-reset`` does to a simulated node: a pure transition, like the others.

Which GPUs reset alone follows ``nvidia-smi(1)``: with NVLink and without a Fabric Manager, or
before Ampere, all that are linked must be named in one command. That nothing is reset when one of
those named is refused is inferred.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from mig_manager.sandbox.driver import identities, states, transitions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of an attempt."""

    refused: Mapping[int, states.Code] = dataclasses.field(default_factory=dict)
    """Index of a GPU that could not be reset, and why; empty: all were."""
    missing: tuple[int, ...] = ()
    """The GPUs that would have had to be named as well."""

    @property
    def code(self) -> states.Code:
        """The first refusal; SUCCESS when all were reset."""
        return next(iter(self.refused.values()), states.Code.SUCCESS)


def attempt(
    node: states.NodeState, boards: Sequence[identities.Board], chosen: Sequence[int]
) -> tuple[states.NodeState, Answer]:
    """Reset GPUs in one command; where one is refused, nothing has changed.

    Args:
        node: The node before.
        boards: Its GPUs.
        chosen: Their indices.
    """
    refused = {
        index: code
        for index in chosen
        if (code := _refusal(node, boards[index])) is not states.Code.SUCCESS
    }
    if refused:
        return node, Answer(refused=refused)
    groups = [group for group in node.options.linked_gpus if set(group) & set(chosen)]
    missing = sorted({index for group in groups for index in group} - set(chosen))
    if missing:
        alone = dict.fromkeys(chosen, states.Code.NOT_SUPPORTED)
        return node, Answer(refused=alone, missing=tuple(missing))
    for index in chosen:
        node = node.with_gpu(index, transitions.reboot(boards[index], node.gpus[index]))
    return node, Answer()


def _refusal(node: states.NodeState, board: identities.Board) -> states.Code:
    if node.gpus[board.index].is_lost:
        return states.Code.GPU_IS_LOST
    if not node.options.permitted:
        return states.Code.NO_PERMISSION
    if node.options.virtualization is not states.Virtualization.NONE:
        return states.Code.NOT_SUPPORTED
    if any(
        client.kind is not states.ClientKind.PERSISTENCE_DAEMON
        for client in node.clients_of(board.uuid)
    ):
        return states.Code.IN_USE
    return states.Code.SUCCESS
