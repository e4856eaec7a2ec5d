"""A budget for the cluster in one run: a slot before the taint, released at every exit."""

import dataclasses
import json

import pytest

from mig_manager import errors
from mig_manager.agent import outcomes
from mig_manager.core import model
from mig_manager.core.node import cluster
from tests import fakes, scenes


@dataclasses.dataclass
class FakeSlots:
    """Implements ``ports.Slots``; notes what it is asked in the rig's own log."""

    rig: fakes.NodeRig
    denials: list[str] = dataclasses.field(default_factory=list)
    failing: list[errors.ClusterError] = dataclasses.field(default_factory=list)
    is_taken: bool = False
    is_stale: bool = False
    taken_while_disrupted: list[bool] = dataclasses.field(default_factory=list)

    def take(self) -> str:
        self.rig.log.append("slots.take")
        if self.failing:
            raise self.failing.pop(0)
        if self.denials:
            return self.denials.pop(0)
        self.taken_while_disrupted.append(self.rig.has_hold_taint)
        self.is_taken = True
        return ""

    def check(self) -> None:
        self.rig.log.append("slots.check")
        if self.is_stale or not self.is_taken:
            raise errors.NotReadyError("stale", reason=errors.Reason.SLOTS_TAKEN)

    def release(self) -> None:
        assert not self.rig.has_hold_taint, "a slot may go when its node is whole again"
        self.rig.log.append("slots.release")
        self.is_taken = False


@pytest.fixture
def slots() -> FakeSlots:
    """Return the slots that a busy node asks."""
    return FakeSlots(scenes.busy_node())


def run(
    slots: FakeSlots, layout: str = "one-slice-changed", **options: object
) -> outcomes.Outcome:
    rig = slots.rig
    request = fakes.FakeRequest(rig.clock, replaced=False, **options)  # type: ignore[arg-type]
    return scenes.reconciler(rig, slots=slots).run(layout, request)


def is_untouched(slots: FakeSlots) -> bool:
    scenes.assert_nothing_taken(slots.rig)
    return not slots.is_taken and "gpus.execute" not in slots.rig.log


def test_the_slot_is_taken_before_the_node_is_closed_and_released_after_it_is_restored(
    slots: FakeSlots,
) -> None:
    assert run(slots).state is model.State.SUCCESS

    log = slots.rig.log
    assert slots.taken_while_disrupted == [False]
    assert log.index("slots.take") < log.index("slots.check") < log.index("node.patch")
    assert [call for call in log if call != "host.save"][-2:] == ["node.patch", "slots.release"]


@pytest.mark.parametrize(
    ("active", "layout", "reason"),
    [
        ("all-balanced", "all-balanced", errors.Reason.ALREADY_APPLIED),
        (None, "too-much", errors.Reason.DOES_NOT_FIT),
    ],
)
def test_a_layout_that_is_active_or_cannot_be_needs_no_slot(
    active: str | None, layout: str, reason: errors.Reason
) -> None:
    slots = FakeSlots(scenes.node(layout=active))

    assert run(slots, layout).reason is reason

    assert "slots.take" not in slots.rig.log


def test_a_node_that_waits_for_a_slot_names_the_owners_and_is_not_touched(
    slots: FakeSlots,
) -> None:
    rig = slots.rig
    slots.denials = ["used by b"] * 3
    seen: list[dict[str, object]] = []
    rig.clock.on_wait.append(
        lambda: seen.append(json.loads(rig.annotations[cluster.STATUS_ANNOTATION]))
    )

    assert run(slots).state is model.State.SUCCESS

    assert {key: seen[0][key] for key in ("state", "phase", "reason", "message")} == {
        "state": "pending",
        "phase": "Wait",
        "reason": "SlotsTaken",
        "message": "used by b",
    }
    assert rig.statuses.count("used by b") == 1
    assert slots.taken_while_disrupted == [False]


def test_a_waiting_node_publishes_the_slot_owners_now_and_then(slots: FakeSlots) -> None:
    slots.denials = [f"used by {number}" for number in range(60)]

    assert run(slots).state is model.State.SUCCESS

    reports = [message for message in slots.rig.statuses if message.startswith("used by")]
    assert 2 <= len(reports) < 12


def test_a_newer_request_ends_the_wait(slots: FakeSlots) -> None:
    slots.denials = ["used by b"] * 10

    with pytest.raises(errors.Superseded):
        run(slots, ends_at=2)

    assert is_untouched(slots)


