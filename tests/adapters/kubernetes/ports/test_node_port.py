"""Node, slots and lock: the fakes keep the promises of their ports as the adapters do."""

import contextlib
import dataclasses

import pytest

from mig_manager import errors, reasons
from mig_manager.core.fleet import slots
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import gpu_recovery, readiness
from tests.adapters.kubernetes.ports import port_rigs
from tests.adapters.kubernetes.ports.port_rigs import GPU, OTHER, Rig


def test_patch_writes_its_keys_alone_and_returns_the_node(rig: Rig) -> None:
    rig.label("site", "a")
    rig.node.patch(node_object.NodePatch(labels={"gone": "1"}, annotations={"note": "x"}))

    patched = rig.node.patch(node_object.NodePatch(labels={"gone": None, "none": None, "new": ""}))

    assert patched.labels.items() >= {"site": "a", "new": ""}.items()
    assert not {"gone", "none"} & patched.labels.keys()
    assert patched.annotations["note"] == "x"
    assert patched == rig.node.read() == rig.node.latest()


def test_update_decides_again_on_the_node_that_another_wrote(rig: Rig) -> None:
    sites: list[str | None] = []

    def decide(view: node_object.NodeView) -> node_object.NodePatch:
        sites.append(view.labels.get("site"))
        rig.label("site", "a")
        return node_object.NodePatch(labels={"seen": view.labels.get("site", "none")})

    updated = rig.node.update(decide)

    assert sites == [None, "a"]
    assert updated.labels["seen"] == updated.labels["site"] == "a"


def test_update_does_not_decide_again_on_a_node_that_has_the_patch(rig: Rig) -> None:
    decisions: list[node_object.NodeView] = []

    def decide(view: node_object.NodeView) -> node_object.NodePatch:
        decisions.append(view)
        rig.label("site", "a")
        return node_object.NodePatch(labels={"site": "a"})

    assert rig.node.update(decide).labels["site"] == "a"
    assert len(decisions) == 1


def test_update_of_a_node_that_always_changes_fails_in_the_end(rig: Rig) -> None:
    written: list[str] = []

    def decide(_view: node_object.NodeView) -> node_object.NodePatch:
        written.append(str(len(written)))
        rig.label("written", written[-1])
        return node_object.NodePatch(labels={"seen": "yes"})

    with pytest.raises(errors.ClusterError) as caught:
        rig.node.update(decide)

    assert caught.value.reason is reasons.Reason.API_UNAVAILABLE
    assert "seen" not in rig.node.read().labels


def test_update_adds_and_removes_our_taint_and_named_ones(rig: Rig) -> None:
    tainted = rig.node.update(lambda _view: node_object.NodePatch(reconfiguring_taint=True))
    assert (
        tainted.taint_keys
        == tainted.closing_taints
        == {well_known.RECONFIGURING_TAINT, "dedicated"}
    )

    rig.node.update(lambda _view: node_object.NodePatch(reconfiguring_taint=False))
    kept = rig.node.update(lambda _view: node_object.NodePatch(labels={"x": "y"}))
    assert kept.taint_keys == kept.closing_taints == {"dedicated"}

    removed = frozenset({"dedicated", "unknown"})
    free = rig.node.update(lambda _view: node_object.NodePatch(removed_taints=removed))
    assert free.taint_keys == frozenset()


def test_hidden_devices_are_reported_again_and_others_stay(rig: Rig) -> None:
    assert rig.node.read().allocatable == port_rigs.DEVICES

    rig.node.hide_devices()
    assert rig.node.read().allocatable == {GPU: 0, OTHER: 4}
    assert rig.node.read().capacity == port_rigs.DEVICES

    small = well_known.RESOURCE_PREFIX + "mig-1g.5gb"
    rig.node.report_devices({small: 7, GPU: 0})
    assert rig.node.read().allocatable == {GPU: 0, OTHER: 4, small: 7}
    assert rig.node.read().capacity == {**port_rigs.DEVICES, small: 7}


def test_removed_resources_are_gone_from_the_node(rig: Rig) -> None:
    node = rig.node.remove_resources([OTHER, "unknown"])

    assert node.allocatable == node.capacity == {GPU: 2}
    assert rig.node.read() == node


def test_condition_that_the_node_lacks_is_written_unless_it_is_the_default(rig: Rig) -> None:
    needed = dataclasses.replace(gpu_recovery.NONE_NEEDED, is_true=True, is_default=False)
    statuses = []
    for condition in (gpu_recovery.NONE_NEEDED, needed, gpu_recovery.NONE_NEEDED):
        rig.node.set_condition(condition)
        statuses.append(rig.conditions().get(condition.type))
    rig.node.set_condition(readiness.NO_LAYOUT_REQUESTED)

    assert statuses == [None, "True", "False"]
    assert rig.conditions()[well_known.READY_CONDITION] == "True"
    assert not rig.node.has_unwritten_condition


def test_announced_patch_is_on_the_node_at_the_next_read(rig: Rig) -> None:
    rig.node.announce(node_object.NodePatch(labels={"phase": "first"}))

    assert rig.node.read().labels["phase"] == "first"


# -- slots and lock ---------------------------------------------------------------------------


def test_slot_of_another_node_is_denied(rig: Rig) -> None:
    rig.occupy_slot("node-b")

    assert rig.slots.take() == slots.Denial(limit=1, changing=("node-b",))

    with pytest.raises(errors.NotReadyError) as caught:
        rig.slots.check()
    assert caught.value.reason is reasons.Reason.SLOTS_TAKEN
    rig.slots.release()


def test_a_slot_is_ours_until_its_release(rig: Rig) -> None:
    assert rig.slots.take() is None
    assert rig.slots.take() is None
    rig.slots.check()

    for _ in range(2):
        rig.slots.release()
        with pytest.raises(errors.NotReadyError):
            rig.slots.check()

    assert rig.slots.take() is None


def test_lock_of_another_manager_is_an_error_and_ours_ends_with_the_body(rig: Rig) -> None:
    with rig.another_manager(), pytest.raises(errors.LockedError), rig.lock.hold("change"):
        pytest.fail("another manager is at work")

    for _ in range(2):
        with contextlib.suppress(LookupError), rig.lock.hold("change", changes_gpus=False):
            raise LookupError
