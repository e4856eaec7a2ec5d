"""What a layout would do to a node, planned from what its agent tells of its GPUs.

Which pod holds which device is known to the node's kubelet alone. So of the pods it is told who
must leave for certain, because every device of the resource that they have goes, and who may have
to, because some of them go: the agent itself spares those in use as far as it can.
"""

import collections
import dataclasses
import enum
from collections.abc import Iterable, Sequence

from mig_manager import errors
from mig_manager.core import (
    clients,
    cluster,
    config,
    inventory,
    members,
    model,
    planner,
    resources,
)


class Verdict(enum.Enum):
    """Whether a node can have a layout."""

    IN_FORCE = "in-force"
    FITS = "fits"
    DOES_NOT_FIT = "does-not-fit"
    UNKNOWN = "unknown"
    """Nothing is told of its GPUs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """One node."""

    name: str
    verdict: Verdict
    reason: str = ""
    """Why it does not fit, or is not known."""
    message: str = ""
    kept: int = 0
    """GPU instances that stay."""
    destroyed: int = 0
    created: int = 0
    modes: tuple[int, ...] = ()
    """Indices of the GPUs whose MIG mode is switched."""
    resets: tuple[int, ...] = ()
    """Indices of the GPUs that are reset for that."""
    evicted: tuple[str, ...] = ()
    """Pods that leave."""
    maybe_evicted: tuple[str, ...] = ()
    """Pods of which some leave."""
    is_provisional: bool = False
    """Whether instances are only known once MIG is on."""

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "reason": self.reason,
            "message": self.message,
            "instances": {
                "kept": self.kept,
                "destroyed": self.destroyed,
                "created": self.created,
            },
            "mode_changes": list(self.modes),
            "resets": list(self.resets),
            "evicted_pods": list(self.evicted),
            "maybe_evicted_pods": list(self.maybe_evicted),
            "is_provisional": self.is_provisional,
        }


def preview(
    node: members.Node, layout: config.Layout, pods: Sequence[cluster.Pod] = ()
) -> Preview:
    """Plan a layout for a node.

    Args:
        node: As the API has it.
        layout: The wish.
        pods: Those on the node that ask for GPUs.
    """
    try:
        gpus = inventory.from_json(node.gpus)
    except ValueError as error:
        why = f"what its agent tells of its GPUs makes no sense: {error}"
        if not node.gpus:
            why = "no agent has told of its GPUs; is one running there?"
        return Preview(name=node.name, verdict=Verdict.UNKNOWN, reason="NotTold", message=why)
    try:
        plan = planner.plan(gpus, config.select(layout, gpus))
    except errors.LayoutError as error:
        return Preview(
            name=node.name,
            verdict=Verdict.DOES_NOT_FIT,
            reason=error.reason.value,
            message=error.message,
        )
    return _planned(node, gpus, plan, pods)


def _planned(
    node: members.Node,
    gpus: tuple[model.Gpu, ...],
    plan: model.Plan,
    pods: Sequence[cluster.Pod],
) -> Preview:
    destroyed = [step for step in plan.steps if isinstance(step, model.DestroyGpuInstance)]
    created = [step for step in plan.steps if isinstance(step, model.CreateGpuInstance)]
    evicted, maybe = _leaving(node, gpus, plan, pods)
    return Preview(
        name=node.name,
        verdict=Verdict.IN_FORCE if plan.is_empty else Verdict.FITS,
        kept=sum(len(gpu.gpu_instances) for gpu in gpus) - len(destroyed),
        destroyed=len(destroyed),
        created=len(created),
        modes=tuple(gpu.gpu_index for gpu in plan.gpus if gpu.changes_mode),
        resets=tuple(gpu.gpu_index for gpu in plan.gpus if gpu.needs_reset),
        evicted=evicted,
        maybe_evicted=maybe,
        is_provisional=plan.is_provisional,
    )


def _leaving(
    node: members.Node,
    gpus: Sequence[model.Gpu],
    plan: model.Plan,
    pods: Sequence[cluster.Pod],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    is_mixed = any(
        name != resources.GPU and resources.is_device(name) and count
        for name, count in node.allocatable.items()
    )
    there = _devices(gpus, is_mixed=is_mixed)
    going = _doomed(gpus, plan, is_mixed=is_mixed)
    evicted: list[str] = []
    maybe: list[str] = []
    for pod in pods:
        if clients.is_device_plugin(pod):
            continue
        held = [name.removesuffix(".shared") for name in pod.gpu_resources]
        if any(going[name] and going[name] >= there[name] for name in held):
            evicted.append(pod.key)
        elif any(going[name] for name in held) or (pod.has_claims and going.total()):
            maybe.append(pod.key)
    return tuple(sorted(evicted)), tuple(sorted(maybe))


def _devices(gpus: Iterable[model.Gpu], *, is_mixed: bool) -> collections.Counter[str]:
    """Count devices by the resource that pods ask for."""
    found: collections.Counter[str] = collections.Counter()
    for gpu in gpus:
        if gpu.current_mode is not model.MigMode.ENABLED:
            found[resources.GPU] += 1
            continue
        for instance in gpu.gpu_instances:
            for device in instance.compute_instances:
                found[_name(device.profile, is_mixed=is_mixed)] += 1
    return found


def _doomed(
    gpus: Sequence[model.Gpu], plan: model.Plan, *, is_mixed: bool
) -> collections.Counter[str]:
    """Count the devices that go, by the resource that pods ask for."""
    found: collections.Counter[str] = collections.Counter()
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    for gpu_plan in plan.gpus:
        if gpu_plan.changes_mode:
            found += _devices([by_uuid[gpu_plan.gpu_uuid]], is_mixed=is_mixed)
            continue
        for step in gpu_plan.steps:
            if isinstance(step, model.DestroyComputeInstance):
                found[_name(step.profile, is_mixed=is_mixed)] += 1
    return found


def _name(profile: model.Profile, *, is_mixed: bool) -> str:
    """Return the resource of a MIG device; with any other strategy all are plain GPUs."""
    return (resources.of_profile(profile) or resources.GPU) if is_mixed else resources.GPU
