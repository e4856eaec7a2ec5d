"""What people see of GPUs and plans."""

import dataclasses
import re

import pytest

from mig_manager.core import model, steps
from mig_manager.core.display import picture, styles
from mig_manager.core.planner import planner
from tests.rigs import layout_table
from tests.rigs.node import samples

PLAIN = styles.Style()
OFF, ON = model.MigMode.DISABLED, model.MigMode.ENABLED

BALANCED = ("1g.5gb@0", "1g.5gb@1", "2g.10gb@2", "3g.20gb@4")
CASES = [
    pytest.param(samples.gpu(samples.A100, *BALANCED), id="a100-balanced"),
    pytest.param(samples.gpu(samples.A100), id="a100-empty"),
    pytest.param(samples.gpu(samples.A100, mode=OFF), id="a100-off"),
    pytest.param(samples.gpu(samples.A30, "1g.6gb@0", "2g.12gb@2"), id="a30"),
    pytest.param(samples.gpu(samples.RTX6000, "2g.48gb@0", "1g.24gb+me.all@9"), id="rtx6000"),
    pytest.param(samples.gpu(samples.H100, "1g.10gb+me@6"), id="h100-media"),
    pytest.param(samples.gpu(None, mode=None), id="no-mig"),
    pytest.param(samples.gpu(None, mode=OFF), id="profiles-unknown"),
]


def drawn(*gpus: model.Gpu) -> str:
    return picture.draw_gpus(gpus, style=PLAIN)


def draw_plan(gpu: model.Gpu, desired: model.DesiredGpu) -> str:
    plan = planner.plan([gpu], {gpu.uuid: desired})
    return picture.draw_change([gpu], plan, selected={gpu.uuid}, style=PLAIN)


def test_a_balanced_a100_is_drawn_to_scale() -> None:
    slice_ = "─" * 10

    lines = drawn(samples.gpu(samples.A100, *BALANCED)).splitlines()

    assert lines[:5] == [
        "GPU 0 · Test GPU · MIG on · GPU-0",
        f"  ┌{slice_}┬{slice_}┬{'─' * 21}┬{'─' * 43}┐",
        f"  │  1g.5gb  │  1g.5gb  │{'2g.10gb':^21}│{'3g.20gb':^43}│",
        f"  └{slice_}┴{slice_}┴{'─' * 21}┴{'─' * 43}┘",
        "   0          1          2          3          4          5          6          7",
    ]


@pytest.mark.parametrize("gpu", CASES)
def test_picture_fits_its_width_in_ascii_and_in_colour(gpu: model.Gpu) -> None:
    plain, ascii_ = drawn(gpu), picture.draw_gpus([gpu], style=styles.Style(unicode=False))
    assert max(map(len, [*plain.splitlines(), *ascii_.splitlines()])) <= styles.WIDTH
    assert ascii_.isascii()
    coloured = picture.draw_gpus([gpu], style=styles.Style(colour=True))
    assert re.sub(r"\x1b\[[0-9]*m", "", coloured) == plain


def test_equal_gpus_are_drawn_once() -> None:
    alike = [samples.gpu(samples.A100, *BALANCED, index=index) for index in (0, 1, 2, 5)]
    other = samples.gpu(samples.A100, index=3)

    text = drawn(*alike[:3], other, alike[3])

    assert "GPU 0-2,5 · Test GPU · MIG on · 4 alike" in text
    assert text.count("3g.20gb  ") == 1
    modes = drawn(samples.gpu(samples.A100), samples.gpu(samples.A100, index=1, mode=OFF))
    assert "alike" not in modes


def test_an_outcome_shows_the_previous_state_above_the_current_one() -> None:
    off = samples.gpu(samples.A100, mode=OFF)
    idle = [samples.gpu(samples.A100, *BALANCED, index=index) for index in (1, 2)]
    before, after = (off, *idle), (samples.gpu(samples.A100, *BALANCED), *idle)

    changed, _, same = picture.draw_outcome(before, after, style=PLAIN).partition("\n\n")

    header, _, was, _, now, *_ = changed.splitlines()
    assert header == "GPU 0 · Test GPU · MIG off → MIG on · GPU-0"
    assert was.startswith(" before │   ")
    assert picture.WHOLE in was
    assert now.startswith("  after │  1g.5gb  │  1g.5gb  │")
    assert same.splitlines() == [
        "GPU 1-2 · Test GPU · MIG on · unchanged · 2 alike",
        "    1x 3g.20gb, 1x 2g.10gb, 2x 1g.5gb",
    ]


@pytest.mark.parametrize("after", CASES)
@pytest.mark.parametrize("before", CASES)
def test_no_outcome_is_too_wide_and_only_equal_gpus_are_unchanged(
    before: model.Gpu, after: model.Gpu
) -> None:
    text = picture.draw_outcome([before], [after], style=styles.Style(unicode=False))

    assert text.isascii()
    assert max(map(len, text.splitlines())) <= styles.WIDTH
    # A list of profiles that the driver shows only with MIG on is no change.
    states = {dataclasses.replace(gpu, profiles=None) for gpu in (before, after)}
    assert ("unchanged" in text) is (len(states) == 1)


