"""GPUs as a scheduler sees them: extended resources with ``mig.strategy=mixed``."""

import collections
from collections.abc import Iterable

from mig_manager.core import model
from mig_manager.core.node import cluster

GPU = f"{cluster.RESOURCE_PREFIX}gpu"
"""A whole GPU."""
_MIG_PREFIX = f"{cluster.RESOURCE_PREFIX}mig-"


def of_profile(profile: model.Profile) -> str | None:
    """Return the resource name of a MIG profile.

    None for a profile that takes a part of its GPU instance: NVIDIA's device plugin has no name
    for such devices, and ends when it meets one.
    """
    # Resource names may not contain a plus sign.
    return f"{_MIG_PREFIX}{profile}".replace("+", ".") if profile.spans else None


def counts(gpus: Iterable[model.Gpu]) -> dict[str, int]:
    """Return how many devices of each resource there are; devices without a name are left out."""
    found: collections.Counter[str] = collections.Counter()
    for gpu in gpus:
        if gpu.current_mode is not model.MigMode.ENABLED:
            found[GPU] += 1
            continue
        names = (
            of_profile(device.profile)
            for instance in gpu.gpu_instances
            for device in instance.compute_instances
            if device.uuid
        )
        found.update(name for name in names if name)
    return dict(found)


def is_device(name: str) -> bool:
    """Tell whether a resource stands for GPUs or MIG devices."""
    return name == GPU or name.startswith(_MIG_PREFIX)
