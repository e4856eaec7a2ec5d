"""The condition MigReady: what it says of a status, and when it is written."""

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import reasons
from mig_manager.core import model
from mig_manager.core.records import readiness, run_status

PUBLISHED = run_status.RunStatus(
    layout="all-1g.5gb",
    content_hash="h",
    state=run_status.State.PENDING,
    phase=run_status.Phase.RESOLVE,
    reason=None,
    message="looking at the GPUs",
    attempt=1,
    started_at="T0",
    finished_at=None,
)
CONDITIONS = st.builds(
    readiness.Condition,
    is_true=st.sampled_from([True, False, None]),
    reason=st.sampled_from(["Pending", "InUse"]),
    message=st.sampled_from(["a", "b"]),
)


@hypothesis.given(st.lists(CONDITIONS, max_size=8))
def test_condition_is_written_if_it_differs_and_keeps_its_transition_time(
    conditions: list[readiness.Condition],
) -> None:
    present: dict[str, str] | None = None
    before, since = None, ""
    for number, condition in enumerate(conditions):
        now = f"T{number}"
        entry = condition.entry(present, now)
        if condition == before:
            assert entry is None
            continue
        if before is None or before.is_true is not condition.is_true:
            since = now
        assert entry == {
            "type": "MigReady",
            "status": {True: "True", False: "False", None: "Unknown"}[condition.is_true],
            "reason": condition.reason,
            "message": condition.message,
            "lastHeartbeatTime": now,
            "lastTransitionTime": since,
        }
        present, before = entry, condition


@pytest.mark.parametrize("reason", [reasons.Reason.APPLIED, reasons.Reason.ALREADY_APPLIED])
def test_verified_layout_is_ready_and_names_unreachable_gpus(reason: reasons.Reason) -> None:
    lost = model.UnreachableGpu(
        index=3,
        uuid="GPU-3",
        reason=reasons.Reason.GPU_UNREACHABLE,
        code=None,
        message="it fell off the bus",
    )
    verified = dataclasses.replace(
        PUBLISHED,
        state=run_status.State.SUCCESS,
        reason=reason,
        message=reason.value,
        observed_gpus=model.ObservedGpus((), unreachable=(lost,)),
    )

    assert readiness.condition(verified) == readiness.Condition(
        is_true=True,
        reason="LayoutVerified",
        message="Layout all-1g.5gb is active and verified. GPU 3 (GPU-3) is unreachable: it fell "
        "off the bus.",
    )


@pytest.mark.parametrize("reason", reasons.Reason)
def test_a_failure_is_not_ready_for_the_reason_and_message_of_the_status(
    reason: reasons.Reason,
) -> None:
    failure = dataclasses.replace(
        PUBLISHED, state=run_status.State.FAILED, reason=reason, message="why"
    )

    assert readiness.condition(failure) == readiness.Condition(
        is_true=False, reason=reason.value, message="why"
    )


def test_only_a_success_is_ready() -> None:
    conditions = {
        s: readiness.condition(dataclasses.replace(PUBLISHED, state=s)) for s in run_status.State
    }

    assert [state for state, each in conditions.items() if each.is_true] == [
        run_status.State.SUCCESS
    ]
    assert len({each.reason for each in conditions.values()}) == len(run_status.State)
