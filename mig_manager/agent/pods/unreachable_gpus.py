"""Recall unreachable GPUs as they were when last verified, so that a repair knows their pods.

The driver lists neither their instances nor the UUIDs of their devices. Both are saved on the host
with each verified layout, and UUIDs are valid until the next boot.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from mig_manager.agent import node_context
from mig_manager.agent.pods import device_usage
from mig_manager.core import messages, model, ports
from mig_manager.core.node import gpu_use, policies


def recall_verified(
    context: node_context.NodeContext, gpus: model.ObservedGpus
) -> tuple[model.ObservedGpus, str]:
    """Return the GPUs; one that requires a reset is as it was when last verified.

    None is remembered if a pod may use one of them unnoticed, for example an instance that another
    program has created since.

    Returns:
        The GPUs, and why GPUs that require a reset are not remembered, as part of a sentence.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    if not any(gpu.recovers_by_reset for gpu in gpus.unreachable):
        return gpus, ""
    if others := [str(gpu) for gpu in gpus.unreachable if not gpu.recovers_by_reset]:
        return gpus, f"the pods of {messages.list_names(others)} are not known either"
    verified = _verified_gpus(context)
    if unknown := [str(gpu) for gpu in gpus.unreachable if gpu.uuid not in verified]:
        return gpus, f"no layout was verified for {messages.list_names(unknown)} since the boot"
    remembered = [
        dataclasses.replace(
            verified[gpu.uuid],
            index=gpu.index,
            recovery_action=model.RecoveryAction.GPU_RESET,
            is_remembered=True,
        )
        for gpu in gpus.unreachable
    ]
    every = model.ObservedGpus(sorted((*gpus, *remembered), key=lambda gpu: gpu.index))
    usage = _usage(context.deps, every)
    if usage.why_incomplete:
        return gpus, usage.why_incomplete
    users = usage.users(_device_ids(remembered))
    if uncertain := [pod for pod in users if usage.why_uncertain(pod)]:
        return gpus, f"pods may use it: {usage.describe_users(uncertain)}"
    return every, ""


def why_unknown(
    context: node_context.NodeContext, gpus: model.ObservedGpus, faulty: Iterable[model.Gpu]
) -> str:
    """Return why kubelet does not show the pods to evict for a repair; empty if it does.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    usage = _usage(context.deps, gpus)
    is_whole_node = context.settings.policy.drain is policies.DrainPolicy.NODE
    ids = None if is_whole_node else _device_ids(faulty)
    return usage.why_incomplete if usage.undecided_users(ids) else ""


def _usage(deps: ports.Dependencies, gpus: model.ObservedGpus) -> gpu_use.Usage:
    """Return who uses devices, also if the owner's list of GPU clients is invalid."""
    clients = device_usage.read_extra_clients(deps)
    return device_usage.report_usage(deps, gpus, has_processes=False, extra_clients=clients)


def _device_ids(gpus: Iterable[model.Gpu]) -> frozenset[str]:
    return frozenset(uuid for gpu in gpus for uuid in (gpu.uuid, *gpu.mig_uuids))


def _verified_gpus(context: node_context.NodeContext) -> Mapping[str, model.Gpu]:
    """Return the GPUs of the layout that was verified since the boot, by UUID."""
    verified = context.verified_layout.read()
    if verified is None or verified.boot_id != context.deps.boot_id:
        return {}
    return {gpu.uuid: gpu for gpu in verified.gpus}
