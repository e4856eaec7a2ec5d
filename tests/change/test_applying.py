"""``apply`` beside other managers and pods; over GPUs in memory."""

import dataclasses

import pytest

from mig_manager import errors, reasons
from mig_manager.change import apply as applying
from mig_manager.change import transaction
from mig_manager.core import steps, timing
from tests.rigs.node import fakes
from tests.rigs.node.local_rig import LocalNode, first_only, is_creation


def test_apply_waits_for_another_manager_until_a_deadline(node: LocalNode) -> None:
    node.lock.refusals = 10_000
    with pytest.raises(errors.LockedError, match="agent; waited 30 s for it to finish"):
        node.change_to("requested")
    assert node.clock.now_s == pytest.approx(30)
    assert node.steps == 0

    node.notes.clear()
    node.lock.refusals = 3
    node.change_to("requested")
    assert node.has("requested")
    assert node.notes == ["another manager is at work: agent; waiting up to 30 s"]
    assert not node.lock.is_locked


def test_a_lock_that_is_met_during_the_work_is_not_waited_for() -> None:
    clock = fakes.FakeClock()
    lock = fakes.FakeLock()

    with (
        pytest.raises(errors.LockedError, match=r"^mine$"),
        transaction.hold_lock(lock, "x", timing.Wait(clock=clock, timeout_s=9.0)),
    ):
        raise errors.LockedError("mine")

    assert clock.now_s == 0


def apply_with_retries(node: LocalNode) -> None:
    """Apply a layout, and retry for a while what the driver refuses as in use."""
    deps = dataclasses.replace(node.deps, in_use_timeout_s=30.0)
    applying.apply(deps, lambda: node.layouts.layout("requested"))


@pytest.mark.parametrize("kind", [steps.DestroyComputeInstance, steps.CreateComputeInstance])
def test_step_refused_as_in_use_is_retried(kind: type[steps.Step]) -> None:
    node = LocalNode(count=1)
    node.refuses_step = first_only(lambda step: isinstance(step, kind))

    apply_with_retries(node)

    assert node.has("requested")


def test_a_pod_admitted_while_instances_are_in_use_keeps_its_device() -> None:
    node = LocalNode(count=1)
    before, devices = node.geometry, frozenset(node.gpus[0].mig_uuids)
    node.refuses_step = first_only(lambda _step: bool(node.pods.add("train", devices=devices)))
    pods = "in use; pods have devices that the change destroys or resets: default/train"

    with pytest.raises(errors.HardwareError, match=pods):
        apply_with_retries(node)

    assert node.geometry == before


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        pytest.param(reasons.Reason.IN_USE, [1.0, 2.0], id="however long they take"),
        pytest.param(reasons.Reason.NVML_TIMEOUT, [], id="no other one while the driver hangs"),
    ],
)
def test_a_rollback_pauses_between_its_attempts(
    node: LocalNode, reason: reasons.Reason, expected: list[float]
) -> None:
    ends: list[float] = []
    pauses: list[float] = []

    def hang() -> None:
        if node.log[-1] != "gpus.execute" or not (ends or node.steps):
            return
        pauses.extend([node.clock.now_s - ends[-1]] if ends else [])
        node.clock.now_s += 2.5
        ends.append(node.clock.now_s)
        raise errors.HardwareError("failed", reason=reason)

    node.refuses_step = is_creation
    node.on_call = hang

    with pytest.raises(errors.HardwareError):
        node.change_to("requested")

    assert (pauses, len(ends)) == (expected, len(expected) + 1)
