"""A drain that takes several attempts: when the node is reopened in between."""

import contextlib
from collections.abc import Callable

import pytest

from mig_manager import errors
from mig_manager.core.records import run_status
from mig_manager.reasons import Reason
from tests.pipeline import drifts
from tests.pipeline.drain import drains
from tests.pipeline.drain.deployments import (
    CONFIG,
    Deployment,
    is_closed,
    node_with,
    try_once,
)
from tests.rigs.node import (
    agents,
    call_errors,
    ends,
    fakes,
    inboxes,
    moments,
    node_rig,
    nodes,
)

News = Callable[[inboxes.Inbox, node_rig.NodeRig], object]


def reason_unless_superseded(agent: agents.AgentInMemory, inbox: inboxes.Inbox) -> Reason | None:
    with contextlib.suppress(errors.Superseded):
        return agent.run("first-gpu-whole", inbox.request("first-gpu-whole")).reason
    return None


@pytest.mark.parametrize("granted", [1, 4])
@pytest.mark.parametrize(
    ("announce", "reason", "is_other"),
    [
        pytest.param(lambda inbox, _rig: inbox.put_file_change(), None, False, id="file"),
        pytest.param(lambda inbox, _rig: inbox.put_label("all-1g.5gb"), None, True, id="label"),
        pytest.param(
            lambda _inbox, rig: rig.failures.add("workloads.list", drains.FORBIDDEN),
            Reason.FORBIDDEN,
            False,
            id="no right to list pods",
        ),
    ],
)
def test_only_another_request_reopens_the_node_in_mid_drain(
    announce: News, reason: Reason | None, granted: int, *, is_other: bool
) -> None:
    rig, serving = node_with(room_elsewhere=1)
    serving.budget.max_unavailable = granted
    # If all are evicted at once, the others take longer to end.
    rig.kubelet.pod_ends_from_s = dict.fromkeys(
        list(serving.local_devices)[2:], rig.clock.now_s + 10
    )
    agent = agents.new_agent(rig, layouts=CONFIG)

    def report() -> None:
        if serving.kills == 2:
            announce(inbox, rig)

    inbox = inboxes.Inbox(rig.clock, report=report)
    assert reason_unless_superseded(agent, inbox) is reason

    rig.clock.wait(1)
    assert rig.node_object.has_reconfiguring_taint is not is_other
    rig.failures.clear()
    serving.room_elsewhere, local_count = 3, len(serving.local_devices)
    newer = inbox.next(0)
    assert newer is not None
    assert (
        agent.run(newer.request, fakes.FakeCancellation(rig.clock)).state
        is run_status.State.SUCCESS
    )
    assert serving.kills == 2 + (not is_other) * local_count
    ends.assert_restored(rig)


def test_file_change_after_the_drain_evicts_no_successor() -> None:
    rig, serving = node_with(room_elsewhere=0, replicas=1)
    agent = agents.new_agent(rig, layouts=CONFIG)

    def report() -> None:
        if serving.kills and rig.node_object.status["phase"] == run_status.Phase.PAUSE.value:
            inbox.put_file_change()

    inbox = inboxes.Inbox(rig.clock, report=report)
    with pytest.raises(errors.Superseded):
        agent.run("first-gpu-whole", inbox.request("first-gpu-whole"))

    rig.clock.wait(1)
    assert (
        agent.run("first-gpu-whole", fakes.FakeCancellation(rig.clock)).state
        is run_status.State.SUCCESS
    )
    assert serving.kills == 1
    ends.assert_restored(rig)


def test_a_drain_that_always_crashes_reopens_the_node() -> None:
    rig, serving = node_with(room_elsewhere=1)
    agent = agents.new_agent(rig, layouts=CONFIG)
    assert try_once(rig, agent).reason is Reason.DRAIN_STALLED
    rig.disruptions.budgets[0].max_unavailable = 4
    rig.failures.add("workloads.evict", RuntimeError("bug"))

    assert {try_once(rig, agent).reason for _ in range(4)} == {Reason.INTERNAL}

    assert not is_closed(rig)
    assert serving.kills == 2


def test_file_change_after_a_refused_eviction_reopens_the_node() -> None:
    rig = nodes.busy_node()
    rig.failures.add("workloads.evict", drains.FORBIDDEN)
    inbox = inboxes.Inbox(rig.clock)
    rig.callbacks.add(moments.Time(3), inbox.put_file_change)

    with pytest.raises(errors.Superseded):
        agents.new_agent(rig).run("one-slice-changed", inbox.request("one-slice-changed"))

    ends.assert_restored(rig)


@pytest.mark.parametrize("has_room", [True, False])
def test_node_stays_closed_until_the_next_try(*, has_room: bool) -> None:
    rig, serving = node_with(room_elsewhere=1)
    agent = agents.new_agent(rig, layouts=CONFIG)

    assert try_once(rig, agent).reason is Reason.DRAIN_STALLED
    assert is_closed(rig)
    assert rig.node_object.journal.is_draining
    assert serving.kills == 2
    if has_room:
        serving.room_elsewhere = 3
    else:
        serving.budget.max_unavailable = 4

    assert try_once(rig, agent).state is run_status.State.SUCCESS
    assert serving.kills == 4
    ends.assert_restored(rig)


def add_foreign_manager(rig: node_rig.NodeRig) -> None:
    rig.pods.add("nvidias", owner_kind="DaemonSet", container_names=("nvidia-mig-manager",))


