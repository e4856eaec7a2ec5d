"""``apply`` beside instances that another program created, or that the driver listed too late."""

import dataclasses

import pytest

from mig_manager import errors, reasons
from mig_manager.core import model, steps
from tests.change.forks import refuse, refuse_first_creation_on
from tests.rigs.node import call_errors, samples
from tests.rigs.node.local_rig import LocalRig

NEW = r"1g\.5gb at 3:1 on GPU 0 is new, and is kept"


def with_unowned(rig: LocalRig, start: int) -> model.Placement:
    """Create an instance of one slice on the first GPU, as another program does."""
    first, *others = rig.gpus
    (unowned,) = samples.gpu(samples.A100, f"1g.5gb@{start}").gpu_instances
    instances = sorted((*first.gpu_instances, unowned), key=lambda gi: gi.placement)
    rig.gpus = (dataclasses.replace(first, gpu_instances=tuple(instances)), *others)
    return unowned.placement


def assert_an_unowned_instance_is_kept(rig: LocalRig) -> None:
    """Check that the undo of what was left unfinished spares an instance created just before."""
    place = with_unowned(rig, start=3)
    refuse(rig, NEW)
    assert place in {gi.placement for gi in rig.gpus[0].gpu_instances}


def test_rollback_keeps_and_names_an_instance_missed_before(rig: LocalRig) -> None:
    """One observation misses it, as on a driver that lists too few."""
    listed = rig.gpus
    place = with_unowned(rig, start=2)
    complete, before = rig.gpus, rig.geometry
    rig.gpus = listed

    def list_all() -> None:
        rig.gpus = complete

    rig.callbacks.add("gpus.execute", list_all, times=1)
    rig.failures.add(
        steps.CreateGpuInstance,
        call_errors.IN_USE,
        when=lambda: rig.driver.next_step.placement == place,
    )

    with pytest.raises(errors.HardwareError) as caught:
        rig.change_to("requested")

    assert caught.value.reason is reasons.Reason.VERIFY_FAILED
    assert "1g.5gb at 2:1 on GPU 0 is new, and is kept" in caught.value.message
    assert rig.geometry == before
    assert rig.journal.text is not None

    rig.failures.clear()
    refuse_first_creation_on(rig, rig.gpus[1].uuid)
    with pytest.raises(errors.HardwareError, match="the former instances are restored"):
        rig.change_to("other")
    assert rig.geometry == before
    assert not rig.journal.text
    rig.change_to("other")
    assert rig.has("other")


@pytest.mark.parametrize(
    ("refusals", "words"), [(1, r"1g\.5gb at 3:1 on GPU 0 is new"), (9, "rollback failed as well")]
)
def test_rollback_keeps_an_instance_created_during_the_change(
    rig: LocalRig, refusals: int, words: str
) -> None:
    rig.callbacks.add(steps.CreateGpuInstance, lambda: with_unowned(rig, 3), times=1)
    rig.failures.add(steps.CreateGpuInstance, call_errors.IN_USE, times=refusals)

    with pytest.raises(errors.HardwareError, match=words) as caught:
        rig.change_to("requested")

    assert caught.value.reason is reasons.Reason.VERIFY_FAILED
    assert 3 in {gi.placement.start for gi in rig.gpus[0].gpu_instances}
    assert rig.journal.text is not None


def test_after_a_kill_only_what_the_change_created_is_removed(rig: LocalRig) -> None:
    before = rig.geometry
    assert rig.kill_apply("requested", steps.CreateComputeInstance)
    place = with_unowned(rig, start=3)

    refuse(rig, NEW)

    first = rig.gpus[0]
    others = tuple(gi for gi in first.gpu_instances if gi.placement != place)
    assert len(others) < len(first.gpu_instances)
    rig.gpus = (dataclasses.replace(first, gpu_instances=others), *rig.gpus[1:])
    assert rig.geometry == before
    assert rig.journal.text is not None

    # Once that instance is removed, nothing is left to undo.
    refuse(rig, r"too-much|fit")
    assert rig.journal.text is None


