"""What PodDisruptionBudgets that grant a part of a drain's evictions make of it."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable

import pytest

from mig_manager import errors
from mig_manager.agent import intake, outcomes
from mig_manager.core import model
from mig_manager.core.node import policies, well_known
from mig_manager.core.records import journals
from mig_manager.errors import Reason
from tests.node import fakes, knobs, scenes
from tests.pipeline import drains


class Deployment:
    """Replicas with a budget; its controller replaces a pod that is gone.

    A successor starts on another node while there is room, else on ours if that is open, and
    waits for a node otherwise.
    """

    def __init__(
        self,
        rig: fakes.NodeRig,
        devices: list[str],
        *,
        room_elsewhere: int,
        name: str = "serving",
        max_unavailable: int = 1,
        starts: bool = True,
    ) -> None:
        self.rig = rig
        self.name = name
        self.room_elsewhere = room_elsewhere
        self.starts = starts
        self.killed = 0
        self._serial = 0
        self.here: dict[str, str] = {}
        """UID of a replica on our node -> its device."""
        for device in devices:
            self._start_here(device)
        self.budget = knobs.Budget(name, name, len(devices), max_unavailable)
        rig.disruptions.budgets.append(self.budget)
        rig.clock.on_wait.append(self.live)

    def live(self) -> None:
        """Replace what is gone, and place what waits for a node."""
        for uid in self.here.keys() - self.rig.pods.keys():
            self.killed += 1
            waiting = self._add(phase="Pending", is_ready=False)
            self.rig.disruptions.elsewhere[waiting] = dataclasses.replace(
                self.rig.pods.pop(waiting),
                node_name="",
                node_selector={"device": self.here.pop(uid)},
            )
        for uid, pod in list(self.rig.disruptions.elsewhere.items()):
            if pod.labels["app"] != self.name or pod.node_name:
                continue
            if self.room_elsewhere:
                self.room_elsewhere -= 1
                self.rig.disruptions.elsewhere[uid] = dataclasses.replace(
                    pod, node_name="node-b", phase="Running", is_ready=self.starts
                )
            elif not is_closed(self.rig):
                del self.rig.disruptions.elsewhere[uid]
                self._start_here(pod.node_selector["device"])

    def _start_here(self, device: str) -> None:
        self.here[self._add(devices=frozenset({device}))] = device

    def _add(self, *, devices: frozenset[str] = frozenset(), **fields: object) -> str:
        self._serial += 1
        return self.rig.add_pod(
            f"{self.name}-{self._serial}",
            devices=devices,
            labels={"app": self.name},
            owner_kind="ReplicaSet",
            **fields,
        )


def is_closed(rig: fakes.NodeRig) -> bool:
    return rig.is_unschedulable or rig.has_hold_taint


def node_with(
    *, room_elsewhere: int, starts: bool = True, replicas: int = 4
) -> tuple[fakes.NodeRig, Deployment]:
    """A node with a deployment on its first GPU, whose budget grants one eviction at a time."""
    rig = scenes.node(layout="all-1g.5gb")
    devices = list(rig.gpus[0].mig_uuids)[:replicas]
    return rig, Deployment(rig, devices, room_elsewhere=room_elsewhere, starts=starts)


LAYOUT = "one-slice-changed-back"
CONFIG = """
version: v1
mig-configs:
  all-1g.5gb:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
  one-slice-changed-back:
  - {devices: [0], mig-enabled: true, mig-devices: {7g.40gb: 1}}
  unknown-profile:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.99gb: 1}}
