"""Names and counts of extended resources."""

import pytest

from mig_manager.core import model, profile_name
from mig_manager.core.node import resources
from tests.unit import samples


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
        samples.gpu(samples.A100, mode=model.MigMode.DISABLED),
        samples.gpu(samples.A100, "1g.5gb@0", "1g.5gb@1", "3g.20gb@4"),
        samples.gpu(samples.A100, "1g.5gb@0", "2g.10gb@2[1c@0]"),
        samples.gpu(samples.A100),
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
