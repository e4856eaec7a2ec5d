"""``apply`` beside instances that another program created, or that the driver listed too late."""

import dataclasses

import pytest

from mig_manager import errors, reasons
from mig_manager.core import model, steps
from tests.change.forks import refuse
from tests.rigs.node import samples, strikes
from tests.rigs.node.local_rig import LocalNode, first_only, is_creation


def with_foreign(node: LocalNode, start: int) -> model.Placement:
    """Create an instance of one slice on the first GPU, as another program does."""
    first, *others = node.gpus
    (foreign,) = samples.gpu(samples.A100, f"1g.5gb@{start}").gpu_instances
    instances = sorted((*first.gpu_instances, foreign), key=lambda gi: gi.placement)
    node.gpus = (dataclasses.replace(first, gpu_instances=tuple(instances)), *others)
    return foreign.placement


def test_rollback_keeps_and_names_an_instance_missed_before(node: LocalNode) -> None:
    """One observation misses it, as on a driver that lists too few."""
    listed = node.gpus
    place = with_foreign(node, start=2)
    complete, before = node.gpus, node.geometry
    node.gpus = listed

    def list_all() -> None:
        node.gpus = complete

    strikes.act_once(node, lambda: node.log[-1] == "gpus.execute", list_all)
    node.refuses_step = lambda step: is_creation(step) and step.placement == place  # type: ignore[union-attr]

    with pytest.raises(errors.HardwareError) as caught:
        node.change_to("requested")

    assert caught.value.reason is reasons.Reason.VERIFY_FAILED
    assert "1g.5gb at 2:1 on GPU 0 is new, and is kept" in caught.value.message
    assert node.geometry == before
    assert node.journal.text is not None

    second = node.gpus[1].uuid
    node.refuses_step = first_only(lambda step: is_creation(step) and step.gpu_uuid == second)
    with pytest.raises(errors.HardwareError, match="the former instances are restored"):
        node.change_to("other")
    assert node.geometry == before
    assert not node.journal.text
    node.change_to("other")
    assert node.has("other")


def test_rollback_keeps_an_instance_created_during_the_change(node: LocalNode) -> None:
    node.refuses_step = first_only(lambda step: is_creation(step) and bool(with_foreign(node, 3)))

    with pytest.raises(errors.HardwareError, match=r"1g\.5gb at 3:1 on GPU 0 is new") as caught:
        node.change_to("requested")

    assert caught.value.reason is reasons.Reason.VERIFY_FAILED
    assert 3 in {gi.placement.start for gi in node.gpus[0].gpu_instances}
    assert node.journal.text is not None


def test_after_a_kill_only_what_the_change_created_is_removed(node: LocalNode) -> None:
    before = node.geometry
    assert node.kill_apply("requested", steps.CreateComputeInstance)
    place = with_foreign(node, start=3)

    refuse(node, r"1g\.5gb at 3:1 on GPU 0 is new, and is kept")

    first = node.gpus[0]
    others = tuple(gi for gi in first.gpu_instances if gi.placement != place)
    assert len(others) < len(first.gpu_instances)
    node.gpus = (dataclasses.replace(first, gpu_instances=others), *node.gpus[1:])
    assert node.geometry == before
    assert node.journal.text is not None

    # Once that instance is removed, nothing is left to undo.
    refuse(node, r"too-much|fit")
    assert node.journal.text is None


def test_a_stale_plan_is_abandoned_before_its_first_step(node: LocalNode) -> None:
    geometries: list[object] = []

    def make_stale() -> None:
        with_foreign(node, start=3)
        geometries.append(node.geometry)

    strikes.act_once(node, lambda: node.log[-1] == "gpus.execute", make_stale)

    with pytest.raises(errors.StalePlanError, match="already; nothing was changed") as caught:
        node.change_to("small")

    assert caught.value.reason.is_transient
    assert (node.steps, [node.geometry], node.journal.text) == (0, geometries, None)
    node.change_to("small")
    assert node.has("small")


