"""The pipeline over a small node in memory: request and rig in, rig out."""

import contextlib
import math
from collections.abc import Iterator, Sequence

import pytest
import structlog

from mig_manager.core import model, steps
from mig_manager.core.objects import discovery_labels, well_known
from mig_manager.core.records import inventory_codec, run_status
from mig_manager.reasons import Reason
from tests.rigs.node import (
    agents,
    call_errors,
    ends,
    fake_host,
    fakes,
    gpu_values,
    moments,
    node_rig,
    nodes,
)
from tests.rigs.node.nodes import guarded_node, node_with_whole_node_drain, node_without_evictions


@pytest.mark.parametrize("label_managed", [True, False])
def test_first_layout_succeeds_with_every_device_schedulable(*, label_managed: bool) -> None:
    rig = nodes.node(label_managed=label_managed)
    old_plugin = next(iter(rig.pods))

    ends.run_to(rig, "all-1g.5gb", Reason.APPLIED)

    assert rig.node_object.states == ["pending", "success"]
    assert rig.node_object.labels[well_known.STATE_LABEL] == "success"
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-1g.5gb"
    assert rig.node_object.labels.get(well_known.PLUGIN_DEPLOY_LABEL) == (
        "true" if label_managed else None
    )
    assert len(rig.kubelet.schedulable["nvidia.com/gpu"]) == 14
    assert old_plugin not in rig.pods


@pytest.mark.parametrize("may_report", [True, False])
def test_devices_are_schedulable_before_kubelets_next_report(*, may_report: bool) -> None:
    rig = nodes.node()
    rig.kubelet.reports_from_s = 10.0
    rig.failures.add_all({} if may_report else {"node.report_devices": call_errors.broken("node")})

    ends.run_to(rig, "all-1g.5gb", Reason.APPLIED)

    assert rig.kubelet.reported_devices == {"nvidia.com/gpu": 14 if may_report else 0}
    assert (rig.clock.monotonic() < rig.kubelet.reports_from_s) is may_report


@pytest.mark.parametrize(
    ("strategy", "label", "devices"),
    [("mixed", {}, 8), ("", {}, 2), ("", {discovery_labels.STRATEGY: "mixed"}, 8)],
    ids=["its own", "unknown", "of the label"],
)
def test_plugin_from_before_mig_is_restarted_if_its_strategy_is_known(
    strategy: str, label: dict[str, str], devices: int
) -> None:
    rig = nodes.node(layout="all-disabled")
    rig.node_object.labels |= label
    (plugin,) = rig.pods
    rig.pods.change(plugin, mig_strategy=strategy)
    # A person applied it at a shell.
    rig.gpus = nodes.node(layout="all-balanced").gpus

    ends.run_to(rig, "all-balanced", Reason.ALREADY_APPLIED)

    # With strategy none it would still offer the whole GPUs.
    assert len(rig.kubelet.schedulable["nvidia.com/gpu"]) == devices


def test_a_former_strategys_label_restarts_the_plugin_once_failing_no_run() -> None:
    rig = nodes.node(layout="all-balanced")
    rig.node_object.labels[discovery_labels.STRATEGY] = "mixed"

    def serve_whole_gpus() -> None:
        # Its new config sets strategy none.
        rig.kubelet.schedulable = {"nvidia.com/gpu": frozenset(gpu.uuid for gpu in rig.gpus)}

    rig.callbacks.add(moments.Wait, serve_whole_gpus)
    serve_whole_gpus()
    agent = agents.new_agent(rig)

    for attempt in (1, 2):
        layout = "all-balanced"
        ends.run_to(rig, layout, Reason.ALREADY_APPLIED, by=agent, attempt=attempt)

    assert rig.log.count("workloads.delete") == 1


def test_broken_plugin_of_other_devices_is_not_waited_for() -> None:
    rig = nodes.node()
    del rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL]
    rig.pods.clear()
    rig.kubelet.schedulable = {}
    rig.kubelet.phantoms = {"nvidia.com/hostdev": 4}

    ends.run_to(rig, "all-1g.5gb", Reason.APPLIED)


def test_active_layout_succeeds_after_one_observation() -> None:
    rig = nodes.node(layout="all-balanced")
    pods = dict(rig.pods)

    ends.run_to(rig, "all-balanced", Reason.ALREADY_APPLIED)

    assert rig.node_object.states == ["success"]
    assert rig.log.count("gpus.observe") == 1
    assert rig.pods == pods
    assert rig.driver.executed_steps == []


