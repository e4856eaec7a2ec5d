"""What people see of GPUs and plans."""

import re

import pytest

from mig_manager.core import bar, model, picture, steps
from mig_manager.core.planner import planner
from tests.unit import samples

PLAIN = bar.Style()
ASCII = bar.Style(unicode=False)
COLOUR = bar.Style(colour=True)

BALANCED = ("1g.5gb@0", "1g.5gb@1", "2g.10gb@2", "3g.20gb@4")
CASES = [
    pytest.param(samples.gpu(samples.A100, *BALANCED), id="a100-balanced"),
    pytest.param(samples.gpu(samples.A100), id="a100-empty"),
    pytest.param(samples.gpu(samples.A100, mode=model.MigMode.DISABLED), id="a100-off"),
    pytest.param(samples.gpu(samples.A30, "1g.6gb@0", "2g.12gb@2"), id="a30"),
    pytest.param(samples.gpu(samples.RTX6000, "2g.48gb@0", "1g.24gb+me.all@9"), id="rtx6000"),
    pytest.param(samples.gpu(samples.H100, "1g.10gb+me@6"), id="h100-media"),
    pytest.param(samples.gpu(None, mode=None), id="no-mig"),
    pytest.param(samples.gpu(None, mode=model.MigMode.DISABLED), id="profiles-unknown"),
]


def planned(gpu: model.Gpu, desired: model.DesiredGpu) -> str:
    plan = planner.plan([gpu], {gpu.uuid: desired})
    return picture.draw_change([gpu], plan, selected={gpu.uuid}, style=PLAIN)


def test_a_balanced_a100_is_drawn_to_scale() -> None:
    slice_ = "─" * 10

    lines = picture.draw_gpus([samples.gpu(samples.A100, *BALANCED)], style=PLAIN).splitlines()

    assert lines[:5] == [
        "GPU 0 · Test GPU · MIG on · GPU-0",
        f"  ┌{slice_}┬{slice_}┬{'─' * 21}┬{'─' * 43}┐",
        f"  │  1g.5gb  │  1g.5gb  │{'2g.10gb':^21}│{'3g.20gb':^43}│",
        f"  └{slice_}┴{slice_}┴{'─' * 21}┴{'─' * 43}┘",
        "   0          1          2          3          4          5          6          7",
    ]


@pytest.mark.parametrize("gpu", CASES)
@pytest.mark.parametrize("style", [PLAIN, ASCII], ids=["unicode", "ascii"])
def test_no_line_is_wider_than_the_page(gpu: model.Gpu, style: bar.Style) -> None:
    assert max(map(len, picture.draw_gpus([gpu], style=style).splitlines())) <= picture.WIDTH


@pytest.mark.parametrize("gpu", CASES)
def test_the_fallback_is_pure_ascii(gpu: model.Gpu) -> None:
    assert picture.draw_gpus([gpu], style=ASCII).isascii()


@pytest.mark.parametrize("gpu", CASES)
def test_colour_adds_nothing_but_colour(gpu: model.Gpu) -> None:
    coloured = picture.draw_gpus([gpu], style=COLOUR)

    assert re.sub(r"\x1b\[[0-9]*m", "", coloured) == picture.draw_gpus([gpu], style=PLAIN)


def test_equal_gpus_are_drawn_once() -> None:
    alike = [samples.gpu(samples.A100, *BALANCED, index=index) for index in (0, 1, 2, 5)]
    other = samples.gpu(samples.A100, index=3)

    text = picture.draw_gpus([*alike[:3], other, alike[3]], style=PLAIN)

    assert "GPU 0-2,5 · Test GPU · MIG on · 4 alike" in text
    assert text.count("3g.20gb  ") == 1


def test_gpus_in_different_modes_are_drawn_apart() -> None:
    gpus = [
        samples.gpu(samples.A100),
        samples.gpu(samples.A100, index=1, mode=model.MigMode.DISABLED),
    ]

    assert picture.draw_gpus(gpus, style=PLAIN).count("GPU ") >= 2 + 2


def test_free_slices_are_distinguished_from_unusable_ones() -> None:
    full = samples.gpu(samples.A100, *[f"1g.5gb@{start}" for start in range(7)])
    half = samples.gpu(samples.A100, "3g.20gb@0")

    assert "│  no fit  │" in picture.draw_gpus([full], style=PLAIN)
    assert re.search(r"│·+ free ·+│", picture.draw_gpus([half], style=PLAIN))


def test_a_gpu_without_instances_is_one_free_bar() -> None:
    assert re.search(
        r"│·{40,} free ·{39,}│", picture.draw_gpus([samples.gpu(samples.A100)], style=PLAIN)
    )


def test_a_gpu_with_mig_off_is_shown_whole() -> None:
    text = picture.draw_gpus([samples.gpu(samples.A100, mode=model.MigMode.DISABLED)], style=PLAIN)

    assert "MIG off" in text
    assert "the whole GPU, not partitioned" in text


