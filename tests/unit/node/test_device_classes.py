"""DeviceClasses for MIG profiles."""

import re

import pytest

from mig_manager.catalogue import hardware
from mig_manager.core import profile_name
from mig_manager.core.node.devices import device_classes

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""A DNS subdomain (RFC 1123)."""


def test_every_profile_has_a_class_of_its_own_with_a_valid_name() -> None:
    profiles = {row.profile for gpu in hardware.known_gpus() for row in gpu.profiles or ()}
    made = {profile: device_classes.of_profile(profile) for profile in profiles}

    classes = [each for each in made.values() if each]
    assert {str(profile) for profile, each in made.items() if not each and profile.memory_gb} == {
        str(profile) for profile in profiles if not profile.spans
    }
    assert len({each.name for each in classes}) == len({each.resource for each in classes})
    assert len({each.name for each in classes}) == len(classes)
    assert all(NAME.fullmatch(each.name) for each in classes)


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        ("1g.12gb", "mig-1g-12gb"),
        ("1g.10gb+me", "mig-1g-10gb-me"),
        ("1g.24gb+me.all", "mig-1g-24gb-me-all"),
        ("1g.24gb-me", "mig-1g-24gb-no-me"),
    ],
)
def test_manifest_of_a_class_is_parsed_again(profile: str, name: str) -> None:
    parsed = profile_name.parse(profile)
    made = device_classes.of_profile(parsed)

    assert made is not None
    assert made.name == f"{name}.gpu.nvidia.com"
    written = device_classes.manifest(parsed, made)
    assert device_classes.parse(written) == made
    assert f"profile == '{profile}'" in written["spec"]["selectors"][0]["cel"]["expression"]


@pytest.mark.parametrize("resource", [None, "nvidia.com/gpu", "example.com/mig-1g.5gb"])
def test_a_class_for_another_resource_is_ignored(resource: str | None) -> None:
    spec = {"extendedResourceName": resource}
    assert device_classes.parse({"metadata": {"name": "x"}, "spec": spec}) is None
