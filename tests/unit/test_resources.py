"""Names and counts of extended resources."""

import dataclasses

import pytest

from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name
from mig_manager.core.node import resources


def gpu(mode: model.MigMode, *profiles: str) -> model.Gpu:
    """Return a GPU with these devices; where they lie does not matter here."""
    instances = tuple(
        model.GpuInstance(
            instance_id=number,
            profile=profile_name.parse(name).gpu_instance,
            profile_id=19,
            placement=model.Placement(number, 1),
            compute_instances=(
                model.ComputeInstance(
                    instance_id=0,
                    profile=profile_name.parse(name),
                    placement=None,
                    uuid=f"MIG-{number}",
                ),
            ),
        )
        for number, name in enumerate(profiles)
    )
    bare = hardware.template(hardware.parse_node("1xA100-SXM4-40GB")[0], 0)
    return dataclasses.replace(bare, current_mode=mode, gpu_instances=instances)


@pytest.mark.parametrize(
    ("name", "resource"),
    [
        ("1g.5gb", "nvidia.com/mig-1g.5gb"),
        ("1g.5gb+me", "nvidia.com/mig-1g.5gb.me"),
        ("1g.24gb-me", "nvidia.com/mig-1g.24gb-me"),
        ("1c.2g.10gb", None),
    ],
)
def test_a_profile_has_the_name_that_nvidias_plugin_gives_it(
    name: str, resource: str | None
) -> None:
    assert resources.of_profile(profile_name.parse(name)) == resource


def test_devices_are_counted_by_resource_without_nameless_ones() -> None:
    node = (
        gpu(model.MigMode.DISABLED),
        gpu(model.MigMode.ENABLED, "1g.5gb", "1g.5gb", "3g.20gb"),
        gpu(model.MigMode.ENABLED, "1g.5gb", "1c.2g.10gb"),
        gpu(model.MigMode.ENABLED),
    )

    assert resources.counts(node) == {
        "nvidia.com/gpu": 1,
        "nvidia.com/mig-1g.5gb": 3,
        "nvidia.com/mig-3g.20gb": 1,
    }


def test_resources_of_other_plugins_are_not_gpus() -> None:
    assert resources.is_device("nvidia.com/gpu")
    assert resources.is_device("nvidia.com/mig-7g.40gb")
    assert not resources.is_device("nvidia.com/hostdev")
    assert not resources.is_device("cpu")
