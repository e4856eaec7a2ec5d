"""A budget for the cluster in one run: a slot before the taint, released at every exit."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors
from mig_manager.core import steps
from mig_manager.core.fleet import slots
from mig_manager.core.objects import well_known
from mig_manager.reasons import Reason
from tests.rigs.node import (
    agents,
    call_errors,
    ends,
    fakes,
    moments,
    node_rig,
    nodes,
    parts,
    strikes,
)

USED_BY_B = slots.Denial(limit=1, changing=("b",))


@pytest.fixture(name="rig")
def node_with_slots() -> node_rig.NodeRig:
    return nodes.limited_node()


def test_slot_is_taken_before_the_taint_and_released_after_the_restore(
    rig: node_rig.NodeRig,
) -> None:
    # A first attempt also publishes before the slot that it will change the GPUs.
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED, attempt=2)

    log = rig.log
    assert log.index("slots.take") < log.index("slots.check") < log.index("node.patch")
    assert [call for call in log if call in ("node.patch", "slots.release")][-2:] == [
        "node.patch",
        "slots.release",
    ]


def test_layouts_are_written_after_the_slot_is_released(rig: node_rig.NodeRig) -> None:
    log = rig.log

    def write(_document: str) -> bool:
        log.append("layouts.write")
        return True

    ends.run_to(
        rig, "one-slice-changed", Reason.APPLIED, by=agents.new_agent(rig, write_layouts=write)
    )

    assert log[-2:] == ["slots.release", "layouts.write"]


@pytest.mark.parametrize(
    ("layout", "reason"),
    [("all-balanced", Reason.ALREADY_APPLIED), ("too-much", Reason.DOES_NOT_FIT)],
)
def test_an_active_or_impossible_layout_needs_no_slot(
    rig: node_rig.NodeRig, layout: str, reason: Reason
) -> None:
    ends.run_to(rig, layout, reason)

    assert "slots.take" not in rig.log


@pytest.mark.parametrize("refusals", [0, 1])
def test_a_slot_is_taken_for_gpus_observed_under_the_lock(
    rig: node_rig.NodeRig, refusals: int
) -> None:
    lock = fakes.FakeLock(refusals=refusals)
    is_locked = rig.note(lambda: lock.is_locked, at="gpus.observe")

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED, by=agents.new_agent(rig, lock=lock))

    assert set(is_locked) == {True}


def test_a_node_that_is_locked_waits_once_and_takes_no_slot(rig: node_rig.NodeRig) -> None:
    lock = fakes.FakeLock(refusals=1000)

    ends.run_to(rig, "one-slice-changed", Reason.LOCKED, by=agents.new_agent(rig, lock=lock))

    assert rig.clock.now_s < 2 * agents.TIMEOUTS["lock_timeout_s"]
    assert "slots.take" not in rig.log


def test_a_node_that_waits_for_a_slot_names_the_owners_and_is_not_touched(
    rig: node_rig.NodeRig,
) -> None:
    rig.slots.denials = [USED_BY_B] * 3
    statuses = rig.note(lambda: rig.node_object.status, at=moments.Wait)

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert {key: statuses[0][key] for key in ("state", "phase", "reason", "message")} == {
        "state": "pending",
        "phase": "Wait",
        "reason": "SlotsTaken",
        "message": str(USED_BY_B),
    }
    assert rig.node_object.status_messages.count(str(USED_BY_B)) == 1


def test_a_waiting_node_publishes_the_slot_owners_now_and_then(
    rig: node_rig.NodeRig,
) -> None:
    rig.slots.denials = [
        slots.Denial(limit=1, changing=(f"node-{number}",)) for number in range(60)
    ]

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    reports = [
        message
        for message in rig.node_object.status_messages
        if "under change now: node-" in message
    ]
    assert 2 <= len(reports) < 12


def test_a_silent_api_only_prolongs_the_wait(
    rig: node_rig.NodeRig,
) -> None:
    rig.slots.next_errors = [errors.ClusterError("away", reason=Reason.API_UNAVAILABLE)] * 2

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)


def end_superseded(rig: node_rig.NodeRig) -> None:
    rig.slots.denials = [USED_BY_B] * 10
    ends.supersede(rig, "one-slice-changed", ends_at=2)
    ends.assert_restored(rig, is_stopped=True)


def end_forbidden(rig: node_rig.NodeRig) -> None:
    rig.slots.next_errors = [errors.ClusterError("no", reason=Reason.FORBIDDEN, status=403)]
    ends.run_to(rig, "one-slice-changed", Reason.FORBIDDEN)


def end_as_slot_is_stale(rig: node_rig.NodeRig) -> None:
    rig.slots.is_stale = True
    assert ends.run_to(rig, "one-slice-changed", Reason.SLOTS_TAKEN).should_retry


@pytest.mark.parametrize("end", [end_superseded, end_forbidden, end_as_slot_is_stale])
def test_without_a_slot_the_node_is_not_touched(
    rig: node_rig.NodeRig, end: Callable[[node_rig.NodeRig], None]
) -> None:
    nodes.add_hooks(rig)

    end(rig)

    assert not rig.slots.is_taken
    assert not {"gpus.execute", "hooks.run"} & {*rig.log}


def test_the_slot_is_released_with_the_nodes_marks_whichever_call_fails(
    rig: node_rig.NodeRig,
) -> None:
    agents.run(rig, "one-slice-changed")
    unreported = 0
    for index, call in enumerate(rig.log):
        rig = nodes.limited_node()
        agent = agents.new_agent(rig)
        rig.failures.add(index, call_errors.broken(call))
        try:
            agents.run(rig, "one-slice-changed", by=agent)
        except errors.ClusterError:
            unreported += 1
            # It could not say how it ended; what it took is still there, and so is the slot.
            has_journal = bool(rig.node_object.annotations.get(well_known.JOURNAL_ANNOTATION))
            assert rig.slots.is_taken is has_journal
            agent.recover("one-slice-changed")
            agents.run(rig, "one-slice-changed", by=agent)

        assert rig.log[index] == call
        ends.assert_restored_or_in_drain(rig, rig.log[:index])
        if rig.node_object.has_reconfiguring_taint:
            assert rig.slots.is_taken
            agents.run(rig, "one-slice-changed", by=agent)
        ends.assert_restored(rig)
    assert unreported > 2


def disrupting_calls() -> list[int]:
    """Return the calls after the first mark on the node, up to that of the last."""
    rig = nodes.busy_node()
    marked = rig.note(
        lambda: len(rig.log) - 1,
        when=lambda: well_known.JOURNAL_ANNOTATION in rig.node_object.annotations,
    )
    agents.run(rig, "one-slice-changed")
    return marked


def test_a_node_that_a_killed_agent_left_disrupted_does_not_wait() -> None:
    calls = disrupting_calls()[::3]
    assert len(calls) > 2
    for index in calls:
        rig, _ = strikes.kill_at_call(
            nodes.busy_node, index, lambda rig: agents.run(rig, "one-slice-changed")
        )
        rig.slots = parts.Slots(are_limited=True, denials=[USED_BY_B])

        assert agents.resume(rig, "one-slice-changed").reason is Reason.APPLIED

        assert rig.log.count("slots.take") == 1
        ends.assert_restored(rig)


def test_a_change_that_another_agent_left_takes_its_slot_again(
    rig: node_rig.NodeRig,
) -> None:
    class Lock(fakes.FakeLock):
        @contextlib.contextmanager
        def hold(self, doing: str, *, changes_gpus: bool = True) -> Iterator[None]:
            if doing.startswith("applying") and not self.descriptions[1:]:
                assert "slots.take" not in rig.log, "the layout was active"
                strikes.kill_before(rig, steps.DestroyGpuInstance, "one-slice-changed")
                rig.slots.is_taken = True
            with super().hold(doing, changes_gpus=changes_gpus):
                yield

    agent = agents.new_agent(rig, lock=Lock())
    rig.slots.are_limited = False

    ends.run_to(rig, "all-balanced", Reason.APPLIED, by=agent)

    assert rig.log.index("slots.take") < rig.log.index("slots.release")


def test_a_change_undone_for_another_request_releases_the_slot() -> None:
    rig, _ = strikes.kill_at_call(
        nodes.busy_node, disrupting_calls()[0], lambda rig: agents.run(rig, "one-slice-changed")
    )
    rig.slots = parts.Slots(are_limited=True, is_taken=True)

    agents.start(rig, "all-balanced")

    ends.assert_restored(rig)
    assert not rig.slots.is_taken


@pytest.mark.parametrize("layout", ["one-slice-changed", "all-1g.5gb", None])
def test_an_agent_without_the_lock_keeps_the_slot_of_the_other(
    rig: node_rig.NodeRig, layout: str | None
) -> None:
    other = agents.new_agent(rig, lock=fakes.FakeLock(refusals=10**9))

    def meet() -> bool:
        if layout is None:
            with pytest.raises(errors.LockedError):
                other.restore_without_request()
        else:
            assert agents.run(rig, layout, by=other).reason is Reason.LOCKED
        return rig.slots.is_taken

    is_taken = rig.note(meet, at=steps.DestroyGpuInstance)

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert is_taken == [True]
    assert not rig.slots.is_taken


@pytest.mark.parametrize("is_changed", [False, True], ids=["free", "changed by another agent"])
def test_an_agent_that_stops_while_it_waits_for_the_lock_frees_its_slot(
    rig: node_rig.NodeRig, *, is_changed: bool
) -> None:
    lock = fakes.FakeLock()
    agent = agents.new_agent(rig, lock=lock)

    def lock_for_others() -> None:
        lock.refusals = 10**9

    rig.callbacks.add("slots.take", lock_for_others, times=1)
    ends.supersede(
        rig, "one-slice-changed", by=agent, ends_when=lambda: 0 < lock.refusals < 10**9 - 2
    )

    rig.node_object.has_reconfiguring_taint = is_changed
    agent.stop()

    assert rig.slots.is_taken is is_changed


def test_a_node_without_a_request_holds_no_slot(rig: node_rig.NodeRig) -> None:
    rig.slots.is_taken = True

    agents.new_agent(rig).restore_without_request()

    assert not rig.slots.is_taken


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda agent: agent.restore_without_request(), id="withdrawn"),
        pytest.param(lambda agent: agent.stop(), id="stopped"),
    ],
)
def test_a_replaced_request_that_waited_for_a_slot_fails_if_no_run_follows(
    rig: node_rig.NodeRig, end: Callable[[agents.AgentInMemory], object]
) -> None:
    rig.slots.denials = [USED_BY_B] * 5
    agent = agents.new_agent(rig)
    ends.supersede(rig, "one-slice-changed", by=agent, ends_at=2, is_replaced=True)
    assert rig.node_object.labels[well_known.STATE_LABEL] == "pending"

    end(agent)

    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"


def test_a_machine_that_reboots_for_us_keeps_its_slot(rig: node_rig.NodeRig) -> None:
    nodes.must_reboot(rig)

    ends.supersede(rig, "all-disabled", ends_when=lambda: rig.host.reboots > 0)

    assert rig.slots.is_taken


def test_an_agent_that_stops_before_the_plugin_is_back_keeps_its_slot(
    rig: node_rig.NodeRig,
) -> None:
    rig.plugin.is_broken = True
    ends.supersede(
        rig,
        "one-slice-changed",
        ends_when=lambda: (
            bool(rig.driver.executed_steps) and not rig.node_object.has_reconfiguring_taint
        ),
    )
    assert rig.slots.is_taken

    rig.plugin.is_broken = False
    rig.pods.remove_if(lambda pod: pod in rig.pods.plugins)
    assert agents.resume(rig, "one-slice-changed").reason is Reason.APPLIED
    assert not rig.slots.is_taken
