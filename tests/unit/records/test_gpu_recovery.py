"""What the driver requests for GPUs with a fault, in words and as a Node condition."""

import dataclasses
import json

import pytest

from mig_manager import reasons
from mig_manager.core import messages, model
from mig_manager.core.records import gpu_recovery, inventory_codec
from tests.rigs import contract
from tests.rigs.node import gpu_values

(GPU,) = gpu_values.gpus_of("A30")
FAULTS = [action for action in model.RecoveryAction if action is not model.RecoveryAction.NONE]
LOST = model.UnreachableGpu(
    index=2, uuid="GPU-2", reason=reasons.Reason.GPU_LOST, code=15, message="GPU is lost"
)


def gpu(index: int, action: model.RecoveryAction | None) -> model.Gpu:
    return dataclasses.replace(GPU, index=index, uuid=f"GPU-{index}", recovery_action=action)


@pytest.mark.parametrize("action", FAULTS)
def test_each_recovery_action_has_its_sentence_and_remedy(action: model.RecoveryAction) -> None:
    (sentence,) = gpu_recovery.faults([gpu(0, model.RecoveryAction.NONE), gpu(5, action)])
    condition = gpu_recovery.condition(model.ObservedGpus([gpu(5, action)]))

    assert "GPU 5" in sentence
    assert "{" not in sentence
    assert sentence.endswith(gpu_recovery.remedy(gpu(5, action)))
    assert (condition.is_true, condition.message) == (True, sentence)
    assert condition.reason.lower() == action.value.replace("-", "")


def test_people_have_nothing_to_do_about_a_gpu_that_the_agent_resets() -> None:
    faulty = gpu(0, model.RecoveryAction.GPU_RESET)
    gpus = model.ObservedGpus([faulty], unreachable=[LOST])

    message = gpu_recovery.condition(gpus, resetting={faulty.uuid, LOST.uuid}).message

    assert message.count("The agent evicts its pods, and resets it.") == 2
    assert "nvidia-smi" not in message
    assert gpu_recovery.remedy(LOST) not in message


@pytest.mark.parametrize("action", [None, model.RecoveryAction.NONE])
def test_gpus_without_a_fault_need_nothing(action: model.RecoveryAction | None) -> None:
    healthy = model.ObservedGpus([gpu(0, action)])
    assert not list(gpu_recovery.faults(healthy))
    assert gpu_recovery.condition(healthy) == gpu_recovery.NONE_NEEDED


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        ([model.RecoveryAction.GPU_RESET, model.RecoveryAction.NODE_REBOOT], "NodeReboot"),
        ([model.RecoveryAction.DRAIN_AND_RESET, model.RecoveryAction.GPU_RESET], "GpuReset"),
        ([None], "GpuUnreachable"),
    ],
)
def test_the_reason_is_the_worst_action_and_all_gpus_are_named(
    actions: list[model.RecoveryAction | None], reason: str
) -> None:
    gpus = [gpu(index, action) for index, action in enumerate(actions)]
    condition = gpu_recovery.condition(model.ObservedGpus(gpus, unreachable=[LOST]))
    assert condition.reason == reason
    assert all(f"GPU {each.index} " in condition.message for each in gpus if each.needs_recovery)
    assert "GPU 2 (GPU-2) is unreachable: GPU is lost." in condition.message


def test_an_unreachable_gpu_with_an_action_gets_its_precise_remedy() -> None:
    with_action = dataclasses.replace(LOST, recovery_action=model.RecoveryAction.NODE_REBOOT)
    hidden = dataclasses.replace(LOST, reason=reasons.Reason.NO_PERMISSION)
    assert gpu_recovery.remedy(LOST) == reasons.Reason.GPU_LOST.remedy
    assert gpu_recovery.remedy(hidden) == reasons.Reason.GPU_UNREACHABLE.remedy
    assert gpu_recovery.remedy(with_action) == "Drain the node and reboot it."
    assert (
        gpu_recovery.condition(model.ObservedGpus(unreachable=[with_action])).reason
        == "NodeReboot"
    )


def test_a_message_about_many_gpus_fits_a_condition() -> None:
    every = [gpu(index, FAULTS[0]) for index in range(64)]
    message = gpu_recovery.condition(model.ObservedGpus(every)).message
    assert len(message.encode()) <= messages.MAX_BYTES


@pytest.mark.parametrize("action", FAULTS)
def test_a_published_gpu_comes_back_with_its_action(action: model.RecoveryAction) -> None:
    text = inventory_codec.to_json([gpu(0, action), gpu(1, model.RecoveryAction.NONE)])
    contract.check("GpusAnnotation", json.loads(text))
    faulty, healthy = inventory_codec.from_json(text)
    assert (faulty.recovery_action, healthy.recovery_action) == (action, None)


def test_an_action_of_a_newer_agent_is_read_as_other() -> None:
    text = inventory_codec.to_json([gpu(0, FAULTS[0])]).replace(FAULTS[0].value, "warm-boot")
    (faulty,) = inventory_codec.from_json(text)
    assert faulty.recovery_action is model.RecoveryAction.OTHER


def test_a_newer_observation_replaces_the_older_of_each_gpu() -> None:
    first, second = gpu(0, None), gpu(1, None)
    lost = gpu_values.unreachable(second)
    older = model.ObservedGpus([first], [lost])
    again = dataclasses.replace(lost, message="another")
    assert older.with_newer(model.ObservedGpus((), [again])) == model.ObservedGpus(
        [first], [again]
    )
    assert older.with_newer(model.ObservedGpus([second])) == model.ObservedGpus([first, second])
    gone = gpu_values.unreachable(first)
    assert older.with_newer(model.ObservedGpus((), [gone])) == model.ObservedGpus((), [gone, lost])


@pytest.mark.parametrize("other", [None, "GPUs", [], model.ObservedGpus((), [LOST])])
def test_an_observation_without_gpus_equals_no_other_value(other: object) -> None:
    assert (model.ObservedGpus() == other) is False
    assert model.ObservedGpus() != other
