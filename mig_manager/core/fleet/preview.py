"""Plan a layout for a node from the GPUs that its agent publishes.

Only the node's kubelet knows which pod uses which device. A pod is evicted for certain if every
device of its resource goes. It may be evicted if some go: the agent spares devices in use as far
as it can.
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
    """Whether a node can have a layout; the values are a public contract."""

    APPLIED = "applied"
    FITS = "fits"
    DOES_NOT_FIT = "does-not-fit"
    UNKNOWN = "unknown"
    """Its GPUs are not known."""

    @property
    def is_good(self) -> bool:
        """Whether the node can have the layout."""
        return self in (Verdict.APPLIED, Verdict.FITS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a layout would change on one node."""

    name: str
    verdict: Verdict
    reason: str = ""
    """Why it does not fit, or is not known."""
    message: str = ""
    kept: int = 0
    """GPU instances."""
    destroyed: int = 0
    created: int = 0
    mode_changes: tuple[int, ...] = ()
    """Indices of GPUs."""
    resets: tuple[int, ...] = ()
    """Indices of GPUs."""
    evicted: tuple[str, ...] = ()
    maybe_evicted: tuple[str, ...] = ()
    """Pods; some of them are evicted."""
    is_provisional: bool = False
    """Whether the instances are not known before MIG is enabled."""

    def to_data(self) -> dict[str, object]:
        """Return plain data; the keys are a public contract."""
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
            "mode_changes": list(self.mode_changes),
            "resets": list(self.resets),
            "evicted_pods": list(self.evicted),
            "maybe_evicted_pods": list(self.maybe_evicted),
            "is_provisional": self.is_provisional,
        }


def preview(node: nodes.Node, layout: config.Layout, pods: Sequence[cluster.Pod] = ()) -> Preview:
    """Plan a layout for a node; ``pods`` are those on it that request GPUs."""
    if not node.gpus:
        why = "no agent has published its GPUs; is one running there?"
        return Preview(name=node.name, verdict=Verdict.UNKNOWN, reason="NotPublished", message=why)
    try:
        gpus = gpu_codec.from_json(node.gpus)
    except ValueError as error:
        why = f"the published GPUs cannot be read: {error}"
        return Preview(name=node.name, verdict=Verdict.UNKNOWN, reason="NotPublished", message=why)
    try:
        plan = planner.plan(gpus, config.select(layout, gpus))
    except errors.LayoutError as error:
        return Preview(
            name=node.name,
            verdict=Verdict.DOES_NOT_FIT,
            reason=error.reason.value,
            message=error.message,
        )
    destroyed = sum(isinstance(step, steps.DestroyGpuInstance) for step in plan.steps)
    evicted, maybe_evicted = _evicted(node, gpus, plan, pods)
    return Preview(
        name=node.name,
        verdict=Verdict.APPLIED if plan.is_empty else Verdict.FITS,
        kept=sum(len(gpu.gpu_instances) for gpu in gpus) - destroyed,
        destroyed=destroyed,
        created=sum(isinstance(step, steps.CreateGpuInstance) for step in plan.steps),
        mode_changes=tuple(gpu.gpu_index for gpu in plan.gpus if gpu.changes_mode),
        resets=tuple(gpu.gpu_index for gpu in plan.gpus if gpu.needs_reset),
        evicted=evicted,
        maybe_evicted=maybe_evicted,
        is_provisional=plan.is_provisional,
    )


def _evicted(
    node: nodes.Node,
    gpus: Sequence[model.Gpu],
    plan: steps.Plan,
    pods: Sequence[cluster.Pod],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    is_mixed = any(
        name != resources.GPU and resources.is_device(name) and count
        for name, count in node.view.allocatable.items()
    )
    requesting = [pod for pod in pods if not clients.is_device_plugin(pod)]
    # With any other strategy every device is a plain GPU to pods.
    strategy = "mixed" if is_mixed else "single"
    losses = resources.losses(plan, gpus, requesting, strategy=strategy)
    evicted = {key for loss in losses if loss.is_total for key in loss.kind.pods}
    maybe = {key for loss in losses for key in loss.kind.pods}
    if any(_destroys_devices(gpu_plan) for gpu_plan in plan.gpus):
        maybe |= {pod.key for pod in requesting if pod.has_claims and not pod.is_finished}
    return tuple(sorted(evicted)), tuple(sorted(maybe - evicted))


def _destroys_devices(gpu_plan: steps.GpuPlan) -> bool:
    return gpu_plan.changes_mode or any(
        isinstance(step, steps.DestroyComputeInstance) for step in gpu_plan.steps
    )
