"""GPUs with a fault: what recovers each, for people, and the Node condition ``GpuRecoveryNeeded``.

The condition is named and behaves like node-problem-detector's: ``True`` is the problem. It
is apart from ``MigReady``, because the layout of a GPU with a fault may still be active.
"""

from collections.abc import Collection, Iterable, Iterator

from mig_manager import reasons
from mig_manager.core import messages, model
from mig_manager.core.objects import well_known
from mig_manager.core.records import readiness

_REBOOT = "drain the node and reboot it"
_NEEDS: dict[model.RecoveryAction, tuple[str, str]] = {
    model.RecoveryAction.SYSTEM_REBOOT: ("a reboot of the system", _REBOOT),
    model.RecoveryAction.NODE_REBOOT: (
        "a reboot of the node, whose operating system may be in an inconsistent state",
        _REBOOT,
    ),
    model.RecoveryAction.BUS_RESET: (
        "a reset of its PCIe bus",
        "drain the node, and reset the bus or reboot",
    ),
    model.RecoveryAction.GPU_RESET: (
        "a reset",
        "end all processes that use it, and run 'nvidia-smi --gpu-reset -i {index}'",
    ),
    model.RecoveryAction.DRAIN_P2P: (
        "an end of all P2P traffic",
        "end its processes with P2P traffic, disable UVM persistence mode, read the action again",
    ),
    model.RecoveryAction.RECOVER_IMEX_DOMAIN: (
        "a recovery of its IMEX domain",
        "read the log of nvidia-imex on the nodes of the domain",
    ),
    model.RecoveryAction.DRAIN_AND_RESET: (
        "a reset to work at full capacity again; running processes are not affected",
        "start nothing new on it, and once it is idle run 'nvidia-smi --gpu-reset -i {index}'",
    ),
    model.RecoveryAction.OTHER: (
        "an action that this version does not know",
        "read 'GPU Recovery Action' of 'nvidia-smi -q -i {index}'",
    ),
}
"""By recovery action, worst first: the driver's request in words, and the remedy.

Sources: NVIDIA GPU Memory Error Management, "Error Recovery and Response Flags", for the first
five values; the comments of ``nvmlDeviceGpuRecoveryAction_t`` in nvml.h for the others.
"""
_RESETTING = "The agent evicts its pods, and resets it."
_UNREACHABLE = reasons.Reason.GPU_UNREACHABLE
LOSSES = (reasons.Reason.GPU_LOST, reasons.Reason.GPU_NEEDS_RESET)
"""Answers of the driver with a remedy of their own.

``nvml.h``: a lost GPU is inaccessible, and one that requires a reset can be used again after it.
For a lost GPU ``nvidia-smi``, which resets GPUs, says to reboot the system.
"""
NONE_NEEDED = readiness.Condition(
    type=well_known.RECOVERY_CONDITION,
    is_true=False,
    reason="NoRecoveryNeeded",
    message="No GPU reports a fault.",
    is_default=True,
)


def fault(gpu: model.Gpu | model.UnreachableGpu) -> str:
    """Say what a GPU needs to recover, without a full stop; empty if it needs nothing."""
    need = _need(gpu)
    return f"{gpu} needs {need[0]}" if need else ""


def remedy(gpu: model.Gpu | model.UnreachableGpu) -> str:
    """Say what to do about a GPU with a fault, as a sentence."""
    need = _need(gpu)
    if need is None:
        if isinstance(gpu, model.UnreachableGpu) and gpu.reason in LOSSES:
            return gpu.reason.remedy
        return _UNREACHABLE.remedy
    advice = need[1].format(index=gpu.index)
    return messages.with_full_stop(f"{advice[0].upper()}{advice[1:]}")


def faults(gpus: Iterable[model.Gpu], resetting: Collection[str] = ()) -> Iterator[str]:
    """Yield a sentence for each reachable GPU that needs recovery, with what to do.

    ``resetting`` are the UUIDs of GPUs that the agent resets: people have nothing to do.
    """
    for gpu in gpus:
        if need := fault(gpu):
            yield f"{need}. {_RESETTING if gpu.uuid in resetting else remedy(gpu)}"


def sentences(gpus: model.ObservedGpus, resetting: Collection[str] = ()) -> list[str]:
    """Return a sentence for each GPU with a fault, as ``faults``; unreachable ones last."""
    return [
        *faults(gpus, resetting),
        *(_unreachable(gpu, is_reset=gpu.uuid in resetting) for gpu in gpus.unreachable),
    ]


def condition(
    gpus: model.ObservedGpus, note: str = "", resetting: Collection[str] = ()
) -> readiness.Condition:
    """Return the condition for GPUs; its reason is the worst action, or GpuUnreachable.

    ``note`` says in sentences why the agent does not reset others than those ``resetting``.
    """
    actions = [gpu.recovery_action for gpu in (*gpus, *gpus.unreachable) if _need(gpu)]
    named = sentences(gpus, resetting)
    if not named:
        return NONE_NEEDED
    worst = next((action for action in _NEEDS if action in actions), None)
    reason = _UNREACHABLE.value if worst is None else _camel_case(worst)
    return readiness.Condition(
        type=well_known.RECOVERY_CONDITION,
        is_true=True,
        reason=reason,
        message=messages.fit(" ".join(filter(None, (note, *named))), messages.MAX_BYTES),
    )


def none_reachable(message: str) -> readiness.Condition:
    """Return the condition for a node without a reachable GPU, with the reason of the driver."""
    return readiness.Condition(
        type=well_known.RECOVERY_CONDITION,
        is_true=True,
        reason=_UNREACHABLE.value,
        message=messages.fit(
            f"No GPU can be observed: {messages.with_full_stop(message)} {_UNREACHABLE.remedy}",
            messages.MAX_BYTES,
        ),
    )


def _need(gpu: model.Gpu | model.UnreachableGpu) -> tuple[str, str] | None:
    return _NEEDS.get(gpu.recovery_action) if gpu.recovery_action else None


def _unreachable(gpu: model.UnreachableGpu, *, is_reset: bool) -> str:
    need = _need(gpu)
    more = f" and needs {need[0]}" if need else ""
    sentence = messages.with_full_stop(f"{gpu} is unreachable{more}: {gpu.message}")
    return f"{sentence} {_RESETTING if is_reset else remedy(gpu)}"


def _camel_case(action: model.RecoveryAction) -> str:
    return "".join(word.capitalize() for word in action.value.split("-"))
