"""What a layout would do to a node, planned from what its agent tells of its GPUs.

Which pod holds which device is known to the node's kubelet alone. So of the pods it is told who
must leave for certain, because every device of the resource that they have goes, and who may have
to, because some of them go: the agent itself spares those in use as far as it can.
"""

import dataclasses
import enum
from collections.abc import Sequence

from mig_manager import errors
from mig_manager.core import model, steps
from mig_manager.core.fleet import nodes
from mig_manager.core.layout import config
from mig_manager.core.node import clients, cluster, resources
from mig_manager.core.planner import planner
from mig_manager.core.records import gpu_codec


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


def preview(node: nodes.Node, layout: config.Layout, pods: Sequence[cluster.Pod] = ()) -> Preview:
    """Plan a layout for a node.

    Args:
        node: As the API has it.
        layout: The wish.
        pods: Those on the node that ask for GPUs.
    """
    try:
        gpus = gpu_codec.from_json(node.gpus)
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
    node: nodes.Node,
    gpus: tuple[model.Gpu, ...],
    plan: steps.Plan,
    pods: Sequence[cluster.Pod],
) -> Preview:
    destroyed = [step for step in plan.steps if isinstance(step, steps.DestroyGpuInstance)]
    created = [step for step in plan.steps if isinstance(step, steps.CreateGpuInstance)]
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
    node: nodes.Node,
    gpus: Sequence[model.Gpu],
    plan: steps.Plan,
    pods: Sequence[cluster.Pod],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    is_mixed = any(
        name != resources.GPU and resources.is_device(name) and count
        for name, count in node.allocatable.items()
    )
    asking = [pod for pod in pods if not clients.is_device_plugin(pod)]
    # With any other strategy all devices are plain GPUs to those who ask.
    strategy = "mixed" if is_mixed else "single"
    lost = resources.losses(plan, gpus, asking, strategy=strategy)
    evicted = {key for loss in lost if loss.is_total for key in loss.kind.pods}
    maybe = {key for loss in lost for key in loss.kind.pods}
    if any(_ends_devices(gpu_plan) for gpu_plan in plan.gpus):
        maybe |= {pod.key for pod in asking if pod.has_claims and not pod.is_finished}
    return tuple(sorted(evicted)), tuple(sorted(maybe - evicted))


def _ends_devices(gpu_plan: steps.GpuPlan) -> bool:
    return gpu_plan.changes_mode or any(
        isinstance(step, steps.DestroyComputeInstance) for step in gpu_plan.steps
    )
