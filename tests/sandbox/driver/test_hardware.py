"""The product table: complete, consistent, and found by the names people use."""

import json
import pathlib
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.catalogue import hardware, product_table
from mig_manager.core import model, profile_name

PRODUCTS = tuple(hardware.products().values())
TABLE = json.loads(pathlib.Path(hardware.__file__).with_name("hardware.json").read_bytes())


WITHOUT_MIG = {"l40s", "t4"}
NOT_SIMULATABLE = {
    "h20-nvl16",
    "jetson-thor",
    "rtx-pro-4500-blackwell",
    "rtx-pro-4500-blackwell-server",
    "rtx-pro-5000-blackwell",
}


def test_the_keys_of_the_products_are_unique() -> None:
    keys = [raw["key"] for raw in TABLE["products"]]

    assert [product.key for product in PRODUCTS] == keys
    assert len({*keys}) == len(keys)


def test_every_product_has_profiles_or_is_listed_without() -> None:
    assert {each.key for each in PRODUCTS if not each.is_mig_capable} == WITHOUT_MIG
    assert {each.key for each in PRODUCTS if each.not_simulatable} == NOT_SIMULATABLE
    assert {each.key for each in PRODUCTS if not each.profiles} == WITHOUT_MIG | NOT_SIMULATABLE


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: p.key)
def test_profiles_of_a_product_differ_and_one_is_the_whole_gpu(
    product: product_table.Product,
) -> None:
    names = [row.name for row in product.profiles]
    spans = [place.size for row in product.profiles for place in row.placements]

    assert len({*names}) == len(names)
    assert max(spans, default=0) == product.memory_slices


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: p.key)
def test_compute_profiles_stay_within_their_gpu_instance(product: product_table.Product) -> None:
    for row in product.profiles:
        assert str(row.profile) == row.name  # computed from the driver's numbers
        assert any(compute.slices == row.profile.gpu_slices for compute in row.compute), row.name
        for compute in row.compute:
            assert compute.placements
            assert max(place.end for place in compute.placements) <= row.profile.gpu_slices
            assert compute.multiprocessors <= row.multiprocessors


@pytest.mark.parametrize("raw", TABLE["products"], ids=lambda raw: raw["key"])
def test_inferred_fields_name_their_basis_and_other_fields_a_source(
    raw: dict[str, Any],
) -> None:
    assert hardware.find(raw["key"].upper()).key == raw["key"]
    assert raw["sources"]
    assert all(raw.get("inferred", {}).values())
    for row in () if "not_simulatable" in raw else raw["profiles"]:
        inferred = set(row.get("inferred", ()))
        assert "name" in inferred or TABLE["source_sets"][row["sources"]]
        is_plain = inferred <= {"compute", "sms", "memory_mib", "id", "placements"}
        assert is_plain or TABLE["bases"][row["basis"]]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("A100", "a100-sxm4-40gb"),
        ("A100-SXM4-40GB", "a100-sxm4-40gb"),
        ("nvidia a100-sxm4-80gb", "a100-sxm4-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("h100", "h100-sxm5-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("H100_NVL", "h100-nvl"),
        ("H200", "h200"),
        ("B200", "b200"),
        ("B300", "b300-sxm6"),
        ("A30", "a30"),
        ("RTX-PRO-6000", "rtx-pro-6000-blackwell-server"),
        ("NVIDIA GH200 120GB", "gh200-96gb"),
        ("T4", "t4"),
        ("GB200", "gb200"),
        ("nvidia thor", "jetson-thor"),
        ("Jetson-Thor", "jetson-thor"),
        ("H20", "h20-96gb"),
        ("NVIDIA H20 NVL16", "h20-nvl16"),
        ("RTX PRO 4500 Blackwell Server Edition", "rtx-pro-4500-blackwell-server"),
    ],
)
def test_product_is_found_by_the_names_people_use(name: str, key: str) -> None:
    assert hardware.find(name).key == key


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("A100x8", "did you mean 'A100'"),
        ("a100-40", "did you mean 'A100-40GB'"),
        ("L4", "unknown GPU"),
        ("A10", "unknown GPU"),
        ("", "unknown GPU"),
        ("A100-SXM4", "ambiguous"),
        ("A100-SXM4-40G", "did you mean 'A100-SXM4-40GB'"),
        ("H100-SXM", "did you mean 'H100-SXM5-80GB'"),
        ("B200-SXM", r"did you mean 'B200'\?"),
        ("X200", r"unknown GPU 'X200'$"),
    ],
)
def test_unknown_and_ambiguous_names_are_usage_errors(name: str, says: str) -> None:
    with pytest.raises(errors.UsageError, match=says):
        hardware.find(name)