def test_an_api_that_does_not_answer_only_makes_the_wait_longer(slots: FakeSlots) -> None:
    slots.failing = [errors.ClusterError("away", reason=errors.Reason.API_UNAVAILABLE)] * 2

    assert run(slots).state is model.State.SUCCESS


def test_without_the_right_to_slots_the_node_is_not_touched_and_says_so(slots: FakeSlots) -> None:
    slots.failing = [errors.ClusterError("no", reason=errors.Reason.FORBIDDEN, status=403)]

    assert run(slots).reason is errors.Reason.FORBIDDEN
    assert is_untouched(slots)


def test_a_slot_that_may_be_lost_is_no_leave_to_begin(slots: FakeSlots) -> None:
    slots.is_stale = True

    outcome = run(slots)

    assert (outcome.reason, outcome.should_retry) == (errors.Reason.SLOTS_TAKEN, True)
    assert is_untouched(slots)


CALLS = len(scenes.calls(scenes.busy_node, "one-slice-changed"))


@pytest.mark.parametrize("index", range(CALLS))
def test_whichever_call_fails_the_slot_goes_with_the_marks_on_the_node(
    slots: FakeSlots, index: int
) -> None:
    rig = slots.rig
    reconciler = scenes.reconciler(rig, slots=slots)
    request = fakes.FakeRequest(rig.clock)
    calls = [0]

    def fail() -> None:
        if rig.log[-1].startswith("slots."):
            return
        calls[0] += 1
        if calls[0] == index + 1:
            name = rig.log[-1]
            if name == "host.save":
                raise errors.ConfigError("broken")
            raise scenes.BROKEN[name.partition(".")[0]]

    rig.on_call = fail
    try:
        reconciler.run("one-slice-changed", request)
    except errors.ClusterError:
        # It could not say how it ended; what it took is still there, and so is the slot.
        assert slots.is_taken is bool(rig.annotations.get(cluster.JOURNAL_ANNOTATION))
        reconciler.recover("one-slice-changed")
        reconciler.run("one-slice-changed", request)

    assert calls[0] > index, "the call was not made"
    scenes.assert_nothing_taken(rig)
    assert not slots.is_taken


def killed_node(index: int) -> fakes.NodeRig:
    """Return a node whose agent was killed in a call."""
    rig = scenes.busy_node()

    def kill() -> None:
        if len(rig.log) == index + 1:
            raise scenes.Killed

    rig.on_call = kill
    with pytest.raises(scenes.Killed):
        scenes.run(rig, "one-slice-changed")
    rig.on_call = lambda: None
    return rig


def disrupting_calls() -> list[int]:
    """Return the calls from the one after the first that marked the node to the last mark's."""
    rig = scenes.busy_node()
    marked: list[int] = []

    def note() -> None:
        if cluster.JOURNAL_ANNOTATION in rig.annotations:
            marked.append(len(rig.log) - 1)

    rig.on_call = note
    scenes.run(rig, "one-slice-changed")
    return marked


@pytest.mark.parametrize("index", disrupting_calls()[::3])
def test_a_node_that_a_killed_agent_left_disrupted_does_not_wait(index: int) -> None:
    rig = killed_node(index)
    slots = FakeSlots(rig, denials=["used by b"])
    reconciler = scenes.reconciler(rig, slots=slots)

    reconciler.recover("one-slice-changed")
    outcome = reconciler.run("one-slice-changed", fakes.FakeRequest(rig.clock))

    assert outcome.state is model.State.SUCCESS
    assert rig.log.count("slots.take") == 1
    scenes.assert_nothing_taken(rig)


def test_a_change_undone_for_another_request_releases_the_slot() -> None:
    rig = killed_node(disrupting_calls()[0])
    slots = FakeSlots(rig, is_taken=True)

    scenes.reconciler(rig, slots=slots).recover("all-balanced")

    scenes.assert_nothing_taken(rig)
    assert not slots.is_taken


def test_a_node_without_a_request_holds_no_slot() -> None:
    rig = scenes.node()
    slots = FakeSlots(rig, is_taken=True)

    scenes.reconciler(rig, slots=slots).rest()

    assert not slots.is_taken


def test_a_machine_that_reboots_for_us_keeps_its_slot(slots: FakeSlots) -> None:
    rig = slots.rig
    rig.mode_waits = rig.may_reboot = True
    request = fakes.FakeRequest(rig.clock)
    request.ends_when = lambda: rig.reboots > 0

    with pytest.raises(errors.Superseded):
        scenes.reconciler(rig, slots=slots).run("all-disabled", request)

    assert slots.is_taken
