"""The layouts that we ship are right for every GPU that we know."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from mig_manager import errors, reasons
from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.core.layout import gpu_selectors, layout_parser, layouts, selection
from mig_manager.core.planner import planner
from tests.rigs.node import gpu_values

PATH = pathlib.Path(__file__).parents[2] / "profiles" / "mig-parted.yaml"
TEXT = PATH.read_text("utf-8")
DOCUMENT = layout_parser.parse(TEXT, source=PATH.name)

UPSTREAM = (
    "all-1g.10gb", "all-1g.10gb.me", "all-1g.12gb", "all-1g.12gb.me", "all-1g.18gb",
    "all-1g.18gb.me", "all-1g.20gb", "all-1g.23gb", "all-1g.23gb.me", "all-1g.24gb",
    "all-1g.24gb-me", "all-1g.24gb.gfx", "all-1g.24gb.me", "all-1g.24gb.me.all", "all-1g.34gb",
    "all-1g.34gb.me", "all-1g.35gb", "all-1g.35gb.me", "all-1g.36gb", "all-1g.45gb",
    "all-1g.47gb", "all-1g.5gb", "all-1g.5gb.me", "all-1g.67gb", "all-1g.6gb", "all-1g.6gb.me",
    "all-1g.70gb", "all-2g.10gb", "all-2g.12gb", "all-2g.12gb.me", "all-2g.20gb",
    "all-2g.24gb", "all-2g.35gb", "all-2g.36gb", "all-2g.45gb", "all-2g.47gb", "all-2g.48gb",
    "all-2g.48gb-me", "all-2g.48gb.gfx", "all-2g.48gb.me.all", "all-2g.67gb", "all-2g.70gb",
    "all-3g.135gb", "all-3g.139gb", "all-3g.20gb", "all-3g.40gb", "all-3g.47gb", "all-3g.48gb",
    "all-3g.71gb", "all-3g.72gb", "all-3g.90gb", "all-3g.93gb", "all-3g.95gb", "all-4g.135gb",
    "all-4g.139gb", "all-4g.20gb", "all-4g.24gb", "all-4g.40gb", "all-4g.47gb", "all-4g.48gb",
    "all-4g.71gb", "all-4g.72gb", "all-4g.90gb", "all-4g.93gb", "all-4g.95gb", "all-4g.96gb",
    "all-4g.96gb.gfx", "all-7g.141gb", "all-7g.144gb", "all-7g.180gb", "all-7g.186gb",
    "all-7g.189gb", "all-7g.269gb", "all-7g.278gb", "all-7g.40gb", "all-7g.80gb",
    "all-7g.94gb", "all-7g.96gb", "all-balanced", "all-disabled", "all-enabled",
)  # fmt: skip
"""The 81 names that NVIDIA's GPU operator ships (``default-mig-parted-config``, August 2026)."""

PRE_PRODUCTION = "gb200-pre-production"
"""Early units with the PCI id of the product: no filter can select them."""

UNPLACED = [
    product
    for product in json.loads(
        pathlib.Path(hardware.__file__).with_name("hardware.json").read_text("utf-8")
    )["products"]
    if "not_simulatable" in product and product["profiles"]
]
"""Products with published names and numbers of profiles, and without published placements."""

LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def gpus() -> Iterator[model.Gpu]:
    """One idle GPU for every PCI id of every product whose slices are known."""
    for product in hardware.products().values():
        if product.not_simulatable or product.key == PRE_PRODUCTION:
            continue
        for device_id in product.pci_device_ids:
            yield dataclasses.replace(hardware.template(product), pci_device_id=device_id)


GPUS = [pytest.param(gpu, id=f"{gpu.name} {gpu.pci_device_id:08X}") for gpu in gpus()]
MIG_GPUS = [each for each in GPUS if each.values[0].is_mig_capable]  # type: ignore[union-attr]


def profiles_of(gpu: model.Gpu) -> set[model.Profile]:
    return {each.profile for each in gpu.profiles or ()}


def deciding_rule(layout: layouts.Layout, gpu: model.Gpu) -> layouts.Rule | None:
    return next((rule for rule in reversed(layout.rules) if rule.matches(gpu)), None)


def is_for(rule: layouts.Rule, gpu: model.Gpu) -> bool:
    """Return whether a rule must fit: it names the model, or only profiles of the GPU."""
    profiles = {each.gpu_instance for each, _ in rule.desired.devices}
    return bool(rule.filters) or profiles <= profiles_of(gpu)


def carry_out(gpu: model.Gpu, desired: model.DesiredGpu) -> model.DesiredGpu:
    """Plan for the GPU; return what it would have afterwards."""
    plan = planner.plan([gpu], {gpu.uuid: desired})
    if plan.is_empty:
        return model.DesiredGpu.of(model.MigMode.DISABLED, {})
    counts: dict[model.Profile, int] = {}
    for target in plan.gpus[0].target:
        for compute in target.compute_instances:
            counts[compute.profile] = counts.get(compute.profile, 0) + 1
    return model.DesiredGpu.of(model.MigMode.ENABLED, counts)


def test_names_are_label_values_and_include_the_operators() -> None:
    assert [name for name in DOCUMENT.layouts if not LABEL_VALUE.fullmatch(name)] == []
    assert len(UPSTREAM) == 81
    assert [name for name in UPSTREAM if name not in DOCUMENT.layouts] == []