def node_and_agent() -> tuple[node_rig.NodeRig, agents.AgentInMemory]:
    """Return a node, and its agent that has applied a layout already."""
    rig = nodes.node()
    agent = agents.new_agent(rig)
    agents.run(rig, "all-1g.5gb", by=agent)
    rig.forget_past()
    return rig, agent


@pytest.mark.parametrize(("attempt", "is_early"), [(1, True), (2, False)])
def test_a_known_change_is_pending_before_kubelet_is_queried(
    attempt: int, *, is_early: bool
) -> None:
    rig, agent = node_and_agent()

    ends.run_to(rig, "all-balanced", Reason.APPLIED, by=agent, attempt=attempt)

    asked_at = rig.log.index("allocations.assigned_devices")
    assert (rig.log.index("node.patch") < asked_at) is is_early


@pytest.mark.parametrize("name", ["all-1g.5gb", "too-much", "no-such-layout"])
def test_an_active_or_impossible_layout_is_never_pending(name: str) -> None:
    rig, agent = node_and_agent()

    with structlog.testing.capture_logs() as logs:
        agents.run(rig, name, by=agent)

    is_active = name == "all-1g.5gb"
    assert rig.node_object.states == ["success" if is_active else "failed"]
    levels = [line["log_level"] for line in logs if line["event"] == "run_finished"]
    assert levels == ["info" if is_active else "warning"]


def test_workers_and_pod_watch_begin_before_a_change_and_end_with_it() -> None:
    rig = nodes.node()

    @contextlib.contextmanager
    def workers_ready() -> Iterator[None]:
        rig.log.append("workers ready")
        yield
        rig.log.append("workers end")

    class PodWatch(fakes.FakePodWatch):
        def expect_change(self) -> None:
            rig.log.append("expect change")

        def dismiss(self) -> None:
            rig.log.append("dismiss watch")

    agent = agents.new_agent(rig, workers_ready=workers_ready, pod_watch=PodWatch())
    before = ["workers ready", "gpus.observe", "expect change"]
    order = [*before, "gpus.execute", "workers end", "dismiss watch"]

    agents.run(rig, "all-1g.5gb", by=agent)
    assert [what for what in rig.log if what in order] == order
    rig.log.clear()
    agents.run(rig, "all-1g.5gb", by=agent)
    assert "expect change" not in rig.log
    assert (rig.log.count("workers end"), rig.log.count("dismiss watch")) == (1, 1)


def test_only_pods_on_destroyed_instances_are_evicted() -> None:
    rig = nodes.busy_node()
    rig.pods.add("spared-3g", devices=frozenset({nodes.device(rig, 0, "3g.20gb")}))
    rig.pods.add("spared-1g", devices=frozenset({nodes.device(rig, 0, "1g.5gb")}))
    spared = {
        uid: used
        for uid, used in rig.kubelet.devices_by_pod.items()
        if "spared" in rig.pods[uid].name
    }

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert rig.log.count("workloads.evict") == 1
    assert len(spared) == 3
    assert "affected" not in rig.pods.names
    assert spared.keys() <= rig.pods.keys()
    assert frozenset().union(*spared.values()) <= {u for gpu in rig.gpus for u in gpu.mig_uuids}


def test_a_kubelet_that_has_just_started_gets_time_to_list_its_pods() -> None:
    rig = nodes.busy_node()
    rig.kubelet.all_listed_from_s = 5.0

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert rig.log.count("workloads.evict") == 1
    assert "affected" not in rig.pods.names
    assert rig.clock.now_s < 20


@pytest.mark.parametrize("lists_pods", [False, True], ids=["no pod", "no device"])
def test_no_pod_is_evicted_while_kubelet_lists_no_device(*, lists_pods: bool) -> None:
    rig = nodes.busy_node()
    before = rig.gpus
    if lists_pods:
        # A kubelet that has lost its checkpoint lists pods without devices.
        rig.kubelet.devices_by_pod = dict.fromkeys(rig.kubelet.devices_by_pod, frozenset())
    else:
        rig.kubelet.all_listed_from_s = math.inf

    outcome = ends.run_to(
        rig,
        "one-slice-changed",
        Reason.POD_RESOURCES_UNAVAILABLE,
        "kubelet lists no device of a running pod, or the pod was started without one",
        "default/spared",
        "where kubelet answers, end the pods that the message names",
    )

    assert outcome.should_retry
    assert {"affected", "spared"} <= rig.pods.names
    assert rig.gpus == before
    assert "workloads.evict" not in rig.log


