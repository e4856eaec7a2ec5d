"""``apply`` beside other managers and pods; over GPUs in memory."""

import dataclasses

import pytest

from mig_manager import errors, reasons
from mig_manager.change import applying, node_lock
from mig_manager.core import steps, timing
from tests.rigs.node import call_errors, fakes, gpu_values, nodes
from tests.rigs.node.local_rig import LocalRig


def test_apply_waits_for_another_manager_until_a_deadline(rig: LocalRig) -> None:
    rig.lock.refusals = 10_000
    with pytest.raises(errors.LockedError, match="agent; waited 30 s for it to finish"):
        rig.change_to("requested")
    assert rig.clock.now_s == pytest.approx(30)
    assert rig.driver.executed_steps == []

    rig.notes.clear()
    rig.lock.refusals = 3
    rig.change_to("requested")
    assert rig.has("requested")
    assert rig.notes == ["another manager is at work: agent; waiting up to 30 s"]
    assert not rig.lock.is_locked


def test_a_lock_that_is_met_during_the_work_is_not_waited_for() -> None:
    clock = fakes.FakeClock()
    lock = fakes.FakeLock()

    with (
        pytest.raises(errors.LockedError, match=r"^mine$"),
        node_lock.hold(lock, "x", timing.Wait(clock=clock, timeout_s=9.0)),
    ):
        raise errors.LockedError("mine")

    assert clock.now_s == 0


def test_apply_changes_only_what_differs(rig: LocalRig) -> None:
    kept = {nodes.device(rig, gpu, "3g.20gb") for gpu in (0, 1)}

    assert rig.change_to("requested").is_changed

    assert rig.has("requested")
    assert kept <= {uuid for gpu in rig.gpus for uuid in gpu.mig_uuids}
    rig.driver.executed_steps.clear()
    assert not rig.change_to("requested").is_changed
    assert rig.driver.executed_steps == []


def test_a_change_that_destroys_nothing_needs_no_kubelet(rig: LocalRig) -> None:
    rig.gpus = gpu_values.without_instances(rig.gpus, 0, 1)
    rig.failures.add("allocations.assigned_devices", errors.KubeletError("no answer"))

    rig.change_to("requested")

    assert rig.has("requested")


def apply_with_retries(rig: LocalRig) -> None:
    """Apply a layout, and retry for a while what the driver refuses as in use."""
    deps = dataclasses.replace(rig.deps, in_use_timeout_s=30.0)
    applying.apply(deps, lambda: rig.layouts.layout("requested"))


@pytest.mark.parametrize("kind", [steps.DestroyComputeInstance, steps.CreateComputeInstance])
def test_step_refused_as_in_use_is_retried(kind: type[steps.Step]) -> None:
    rig = LocalRig(count=1)
    rig.failures.add(kind, call_errors.IN_USE, times=1)

    apply_with_retries(rig)

    assert rig.has("requested")


def test_no_other_refusal_of_a_step_is_retried(rig: LocalRig) -> None:
    rig.failures.add(steps.DestroyComputeInstance, call_errors.REFUSED, times=1)

    with pytest.raises(errors.HardwareError, match="no"):
        apply_with_retries(rig)

    assert rig.clock.now_s == 0


def test_a_pod_admitted_while_instances_are_in_use_keeps_its_device() -> None:
    rig = LocalRig(count=1)
    before, devices = rig.geometry, frozenset(rig.gpus[0].mig_uuids)
    rig.callbacks.add(steps.Step, lambda: rig.pods.add("train", devices=devices), times=1)
    rig.failures.add(steps.Step, call_errors.IN_USE, times=1)
    pods = "in use; pods have devices that the change destroys or resets: default/train"

    with pytest.raises(errors.HardwareError, match=pods):
        apply_with_retries(rig)

    assert rig.geometry == before


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        pytest.param(reasons.Reason.IN_USE, [1.0, 2.0], id="however long they take"),
        pytest.param(reasons.Reason.NVML_TIMEOUT, [], id="no other one while the driver hangs"),
    ],
)
def test_a_rollback_pauses_between_its_attempts(
    rig: LocalRig, reason: reasons.Reason, expected: list[float]
) -> None:
    ends: list[float] = []
    pauses: list[float] = []

    def hang() -> None:
        pauses.extend([rig.clock.now_s - ends[-1]] if ends else [])
        rig.clock.now_s += 2.5
        ends.append(rig.clock.now_s)
        raise errors.HardwareError("failed", reason=reason)

    rig.failures.add(steps.CreateGpuInstance, call_errors.IN_USE)
    rig.callbacks.add("gpus.execute", hang, when=lambda: bool(ends or rig.driver.executed_steps))

    with pytest.raises(errors.HardwareError):
        rig.change_to("requested")

    assert (pauses, len(ends)) == (expected, len(expected) + 1)
