"""The inbox of the agent: the newest request, from watchers to worker."""

import threading
from collections.abc import Callable

import pytest

from mig_manager import errors
from mig_manager.agent import intake
from mig_manager.core.objects import well_known
from tests.pipeline.custom_requests import custom_layout
from tests.rigs.node import agents, ends, moments, nodes


@pytest.fixture
def inbox() -> intake.Inbox:
    """Return an inbox with a request for layout ``a``."""
    inbox = intake.Inbox()
    inbox.put_label("a")
    return inbox


def latest(inbox: intake.Inbox, generation: int = 0) -> intake.ReceivedRequest:
    current = inbox.next(generation)
    assert current is not None
    return current


def test_the_newest_request_replaces_older_ones(
    inbox: intake.Inbox,
) -> None:
    inbox.put_label("b")
    current = latest(inbox)
    inbox.put_label("b")

    assert current.request.layout == "b"
    current.check()


def test_another_node_object_is_served_again_and_an_unknown_one_is_not(
    inbox: intake.Inbox,
) -> None:
    inbox.put_label("a", node_uid="u1")
    current = latest(inbox)
    for node_uid in ("u1", ""):
        inbox.put_label("a", node_uid=node_uid)
    current.check()

    inbox.put_label("a", node_uid="u2")

    with pytest.raises(errors.Superseded) as end:
        current.check()
    assert end.value.by is errors.SupersededBy.SAME_LAYOUT
    again = latest(inbox, current.generation)
    assert (again.request.layout, again.node_uid) == ("a", "u2")
    assert again.since == 0
    assert current.generation < again.generation


def test_a_label_that_changes_with_the_node_object_is_a_request_of_its_own(
    inbox: intake.Inbox,
) -> None:
    inbox.put_label("a", node_uid="u1")
    current = latest(inbox)

    inbox.put_label("b", node_uid="u2")
    inbox.put_label("b", node_uid="u3")

    again = latest(inbox, current.generation)
    assert (again.request.layout, again.node_uid) == ("b", "u3")
    assert current.generation < again.since < again.generation


def test_changed_file_before_the_first_label_does_not_count() -> None:
    inbox = intake.Inbox()
    inbox.put_file_change()

    assert inbox.next(0) is None

    inbox.put_label(None)
    assert latest(inbox).request.layout == ""


@pytest.mark.parametrize(
    ("act", "by", "layout"),
    [
        (lambda inbox: inbox.put_label(None), errors.SupersededBy.NO_LAYOUT, ""),
        (lambda inbox: inbox.put_file_change(), errors.SupersededBy.SAME_LAYOUT, "a"),
    ],
    ids=["label removed", "file changed"],
)
def test_a_changed_file_is_a_new_request_and_a_removed_label_is_not(
    inbox: intake.Inbox,
    act: Callable[[intake.Inbox], None],
    by: errors.SupersededBy,
    layout: str,
) -> None:
    current = latest(inbox)
    act(inbox)

    with pytest.raises(errors.Superseded) as end:
        current.check()
    assert end.value.by is by
    assert latest(inbox, current.generation).request.layout == layout


@pytest.mark.parametrize("change", ["label", "file", "stop"])
def test_a_waiting_run_wakes_at_once_when_its_request_ends(
    inbox: intake.Inbox, change: str
) -> None:
    current = latest(inbox)
    act = {
        "label": lambda: inbox.put_label("b"),
        "file": inbox.put_file_change,
        "stop": inbox.stop,
    }[change]
    threading.Timer(0.05, act).start()

    with pytest.raises(errors.Superseded):
        current.wait(60)


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_news_before_or_during_a_pause_end_it_and_not_the_next(
    inbox: intake.Inbox, delay_s: float
) -> None:
    current = latest(inbox)
    threading.Timer(delay_s, inbox.put_cluster_change).start()

    current.pause(60)

    threading.Timer(0.1, inbox.stop).start()
    with pytest.raises(errors.Superseded):
        current.pause(60)


def test_news_of_the_cluster_end_no_other_sleep(inbox: intake.Inbox) -> None:
    current = latest(inbox)
    inbox.put_cluster_change()
    threading.Timer(0.1, inbox.stop).start()

    with pytest.raises(errors.Superseded):
        current.wait(60)


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_a_pause_ends_with_its_request(inbox: intake.Inbox, delay_s: float) -> None:
    current = latest(inbox)
    threading.Timer(delay_s, inbox.stop).start()

    with pytest.raises(errors.Superseded):
        current.pause(60)


@pytest.mark.parametrize(
    ("act", "is_over"),
    [
        (lambda inbox: inbox.put_label("b"), True),
        (intake.Inbox.stop, True),
        (intake.Inbox.put_gpu_change, True),
        (intake.Inbox.put_use_change, False),
    ],
    ids=["label", "stop", "GPU", "use"],
)
def test_news_end_a_rest_without_a_time_limit(
    inbox: intake.Inbox, act: Callable[[intake.Inbox], None], *, is_over: bool
) -> None:
    threading.Timer(0.05, act, [inbox]).start()

    assert inbox.wait_until_superseded(latest(inbox).generation, at_rest=True) is is_over


def test_a_changed_gpu_does_not_end_the_pause_before_a_retry(inbox: intake.Inbox) -> None:
    inbox.put_gpu_change()

    assert not inbox.wait_until_superseded(latest(inbox).generation, timeout_s=0.01)


def test_a_stop_ends_the_queue_for_good(inbox: intake.Inbox) -> None:
    inbox.stop()

    assert inbox.next(0) is None
    assert inbox.is_stopping


def test_an_agent_that_stops_in_a_run_publishes_that_it_was_interrupted() -> None:
    rig = nodes.busy_node()
    inbox = intake.Inbox()
    inbox.put_label("one-slice-changed")
    rig.callbacks.add(
        moments.Call, inbox.stop, when=lambda: rig.node_object.has_reconfiguring_taint
    )

    with pytest.raises(errors.Superseded):
        agents.new_agent(rig).run("one-slice-changed", latest(inbox))

    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    assert "Interrupted" in rig.node_object.events
    assert rig.node_object.ready_reasons[-1] == "Interrupted"
    ends.assert_restored(rig, is_stopped=True)


def test_another_annotation_makes_a_new_request_and_the_same_none(
    inbox: intake.Inbox,
) -> None:
    inbox.put_label("custom", custom=custom_layout("one"))
    current = latest(inbox)
    inbox.put_label("custom", custom=custom_layout("one"))
    current.check()

    inbox.put_label("custom", custom=custom_layout("two"))

    with pytest.raises(errors.Superseded) as end:
        current.check()
    assert end.value.by is errors.SupersededBy.OTHER_LAYOUT
    again = latest(inbox, current.generation)
    assert (again.request.layout, again.request.custom) == ("custom", custom_layout("two"))


def test_a_node_that_becomes_on_demand_ends_a_run_that_may_evict(inbox: intake.Inbox) -> None:
    inbox.put_label("custom", custom=custom_layout("one"))
    current = latest(inbox)

    inbox.put_label("custom", custom=custom_layout("one", is_on_demand=True))

    with pytest.raises(errors.Superseded):
        current.check()


def test_a_node_that_is_no_longer_on_demand_makes_no_new_request(inbox: intake.Inbox) -> None:
    inbox.put_label("custom", custom=custom_layout("one", is_on_demand=True))
    current = latest(inbox)

    inbox.put_label("custom", custom=custom_layout("one"))
    current.check()
    inbox.put_label("custom", custom=custom_layout("two"))

    assert latest(inbox, current.generation).request.custom == custom_layout("two")