def test_a_pending_mode_is_shown() -> None:
    gpu = samples.gpu(samples.A100, mode=model.MigMode.DISABLED, pending=model.MigMode.ENABLED)

    assert "MIG off, on after the next reset" in picture.draw_gpus([gpu], style=PLAIN)


def test_a_gpu_without_mig_gets_no_bar() -> None:
    text = picture.draw_gpus([samples.gpu(None, mode=None)], style=PLAIN)

    assert "has no MIG" in text
    assert "│" not in text


def test_missing_profiles_of_the_driver_are_mentioned() -> None:
    text = picture.draw_gpus([samples.gpu(None, mode=model.MigMode.DISABLED)], style=PLAIN)

    assert "lists its profiles once MIG is on" in text


def test_a_gpu_instance_without_a_compute_instance_is_marked_and_explained() -> None:
    text = picture.draw_gpus([samples.gpu(samples.A100, "2g.10gb@0[]")], style=PLAIN)

    assert "! 2g.10gb" in text
    assert "it only blocks memory slices" in text


def test_compute_instances_divide_their_gpu_instance() -> None:
    gpu = samples.gpu(samples.A100, "4g.20gb@0[1c@0 2c@1]")

    lines = picture.draw_gpus([gpu], style=PLAIN).splitlines()

    assert lines[3].startswith("  │    1c    │          2c         │    ·     │")
    assert lines[4].startswith("  └──────────┴─────────────────────┴──────────┴")


def test_compute_instances_without_a_known_span_are_drawn_in_their_order() -> None:
    gpu = samples.gpu(samples.A100, "4g.20gb@0[1c 1c]")

    assert "│    1c    │    1c    │          ·          │" in picture.draw_gpus([gpu], style=PLAIN)


def test_status_lists_the_profiles_that_a_layout_may_request() -> None:
    text = picture.draw_gpus([samples.gpu(samples.A30)], style=PLAIN)

    assert "PCI 0x20B010DE · offers 1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb" in text


def test_a_change_shows_destroyed_and_created_instances_beside_the_rest() -> None:
    gpu = samples.gpu(samples.A100, *BALANCED)

    lines = planned(gpu, samples.want({"1g.5gb": 4, "3g.20gb": 1})).splitlines()

    assert lines[1].count("goes") == 1
    assert lines[2].startswith("  now │  1g.5gb  │  1g.5gb  │       2g.10gb       │")
    assert lines[3].startswith("      ├──────────┼──────────┼──────────┬──────────┼───")
    assert lines[4].startswith(" then │  1g.5gb  │  1g.5gb  │  1g.5gb  │  1g.5gb  │")
    assert lines[5].count("new") == 2
    assert "stays" not in "".join(lines)


def test_a_kept_gpu_instance_with_new_compute_instances_is_shown_as_changed() -> None:
    gpu = samples.gpu(samples.A100, "4g.20gb@0")

    text = planned(gpu, samples.want({"1c.4g.20gb": 4}))

    assert text.count("changes") == 2
    assert "│    1c    │    1c    │    1c    │    1c    │" in text


def test_enabling_mig_shows_both_modes_and_the_reset() -> None:
    gpu = samples.gpu(samples.A100, mode=model.MigMode.DISABLED)

    text = planned(gpu, samples.want({"7g.40gb": 1}))

    assert "MIG off → on, resets the GPU" in text
    assert re.search(r"then │ +7g\.40gb +│", text)


def test_disabling_mig_shows_the_whole_gpu() -> None:
    text = planned(
        samples.gpu(samples.A100, "7g.40gb@0", needs_reset=False),
        samples.want(mode=model.MigMode.DISABLED),
    )

    assert "MIG on → off ·" in text
    assert re.search(r"then │ +the whole GPU, not partitioned +│", text)


def test_a_change_without_known_profiles_says_that_placements_come_later() -> None:
    gpu = samples.gpu(None, mode=model.MigMode.DISABLED)

    assert "placements are decided once MIG is on" in planned(gpu, samples.want({"1g.5gb": 1}))


def test_gpus_that_are_right_are_one_line() -> None:
    gpu = samples.gpu(samples.A100, *BALANCED)

    text = planned(gpu, samples.want({"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}))

    assert text.splitlines() == [
        "GPU 0 · Test GPU · MIG on · right already · GPU-0",
        "    1x 3g.20gb, 1x 2g.10gb, 2x 1g.5gb",
    ]


def test_gpus_outside_the_layout_are_mentioned() -> None:
    text = picture.draw_change(
        [samples.gpu(samples.A100)], steps.Plan(gpus=()), selected=(), style=PLAIN
    )

    assert "not in this layout" in text


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0,2-3,7"), ((), "")],
)
def test_indices_are_written_as_people_write_them(numbers: tuple[int, ...], expected: str) -> None:
    assert picture.indices(samples.gpu(None, index=number) for number in numbers) == expected
