"""DeviceClasses by which pods with plain limits get their MIG devices from ResourceClaims.

A DeviceClass with ``extendedResourceName: nvidia.com/mig-1g.10gb`` serves limits of that name on
nodes where no device plugin offers it: the scheduler makes the ResourceClaim (KEP-5004, on by
default since Kubernetes 1.36). NVIDIA's DRA driver ships no class for a single profile, only an
example: ``demo/specs/extended-resources/mig-1g-12gb.yaml`` in dra-driver-nvidia-gpu. Its device
attribute ``profile`` is the name that go-nvlib gives a profile (``MigProfileInfo.String``), which
is ours.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mig_manager.core import model
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import well_known

VERSION = "resource.k8s.io/v1"
PATH = f"/apis/{VERSION}/deviceclasses"
_DRIVER = well_known.GPU_CLAIM_DRIVER


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """A DeviceClass that serves a MIG resource."""

    name: str
    resource: str


def of_profile(profile: model.Profile) -> DeviceClass | None:
    """Return the class for a profile, named as in NVIDIA's example.

    None for a profile without a resource: parts of a GPU instance, and profiles whose memory is
    not known.
    """
    resource = resources.of_profile(profile)
    if resource is None or not profile.memory_gb:
        return None
    plain = f"{profile.gpu_slices}g-{profile.memory_gb}gb"
    attributes = (*profile.attributes, *(f"no-{each}" for each in profile.negated_attributes))
    words = "-".join((plain, *attributes)).replace(".", "-")
    return DeviceClass(name=f"mig-{words}.{_DRIVER}", resource=resource)


def manifest(profile: model.Profile, device_class: DeviceClass) -> dict[str, Any]:
    """Return the object to create."""
    attributes = f"device.attributes['{_DRIVER}']"
    conditions = (
        f"device.driver == '{_DRIVER}'",
        f"{attributes}.type == 'mig'",
        f"{attributes}.profile == '{profile}'",
    )
    return {
        "apiVersion": VERSION,
        "kind": "DeviceClass",
        "metadata": {"name": device_class.name},
        "spec": {
            "selectors": [{"cel": {"expression": " && ".join(conditions)}}],
            "extendedResourceName": device_class.resource,
        },
    }


def parse(item: Mapping[str, Any]) -> DeviceClass | None:
    """Parse a DeviceClass; None if it serves no MIG resource.

    See ``api_values.as_cluster_error`` for its exceptions.
    """
    resource = str((item.get("spec") or {}).get("extendedResourceName") or "")
    if not resources.is_mig(resource):
        return None
    return DeviceClass(name=str(item["metadata"]["name"]), resource=resource)