"""


class Agent:
    """Tries one layout again and again, as the agent does, with a pause in between."""

    def __init__(self, rig: fakes.NodeRig) -> None:
        self.rig = rig
        self.reconciler = scenes.reconciler(rig, CONFIG)
        self.attempt = 0

    def try_once(self, layout: str = LAYOUT) -> outcomes.Outcome:
        self.attempt += 1
        outcome = scenes.run(self.rig, layout, by=self.reconciler, attempt=self.attempt)
        for _ in range(30):
            self.rig.clock.wait(1)
        return outcome


def test_partial_budget_drains_as_successors_get_ready() -> None:
    rig, serving = node_with(room_elsewhere=4)
    healthy: list[int] = []
    rig.clock.on_wait.insert(
        0, lambda: healthy.append(serving.budget.observed(rig.pods_everywhere).healthy)
    )

    assert Agent(rig).try_once().state is model.State.SUCCESS

    assert serving.killed == 4
    assert min(healthy) == 3
    assert any("evicting default/serving-1; 3 more" in each for each in rig.statuses)
    scenes.assert_restored(rig)


def test_drain_without_room_elsewhere_evicts_one_pod_in_all_tries() -> None:
    rig, serving = node_with(room_elsewhere=0)
    bare = rig.add_pod("bare", devices=frozenset({scenes.device(rig, 0, "1g.5gb")}))
    before = rig.gpus
    agent = Agent(rig)

    ended = [agent.try_once() for _ in range(4)]

    assert serving.killed == 1
    assert bare in rig.pods
    assert rig.gpus == before
    assert {outcome.reason for outcome in ended} == {Reason.DRAIN_STALLED}
    assert "no node has room for default/serving-5" in ended[0].message
    assert "default/serving-2" in ended[0].message
    assert all(outcome.should_retry for outcome in ended)


@pytest.mark.parametrize("granted", [1, 4])
@pytest.mark.parametrize("news", ["file", "label", "no right to list pods"])
def test_only_another_request_reopens_the_node_in_mid_drain(news: str, granted: int) -> None:
    rig, serving = node_with(room_elsewhere=1)
    serving.budget.max_unavailable = granted
    # If all are evicted at once, the others take longer to end.
    rig.kubelet.ends_from_s = dict.fromkeys(list(serving.here)[2:], rig.clock.now_s + 10)
    agent, inbox = scenes.reconciler(rig, CONFIG), intake.Inbox()
    inbox.put_label(LAYOUT)

    def follow_news() -> bool:
        if serving.killed == 2 and news == "file":
            inbox.put_file_change()
        elif serving.killed == 2 and news == "label":
            inbox.put_label("all-1g.5gb")
        elif serving.killed == 2:
            rig.refusing["workloads.list"] = drains.FORBIDDEN
        inbox.check(1)
        return False

    request = fakes.FakeRequest(rig.clock)
    request.ends_when = follow_news
    with contextlib.suppress(errors.Superseded):
        assert agent.run(LAYOUT, request).reason is Reason.FORBIDDEN

    rig.clock.wait(1)
    assert rig.has_hold_taint is (news != "label")
    rig.refusing.clear()
    serving.room_elsewhere, here = 3, len(serving.here)
    newer = inbox.next(0)
    assert newer is not None
    assert agent.run(newer.layout, fakes.FakeRequest(rig.clock)).state is model.State.SUCCESS
    assert serving.killed == 2 + (0 if news == "label" else here)
    scenes.assert_restored(rig)


def test_file_change_after_the_drain_evicts_no_successor() -> None:
    rig, serving = node_with(room_elsewhere=0, replicas=1)
    agent, inbox = scenes.reconciler(rig, CONFIG), intake.Inbox()
    inbox.put_label(LAYOUT)

    def follow_news() -> bool:
        text = rig.annotations.get(well_known.STATUS_ANNOTATION, "{}")
        if serving.killed and json.loads(text)["phase"] == model.Phase.PAUSE.value:
            inbox.put_file_change()
        inbox.check(1)
        return False

    request = fakes.FakeRequest(rig.clock)
    request.ends_when = follow_news
    with pytest.raises(errors.Superseded):
        agent.run(LAYOUT, request)

    rig.clock.wait(1)
    assert agent.run(LAYOUT, fakes.FakeRequest(rig.clock)).state is model.State.SUCCESS
    assert serving.killed == 1
    scenes.assert_restored(rig)


def test_a_drain_that_always_crashes_reopens_the_node() -> None:
    rig, serving = node_with(room_elsewhere=1)
    agent = Agent(rig)
    assert agent.try_once().reason is Reason.DRAIN_STALLED
    rig.disruptions.budgets[0].max_unavailable = 4
    rig.refusing["workloads.evict"] = RuntimeError("bug")

    assert {agent.try_once().reason for _ in range(4)} == {Reason.INTERNAL}

    assert not is_closed(rig)
    assert serving.killed == 2


def test_file_change_after_a_refused_eviction_reopens_the_node() -> None:
    rig = scenes.busy_node()
    rig.refusing["workloads.evict"] = drains.FORBIDDEN
    inbox = intake.Inbox()
    inbox.put_label(scenes.LAYOUT)
    drains.at(rig, 3, inbox.put_file_change)

    def follow_news() -> bool:
        inbox.check(1)
        return False

    request = fakes.FakeRequest(rig.clock)
    request.ends_when = follow_news

    with pytest.raises(errors.Superseded):
        scenes.run(rig, request=request)

    scenes.assert_restored(rig)


@pytest.mark.parametrize("has_room", [True, False])
def test_node_stays_closed_until_the_next_try(*, has_room: bool) -> None:
    rig, serving = node_with(room_elsewhere=1)
    agent = Agent(rig)

    assert agent.try_once().reason is Reason.DRAIN_STALLED
    assert is_closed(rig)
    assert journals.Journal.from_json(rig.annotations[well_known.JOURNAL_ANNOTATION]).draining
    assert serving.killed == 2
    if has_room:
        serving.room_elsewhere = 3
    else:
        serving.budget.max_unavailable = 4

    assert agent.try_once().state is model.State.SUCCESS
    assert serving.killed == 4
    scenes.assert_restored(rig)


def add_foreign_manager(rig: fakes.NodeRig) -> None:
    rig.add_pod("nvidias", owner_kind="DaemonSet", container_names=("nvidia-mig-manager",))


def unload_driver(rig: fakes.NodeRig) -> None:
    rig.refusing["gpus.observe"] = errors.HardwareError("", reason=Reason.DRIVER_NOT_LOADED)


def silence_kubelet(rig: fakes.NodeRig) -> None:
    rig.refusing["allocations.assigned_devices"] = scenes.BROKEN["allocations"]


def silence_api(rig: fakes.NodeRig) -> None:
    rig.refusing["workloads.list"] = scenes.BROKEN["node"]


def refuse_the_list(rig: fakes.NodeRig) -> None:
    rig.refusing["workloads.list"] = drains.FORBIDDEN


def refuse_evictions(rig: fakes.NodeRig) -> None:
    rig.disruptions.budgets[0].max_unavailable = 4
    why = errors.ClusterError("webhook", reason=Reason.API_ERROR, status=500)
    rig.refusing["workloads.evict"] = why


@pytest.mark.parametrize(
    ("disturb", "reason"),
    [
        (refuse_evictions, Reason.API_ERROR),
        (add_foreign_manager, Reason.FOREIGN_MANAGER),
        (unload_driver, Reason.DRIVER_NOT_LOADED),
        (silence_kubelet, Reason.POD_RESOURCES_UNAVAILABLE),
        (silence_api, Reason.API_UNAVAILABLE),
        (refuse_the_list, Reason.FORBIDDEN),
    ],
)
def test_only_a_failure_of_drain_or_api_keeps_the_node_closed(
    disturb: Callable[[fakes.NodeRig], None], reason: Reason
) -> None:
    rig, serving = node_with(room_elsewhere=1)
    agent = Agent(rig)
    assert agent.try_once().reason is Reason.DRAIN_STALLED
    disturb(rig)

    ended = [agent.try_once() for _ in range(4)]

    assert {outcome.reason for outcome in ended} == {reason}
    assert all(outcome.should_retry for outcome in ended)
    of_api = {Reason.API_ERROR, Reason.API_UNAVAILABLE, Reason.FORBIDDEN}
    assert is_closed(rig) is (reason in of_api)
    assert serving.killed == 2
    rig.refusing.clear()
    rig.pods = {uid: pod for uid, pod in rig.pods.items() if pod.name != "nvidias"}
    serving.room_elsewhere = 3
    assert agent.try_once().state is model.State.SUCCESS
    scenes.assert_restored(rig)


@pytest.mark.parametrize("reason", [Reason.IN_USE, Reason.HOST_SERVICE_FAILED])
def test_a_late_rolling_drain_leaves_no_taint_after_a_change_that_fails(reason: Reason) -> None:
    rig = scenes.node(layout="all-1g.5gb")
    late: list[Deployment] = []
    rig.host.services["dcgm.service"] = True

    def bind() -> None:
        if not late and rig.labels[well_known.PLUGIN_DEPLOY_LABEL] == well_known.PAUSED_VALUE:
            late.append(Deployment(rig, list(rig.gpus[0].mig_uuids)[:2], room_elsewhere=2))
            if reason is Reason.HOST_SERVICE_FAILED:
                rig.refusing["host.running"] = scenes.BROKEN["host"]

    rig.on_call = bind
    rig.driver.clients = "a process"

    outcome = Agent(rig).try_once()

    assert outcome.reason is reason
    assert outcome.should_retry
    assert late[0].killed == 2
    scenes.assert_restored(rig)


def test_an_agent_that_is_restarted_between_two_tries_evicts_no_pod_again() -> None:
    rig, serving = node_with(room_elsewhere=0)
    Agent(rig).try_once()

    successor = Agent(rig)
    successor.reconciler.recover(LAYOUT)

    assert successor.try_once().reason is Reason.DRAIN_STALLED
    assert is_closed(rig)
    assert serving.killed == 1


def test_successors_that_start_slowly_elsewhere_are_no_stall() -> None:
    rig, serving = node_with(room_elsewhere=4, starts=False)

    outcome = Agent(rig).try_once()

    assert outcome.reason is Reason.DRAIN_TIMEOUT
    assert "not ready yet elsewhere: default/serving-5" in outcome.message
    assert is_closed(rig)
    assert serving.killed == 1


def ask_for_another_layout(agent: Agent) -> None:
    assert agent.try_once("all-1g.5gb").state is model.State.SUCCESS


def ask_for_what_cannot_be(agent: Agent) -> None:
    assert agent.try_once("unknown-profile").reason is Reason.UNKNOWN_PROFILE


@pytest.mark.parametrize(
    "end",
    [
        lambda agent: agent.reconciler.rest(),
        lambda agent: agent.reconciler.stop(),
        ask_for_another_layout,
        ask_for_what_cannot_be,
    ],
    ids=["label removed", "agent stopped", "another layout", "impossible layout"],
)
def test_node_closed_between_attempts_is_reopened_without_a_request(
    end: Callable[[Agent], None],
) -> None:
    rig, serving = node_with(room_elsewhere=0)
    agent = Agent(rig)
    agent.try_once()
    assert is_closed(rig)

    end(agent)
    for _ in range(3):
        rig.clock.wait(1)

    scenes.assert_restored(rig)
    assert len(serving.here) == 4
    assert serving.killed == 1


@pytest.mark.parametrize(
    ("kind", "budget"), [("ReplicaSet", 1), ("DaemonSet", 7), ("StatefulSet", 0)]
)
def test_pods_that_tolerate_the_taint_are_evicted_once_more(kind: str, budget: int) -> None:
    rig = scenes.node(layout="all-1g.5gb")
    devices = sorted(rig.gpus[0].mig_uuids)
    before = rig.gpus
    rig.disruptions.budgets.append(knobs.Budget("web", "web", len(devices), budget))
    rig.policy = policies.Policy(is_forced=not budget)
    names = (f"web-{number}" for number in itertools.count())

    def start_missing() -> None:
        # Kubelet admits the pods as long as the plugin runs.
        used = frozenset().union(*rig.kubelet.assigned.values())
        for device in devices:
            if rig.gpus == before and device not in used:
                rig.add_pod(
                    next(names),
                    devices=frozenset({device}),
                    labels={"app": "web"},
                    owner_kind=kind,
                    owner_name="web-5d8",
                )

    start_missing()
    rig.clock.on_wait.append(start_missing)
    agent = Agent(rig)

    outcome = agent.try_once()

    assert outcome.reason is Reason.PODS_RETURN
    assert f"return to the node: {kind} default/web-5d8" in outcome.message
    assert not outcome.should_retry
    removed = rig.log.count("workloads.evict") + rig.log.count("workloads.delete")
    assert removed == 2 * (budget or len(devices))
    assert rig.gpus == before
    scenes.assert_restored(rig)


def test_a_later_attempt_remembers_the_pods_that_return() -> None:
    rig = scenes.node(layout="all-1g.5gb")
    devices = frozenset(rig.gpus[0].mig_uuids)
    names = (f"probe-{number}" for number in itertools.count())

    def start_missing() -> None:
        if not any(pod.owner_name for pod in rig.pods.values()):
            rig.add_pod(next(names), devices=devices, owner_kind="DaemonSet", owner_name="probe")

    start_missing()
    rig.clock.on_wait.append(start_missing)
    rig.disruptions.refusals["probe-1"] = "not now"
    agent = Agent(rig)

    assert agent.try_once().reason is Reason.DRAIN_TIMEOUT
    rig.disruptions.refusals.clear()

    assert agent.try_once().reason is Reason.PODS_RETURN
    assert "probe-2" in rig.pod_names


def test_strategy_whole_evicts_no_pod_for_a_partial_budget() -> None:
    rig, serving = node_with(room_elsewhere=4)
    rig.policy = policies.Policy(strategy=policies.DrainStrategy.WHOLE)

    outcome = Agent(rig).try_once()

    assert outcome.reason is Reason.DRAIN_TIMEOUT
    assert "PodDisruptionBudget serving allows 1 of 4 evictions" in outcome.message
    assert serving.killed == 0
    assert "workloads.can_evict" not in rig.log
    assert not is_closed(rig)


def test_strategy_whole_evicts_no_late_pod_for_a_partial_budget() -> None:
    rig = scenes.node(layout="all-1g.5gb")
    rig.policy = policies.Policy(strategy=policies.DrainStrategy.WHOLE)
    first, *devices = rig.gpus[0].mig_uuids
    rig.add_pod("early", devices=frozenset({first}))
    late: list[Deployment] = []

    def bind() -> None:
        if not late and rig.labels[well_known.PLUGIN_DEPLOY_LABEL] == well_known.PAUSED_VALUE:
            late.append(Deployment(rig, devices[:2], room_elsewhere=2))

    rig.on_call = bind
    outcome = Agent(rig).try_once()

    assert outcome.reason is Reason.DRAIN_TIMEOUT
    assert "early" not in rig.pod_names
    assert late[0].killed == 0


def test_what_the_budgets_grant_as_a_whole_goes_at_once() -> None:
    rig, serving = node_with(room_elsewhere=4)
    serving.budget.max_unavailable = 4

    assert Agent(rig).try_once().state is model.State.SUCCESS

    assert serving.killed == 4
    first = rig.log.index("workloads.evict")
    assert rig.log[first : first + 4] == ["workloads.evict"] * 4


@pytest.mark.parametrize("is_shared", [True, False])
def test_no_pod_is_evicted_while_another_budget_blocks_it(*, is_shared: bool) -> None:
    rig, serving = node_with(room_elsewhere=4, replicas=2)
    if is_shared:
        rig.disruptions.budgets.append(knobs.Budget("second", "serving", 2, 2))
        why = "PodDisruptionBudgets second and serving both cover it"
    else:
        device = next(uuid for uuid in rig.gpus[0].mig_uuids if uuid not in serving.here.values())
        Deployment(rig, [device], room_elsewhere=1, name="guarded", max_unavailable=0)
        why = "PodDisruptionBudget guarded needs 1 healthy pods and has 1"

    outcome = Agent(rig).try_once()

    assert outcome.reason is Reason.DRAIN_TIMEOUT
    assert why in outcome.message
    assert "workloads.evict" not in rig.log
    scenes.assert_restored(rig)


def test_a_pod_that_may_no_longer_be_evicted_ends_a_rolling_drain() -> None:
    rig, serving = node_with(room_elsewhere=4)

    def keep() -> None:
        if serving.killed == 1:
            last = list(serving.here)[-1]
            rig.pods[last] = dataclasses.replace(rig.pods[last], is_kept=True)

    rig.clock.on_wait.append(keep)
    outcome = Agent(rig).try_once()

    assert outcome.reason is Reason.DRAIN_TIMEOUT
    assert "do-not-evict forbids the eviction" in outcome.message
    assert serving.killed == 1
    assert not is_closed(rig)


def test_a_rolling_drain_goes_on_while_a_pod_deleted_by_force_ends() -> None:
    rig, serving = node_with(room_elsewhere=4)
    device = next(uuid for uuid in rig.gpus[0].mig_uuids if uuid not in serving.here.values())
    uid = rig.add_pod("forced", devices=frozenset({device}))

    def delete() -> None:
        if serving.killed == 1 and uid in rig.pods:
            drains.goes(rig, uid)
            rig.kubelet.unlisted["forced"] = frozenset({device})
        elif serving.killed == 4:
            rig.kubelet.unlisted.clear()

    rig.clock.on_wait.append(delete)

    assert Agent(rig).try_once().state is model.State.SUCCESS


def test_pods_without_a_controller_go_last() -> None:
    rig, _ = node_with(room_elsewhere=4, replicas=2)
    used = frozenset().union(*rig.kubelet.assigned.values())
    free = next(uuid for uuid in rig.gpus[0].mig_uuids if uuid not in used)
    bare = rig.add_pod("bare", devices=frozenset({free}))
    order: list[str] = []
    rig.clock.on_wait.insert(
        0,
        lambda: order.extend(
            pod.name
            for pod in rig.pods.values()
            if pod.is_terminating and pod.name not in order and pod.name != "nvidia-device-plugin"
        ),
    )

    assert Agent(rig).try_once().state is model.State.SUCCESS

    assert order == ["serving-1", "serving-2", "bare"]
    assert bare not in rig.pods


def test_a_budget_that_never_grants_all_pods_without_a_controller_keeps_all() -> None:
    rig = scenes.node(layout="all-1g.5gb")
    notebooks = {
        rig.add_pod(f"notebook-{n}", devices=frozenset({device}), labels={"app": "notebooks"})
        for n, device in enumerate(list(rig.gpus[0].mig_uuids)[:3])
    }
    rig.disruptions.budgets.append(knobs.Budget("notebooks", "notebooks", 3, 1))

    outcome = Agent(rig).try_once()

    assert outcome.reason is Reason.DRAIN_TIMEOUT
    assert "allows 1 of 3 evictions, and nothing replaces 3 of the pods" in outcome.message
    assert notebooks <= rig.pods.keys()
    assert not rig.has_hold_taint


def test_a_blocked_drain_asks_for_the_budgets_and_not_for_each_pod() -> None:
    rig, serving = node_with(room_elsewhere=0)
    serving.budget.max_unavailable = 0

    Agent(rig).try_once()

    assert "workloads.can_evict" not in rig.log
    assert rig.log.count("workloads.budgets") <= 6


def test_agent_that_may_not_list_budgets_drains_and_says_so() -> None:
    rig, serving = node_with(room_elsewhere=0)
    forbidden = errors.ClusterError("no", reason=Reason.FORBIDDEN, status=403)
    rig.refusing = {"workloads.budgets": forbidden}
    agent = Agent(rig)

    ended = [agent.try_once() for _ in range(3)]

    assert serving.killed == 1
    assert "may not list PodDisruptionBudgets" in ended[0].message
    assert rig.log.count("workloads.budgets") == 3


def test_api_that_never_lists_budgets_is_the_reason() -> None:
    rig, serving = node_with(room_elsewhere=4)
    away = errors.ClusterError("away", reason=Reason.API_UNAVAILABLE, status=503)
    rig.refusing = {"workloads.budgets": away}

    outcome = Agent(rig).try_once()

    assert outcome.reason is Reason.API_UNAVAILABLE
    assert serving.killed == 0
