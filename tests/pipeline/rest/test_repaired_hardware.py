"""Failures that only other hardware ends: they are tried again once it changed."""

import dataclasses
from collections.abc import Callable

import pytest

from mig_manager import errors
from mig_manager.agent.drift import actions
from mig_manager.core import model
from mig_manager.reasons import Reason
from tests.pipeline.drifts import TWO_GPUS
from tests.rigs.node import ends, node_rig, nodes


def test_final_failure_is_retried_only_after_the_hardware_changed() -> None:
    rig, agent, outcome = nodes.at_rest("too-much", rig=nodes.node())
    assert not outcome.should_retry

    assert [agent.check_drift("too-much", outcome) for _ in range(3)] == [actions.Action.REST] * 3
    enabled = {"current_mode": model.MigMode.ENABLED, "pending_mode": model.MigMode.ENABLED}
    rig.gpus = tuple(dataclasses.replace(gpu, **enabled) for gpu in rig.gpus)  # type: ignore[arg-type]
    assert agent.check_drift("too-much", outcome) is actions.Action.RUN


def finish_modes(rig: node_rig.NodeRig) -> None:
    """Reset the GPUs as a person does."""
    rig.driver.mode_waits = False
    rig.gpus = tuple(dataclasses.replace(gpu, current_mode=gpu.pending_mode) for gpu in rig.gpus)


def waiting_mode(rig: node_rig.NodeRig) -> Callable[[], None]:
    rig.driver.mode_waits, rig.resets.are_available = True, False
    return lambda: finish_modes(rig)


def missing_gpu(rig: node_rig.NodeRig) -> Callable[[], None]:
    gpus, rig.gpus = rig.gpus, rig.gpus[:1]
    return lambda: setattr(rig, "gpus", gpus)


def no_permission(rig: node_rig.NodeRig) -> Callable[[], None]:
    rig.failures.add("gpus.observe", errors.HardwareError("no", reason=Reason.NO_PERMISSION))
    return rig.failures.clear


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (waiting_mode, Reason.RESET_REQUIRED),
        (missing_gpu, Reason.NO_GPU_MATCHES),
        (no_permission, Reason.NO_PERMISSION),
    ],
)
@pytest.mark.parametrize("checks", [0, 2])
def test_hardware_repaired_after_a_final_failure_is_served(
    fail: Callable[[node_rig.NodeRig], Callable[[], None]], reason: Reason, checks: int
) -> None:
    rig = nodes.node()
    mend = fail(rig)
    _, agent, outcome = nodes.at_rest("two-gpus", rig=rig, layouts=TWO_GPUS)
    assert (outcome.reason, outcome.should_retry) == (reason, False)
    for _ in range(checks):
        assert agent.check_drift("two-gpus", outcome) is actions.Action.REST

    mend()

    assert agent.check_drift("two-gpus", outcome) is actions.Action.RUN
    ends.run_to(rig, "two-gpus", Reason.APPLIED, by=agent)


def test_an_invalid_file_alone_is_not_retried_at_each_check() -> None:
    text = "version: v1\nmig-configs: 3\n"
    _, agent, outcome = nodes.at_rest("two-gpus", rig=nodes.node(), layouts=text)
    assert outcome.reason is Reason.INVALID_CONFIG

    assert [agent.check_drift("two-gpus", outcome) for _ in range(3)] == [actions.Action.REST] * 3
