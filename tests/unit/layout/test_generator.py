"""Layout files for given GPUs, by the acceptance tables of NVIDIA's builder."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mig_manager import errors, reasons
from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name
from mig_manager.core.files import yaml_text
from mig_manager.core.layout import (
    generator,
    gpu_selectors,
    layout_documents,
    layout_parser,
    selection,
)
from mig_manager.core.planner import planner
from tests.unit import bruteforce

A100_40, A100_80, A30, H100 = "a100-sxm4-40gb", "a100-sxm4-80gb", "a30", "h100-sxm5-80gb"
RTX = "rtx-pro-6000-blackwell-server"
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")

# The nine products of the builder's table; the boards of one row are alike in their profiles.
BALANCED = {
    A30: {"1g.6gb": 2, "2g.12gb": 1},
    A100_40: {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1},
    A100_80: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
    H100: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
    "h100-nvl": {"1g.12gb": 2, "2g.24gb": 1, "3g.47gb": 1},
    "gh200-96gb": {"1g.12gb": 2, "2g.24gb": 1, "3g.48gb": 1},
    "h200": {"1g.18gb": 2, "2g.35gb": 1, "3g.71gb": 1},
    "b200": {"1g.23gb": 2, "2g.45gb": 1, "3g.90gb": 1},
    RTX: {"1g.24gb": 2, "2g.48gb": 1},
}
PER_PROFILE = {
    A100_40: {
        "1g.5gb": 7, "1g.5gb+me": 1, "1g.10gb": 4, "2g.10gb": 3, "3g.20gb": 2, "4g.20gb": 1,
        "7g.40gb": 1,
    },
    A100_80: {
        "1g.10gb": 7, "1g.10gb+me": 1, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1,
        "7g.80gb": 1,
    },
    A30: {"1g.6gb": 4, "1g.6gb+me": 1, "2g.12gb": 2, "2g.12gb+me": 1, "4g.24gb": 1},
    RTX: {
        "1g.24gb": 4, "1g.24gb+me": 1, "1g.24gb+gfx": 4, "1g.24gb+me.all": 1, "1g.24gb-me": 4,
        "2g.48gb": 2, "2g.48gb+gfx": 2, "2g.48gb+me.all": 1, "2g.48gb-me": 2, "4g.96gb": 1,
        "4g.96gb+gfx": 1,
    },
}  # fmt: skip


def kinds(*names: str) -> tuple[gpu_selectors.GpuKind, ...]:
    return hardware.kinds(names, warn=lambda _: pytest.fail("nothing is left out"))


def rules_by_name(*names: str, has_all_maximal: bool = False) -> dict[str, Any]:
    document = rendered_document(kinds(*names), has_all_maximal=has_all_maximal)
    assert document["version"] == "v1"
    configs = document["mig-configs"]
    assert isinstance(configs, dict)
    return configs


def rendered_document(
    gpu_kinds: Sequence[gpu_selectors.GpuKind], *, has_all_maximal: bool = False
) -> dict[str, object]:
    generated_layouts = generator.layouts_of(gpu_kinds, has_all_maximal=has_all_maximal)
    return layout_documents.render(generated_layouts.values())


def kind(device_id: int, *rows: tuple[str, tuple[int, ...], int]) -> gpu_selectors.GpuKind:
    """Make GPUs up: each row is a profile, where it may start, and how many slices it takes."""
    return gpu_selectors.GpuKind(
        device_ids=(device_id,),
        profiles=tuple(
            model.GpuInstanceProfile(
                profile=profile_name.parse(name),
                enum_index=number,
                profile_id=number,
                memory_mib=1024,
                multiprocessors=1,
                max_instances=99,
                engines=model.Engines(),
                placements=tuple(model.Placement(start, size) for start in starts),
            )
            for number, (name, starts, size) in enumerate(rows)
        ),
    )


def only(configs: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    (rule,) = configs[name]
    assert rule["devices"] == "all"
    assert isinstance(rule, dict)
    return rule


@pytest.mark.parametrize("name", BALANCED)
def test_balanced_equals_the_layout_of_mig_parted_on_nine_products(name: str) -> None:
    configs = rules_by_name(name)

    rule = {"devices": "all", "mig-enabled": True, "mig-devices": BALANCED[name]}
    assert configs["all-balanced"] == [rule]
    assert configs["all-enabled"] == [rule | {"mig-devices": {}}]
    assert configs["all-disabled"] == [rule | {"mig-enabled": False, "mig-devices": {}}]


@pytest.mark.parametrize("name", PER_PROFILE)
def test_every_profile_has_a_layout_with_the_count_of_mig_parted(name: str) -> None:
    configs = rules_by_name(name)

    for profile, count in PER_PROFILE[name].items():
        rule = only(configs, f"all-{profile}".replace("+", "."))
        assert rule == {"devices": "all", "mig-enabled": True, "mig-devices": {profile: count}}
    standard = {"all-disabled", "all-enabled", "all-balanced"}
    assert len(configs) == len(PER_PROFILE[name]) + len(standard)


def test_models_with_the_same_profiles_share_their_rules_but_for_balanced() -> None:
    configs = rules_by_name(A100_80, H100)

    filters = ["0x20B210DE", "0x233010DE"]
    for profile, count in PER_PROFILE[A100_80].items():
        rule = only(configs, f"all-{profile}".replace("+", "."))
        assert (rule["device-filter"], rule["mig-devices"]) == (filters, {profile: count})
    assert [rule["device-filter"] for rule in configs["all-balanced"]] == filters
    assert "device-filter" not in only(configs, "all-disabled")


def test_a_profile_that_fits_gpus_unequally_has_a_rule_for_each_count() -> None:
    rules = rules_by_name(A100_40, A100_80)["all-1g.10gb"]

    assert [(rule["device-filter"], rule["mig-devices"]) for rule in rules] == [
        (["0x20B010DE", "0x20B110DE"], {"1g.10gb": 4}),
        ("0x20B210DE", {"1g.10gb": 7}),
    ]


@pytest.mark.parametrize(
    "made_up",
    [
        pytest.param(
            kind(0x20B510DE, ("1g.10gb+me", (0,), 1), ("2g.20gb+me", (0,), 2)),
            id="attributes only",
        ),
        pytest.param(
            kind(0x20B510DE, ("1g.10gb", (0, 1, 2, 3, 4, 5, 6), 1), ("3g.40gb", (0, 4), 4)),
            id="no 2g",
        ),
        pytest.param(
            kind(0x2BB610DE, ("1g.16gb", (0, 1), 1), ("2g.32gb", (0,), 2)), id="two slices"
        ),
        # As the RTX PRO 5000, whose only 2g has no media engines.
        pytest.param(
            kind(0x2BB410DE, ("1g.12gb", (0,), 1), ("2g.24gb-me", (0,), 2), ("4g.48gb", (0,), 4)),
            id="no plain 2g",
        ),
    ],
)
def test_no_balanced_layout_exists_where_the_formula_lacks_a_size(
    made_up: gpu_selectors.GpuKind,
) -> None:
    generated = generator.layouts_of([made_up])

    assert "all-balanced" not in generated
    assert "all-enabled" in generated


def test_layouts_are_in_the_order_of_their_names_with_numbers_by_value() -> None:
    names = list(rules_by_name(A100_40))

    assert names == [
        "all-1g.5gb", "all-1g.5gb.me", "all-1g.10gb", "all-2g.10gb", "all-3g.20gb",
        "all-4g.20gb", "all-7g.40gb", "all-balanced", "all-disabled", "all-enabled",
    ]  # fmt: skip


def test_generated_counts_equal_the_drivers() -> None:
    for name in hardware.product_names():
        configs = rules_by_name(name)
        for spec in hardware.template(hardware.find(name)).profiles or ():
            rule = only(configs, f"all-{spec.profile}".replace("+", "."))
            assert rule["mig-devices"] == {str(spec.profile): spec.max_instances}


@pytest.mark.parametrize("name", [A30, A100_40, "h200", RTX])
def test_maximal_layouts_are_exactly_those_that_cannot_be_extended(name: str) -> None:
    gpu = bruteforce.template(hardware.find(name))
    profiles = [spec.profile for spec in gpu.profiles or ()]
    possible = bruteforce.placeable(gpu)

    full = {
        frozenset((profile, n) for profile, n in zip(profiles, counts, strict=True) if n)
        for counts in possible
        if possible.isdisjoint(bruteforce.one_more(counts))
    }

    assert {frozenset(counts) for counts in generator.maximal(gpu.profiles or ())} == full


def test_mixed_layouts_are_distinct_and_repeat_no_standard_layout() -> None:
    configs = rules_by_name(A100_40, has_all_maximal=True)
    mixed = {name: only(configs, name)["mig-devices"] for name in configs if "max-" in name}

    assert mixed["max-3g.20gb_2g.10gb_1g.5gb.me_1g.5gb"] == {
        "1g.5gb": 1, "1g.5gb+me": 1, "2g.10gb": 1, "3g.20gb": 1,
    }  # fmt: skip
    assert mixed["max-4g.20gb_3g.20gb"] == {"3g.20gb": 1, "4g.20gb": 1}
    standard = [only(configs, name)["mig-devices"] for name in configs if "max-" not in name]
    assert not [devices for devices in mixed.values() if devices in standard]
    assert len({str(sorted(devices.items())) for devices in mixed.values()}) == len(mixed)


def test_equal_mixed_layouts_of_several_models_are_joined() -> None:
    configs = rules_by_name(A100_80, H100, A30, has_all_maximal=True)

    assert only(configs, "max-4g.40gb_3g.40gb")["device-filter"] == ["0x20B210DE", "0x233010DE"]
    assert only(configs, "max-1g.6gb.me_3x1g.6gb")["device-filter"] == "0x20B710DE"


def test_a_name_that_is_too_long_is_cut_and_stays_unique() -> None:
    names = [f"{slices}g.{slices}00gb+me.all" for slices in range(1, 8)]
    counts = [
        tuple((profile_name.parse(name), 2) for name in combination)
        for combination in itertools.combinations(names, 6)
    ]

    made = {generator.maximal_name(each) for each in counts}

    assert len(made) == len(counts)
    assert all(LABEL_VALUE.fullmatch(each) for each in made)


@pytest.mark.slow
def test_a_document_for_every_product_at_once_can_still_be_read() -> None:
    every = hardware.kinds(hardware.product_names(), warn=lambda _: None)
    text = yaml_text.dump(rendered_document(every, has_all_maximal=True))

    assert len(layout_parser.parse(text, source="generated").layouts) > 500


def test_gpu_kinds_differ_by_pci_id_and_must_list_profiles() -> None:
    a100, t4 = hardware.template(hardware.find(A100_40)), hardware.template(hardware.find("t4"), 1)
    silent = dataclasses.replace(a100, index=2, profiles=None)

    gpu_kinds = generator.kinds_of([a100, silent, t4])

    assert [each.device_ids for each in gpu_kinds] == [(0x20B010DE,)]
    with pytest.raises(errors.LayoutError, match="only once MIG is on"):
        generator.kinds_of([silent])
    with pytest.raises(errors.LayoutError) as caught:
        generator.kinds_of([t4])
    assert caught.value.reason is reasons.Reason.NOT_MIG_CAPABLE


def test_generated_layouts_equal_their_parsed_document() -> None:
    nodes = [[name] for name in hardware.product_names()] + [[A100_80, H100, A30], [A100_40, RTX]]
    for names in nodes:
        document = yaml_text.dump(rendered_document(kinds(*names)))

        expected = layout_parser.parse(document, source="generated").layouts
        made = generator.layouts_of(kinds(*names))

        assert list(made) == list(expected)
        assert made == expected


@pytest.mark.parametrize(
    "spec",
    [
        *("a100-sxm4-80gb+a30", "a30+t4", "h200+rtx-pro-6000+a30"),
        pytest.param(
            "+".join(hardware.product_names()), marks=pytest.mark.slow, id="every product"
        ),
    ],
)
def test_a_generated_layout_fits_every_gpu_that_it_selects(spec: str) -> None:
    node = [
        hardware.template(product, index)
        for index, product in enumerate(hardware.find(name) for name in spec.split("+"))
    ]

    for layout in generator.layouts_of(generator.kinds_of(node), has_all_maximal=True).values():
        # Raises where anything does not fit.
        planner.plan(node, selection.select(layout, node))


def test_gpu_kinds_of_one_pci_id_differ_by_subsystem() -> None:
    whole = hardware.template(hardware.find(A100_40))
    less = dataclasses.replace(
        whole,
        index=1,
        uuid="GPU-1",
        pci_subsystem_id=0x147610DE,
        profiles=tuple(each for each in whole.profiles or () if each.profile.gpu_slices < 7),
    )
    same = dataclasses.replace(less, index=2, uuid="GPU-2", pci_subsystem_id=0)

    made = generator.layouts_of(generator.kinds_of([whole, less]))
    assert set(selection.select(made["all-7g.40gb"], [whole, less])) == {whole.uuid}
    assert set(selection.select(made["all-1g.5gb"], [whole, less])) == {whole.uuid, less.uuid}

    # Where no filter distinguishes them, only what all of them offer counts.
    assert "all-7g.40gb" not in generator.layouts_of(generator.kinds_of([whole, same]))


def test_an_error_about_a_generated_layout_names_its_origin() -> None:
    a100, a30 = (hardware.template(hardware.find(name)) for name in (A100_40, A30))
    layout = generator.layouts_of(generator.kinds_of([a100]))["all-3g.20gb"]

    with pytest.raises(errors.LayoutError) as caught, selection.located(layout, [a30]):
        planner.plan([a30], selection.select(layout, [a30]))

    assert layout.origin == "generated for NVIDIA A100-SXM4-40GB"
    assert caught.value.message.startswith(f"{layout.origin}: ")