def test_a_node_without_gpu_pods_changes_although_kubelet_lists_none() -> None:
    rig = nodes.node(layout="all-balanced")
    rig.pods.add("web")
    rig.kubelet.all_listed_from_s = math.inf

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert "web" in rig.pods.names


@pytest.mark.parametrize(
    ("layout", "budgets", "phase"),
    [
        ("one-slice-changed", {}, "Done"),
        ("too-much", {}, "Resolve"),
        ("one-slice-changed", {"affected": "no disruption"}, "Drain"),
    ],
)
def test_the_status_names_the_phase_in_which_a_run_has_ended(
    layout: str, budgets: dict[str, str], phase: str
) -> None:
    rig = nodes.busy_node()
    rig.disruptions.refusals.update(budgets)

    agents.run(rig, layout)

    assert (
        run_status.parse(rig.node_object.annotations[well_known.STATUS_ANNOTATION]).phase == phase
    )


def test_a_change_that_evicts_no_pod_announces_a_wait() -> None:
    rig = node_without_evictions()

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    waits = "1 pod to wait for: default/affected"
    assert waits in rig.node_object.status_messages
    assert any(message.endswith(waits) for message in rig.node_object.event_messages)
    assert "to evict" not in str((rig.node_object.event_messages, rig.node_object.status_messages))


def test_an_evicted_daemonset_pod_cannot_restart_before_the_change_ends() -> None:
    rig = nodes.node(layout="all-balanced")
    devices = frozenset({nodes.device(rig, 0, "2g.10gb")})
    rig.pods.add("monitor-1", devices=devices, owner_kind="DaemonSet")
    rig.daemons.without_label.add("monitor-1")

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert rig.log.count("workloads.evict") == 1
    rig.advance()
    assert "monitor-1" in rig.pods.names


@pytest.mark.slow
def test_a_drain_blocked_by_many_pods_has_a_short_message() -> None:
    rig = nodes.busy_node()
    devices = frozenset({nodes.device(rig, 0, "2g.10gb")})
    for number in range(224):
        rig.pods.add(f"a-rather-long-name-of-a-pod-{number}", devices=devices, is_kept=True)

    outcome = ends.run_to(rig, "one-slice-changed", Reason.DRAIN_TIMEOUT, "225 pods still use")

    assert any(
        "225 pods to evict: default/affected" in text for text in rig.node_object.event_messages
    )
    assert outcome.message.count("do-not-evict") == 1
    assert outcome.message.endswith(outcome.reason.remedy)
    texts = (*rig.node_object.event_messages, *rig.node_object.status_messages, outcome.message)
    assert max(map(len, texts)) < 1024


def test_gpus_are_planned_twice_if_the_driver_hides_profiles() -> None:
    rig = nodes.node()
    rig.driver.hides_profiles = True
    ends.run_to(rig, "all-1g.5gb", Reason.APPLIED)

    assert [len(gpu.mig_uuids) for gpu in rig.gpus] == [7, 7]


def test_steps_that_a_driver_does_not_execute_are_noticed() -> None:
    class Driver(fake_host.FakeGpus):
        def execute(
            self, plan: steps.Plan, observed: Sequence[model.Gpu] = ()
        ) -> model.ObservedGpus:
            return gpu_values.of_plan(self.observe(), plan)

    rig = nodes.node()
    ends.run_to(
        rig, "all-1g.5gb", Reason.VERIFY_FAILED, by=agents.new_agent(rig, gpus=Driver(rig))
    )


def admit_late_pod(rig: node_rig.NodeRig, *, is_kept: bool = False) -> None:
    """Admit a pod on an affected device in the first wait in which the plugin is paused."""
    doomed = frozenset({nodes.device(rig, 0, "2g.10gb")})

    # A pod that is bound to the node by its author passes the scheduler and its cordon.
    rig.callbacks.add(
        moments.Wait,
        lambda: rig.pods.add("late", devices=doomed, is_kept=is_kept),
        when=lambda: rig.node_object.is_plugin_paused,
        times=1,
    )


def test_kept_pod_admitted_before_the_plugin_stops_ends_the_run() -> None:
    rig = nodes.busy_node()
    before = rig.gpus
    admit_late_pod(rig, is_kept=True)

    why = "default/late (its annotation mig-manager.io/do-not-evict"
    ends.run_to(rig, "one-slice-changed", Reason.DRAIN_TIMEOUT, why)

    assert "late" in rig.pods.names
    assert rig.gpus == before