def refusing(call: str, error: Exception) -> Callable[[node_rig.NodeRig], None]:
    return lambda rig: rig.failures.add(call, error)


def refuse_evictions(rig: node_rig.NodeRig) -> None:
    rig.disruptions.budgets[0].max_unavailable = 4
    why = errors.ClusterError("webhook", reason=Reason.API_ERROR, status=500)
    rig.failures.add("workloads.evict", why)


@pytest.mark.parametrize(
    ("disturb", "reason"),
    [
        (refuse_evictions, Reason.API_ERROR),
        (add_foreign_manager, Reason.FOREIGN_MANAGER),
        (refusing("gpus.observe", call_errors.NO_DRIVER), Reason.DRIVER_NOT_LOADED),
        (
            refusing("allocations.assigned_devices", call_errors.broken("allocations")),
            Reason.POD_RESOURCES_UNAVAILABLE,
        ),
        (refusing("workloads.list", call_errors.broken("node")), Reason.API_UNAVAILABLE),
        (refusing("workloads.list", drains.FORBIDDEN), Reason.FORBIDDEN),
    ],
    ids=["evictions", "another manager", "driver", "kubelet", "API", "rights"],
)
def test_only_a_failure_of_drain_or_api_keeps_the_node_closed(
    disturb: Callable[[node_rig.NodeRig], None], reason: Reason
) -> None:
    rig, serving = node_with(room_elsewhere=1)
    agent = agents.new_agent(rig, layouts=CONFIG)
    assert try_once(rig, agent).reason is Reason.DRAIN_STALLED
    disturb(rig)

    attempt_outcomes = [try_once(rig, agent) for _ in range(4)]

    assert {outcome.reason for outcome in attempt_outcomes} == {reason}
    assert all(outcome.should_retry for outcome in attempt_outcomes)
    of_api = {Reason.API_ERROR, Reason.API_UNAVAILABLE, Reason.FORBIDDEN}
    assert is_closed(rig) is (reason in of_api)
    assert serving.kills == 2
    rig.failures.clear()
    rig.pods.remove_if(lambda pod: pod.name == "nvidias")
    serving.room_elsewhere = 3
    assert try_once(rig, agent).state is run_status.State.SUCCESS
    ends.assert_restored(rig)


@pytest.mark.parametrize("reason", [Reason.IN_USE, Reason.HOST_SERVICE_FAILED])
def test_a_late_rolling_drain_leaves_no_taint_after_a_change_that_fails(reason: Reason) -> None:
    rig = nodes.node(layout="all-1g.5gb")
    late: list[Deployment] = []
    rig.host.services["dcgm.service"] = True

    def bind() -> None:
        late.append(Deployment(rig, list(rig.gpus[0].mig_uuids)[:2], room_elsewhere=2))

    def break_services() -> None:
        if late and late[0].kills and reason is Reason.HOST_SERVICE_FAILED:
            rig.failures.add("services.running", call_errors.broken("services"))

    rig.callbacks.add(moments.Wait, break_services)
    rig.callbacks.add(
        moments.Call,
        bind,
        when=lambda: rig.node_object.is_plugin_paused,
        times=1,
    )
    rig.driver.clients = "a process"

    outcome = try_once(rig)

    assert outcome.reason is reason
    assert outcome.should_retry
    assert late[0].kills == 2
    ends.assert_restored(rig)


def test_an_agent_that_is_restarted_between_two_tries_evicts_no_pod_again() -> None:
    rig, serving = node_with(room_elsewhere=0)
    try_once(rig)

    successor = agents.start(rig, "first-gpu-whole", layouts=CONFIG)

    assert try_once(rig, successor).reason is Reason.DRAIN_STALLED
    assert is_closed(rig)
    assert serving.kills == 1


def request_another_layout(rig: node_rig.NodeRig, agent: agents.AgentInMemory) -> None:
    assert try_once(rig, agent, "all-1g.5gb").state is run_status.State.SUCCESS


def request_unknown_profile(rig: node_rig.NodeRig, agent: agents.AgentInMemory) -> None:
    assert try_once(rig, agent, "unknown-profile").reason is Reason.UNKNOWN_PROFILE


@pytest.mark.parametrize(
    "end",
    [
        lambda _rig, agent: agent.restore_without_request(),
        lambda _rig, agent: agent.stop(),
        request_another_layout,
        request_unknown_profile,
    ],
    ids=["label removed", "agent stopped", "another layout", "impossible layout"],
)
def test_node_closed_between_attempts_is_reopened_without_a_request(
    end: Callable[[node_rig.NodeRig, agents.AgentInMemory], None],
) -> None:
    rig, serving = node_with(room_elsewhere=0)
    agent = agents.new_agent(rig, layouts=CONFIG)
    try_once(rig, agent)
    assert is_closed(rig)

    end(rig, agent)
    for _ in range(3):
        rig.clock.wait(1)

    ends.assert_restored(rig)
    assert len(serving.local_devices) == 4
    assert serving.kills == 1


def test_a_plugin_is_not_restarted_while_the_tainted_node_awaits_a_retry() -> None:
    rig, _ = node_with(room_elsewhere=0)
    plugins = {pod.uid for pod in rig.pods.plugins}
    rig.callbacks.add(moments.Time(5), lambda: drifts.tamper(rig, 1))

    assert try_once(rig).reason is Reason.DRAIN_STALLED

    assert rig.node_object.has_reconfiguring_taint
    assert {pod.uid for pod in rig.pods.plugins} == plugins
