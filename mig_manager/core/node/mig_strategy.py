"""Which layouts NVIDIA's device plugin serves with which MIG strategy.

The plugin exits at its start when a node's layout does not suit its strategy (k8s-device-plugin
v0.20, ``internal/rm/device_map.go`` and ``rm.go``): the node then offers no device at all.
"""

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping, Sequence

from mig_manager.core import model
from mig_manager.core.node import clients, cluster, resources

STRATEGY_LABEL = "nvidia.com/mig.strategy"
"""Node label of GPU feature discovery, which has the plugin's strategy."""


class Strategy(enum.Enum):
    """How the device plugin names MIG devices."""

    NONE = "none"
    """Not at all: it advertises whole GPUs."""
    SINGLE = "single"
    """All as ``nvidia.com/gpu``, which takes devices of one profile on all GPUs."""
    MIXED = "mixed"
    """By profile, such as ``nvidia.com/mig-1g.5gb``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuLayout:
    """The MIG state of one GPU, now or desired."""

    name: str
    """For messages, such as ``GPU 0``."""
    is_enabled: bool
    profiles: Collection[model.Profile]


def of_node(
    gpus: Iterable[model.Gpu], wanted: Mapping[str, model.DesiredGpu]
) -> tuple[GpuLayout, ...]:
    """Return the layout of a node's GPUs once these desired GPUs, by UUID, are applied."""
    return tuple(
        of_wanted(f"GPU {gpu.index}", wanted[gpu.uuid])
        if gpu.uuid in wanted
        else GpuLayout(
            name=f"GPU {gpu.index}",
            is_enabled=gpu.current_mode is model.MigMode.ENABLED,
            profiles=[ci.profile for gi in gpu.gpu_instances for ci in gi.compute_instances],
        )
        for gpu in gpus
        if gpu.name not in resources.DISPLAYS
    )


def of_wanted(name: str, wanted: model.DesiredGpu) -> GpuLayout:
    """Return the layout of a desired GPU."""
    is_enabled = wanted.mode is model.MigMode.ENABLED
    return GpuLayout(name=name, is_enabled=is_enabled, profiles=wanted.counts)


def refusals(gpus: Sequence[GpuLayout]) -> Mapping[Strategy, str]:
    """Return why the plugin exits over a layout; strategies that it serves do not occur."""
    found = {Strategy.SINGLE: _single(gpus), Strategy.MIXED: _mixed(gpus)}
    return {strategy: why for strategy, why in found.items() if why}


def empty(gpus: Iterable[GpuLayout]) -> str:
    """Name the MIG-enabled GPUs without a device; with ``mixed`` older plugins exit over them."""
    return ", ".join(gpu.name for gpu in gpus if gpu.is_enabled and not gpu.profiles)


def of_plugin(pods: Iterable[cluster.Pod], labels: Mapping[str, str]) -> Strategy | None:
    """Return the strategy of a node's device plugin; None if unknown."""
    plugins = [pod.mig_strategy for pod in pods if clients.is_device_plugin(pod)]
    known = next(filter(None, plugins), labels.get(STRATEGY_LABEL) if plugins else None)
    return next((strategy for strategy in Strategy if strategy.value == known), None)


def _single(gpus: Sequence[GpuLayout]) -> str:
    enabled = [gpu for gpu in gpus if gpu.is_enabled]
    if not enabled:
        return ""
    off = [gpu.name for gpu in gpus if not gpu.is_enabled]
    if off:
        return f"MIG is enabled on {enabled[0].name} and not on {off[0]}"
    if empty(enabled):
        return f"MIG is enabled without a MIG device on {empty(enabled)}"
    profiles = sorted({str(profile) for gpu in enabled for profile in gpu.profiles})
    return f"MIG devices differ: {', '.join(profiles)}" if len(profiles) > 1 else ""


def _mixed(gpus: Sequence[GpuLayout]) -> str:
    nameless = {str(p) for gpu in gpus if gpu.is_enabled for p in gpu.profiles if not p.spans}
    if not nameless:
        return ""
    return f"no resource has the name of a part of a GPU instance: {', '.join(sorted(nameless))}"