@pytest.mark.parametrize(
    ("gpu", "shown"),
    [
        pytest.param(
            samples.gpu(samples.A100, *[f"1g.5gb@{start}" for start in range(7)]),
            r"│  no fit  │",
            id="an unusable slice",
        ),
        pytest.param(samples.gpu(samples.A100, "3g.20gb@0"), r"│·+ free ·+│", id="free slices"),
        pytest.param(samples.gpu(samples.A100), r"│·{40,} free ·{39,}│", id="one free bar"),
        pytest.param(
            samples.gpu(samples.A100, mode=OFF),
            r"MIG off(?s:.*)the whole GPU, not partitioned",
            id="MIG off",
        ),
        pytest.param(
            samples.gpu(samples.A100, mode=OFF, pending=ON),
            "MIG off, on after the next reset",
            id="a pending mode",
        ),
        pytest.param(samples.gpu(None, mode=None), r"has no MIG[^│]*$", id="no bar without MIG"),
        pytest.param(
            samples.gpu(None, mode=OFF), "lists its profiles once MIG is on", id="no profiles"
        ),
        pytest.param(
            samples.gpu(samples.A100, "2g.10gb@0[]"),
            r"! 2g\.10gb(?s:.*)it only blocks memory slices",
            id="no compute instance",
        ),
        pytest.param(
            samples.gpu(samples.A100, "4g.20gb@0[1c 1c]"),
            "│    1c    │    1c    │          ·          │",
            id="compute instances without a known span in their order",
        ),
        pytest.param(
            samples.gpu(samples.A100, "4g.20gb@0[1c@0 2c@1]"),
            r"\n  │    1c    │          2c         │    ·     │[^\n]*"
            r"\n  └──────────┴─────────────────────┴──────────┴",
            id="compute instances divide their GPU instance",
        ),
        pytest.param(
            samples.gpu(samples.A30),
            r"PCI 0x20B010DE · offers 1g.6gb 1g.6gb\+me 2g.12gb 2g.12gb\+me 4g.24gb",
            id="profiles that a layout may request",
        ),
    ],
)
def test_a_picture_shows_every_part_of_a_gpu(gpu: model.Gpu, shown: str) -> None:
    assert re.search(shown, drawn(gpu))


def test_a_change_shows_destroyed_and_created_instances_beside_the_rest() -> None:
    gpu = samples.gpu(samples.A100, *BALANCED)

    lines = draw_plan(gpu, samples.desired_gpu({"1g.5gb": 4, "3g.20gb": 1})).splitlines()

    assert lines[1].count("destroy") == 1
    assert lines[2].startswith("  now │  1g.5gb  │  1g.5gb  │       2g.10gb       │")
    assert lines[3].startswith("      ├──────────┼──────────┼──────────┬──────────┼───")
    assert lines[4].startswith(" then │  1g.5gb  │  1g.5gb  │  1g.5gb  │  1g.5gb  │")
    assert lines[5].count("create") == 2
    assert "stays" not in "".join(lines)


@pytest.mark.parametrize(
    ("gpu", "desired", "shown"),
    [
        (
            samples.gpu(samples.A100, mode=OFF),
            samples.desired_gpu({"7g.40gb": 1}),
            r"MIG off → on, resets the GPU(?s:.*)then │ +7g\.40gb +│",
        ),
        (
            samples.gpu(samples.A100, "7g.40gb@0", needs_reset=False),
            samples.desired_gpu(mode=OFF),
            r"MIG on → off ·(?s:.*)then │ +the whole GPU, not partitioned +│",
        ),
        (
            samples.gpu(None, mode=OFF),
            samples.desired_gpu({"1g.5gb": 1}),
            "placements are decided once MIG is on",
        ),
        (
            samples.gpu(samples.A100, "4g.20gb@0"),
            samples.desired_gpu({"1c.4g.20gb": 4}),
            r"\n.*change.*\n(?s:.*)│    1c    │    1c    │    1c    │    1c    │.*\n.*change",
        ),
    ],
    ids=["enabled", "disabled", "enabled, profiles unknown", "new compute instances"],
)
def test_a_change_shows_the_mode_and_changed_instances(
    gpu: model.Gpu, desired: model.DesiredGpu, shown: str
) -> None:
    assert re.search(shown, draw_plan(gpu, desired))


def test_gpus_that_are_right_or_outside_the_layout_are_mentioned() -> None:
    gpu = samples.gpu(samples.A100, *BALANCED)

    text = draw_plan(gpu, samples.desired_gpu(layout_table.counts_of("all-balanced")))

    assert text.splitlines() == [
        "GPU 0 · Test GPU · MIG on · unchanged · GPU-0",
        "    1x 3g.20gb, 1x 2g.10gb, 2x 1g.5gb",
    ]
    outside = picture.draw_change([gpu], steps.Plan(gpus=()), selected=(), style=PLAIN)
    assert "not in this layout" in outside


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0,2-3,7"), ((), "")],
)
def test_indices_are_written_as_people_write_them(numbers: tuple[int, ...], expected: str) -> None:
    assert picture.indices(samples.gpu(None, index=number) for number in numbers) == expected


def test_no_colour_is_a_light_one_that_cannot_be_read_on_white() -> None:
    light_green_yellow_cyan_white = {"92", "93", "96", "97"}

    assert {tone.value for tone in styles.Tone}.isdisjoint(light_green_yellow_cyan_white)