def test_an_outdated_plan_is_abandoned_before_its_first_step(rig: LocalRig) -> None:
    geometries: list[object] = []

    def make_stale() -> None:
        with_unowned(rig, start=3)
        geometries.append(rig.geometry)

    rig.callbacks.add("gpus.execute", make_stale, times=1)

    with pytest.raises(errors.OutdatedPlanError, match="already; nothing was changed") as caught:
        rig.change_to("small")

    assert caught.value.reason.is_transient
    assert (rig.driver.executed_steps, [rig.geometry]) == ([], geometries)
    assert rig.journal.text is None
    rig.change_to("small")
    assert rig.has("small")


def test_outdated_plan_beside_an_older_change_keeps_unowned_instances(rig: LocalRig) -> None:
    assert rig.kill_apply("requested", steps.CreateComputeInstance)
    created: list[model.Placement] = []
    rig.callbacks.add("gpus.execute", lambda: created.append(with_unowned(rig, start=3)), times=1)

    with pytest.raises(errors.HardwareError, match=NEW):
        rig.change_to("small")
    refuse(rig, NEW)

    assert created[0] in {gi.placement for gi in rig.gpus[0].gpu_instances}
    assert rig.journal.text is not None


def test_refused_change_keeps_instances_in_use_of_an_interrupted_one(rig: LocalRig) -> None:
    assert rig.kill_apply("requested", steps.CreateComputeInstance)
    interrupted = rig.geometry
    rig.driver.clients = "train (pid 7)"

    with pytest.raises(errors.GpuInUseError):
        rig.change_to("other")
    assert rig.geometry == interrupted

    rig.driver.clients = ""
    refuse(rig)


def test_refused_undo_forgets_instances_that_were_never_created(rig: LocalRig) -> None:
    assert rig.kill_apply("small", steps.CreateComputeInstance)
    rig.driver.clients = "train (pid 7)"
    refuse(rig, "in use by train")
    rig.driver.clients = ""

    assert_an_unowned_instance_is_kept(rig)


def test_rollback_checks_users_again_after_an_outdated_plan(rig: LocalRig) -> None:
    first, _ = rig.gpus
    assert rig.kill_apply("requested", steps.CreateComputeInstance, 3)
    _, second = rig.gpus

    def strike() -> None:
        if first in rig.gpus:
            rig.driver.clients = "train (pid 7)"
        rig.gpus = (first, second)

    rig.callbacks.add("gpus.execute", strike)

    refuse(rig, "in use by train")
    assert rig.gpus == (first, second)


def test_failed_rollback_forgets_instances_that_were_never_created(rig: LocalRig) -> None:
    executed = rig.driver.executed_steps
    refusal = rig.failures.adding(steps.Step, call_errors.IN_USE, when=lambda: len(executed) >= 4)
    with refusal, pytest.raises(errors.HardwareError, match="the rollback failed as well"):
        rig.change_to("small")

    assert_an_unowned_instance_is_kept(rig)


def test_rollback_that_did_not_begin_forgets_missing_instances(rig: LocalRig) -> None:
    unread = errors.HardwareError("no answer", reason=reasons.Reason.NO_PERMISSION)
    undisturbed = LocalRig()
    for each in (undisturbed, rig):
        each.failures.add(steps.CreateGpuInstance, call_errors.IN_USE, times=1)
    with pytest.raises(errors.HardwareError, match="the former instances are restored"):
        undisturbed.change_to("small")
    _, rollback = (n for n, call in enumerate(undisturbed.log) if call == "gpus.execute")
    rig.failures.add(rollback - 1, unread)
    with pytest.raises(errors.HardwareError, match="the rollback failed as well: no answer"):
        rig.change_to("small")

    assert_an_unowned_instance_is_kept(rig)


def test_pending_mode_forgets_instances_that_were_never_created() -> None:
    rig = LocalRig("off")
    assert rig.kill_apply("requested", steps.CreateComputeInstance)
    rig.driver.mode_waits = True
    with pytest.raises(errors.HardwareError, match="the mode waits for a reset"):
        rig.change_to("requested", may_reset=False)
    rig.driver.mode_waits = False
    (unowned,) = samples.gpu(samples.A100, "1g.5gb@0").gpu_instances
    first, second = rig.gpus
    second = dataclasses.replace(second, current_mode=second.pending_mode)
    rig.gpus = (first, dataclasses.replace(second, gpu_instances=(unowned,)))

    refuse(rig, r"1g\.5gb at 0:1 on GPU 1 is new, and is kept")
