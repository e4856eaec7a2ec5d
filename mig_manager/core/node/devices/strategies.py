"""MIG strategies of NVIDIA's device plugin, and the layouts over which it exits."""

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping, Sequence

from mig_manager.core import model
from mig_manager.core.node.daemons import clients
from mig_manager.core.objects import discovery_labels, pod_object

DISPLAYS = frozenset({"DGX Display", "NVIDIA DGX Display"})
"""Console GPUs of a DGX Station, which the plugin skips: go-nvlib does so by name."""


class Strategy(enum.Enum):
    """How the device plugin names MIG devices."""

    NONE = "none"  # not at all: it advertises whole GPUs
    SINGLE = "single"  # all as ``nvidia.com/gpu``, which takes devices of one profile on all GPUs
    MIXED = "mixed"  # by profile, such as ``nvidia.com/mig-1g.5gb``


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuLayout:
    """The MIG state of one GPU, now or desired."""

    name: str  # for messages, such as ``GPU 0``
    is_enabled: bool
    profiles: Collection[model.Profile]
    known_profiles: Collection[model.GpuInstanceProfile] = ()
    """The profiles of its model; empty: unknown."""


def gpu_layouts(
    gpus: Iterable[model.Gpu], desired: Mapping[str, model.DesiredGpu]
) -> tuple[GpuLayout, ...]:
    """Return the layout of a node's GPUs once these desired GPUs, by UUID, are applied."""
    return tuple(
        gpu_layout(f"GPU {gpu.index}", desired[gpu.uuid], gpu.profiles or ())
        if gpu.uuid in desired
        else _live_layout(gpu)
        for gpu in gpus
        if gpu.name not in DISPLAYS
    )


def _live_layout(gpu: model.Gpu) -> GpuLayout:
    return GpuLayout(
        name=f"GPU {gpu.index}",
        is_enabled=gpu.current_mode is model.MigMode.ENABLED,
        profiles=[device.profile for device in gpu.devices],
        known_profiles=gpu.profiles or (),
    )


def gpu_layout(
    name: str, desired: model.DesiredGpu, known_profiles: Collection[model.GpuInstanceProfile] = ()
) -> GpuLayout:
    """Return the layout of a desired GPU."""
    is_enabled = desired.mode is model.MigMode.ENABLED
    return GpuLayout(
        name=name, is_enabled=is_enabled, profiles=desired.counts, known_profiles=known_profiles
    )


def refusals(gpus: Sequence[GpuLayout]) -> Mapping[Strategy, str]:
    """Return why the plugin exits over a layout; strategies that it serves do not occur.

    The node then advertises no device at all (k8s-device-plugin v0.20,
    ``internal/rm/device_map.go`` and ``rm.go``).
    """
    why_not = {Strategy.SINGLE: _single_refusal(gpus)}
    nameless = {str(p) for gpu in gpus if gpu.is_enabled for p in gpu.profiles if not p.spans}
    if nameless:
        names = ", ".join(sorted(nameless))
        why_not[Strategy.MIXED] = f"no resource has the name of a part of a GPU instance: {names}"
    return {strategy: why for strategy, why in why_not.items() if why}


def refusal(gpus: Sequence[GpuLayout], strategy: Strategy, labels: Mapping[str, str]) -> str:
    """Return why a node's plugin exits over a layout; empty if it does not.

    ``labels`` are the node's. A plugin that shares whole GPUs by MPS exits over any MIG device
    (k8s-device-plugin v0.20, ``internal/plugin/mps.go``).
    """
    has_mps = labels.get(discovery_labels.MPS_CAPABLE) == "true"
    if has_mps and strategy is Strategy.SINGLE and any(gpu.is_enabled for gpu in gpus):
        return f"MPS cannot share MIG devices (label {discovery_labels.MPS_CAPABLE}=true)"
    return refusals(gpus).get(strategy, "")


def without_devices(gpus: Iterable[GpuLayout]) -> str:
    """Name the MIG-enabled GPUs without a device; with ``mixed`` older plugins exit over them."""
    return ", ".join(gpu.name for gpu in gpus if gpu.is_enabled and not gpu.profiles)


def of_plugin(pods: Iterable[pod_object.Pod], labels: Mapping[str, str]) -> Strategy | None:
    """Return the strategy of a node's device plugin; None if unknown.

    ``labels`` are the node's; empty: only the plugin's own settings count, because the label may
    still show the strategy before a new plugin config.
    """
    plugins = tuple(filter(clients.is_device_plugin, pods))
    configured = filter(None, (pod.mig_strategy for pod in plugins))
    return _strategy(next(configured, labels.get(discovery_labels.STRATEGY) if plugins else None))


def from_labels(labels: Mapping[str, str]) -> Strategy | None:
    """Return the strategy that GPU feature discovery last published; None if unknown."""
    return _strategy(labels.get(discovery_labels.STRATEGY))


def _strategy(name: str | None) -> Strategy | None:
    return next((strategy for strategy in Strategy if strategy.value == name), None)


def _single_refusal(gpus: Sequence[GpuLayout]) -> str:
    enabled = [gpu for gpu in gpus if gpu.is_enabled]
    if not enabled:
        return ""
    off = [gpu.name for gpu in gpus if not gpu.is_enabled]
    if off and off[0] == enabled[0].name:
        return "MIG is enabled on some GPUs and not on others"
    if off:
        return f"MIG is enabled on {enabled[0].name} and not on {off[0]}"
    if without_devices(enabled):
        return f"MIG is enabled without a MIG device on {without_devices(enabled)}"
    profiles = sorted({str(profile) for gpu in enabled for profile in gpu.profiles})
    if len(profiles) > 1:
        return f"MIG devices differ: {', '.join(profiles)}"
    # The plugin compares ``nvmlDeviceAttributes_t``. Two models can share a profile's name.
    sizes = {
        (spec.multiprocessors, spec.memory_mib): gpu.name
        for gpu in enabled
        for spec in gpu.known_profiles
        if spec.profile in {profile.gpu_instance for profile in gpu.profiles}
    }
    listed = ", ".join(f"{mib} MiB and {count} SMs on {at}" for (count, mib), at in sizes.items())
    return f"MIG devices differ: {profiles[0]} has {listed}" if len(sizes) > 1 else ""
