"""``apply`` beside other managers and pods; over GPUs in memory."""

import contextlib
import dataclasses

import pytest

from mig_manager import errors
from mig_manager.change import apply as applying
from mig_manager.change import transaction
from mig_manager.core import steps, timing
from tests.node import fakes
from tests.node.applying_rig import ApplyingNode, is_creation, once


def test_apply_waits_for_another_manager_until_a_deadline(node: ApplyingNode) -> None:
    node.exclusion.refusals = 10_000
    with pytest.raises(errors.LockedError, match="agent; waited 30 s for it to finish"):
        node.change_to("wanted")
    assert node.clock.now_s == pytest.approx(30)
    assert node.steps == 0

    node.notes.clear()
    node.exclusion.refusals = 3
    node.change_to("wanted")
    assert node.has("wanted")
    assert node.notes == ["another manager is at work: agent; waiting up to 30 s"]
    assert not node.exclusion.is_locked


def test_a_lock_that_the_work_itself_meets_is_not_waited_for() -> None:
    clock = fakes.FakeClock()
    lock = fakes.FakeLock()

    with (
        pytest.raises(errors.LockedError, match=r"^mine$"),
        transaction.hold_lock(lock, "x", timing.Wait(clock=clock, timeout_s=9.0)),
    ):
        raise errors.LockedError("mine")

    assert clock.now_s == 0


@pytest.mark.parametrize("is_admitted", [False, True])
def test_a_pod_admitted_while_instances_are_in_use_keeps_its_device(*, is_admitted: bool) -> None:
    node = ApplyingNode(count=1)
    before, devices = node.shape, frozenset(node.gpus[0].mig_uuids)

    def admit(_step: steps.Step) -> bool:
        if is_admitted:
            node.add_pod("train", devices=devices)
        return True

    node.fails = once(admit)
    deps = dataclasses.replace(node.deps, in_use_timeout_s=30.0)
    pods = "in use; pods have devices that the change destroys or resets: default/train"
    refusal = pytest.raises(errors.HardwareError, match=pods)

    with refusal if is_admitted else contextlib.nullcontext():
        applying.apply(deps, lambda: node.layouts.layout("wanted"))

    assert node.has("wanted") is not is_admitted
    assert (node.shape == before) is is_admitted


def test_a_rollback_pauses_between_its_attempts_however_long_they_take(node: ApplyingNode) -> None:
    ends: list[float] = []
    pauses: list[float] = []

    def hang() -> None:
        if node.log[-1] != "gpus.execute" or not (ends or node.steps):
            return
        pauses.extend([node.clock.now_s - ends[-1]] if ends else [])
        node.clock.now_s += 2.5
        ends.append(node.clock.now_s)
        raise errors.HardwareError("in use", reason=errors.Reason.IN_USE)

    node.fails = is_creation
    node.on_call = hang

    with pytest.raises(errors.HardwareError):
        node.change_to("wanted")

    assert pauses == [1.0, 2.0]
