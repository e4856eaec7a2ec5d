"""Reboots where a MIG mode becomes active in no other way."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.core import model, steps
from mig_manager.core.node import policies
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status, verified_layouts
from mig_manager.reasons import Reason
from tests.rigs.node import (
    agents,
    call_errors,
    ends,
    fakes,
    gpu_values,
    moments,
    node_rig,
    nodes,
)

POLKIT = errors.HostError("polkit says no", reason=Reason.REBOOT_REQUIRED)

ONE_OR_BOTH = """
version: v1
mig-configs:
  one:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 7}}
  both:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
"""


def go_down(
    rig: node_rig.NodeRig, layout: str = "all-1g.5gb", *, by: agents.AgentInMemory | None = None
) -> None:
    """Run until the machine goes down: SIGTERM comes while the agent waits for the reboot."""
    agent, before = by or agents.new_agent(rig), rig.host.reboots
    ends.supersede(rig, layout, by=agent, ends_when=lambda: rig.host.reboots > before)
    agent.stop()


def restart_without_the_mode(rig: node_rig.NodeRig) -> None:
    """Restart the machine, which does not activate the pending mode."""
    rig.reboot()
    off = model.MigMode.DISABLED
    rig.gpus = tuple(dataclasses.replace(gpu, current_mode=off) for gpu in rig.gpus)


def test_node_that_needs_a_reboot_reboots_once_and_gets_its_layout() -> None:
    rig = nodes.rebooting_node()

    go_down(rig)

    assert rig.host.reboots == 1
    assert rig.node_object.labels[well_known.STATE_LABEL] == "rebooting"
    assert rig.node_object.has_reconfiguring_taint
    assert "Rebooting" in rig.node_object.events
    assert rig.node_object.ready_reasons[-1] == "Rebooting"
    assert rig.node_object.status["rebooted"] is True
    rig.driver.mode_waits = False
    rig.reboot()

    assert agents.resume(rig, "all-1g.5gb").state is run_status.State.SUCCESS
    assert rig.host.reboots == 1
    ends.assert_restored(rig)


def hang_at_the_end(rig: node_rig.NodeRig) -> None:
    """Let the driver hang when a run observes for the second time what it has executed."""
    since = itertools.dropwhile(lambda call: call != "gpus.execute", rig.log)
    if list(since).count("gpus.observe") == 2:
        rig.failures.add("gpus.observe", errors.HardwareError("hung", reason=Reason.NVML_TIMEOUT))


def reboot_by_person(rig: node_rig.NodeRig) -> None:
    rig.host.may_reboot = False
    ends.run_to(rig, "all-1g.5gb", Reason.RESET_REQUIRED)


def reboot_by_person_as_driver_hangs(rig: node_rig.NodeRig) -> None:
    rig.callbacks.add(moments.Call, lambda: hang_at_the_end(rig))
    reboot_by_person(rig)


def refuse_by_budget(rig: node_rig.NodeRig) -> None:
    rig.pods.add("job", devices=frozenset({rig.gpus[1].uuid}))
    rig.disruptions.refusals["job"] = "budget"
    ends.run_to(rig, "one", Reason.DRAIN_TIMEOUT, "no reboot", layouts=ONE_OR_BOTH)


@pytest.mark.parametrize(
    "act", [go_down, refuse_by_budget, reboot_by_person, reboot_by_person_as_driver_hangs]
)
def test_the_boot_unit_keeps_the_mode_that_a_reboot_activated(
    act: Callable[[node_rig.NodeRig], None],
) -> None:
    rig = nodes.rebooting_node()
    ends.run_to(rig, "all-disabled", Reason.ALREADY_APPLIED)

    act(rig)

    (kept, now) = (
        verified_layouts.VerifiedLayout.from_json(text) for text in rig.verified_layout_file.saved
    )

    pending = {gpu.uuid for gpu in rig.gpus if gpu.has_pending_mode}
    assert [gpu.uuid for gpu in kept.snapshots] == [gpu.uuid for gpu in rig.gpus]
    assert {gpu.uuid for gpu in rig.gpus} - {gpu.uuid for gpu in now.snapshots} == pending != set()


def test_a_reboot_activates_no_mode_of_an_older_rollback_that_was_refused() -> None:
    rig = nodes.node()
    refused = errors.HardwareError("no", reason=Reason.NO_PERMISSION)

    def is_back() -> bool:
        return rig.driver.next_step.mode is model.MigMode.DISABLED

    with (
        rig.failures.adding(steps.CreateGpuInstance, refused),
        rig.failures.adding(steps.SetMode, refused, when=is_back),
    ):
        assert agents.run(rig, "one", layouts=ONE_OR_BOTH).should_retry
    assert rig.gpus[0].current_mode is model.MigMode.ENABLED
    nodes.must_reboot(rig)

    go_down(rig, "both", by=agents.start(rig, "both", layouts=ONE_OR_BOTH))
    older = json.loads(rig.node_object.annotations[well_known.JOURNAL_ANNOTATION])["snapshot"]
    rig.reboot()
    outcome = agents.resume(rig, "both", layouts=ONE_OR_BOTH)

    assert [each["uuid"] for each in older] == [gpu.uuid for gpu in rig.gpus]
    assert outcome.reason is Reason.APPLIED, outcome.message
    assert rig.host.reboots == 1


@pytest.mark.parametrize(("attempt", "after_s"), [(1, 15), (40, 15), (41, 300)])
def test_status_names_the_retry_while_the_driver_is_loading(attempt: int, after_s: int) -> None:
    rig = nodes.node()
    rig.failures.add("gpus.observe", call_errors.NO_DRIVER)

    agents.run(rig, "all-1g.5gb", attempt=attempt, retry_after_s=300.0)

    assert rig.node_object.status["retryAt"] == rig.clock.now_iso(after_s=after_s)


MANAGER: dict[str, Any] = {"labels": {"app": "nvidia-mig-manager"}, "owner_kind": "DaemonSet"}


@pytest.mark.parametrize(
    ("obstruct", "reason"),
    [
        (
            lambda rig: rig.failures.add("gpus.observe", call_errors.NO_DRIVER),
            Reason.DRIVER_NOT_LOADED,
        ),
        (lambda rig: rig.pods.add("m", **MANAGER), Reason.FOREIGN_MANAGER),
        (lambda rig: nodes.add_hooks(rig).hooks.broken.add("start"), Reason.HOOK_FAILED),
    ],
    ids=["driver", "manager", "hook"],
)
def test_a_layout_that_a_reboot_took_is_not_labelled_until_it_is_back(
    obstruct: Callable[[node_rig.NodeRig], object], reason: Reason
) -> None:
    rig, _, _ = nodes.at_rest("all-1g.5gb")
    rig.reboot()
    obstruct(rig)

    assert agents.resume(rig, "all-1g.5gb").reason is reason

    assert well_known.APPLIED_LABEL not in rig.node_object.labels


def test_a_new_node_object_leads_to_no_second_reboot() -> None:
    """Kubelet registers the node again after the reboot, with the label from its flags."""
    rig = nodes.rebooting_node()
    go_down(rig)
    restart_without_the_mode(rig)
    rig.node_object.annotations.clear()
    rig.node_object.labels.clear()
    rig.node_object.has_reconfiguring_taint = False

    assert agents.resume(rig, "all-1g.5gb").reason is not Reason.APPLIED

    assert rig.host.reboots == 1


def test_an_agent_stopped_after_reboot_and_lost_run_restores_the_node() -> None:
    rig = nodes.rebooting_node()
    go_down(rig)
    rig.driver.mode_waits = False
    rig.reboot()
    agent = agents.start(rig, "all-1g.5gb")
    rig.log.clear()

    def is_to_api() -> bool:
        return "gpus.execute" in rig.log and rig.log[-1].startswith(("node.", "workloads."))

    with (
        rig.failures.adding(moments.Call, call_errors.broken("node"), when=is_to_api),
        pytest.raises(errors.ClusterError),
    ):
        agents.run(rig, "all-1g.5gb", by=agent)
    assert rig.node_object.has_reconfiguring_taint

    agent.stop()

    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    assert not rig.node_object.has_reconfiguring_taint
    assert well_known.PAUSED_VALUE not in rig.node_object.labels.values()


def test_another_layout_does_not_start_a_run_on_a_machine_that_goes_down() -> None:
    rig = nodes.rebooting_node()
    cancel = fakes.FakeCancellation(
        rig.clock, ends_when=lambda: rig.host.reboots > 0, is_replaced=True
    )

    late = "the machine is still up 600 s after the reboot request"
    ends.run_to(rig, "all-1g.5gb", Reason.REBOOT_REQUIRED, late, cancel=cancel)

    assert rig.clock.now_s >= 600
    assert rig.host.reboots == 1


def test_a_reboot_evicts_none_of_the_owners_extra_clients() -> None:
    rig = nodes.rebooting_node()
    rig.owner.extra_clients = "version: v1\nclients:\n- labels: {app: watcher}\n"

    def restart() -> None:
        # It tolerates every taint.
        devices = frozenset({rig.gpus[1].uuid})
        rig.pods.add("b", devices=devices, labels={"app": "watcher"}, owner_kind="DaemonSet")

    rig.pods.add("a", labels={"app": "watcher"}, owner_kind="DaemonSet")
    rig.callbacks.add("workloads.delete", restart)

    go_down(rig)

    assert "b" in rig.pods.names
    assert rig.host.reboots == 1


@pytest.mark.parametrize("failures", [{"reboot.request": POLKIT}, {}], ids=["refused", "missing"])
def test_a_refused_or_missing_reboot_is_requested_again(failures: dict[str, Exception]) -> None:
    rig = nodes.rebooting_node()
    rig.failures.add_all(failures)
    agent = agents.new_agent(rig)
    cancel = fakes.FakeCancellation(rig.clock)

    first = agent.run("all-1g.5gb", cancel)
    again = agent.run("all-1g.5gb", cancel, attempt=2)

    assert {first.reason, again.reason} == {Reason.REBOOT_REQUIRED}
    assert rig.log.count("reboot.request") == 2


def test_agent_that_starts_before_the_reboot_requests_it_again() -> None:
    rig = nodes.rebooting_node()
    go_down(rig)

    go_down(rig, by=agents.start(rig, "all-1g.5gb"))

    assert rig.host.reboots == 2
    assert rig.node_object.labels[well_known.STATE_LABEL] == "rebooting"


@pytest.mark.parametrize(
    ("reason", "has_default_layouts"),
    [
        (Reason.DRIVER_NOT_LOADED, True),
        (Reason.DRIVER_NOT_LOADED, False),
        (Reason.INVALID_CONFIG, False),
    ],
)
def test_run_that_fails_early_leads_to_no_second_reboot(
    reason: Reason, *, has_default_layouts: bool
) -> None:
    rig = nodes.rebooting_node()

    def successor(text: str = agents.LAYOUTS_TEXT) -> agents.AgentInMemory:
        settings = {"has_default_layouts": has_default_layouts}
        return agents.start(rig, "all-1g.5gb", layouts=text, settings=settings)

    go_down(rig, by=successor())
    before = rig.node_object.status
    restart_without_the_mode(rig)
    if reason is Reason.INVALID_CONFIG:
        outcome = agents.run(rig, "all-1g.5gb", by=successor("version: v2"))
    else:
        # The agent comes up before the driver.
        rig.failures.add("gpus.observe", errors.HardwareError("no driver", reason=reason))
        outcome = agents.run(rig, "all-1g.5gb", by=successor())
        rig.failures.clear()
    assert outcome.reason is reason
    after = rig.node_object.status
    assert (after["rebooted"], after["configHash"]) == (True, before["configHash"])

    ends.run_to(rig, "all-1g.5gb", Reason.RESET_REQUIRED, by=successor())
    assert rig.host.reboots == 1


def test_an_owners_layout_with_new_content_is_a_new_request_for_a_reboot() -> None:
    rig = nodes.rebooting_node()
    go_down(rig)
    restart_without_the_mode(rig)
    text = agents.LAYOUTS_TEXT.replace("{1g.5gb: 7}", "{1g.5gb: 6}")
    agents.resume(rig, "all-1g.5gb", layouts="version: v2")

    go_down(rig, by=agents.start(rig, "all-1g.5gb", layouts=text))

    assert rig.host.reboots == 2


def node_with_bystander() -> node_rig.NodeRig:
    """Return a node that must reboot for GPU 0, with a pod on GPU 1."""
    rig = nodes.node(layout="all-balanced")
    nodes.must_reboot(rig)
    off = gpu_values.with_desired(rig.gpus[:1], model.DesiredGpu(mode=model.MigMode.DISABLED))
    rig.gpus = (*off, rig.gpus[1])
    rig.pods.add("bystander", devices=frozenset({nodes.device(rig, 1, "3g.20gb")}))
    return rig


def test_a_reboot_comes_after_every_gpu_pod_has_left() -> None:
    rig = node_with_bystander()

    go_down(rig, "all-balanced")

    assert "bystander" not in rig.pods.names


@pytest.mark.parametrize(
    ("obstruct", "reason", "message"),
    [
        (
            lambda rig: rig.disruptions.refusals.update(bystander="budget"),
            Reason.DRAIN_TIMEOUT,
            "budget",
        ),
        (
            lambda rig: rig.failures.add("reboot.check", POLKIT),
            Reason.REBOOT_REQUIRED,
            "polkit",
        ),
    ],
    ids=["budget", "polkit"],
)
def test_a_refused_reboot_evicts_no_pod(
    obstruct: Callable[[node_rig.NodeRig], object], reason: Reason, message: str
) -> None:
    rig = node_with_bystander()
    obstruct(rig)

    ends.run_to(rig, "all-balanced", reason, message)

    assert "bystander" in rig.pods.names
    assert rig.host.reboots == 0


def refuse_a_patch_after_evictions(rig: node_rig.NodeRig) -> None:
    def refuse() -> None:
        raise call_errors.broken("node")

    rig.callbacks.add("node.patch", refuse, when=lambda: "workloads.evict" in rig.log, times=1)


@pytest.mark.parametrize(
    ("obstruct", "reason"),
    [
        (lambda rig: rig.disruptions.refusals.update(job="budget"), Reason.DRAIN_TIMEOUT),
        (refuse_a_patch_after_evictions, Reason.API_UNAVAILABLE),
    ],
    ids=["budget", "API"],
)
def test_a_reboot_follows_once_the_pods_can_leave(
    obstruct: Callable[[node_rig.NodeRig], object], reason: Reason
) -> None:
    rig = nodes.rebooting_node()
    rig.pods.add("job", devices=frozenset({rig.gpus[1].uuid}))
    obstruct(rig)
    agent = agents.new_agent(rig, layouts=ONE_OR_BOTH)
    first = ends.run_to(rig, "one", reason, "no reboot", by=agent)
    assert first.should_retry
    assert "--with-reboot" not in first.message
    rig.disruptions.refusals.clear()
    rig.clock.wait(30)

    go_down(rig, "one", by=agent)

    assert rig.host.reboots == 1


def test_a_drain_for_a_reboot_that_evicted_pods_is_not_repeated() -> None:
    rig = nodes.rebooting_node()
    pod = rig.pods.add("slow", devices=frozenset({rig.gpus[1].uuid}))
    rig.kubelet.pod_ends_from_s[pod] = 3600.0

    outcome = ends.run_to(rig, "one", Reason.REBOOT_REQUIRED, "slow", layouts=ONE_OR_BOTH)

    assert not outcome.should_retry


@pytest.mark.parametrize(
    ("failures", "message"),
    [({"reboot.request": POLKIT}, "polkit says no"), ({}, "still up")],
    ids=["refused", "missing"],
)
def test_a_refused_or_missing_reboot_fails_the_run_and_restores_the_node(
    failures: dict[str, Exception], message: str
) -> None:
    rig = nodes.rebooting_node()
    rig.failures.add_all(failures)

    ends.run_to(rig, "all-1g.5gb", Reason.REBOOT_REQUIRED, message)

    assert {gpu.pending_mode for gpu in rig.gpus} == {model.MigMode.ENABLED}
    # It may be asked for again by the next agent.
    is_counted = rig.node_object.status.get("rebooted", False)
    assert is_counted is not bool(failures)


@pytest.mark.parametrize("label_managed", [True, False])
def test_refused_reboot_refreshes_device_files_and_the_plugin(*, label_managed: bool) -> None:
    rig = nodes.node(layout="all-balanced", label_managed=label_managed)
    nodes.must_reboot(rig)
    rig.failures.add("reboot.request", POLKIT)
    rig.host.refreshes = 0
    before = rig.gpus
    old = set(rig.pods)

    ends.run_to(rig, "all-disabled", Reason.REBOOT_REQUIRED)

    current = (dataclasses.replace(gpu, pending_mode=gpu.current_mode) for gpu in rig.gpus)
    assert gpu_values.geometry(current) == gpu_values.geometry(before)
    assert rig.host.refreshes == 1
    rig.clock.wait(1)
    assert not old & set(rig.pods)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_request_superseded_before_the_reboot_restores_the_node(*, replaced: bool) -> None:
    rig = nodes.hosted_node()
    nodes.must_reboot(rig)
    rig.disruptions.refusals["spared"] = "budget 'pdb-a' allows no disruption"

    ends.supersede(
        rig,
        "all-disabled-first",
        ends_when=lambda: "gpus.execute" in rig.log,
        is_replaced=replaced,
    )
    ends.assert_restored(rig, is_stopped=not replaced)

    assert rig.host.reboots == 0


def test_no_pod_is_evicted_to_reboot_for_an_already_active_layout() -> None:
    rig = nodes.node(layout="all-balanced")
    first, second = rig.gpus
    off = model.MigMode.DISABLED
    changed = dataclasses.replace(first, current_mode=off, pending_mode=off, gpu_instances=())
    rig.gpus = (changed, second)
    rig.advance()
    rig.pods.add("elsewhere", devices=frozenset({nodes.device(rig, 1, "3g.20gb")}))
    nodes.must_reboot(rig)
    agent = agents.start(rig, "all-balanced")

    ends.run_to(rig, "all-balanced", Reason.REBOOT_REQUIRED, "elsewhere", by=agent)

    assert rig.host.reboots == 0
    assert "elsewhere" in rig.pods.names


def test_policy_none_forbids_a_reboot() -> None:
    rig = nodes.rebooting_node()
    rig.owner.policy = policies.Policy(drain=policies.DrainPolicy.NONE)

    ends.run_to(rig, "all-1g.5gb", Reason.RESET_REQUIRED)
    assert rig.host.reboots == 0


def test_a_request_removed_during_the_reboot_restores_the_node() -> None:
    rig = nodes.rebooting_node()
    go_down(rig)
    rig.reboot()
    agents.undo(rig)

    assert rig.node_object.labels[well_known.STATE_LABEL] == "failed"
    ends.assert_restored(rig)