@pytest.mark.parametrize("gpu", MIG_GPUS)
def test_every_layout_fits_every_gpu_that_it_is_for(gpu: model.Gpu) -> None:
    fitting = 0
    for layout in DOCUMENT.layouts.values():
        rule = deciding_rule(layout, gpu)
        if rule is None or not is_for(rule, gpu):
            continue
        selected = selection.select(layout, [gpu])
        assert carry_out(gpu, selected[gpu.uuid]) == rule.desired, layout.name
        fitting += 1
    assert fitting >= 8


@pytest.mark.parametrize("gpu", MIG_GPUS)
def test_every_profile_of_every_gpu_has_its_layout_with_as_many_as_fit(gpu: model.Gpu) -> None:
    for profile in profiles_of(gpu):
        layout = DOCUMENT.layout(f"all-{profile}".replace("+", "."))
        desired = selection.select(layout, [gpu])[gpu.uuid]
        ((named, count),) = desired.devices
        assert named == profile
        with pytest.raises(errors.LayoutError) as caught:
            carry_out(gpu, model.DesiredGpu.of(model.MigMode.ENABLED, {profile: count + 1}))
        assert caught.value.reason is reasons.Reason.DOES_NOT_FIT


@pytest.mark.parametrize("gpu", MIG_GPUS)
def test_balanced_takes_every_compute_slice_of_every_gpu(gpu: model.Gpu) -> None:
    desired = selection.select(DOCUMENT.layout("all-balanced"), [gpu])[gpu.uuid]
    slices = sum(profile.gpu_slices * count for profile, count in desired.devices)
    assert slices == max(profile.gpu_slices for profile in profiles_of(gpu))


def test_every_layout_is_for_a_known_gpu() -> None:
    early = hardware.template(hardware.find(PRE_PRODUCTION))
    known_gpus = [*gpus(), early]
    rows = (row for product in UNPLACED for row in product["profiles"])
    published = {f"all-{row['name']}".replace("+", ".") for row in rows}
    useless = {
        layout.name
        for layout in DOCUMENT.layouts.values()
        if not any(
            is_for(rule, gpu) for rule in layout.rules for gpu in known_gpus if rule.matches(gpu)
        )
    }
    assert useless <= published


@pytest.mark.parametrize("name", ["all-3g.95gb", "all-4g.95gb", "all-7g.189gb", "all-2g.47gb"])
def test_the_layouts_of_pre_production_units_fit_them(name: str) -> None:
    early = hardware.template(hardware.find(PRE_PRODUCTION))
    desired = selection.select(DOCUMENT.layout(name), [early])[early.uuid]
    assert carry_out(early, desired) == desired


@pytest.mark.parametrize("product", UNPLACED, ids=lambda each: each["key"])
def test_layouts_of_unplaced_products_have_the_published_number(product: dict[str, Any]) -> None:
    most = {row["name"]: row["max"] for row in product["profiles"]}
    like = hardware.template(hardware.find("A30"))
    gpu = dataclasses.replace(like, pci_device_id=int(product["pci"][0], 16))
    for profile, count in most.items():
        name = f"all-{profile}".replace("+", ".")
        # Jetson Thor creates this one only beside another: all-balanced.
        if profile != "1g.0gb+me":
            desired = selection.select(DOCUMENT.layout(name), [gpu])[gpu.uuid]
            assert {str(each): n for each, n in desired.devices} == {profile: count}, name
    balanced = selection.select(DOCUMENT.layout("all-balanced"), [gpu])[gpu.uuid].devices
    assert all(n <= most[str(each)] for each, n in balanced)
    slices = max(row["slices"] for row in product["profiles"])
    assert sum(each.gpu_slices * n for each, n in balanced) == slices


def test_every_filter_names_known_gpus_and_each_once() -> None:
    device_ids = {
        each for product in hardware.products().values() for each in product.pci_device_ids
    }
    for layout in DOCUMENT.layouts.values():
        named = [
            each.device_id
            for rule in layout.rules
            for each in rule.filters
            if isinstance(each, gpu_selectors.PciIdFilter)
        ]
        assert set(named) <= device_ids, layout.name
        assert len(named) == len(set(named)), layout.name


def test_names_spell_the_profile_that_they_give() -> None:
    for layout in DOCUMENT.layouts.values():
        if re.match(r"all-\d", layout.name):
            profiles = {profile for rule in layout.rules for profile, _ in rule.desired.devices}
            assert {f"all-{each}".replace("+", ".") for each in profiles} == {layout.name}


def test_the_examples_in_the_comments_work_when_uncommented() -> None:
    rest, marker, examples = TEXT.partition("# --- Layouts of your own")
    code = re.sub(r"(?m)^  # (?=[a-z-]+:$|-|  )", "  ", examples)
    document = layout_parser.parse(rest + marker + code, source="examples")
    h100 = gpu_values.gpus_of("8xh100")
    for name in ("training-and-notebooks", "inference", "shared-memory"):
        for gpu in h100:
            desired = selection.select(document.layout(name), h100)[gpu.uuid]
            assert carry_out(gpu, desired) == desired