def test_stale_plan_beside_an_older_change_keeps_foreign_instances(node: LocalNode) -> None:
    assert node.kill_apply("requested", steps.CreateComputeInstance)
    created: list[model.Placement] = []
    strikes.act_once(
        node,
        lambda: node.log[-1] == "gpus.execute",
        lambda: created.append(with_foreign(node, start=3)),
    )

    with pytest.raises(errors.HardwareError, match=r"1g\.5gb at 3:1 on GPU 0 is new, and is kept"):
        node.change_to("small")
    refuse(node, r"1g\.5gb at 3:1 on GPU 0 is new, and is kept")

    assert created[0] in {gi.placement for gi in node.gpus[0].gpu_instances}
    assert node.journal.text is not None


def test_refused_change_keeps_instances_in_use_of_an_interrupted_one(node: LocalNode) -> None:
    assert node.kill_apply("requested", steps.CreateComputeInstance)
    interrupted = node.geometry
    node.driver.clients = "train (pid 7)"

    with pytest.raises(errors.GpuInUseError):
        node.change_to("other")
    assert node.geometry == interrupted

    node.driver.clients = ""
    refuse(node)


def test_refused_undo_forgets_instances_that_were_never_created(node: LocalNode) -> None:
    assert node.kill_apply("small", steps.CreateComputeInstance)
    node.driver.clients = "train (pid 7)"
    refuse(node, "in use by train")
    node.driver.clients = ""
    place = with_foreign(node, start=3)

    refuse(node, r"1g\.5gb at 3:1 on GPU 0 is new, and is kept")

    assert place in {gi.placement for gi in node.gpus[0].gpu_instances}


def test_rollback_checks_users_again_after_a_stale_plan(node: LocalNode) -> None:
    first, _ = node.gpus
    assert node.kill_apply("requested", steps.CreateComputeInstance, 3)
    _, second = node.gpus

    def strike() -> None:
        if node.log[-1] != "gpus.execute":
            return
        if first in node.gpus:
            node.driver.clients = "train (pid 7)"
        node.gpus = (first, second)

    node.on_call = strike

    refuse(node, "in use by train")
    assert node.gpus == (first, second)


def test_failed_rollback_forgets_instances_that_were_never_created(node: LocalNode) -> None:
    refusal = node.refusing_steps(lambda _step: node.steps > 4)
    with refusal, pytest.raises(errors.HardwareError, match="the rollback failed as well"):
        node.change_to("small")
    place = with_foreign(node, start=3)

    refuse(node, r"1g\.5gb at 3:1 on GPU 0 is new, and is kept")

    assert place in {gi.placement for gi in node.gpus[0].gpu_instances}


def test_rollback_that_did_not_begin_forgets_missing_instances(node: LocalNode) -> None:
    unread = errors.HardwareError("no answer", reason=reasons.Reason.NO_PERMISSION)
    undisturbed = LocalNode()
    for each in (undisturbed, node):
        each.refuses_step = first_only(is_creation)
    with pytest.raises(errors.HardwareError, match="the former instances are restored"):
        undisturbed.change_to("small")
    _, rollback = (n for n, call in enumerate(undisturbed.log) if call == "gpus.execute")
    node.fail_once(rollback - 1, unread)
    with pytest.raises(errors.HardwareError, match="the rollback failed as well: no answer"):
        node.change_to("small")
    place = with_foreign(node, start=3)

    refuse(node, r"1g\.5gb at 3:1 on GPU 0 is new, and is kept")

    assert place in {gi.placement for gi in node.gpus[0].gpu_instances}


def test_pending_mode_forgets_instances_that_were_never_created() -> None:
    node = LocalNode("off")
    assert node.kill_apply("requested", steps.CreateComputeInstance)
    node.driver.mode_waits = True
    with pytest.raises(errors.HardwareError, match="the mode waits for a reset"):
        node.change_to("requested", may_reset=False)
    node.driver.mode_waits = False
    (foreign,) = samples.gpu(samples.A100, "1g.5gb@0").gpu_instances
    first, second = node.gpus
    second = dataclasses.replace(second, current_mode=second.pending_mode)
    node.gpus = (first, dataclasses.replace(second, gpu_instances=(foreign,)))

    refuse(node, r"1g\.5gb at 0:1 on GPU 1 is new, and is kept")
