"""Who may have which slot, decided from what was seen."""

import dataclasses
from typing import Any

import pytest

from mig_manager.core.fleet import slots
from mig_manager.core.objects import lease, well_known
from mig_manager.core.records import journals, node_entries
from tests.rigs.node import samples


def slot(index: int, holder: str = "", *, age_s: float = 0.0) -> lease.Lease:
    return lease.Lease(
        name=f"mig-manager-slot-{index}",
        holder=holder,
        version="1",
        duration_s=90,
        read_s=age_s,
    )


def classify(*leases: lease.Lease, limit: int = 3) -> slots.SlotUse:
    return slots.classify(leases, node="a", limit=limit)


def test_a_slot_of_our_own_node_is_ours_at_any_age() -> None:
    own_slot = slot(2, "a", age_s=1000)

    slot_use = classify(own_slot)

    assert slot_use.mine == (own_slot,)
    assert slot_use.silent == slot_use.occupied == ()


def test_a_slot_beyond_our_limit_counts_as_held_and_is_never_free() -> None:
    slot_use = classify(slot(7, "b"), slot(8), limit=1)

    assert slot_use.occupied == (slot(7, "b"),)
    assert [each.name for each in slot_use.free] == ["mig-manager-slot-0"]


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("mig-manager-slot-0", 0), ("mig-manager-slot-12", 12), ("mig-manager-slot-012", None),
        ("mig-manager-slot-", None), ("mig-manager-slot-1x", None), ("mig-manager-slot-²", None),
        ("mig-manager-slot-1234567890", None), ("mig-manager", None), ("kube-scheduler", None),
    ],
)  # fmt: skip
def test_leases_of_other_programs_do_not_count_as_slots(name: str, index: int | None) -> None:
    assert slots.index_of(name) == index
    assert index is None or slot(index).name == name


def journal(**records: Any) -> dict[str, str]:
    return {well_known.JOURNAL_ANNOTATION: journals.Journal(layout="a", **records).to_json()}


@pytest.mark.parametrize(
    "mark",
    [
        {"annotations": {well_known.JOURNAL_ANNOTATION: "{}"}},
        {"annotations": journal(node=node_entries.NodeEntries(rebooted_from="boot-1"))},
        {"taint_keys": frozenset({well_known.RECONFIGURING_TAINT})},
        {"labels": {well_known.PLUGIN_DEPLOY_LABEL: well_known.PAUSED_VALUE}},
        {"labels": {well_known.PLUGIN_DEPLOY_LABEL: f"{well_known.PAUSED_VALUE}_by-another"}},
    ],
)
def test_each_mark_of_a_change_makes_a_node_disrupted(mark: dict[str, Any]) -> None:
    cordoned = samples.node_view(is_unschedulable=True)
    assert slots.is_disrupted(dataclasses.replace(cordoned, **mark))
    assert not slots.is_disrupted(cordoned)
    snapshot = tuple(gpu.snapshot for gpu in samples.balanced_gpu())
    waiting = journal(gpus=journals.GpuEntries(snapshots=snapshot))
    assert not slots.is_disrupted(dataclasses.replace(cordoned, annotations=waiting))


def test_a_denial_names_the_nodes_that_hold_and_counts_the_rest() -> None:
    denial = slots.Denial(limit=12, changing=tuple(f"n{number:02}" for number in range(12)))

    assert str(denial) == (
        "waiting for one of 12 slots for nodes under change; under change now: "
        "n00, n01, n02, n03, n04, n05, n06, n07, n08, n09 and 2 more"
    )
    assert "silent: dead" in str(slots.Denial(limit=1, changing=(), silent=("dead",)))
