"""The ids of devices: which ones GPUs have, and which ones a device plugin should list."""

import re
from collections.abc import Iterable

from mig_manager.core import model
from mig_manager.core.node.devices import strategies

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
DEVICE_UUID = re.compile(rf"(?:GPU|MIG)-{_UUID}|MIG-GPU-{_UUID}/\d+/\d+", re.IGNORECASE)
"""Device ids of NVIDIA's plugin are UUIDs; before driver 470 MIG devices had the longer form.
Other device plugins have other ids (GKE: ``nvidia0/gi7``)."""


def of_gpus(gpus: model.ObservedGpus) -> frozenset[str] | None:
    """Return the ids of all devices of a node's GPUs; None if not all are known.

    For None, an unknown device may belong to an unreachable GPU, which no plan changes. A device
    whose UUID NVML does not report is no reason: a plan may change it.
    """
    if gpus.unreachable:
        return None
    return frozenset(uuid for gpu in gpus for uuid in (gpu.uuid, *gpu.mig_uuids))


def is_unknown(device_id: str, known_ids: frozenset[str] | None) -> bool:
    """Return whether no GPU has this device of NVIDIA's; ``known_ids`` as from ``of_gpus``."""
    is_missing = known_ids is not None and device_id not in known_ids
    return is_missing and DEVICE_UUID.fullmatch(device_id) is not None


def destroyed_ids(
    ids: Iterable[str], gpus: model.ObservedGpus, *, is_sliced: bool
) -> frozenset[str]:
    """Return the devices of NVIDIA's that no GPU has; empty if a GPU is unreachable.

    ``is_sliced``: a GPU with MIG enabled is no device either.
    """
    known_ids = of_gpus(gpus)
    if known_ids is not None and is_sliced:
        known_ids -= {gpu.uuid for gpu in gpus if gpu.current_mode is model.MigMode.ENABLED}
    return frozenset(each for each in ids if is_unknown(each, known_ids))


def expected_ids(gpus: Iterable[model.Gpu]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the device ids of the device plugin: with MIG devices, and with ``none``."""
    plugin_gpus = tuple(gpu for gpu in gpus if gpu.name not in strategies.DISPLAYS)
    whole = frozenset(gpu.uuid for gpu in plugin_gpus)
    enabled = [gpu for gpu in plugin_gpus if gpu.current_mode is model.MigMode.ENABLED]
    unsliced = whole - {gpu.uuid for gpu in enabled}
    return unsliced.union(*(gpu.mig_uuids for gpu in enabled)), whole