def test_pod_admitted_before_the_plugin_stops_is_evicted_too() -> None:
    rig = nodes.busy_node()
    admit_late_pod(rig)

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert "late" not in rig.pods.names
    assert rig.log.count("workloads.evict") == 2
    last_eviction = len(rig.log) - rig.log[::-1].index("workloads.evict")
    assert last_eviction < rig.log.index("gpus.execute")


def test_the_node_is_tainted_and_never_cordoned_before_any_pod_is_evicted() -> None:
    rig = nodes.busy_node()
    closed = rig.note(
        lambda: (rig.node_object.has_reconfiguring_taint, rig.node_object.is_unschedulable),
        at=moments.Wait,
    )

    agents.run(rig, "one-slice-changed")

    calls = ("node.patch", "workloads.can_evict", "gpus.execute")
    assert [rig.log.index(call) for call in calls] == sorted(map(rig.log.index, calls))
    assert closed[0] == (True, False)
    assert not any(is_cordoned for _, is_cordoned in closed)


def test_policy_node_evicts_every_gpu_pod() -> None:
    rig = node_with_whole_node_drain()
    rig.pods.add("cpu")
    rig.pods.add("nic", gpu_resources={"nvidia.com/hostdev": 1})
    rig.kubelet.claims.add(rig.pods.add("claimant"))
    devices = frozenset({nodes.device(rig, 1, "1g.5gb")})
    rig.pods.add("with another resource name", devices=devices, gpu_resources={})

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    evicted = {"affected", "spared", "claimant", "with another resource name"}
    assert evicted.isdisjoint(rig.pods.names)
    assert {"cpu", "nic"} <= rig.pods.names


def test_force_is_reported_in_an_event_a_status_and_the_message() -> None:
    rig = guarded_node()

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED, "Deleted by force: default/affected")

    assert "ForcedDrain" in rig.node_object.events
    assert "deleting by force default/affected" in rig.node_object.status_messages
    assert "workloads.evict" not in rig.log


def test_pods_with_claims_on_gpus_are_evicted_with_one_event() -> None:
    rig = nodes.busy_node()
    rig.kubelet.claims |= {rig.pods.add("claimant"), rig.pods.add("another")}

    agents.run(rig, "one-slice-changed")

    assert rig.pods.names.isdisjoint({"claimant", "another"})
    drained = rig.node_object.event_messages[rig.node_object.events.index("Draining")]
    why = "default/claimant, default/another (its ResourceClaim may stand for any GPU)"
    assert f"default/affected; {why}" in drained


def test_run_publishes_the_gpus_it_observes() -> None:
    rig = nodes.node(layout="all-balanced")

    ends.run_to(rig, "all-1g.5gb", Reason.APPLIED)

    text = rig.node_object.annotations[well_known.GPUS_ANNOTATION]
    published = inventory_codec.from_json(text)
    assert [(gpu.uuid, gpu.profiles, run_status.device_counts(gpu)) for gpu in published] == [
        (gpu.uuid, gpu.profiles, run_status.device_counts(gpu)) for gpu in rig.gpus
    ]
    assert agents.run(rig, "all-9g").state is run_status.State.FAILED
    assert rig.node_object.annotations[well_known.GPUS_ANNOTATION] == text


def test_annotations_that_another_program_removed_are_written_again() -> None:
    rig = nodes.node()
    agent = agents.start(rig, "all-1g.5gb")
    ends.run_to(rig, "all-1g.5gb", Reason.APPLIED, by=agent)
    steady = {
        well_known.GPUS_ANNOTATION,
        well_known.LAYOUTS_ANNOTATION,
        well_known.REQUEST_ANNOTATION,
    }
    before = {key: rig.node_object.annotations.pop(key) for key in steady}

    ends.run_to(rig, "all-1g.5gb", Reason.ALREADY_APPLIED, by=agent)

    assert {key: rig.node_object.annotations[key] for key in steady} == before


def test_no_gpu_is_published_if_the_driver_lists_none() -> None:
    rig = nodes.node()
    agent = agents.start(rig, "all-1g.5gb")
    ends.run_to(rig, "all-1g.5gb", Reason.APPLIED, by=agent)
    rig.gpus = model.NO_GPUS

    assert agents.run(rig, "all-1g.5gb", by=agent).state is run_status.State.FAILED

    assert well_known.GPUS_ANNOTATION not in rig.node_object.annotations