def test_a_glob_and_a_family_select_several_products_and_a_name_one() -> None:
    keys = [product.key for product in hardware.match("NVIDIA A100*80GB*")]
    assert keys == ["a100-sxm4-80gb", "a100-80gb-pcie"]
    keys = [product.key for product in hardware.match("A100")]
    assert keys == [product.key for product in hardware.match("A100-*")]
    assert len(keys) > 3
    assert hardware.match("A100-SXM4-40GB") == (hardware.find("A100"),)
    with pytest.raises(errors.UsageError, match="no known GPU"):
        hardware.match("X*")


def test_jetson_thor_has_the_published_ids_and_null_where_nothing_is() -> None:
    thor = next(raw for raw in TABLE["products"] if raw["key"] == "jetson-thor")
    ids = {row["name"]: row["id"] for row in thor["profiles"]}
    published = {"1g.0gb+me": 78, "1g.0gb": 80, "1g.0gb+gfx": 81, "2g.0gb": 82, "2g.0gb+gfx": 83}
    assert ids == published | {"3g.0gb": None, "3g.0gb+gfx": None}
    for row in thor["profiles"]:
        named = profile_name.from_nvml(
            enum_index=row["enum"], slice_count=row["slices"], memory_gb=row["memory_mib"]
        )
        assert str(named) == row["name"]


def test_a_document_has_one_kind_for_each_pci_id() -> None:
    notes: list[object] = []
    assert hardware.match("GB200*") == (hardware.find("GB200"),)
    kinds = hardware.kinds(["GB200", "GB200-pre-production"], warn=notes.append)
    assert [kind.device_ids for kind in kinds] == [(0x294110DE,)]
    assert notes == ["gb200-pre-production is left out: it has the PCI id of gb200"]


def test_node_can_mix_products() -> None:
    keys = [product.key for product in hardware.parse_node("2xA100-SXM4-80GB + A30")]
    assert keys == ["a100-sxm4-80gb", "a100-sxm4-80gb", "a30"]


@pytest.mark.parametrize("spec", ["", "0xA30", "17xA30", "8xA30+9xA30", "A30+", "8x", "99999xA30"])
def test_malformed_nodes_are_usage_errors(spec: str) -> None:
    with pytest.raises(errors.UsageError):
        hardware.parse_node(spec)


def test_a_product_that_cannot_be_simulated_is_refused_with_a_reason() -> None:
    with pytest.raises(errors.UsageError, match="disagree on the profiles"):
        hardware.parse_node("RTX-PRO-5000-Blackwell")
    with pytest.raises(errors.UsageError, match="cannot be simulated"):
        hardware.template(hardware.find("rtx-pro-4500-blackwell"))


def test_template_is_an_idle_gpu_with_all_profiles() -> None:
    gpu = hardware.template(hardware.find("H100"), index=2)
    assert (gpu.index, gpu.current_mode, gpu.gpu_instances) == (2, model.MigMode.DISABLED, ())
    assert gpu.architecture is model.Architecture.HOPPER
    assert not gpu.mode_change_needs_reset
    names = " ".join(str(p.profile) for p in gpu.profiles or ())
    assert names == "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"
    without_mig = hardware.template(hardware.find("L40S"))
    assert not without_mig.is_mig_capable
    assert without_mig.architecture is model.Architecture.OTHER
