"""The tables of mig-parted's own tests that need a GPU to compare with, played here."""

import dataclasses

import pytest

from mig_manager import errors
from mig_manager.catalogue import hardware
from mig_manager.core import model, steps
from mig_manager.core.layout import config
from mig_manager.core.planner import planner

A100 = hardware.template(hardware.find("A100-SXM4-40GB"))


def plan(*devices: str, mode: str = "true") -> steps.Plan:
    """Plan a layout of ``profile: count`` entries for an A100 with 40 GB."""
    text = (
        "version: v1\nmig-configs:\n  x:\n  - devices: all\n"
        f"    mig-enabled: {mode}\n    mig-devices: {{{', '.join(devices)}}}\n"
    )
    layout = config.parse(text, source="f").layout("x")
    return planner.plan([A100], config.select(layout, [A100]))


def names_created(plan: steps.Plan) -> list[str]:
    return [str(s.profile) for s in plan.steps if isinstance(s, steps.CreateComputeInstance)]


# TestParseMigProfile, which compares with what an A100 offers


@pytest.mark.parametrize("name", ["1g.5gb", "1c.1g.5gb", "1g.5gb+me", "1c.1g.5gb+me"])
def test_a_profile_of_the_a100_is_one(name: str) -> None:
    assert names_created(plan(f'"{name}": 1')) == [name.removeprefix("1c.")]


@pytest.mark.parametrize(
    "name",
    [
        "0g.0gb",
        "0c.0g.0gb",
        "10000g.500000gb",
        "10000c.10000g.500000gb",
        "1g.5gb+me,you,them",
        "1c.1g.5gb+me,you,them",
    ],
)
def test_a_well_formed_profile_may_be_unknown_to_the_a100(name: str) -> None:
    with pytest.raises(errors.LayoutError) as caught:
        plan(f'"{name}": 1')
    assert caught.value.reason is errors.Reason.UNKNOWN_PROFILE


@pytest.mark.parametrize("name", ["", " 1c.1g.5gb", "1g.5gbk", "1g.5gb+me,me", "1g.5gb*me"])
def test_a_malformed_profile_is_refused_with_its_location(name: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        plan(f'"{name}": 1')
    assert str(caught.value.location) == "f:6:19"


# device_test.go and helpers_test.go: ids of devices


def gpu(device_id: int, subsystem_id: int) -> model.Gpu:
    return dataclasses.replace(A100, pci_device_id=device_id, pci_subsystem_id=subsystem_id)


A16, A16_SUBSYSTEM = 0x25B610DE, 0x14A910DE


@pytest.mark.parametrize(
    ("text", "subsystem_id", "expected"),
    [
        ("0x25B610DE", A16_SUBSYSTEM, True),
        ("0x25B610DE:0x14A910DE", A16_SUBSYSTEM, True),
        ("0x25B610DE:0x159D10DE", A16_SUBSYSTEM, False),
        ("0x25B610DE:0x14A910DE", 0, False),
        ("0x25B610DE:0x00000000", 0, True),
        ("0x20B010DE", A16_SUBSYSTEM, False),
        ("0x20B010DE:0x14A910DE", A16_SUBSYSTEM, False),
    ],
)
def test_an_id_matches_as_in_mig_parted(text: str, subsystem_id: int, *, expected: bool) -> None:
    assert config.parse_filter(text).matches(gpu(A16, subsystem_id)) is expected


def test_a_filter_with_the_form_of_a_name_matches_no_gpu_of_another_name() -> None:
    assert not config.parse_filter("not-a-device-id").matches(gpu(A16, A16_SUBSYSTEM))
