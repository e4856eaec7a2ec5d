"""The machine underneath: services, resets, reboots, device files, and the next boot."""

import json

import pytest
import structlog.testing

from mig_manager import errors
from mig_manager.agent import loop
from mig_manager.core import model, ports, steps
from mig_manager.core.node import cluster
from mig_manager.core.node import policy as policies
from mig_manager.core.planner import planner
from mig_manager.core.records import status
from tests import fakes, scenes

LAYOUT = "all-1g.5gb"


def steadfast(rig: fakes.NodeRig) -> fakes.FakeRequest:
    return fakes.FakeRequest(rig.clock)


# -- services ------------------------------------------------------------------------------------


def test_services_that_run_are_stopped_in_order_and_started_in_reverse_before_the_plugin() -> None:
    rig = scenes.hosted_node()
    switched: list[tuple[str, bool]] = []
    before = dict(rig.services)

    def note() -> None:
        switched.extend((n, on) for n, on in rig.services.items() if before[n] is not on)
        before.update(rig.services)

    rig.on_call = note
    outcome = scenes.run(rig, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert switched == [
        ("dcgm.service", False),
        ("nvsm.service", False),
        ("nvsm.service", True),
        ("dcgm.service", True),
    ]
    calls = [call for call in rig.log if call.startswith("host.")]
    assert calls.index("host.refresh") < calls.index("host.start")
    scenes.assert_nothing_taken(rig)


def test_services_keep_running_where_no_device_is_removed() -> None:
    rig = scenes.node()
    rig.gpus = fakes.brought_to(rig.gpus, model.DesiredGpu(mode=model.MigMode.ENABLED))
    rig.services["dcgm.service"] = True

    assert scenes.run(rig, LAYOUT).state is model.State.SUCCESS
    assert "host.stop" not in rig.log


def test_a_service_that_does_not_stop_ends_the_run_before_the_gpus_are_touched() -> None:
    rig = scenes.hosted_node()
    rig.broken_services = {"nvsm.service"}
    rig.step_error = lambda _step: AssertionError()  # it would crash the run

    outcome = scenes.run(rig, "one-slice-changed")

    assert outcome.reason is errors.Reason.HOST_SERVICE_FAILED
    assert "nvsm.service does not answer" in outcome.message
    assert rig.services["dcgm.service"]


def test_only_a_service_that_was_down_is_logged_as_started() -> None:
    rig = scenes.hosted_node()
    rig.broken_services = {"nvsm.service"}
    rig.on_call = lambda: rig.broken_services.clear() if "host.start" in rig.log else None

    with structlog.testing.capture_logs() as log:
        scenes.run(rig, "one-slice-changed")

    started = [line["service"] for line in log if line["event"] == "host_service_started"]
    assert started == ["dcgm.service"]


def test_a_service_that_does_not_start_is_reported_and_retried() -> None:
    rig = scenes.hosted_node()
    rig.on_call = lambda: rig.broken_services.update(
        {"nvsm.service"} if not rig.services["nvsm.service"] else ()
    )
    ours = scenes.reconciler(rig)

    outcome = ours.run("one-slice-changed", steadfast(rig))

    assert outcome.reason is errors.Reason.HOST_SERVICE_FAILED
    assert outcome.should_retry
    journal = status.Journal.from_json(rig.annotations[cluster.JOURNAL_ANNOTATION])
    assert journal.host_services == ("nvsm.service",)
    assert not rig.is_unschedulable

    rig.on_call = lambda: None
    rig.broken_services.clear()
    again = ours.run("one-slice-changed", steadfast(rig), attempt=2)
    assert again.state is model.State.SUCCESS
    scenes.assert_nothing_taken(rig)


@pytest.mark.parametrize("wanted", ["one-slice-changed", "all-balanced", None])
def test_a_journal_has_no_service_started_that_the_list_does_not_name(wanted: str | None) -> None:
    rig = scenes.hosted_node()
    rig.services["nvsm.service"] = False
    rig.services["debug-shell.service"] = False
    forged = status.Journal(
        config="one-slice-changed", host_services=("debug-shell.service", "nvsm.service")
    )
    rig.annotations[cluster.JOURNAL_ANNOTATION] = forged.to_json()
    ours = scenes.reconciler(rig, service_names=lambda: ("dcgm.service", "nvsm.service"))

    ours.recover(wanted)
    if wanted:
        assert ours.run(wanted, steadfast(rig)).state is model.State.SUCCESS

    assert not rig.services["debug-shell.service"]
    assert rig.services["nvsm.service"]
    assert "HostServiceRefused" in rig.events
    assert any("debug-shell.service" in message for message in rig.messages)
    assert cluster.JOURNAL_ANNOTATION not in rig.annotations


def test_a_change_that_fails_starts_the_services_all_the_same() -> None:
    rig = scenes.hosted_node()
    rig.step_error = scenes.refuse(steps.CreateGpuInstance, times=1)

    outcome = scenes.run(rig, "one-slice-changed")

    assert outcome.reason is errors.Reason.INSUFFICIENT_RESOURCES
    scenes.assert_nothing_taken(rig)


# -- resets --------------------------------------------------------------------------------------


def test_a_mode_that_waits_is_brought_into_force_by_resetting_that_gpu_alone() -> None:
    rig = scenes.resetting_node()
    first, second = rig.gpus
    (ready,) = fakes.brought_to((first,), model.DesiredGpu(mode=model.MigMode.ENABLED))
    rig.gpus = (ready, second)
    rig.reset_only = {second.uuid}

    outcome = scenes.run(rig, LAYOUT)

    assert outcome.state is model.State.SUCCESS
    assert rig.log.count("host.reset") == 1


def test_a_reset_that_is_refused_says_so_and_leaves_the_mode_waiting() -> None:
    rig = scenes.resetting_node()
    rig.reset_refusal = "GPU 0 is in use by dcgm (pid 7)"

    outcome = scenes.run(rig, LAYOUT)

    assert outcome.reason is errors.Reason.RESET_REQUIRED
    assert "dcgm (pid 7)" in outcome.message
    assert {gpu.pending_mode for gpu in rig.gpus} == {model.MigMode.ENABLED}
    assert {gpu.current_mode for gpu in rig.gpus} == {model.MigMode.DISABLED}
    scenes.assert_nothing_taken(rig)


def test_without_leave_to_reset_a_mode_that_waits_is_a_reset_required() -> None:
    rig = scenes.resetting_node()
    rig.has_reset = False

    assert scenes.run(rig, LAYOUT).reason is errors.Reason.RESET_REQUIRED
    scenes.assert_nothing_taken(rig)


# -- reboots -------------------------------------------------------------------------------------


def rebooting_node() -> fakes.NodeRig:
    """Only a reboot helps; a pod holds a whole GPU."""
    rig = scenes.node()
    rig.mode_waits = rig.may_reboot = True
    return rig


def go_down(rig: fakes.NodeRig, layout: str = LAYOUT) -> None:
    """Run until the machine goes down: the signal to end comes while it is waited for."""
    patient = fakes.FakeRequest(rig.clock)
    patient.ends_when = lambda: rig.reboots > 0
    with pytest.raises(errors.Superseded):
        scenes.reconciler(rig).run(layout, patient)


def test_where_only_a_reboot_helps_the_node_reboots_once_and_gets_its_layout() -> None:
    rig = rebooting_node()

    go_down(rig)

    assert rig.reboots == 1
    assert rig.labels[cluster.STATE_LABEL] == "rebooting"
    assert rig.has_hold_taint
    assert "Rebooting" in rig.events
    rig.mode_waits = False
    rig.restart_machine()
    successor = scenes.reconciler(rig)
    successor.recover(LAYOUT)
    outcome = successor.run(LAYOUT, steadfast(rig))

    assert outcome.state is model.State.SUCCESS
    assert rig.reboots == 1
    scenes.assert_nothing_taken(rig)


def test_a_reboot_that_did_not_help_is_not_followed_by_another_not_even_after_a_restart() -> None:
    rig = rebooting_node()
    go_down(rig)
    rig.restart_machine()
    # The mode was lost in the reboot, and waits again.
    rig.gpus = scenes.node().gpus

    for _ in range(3):
        successor = scenes.reconciler(rig)
        successor.recover(LAYOUT)
        outcome = successor.run(LAYOUT, steadfast(rig))

        assert outcome.reason is errors.Reason.RESET_REQUIRED
        assert rig.reboots == 1
        scenes.assert_nothing_taken(rig)


def test_another_layout_does_not_start_a_run_on_a_machine_that_goes_down() -> None:
    rig = rebooting_node()
    impatient = fakes.FakeRequest(rig.clock, replaced=True)
    impatient.ends_when = lambda: rig.reboots > 0

    outcome = scenes.reconciler(rig).run(LAYOUT, impatient)

    assert outcome.reason is errors.Reason.REBOOT_REQUIRED
    assert "the machine is still up 600 s after it was asked" in outcome.message
    assert rig.clock.now_s >= 600
    assert rig.reboots == 1
    scenes.assert_nothing_taken(rig)


def test_an_agent_that_starts_before_the_machine_went_down_asks_for_the_reboot_again() -> None:
    rig = rebooting_node()
    go_down(rig)

    go_down_again = fakes.FakeRequest(rig.clock)
    go_down_again.ends_when = lambda: rig.reboots > 1
    successor = scenes.reconciler(rig)
    successor.recover(LAYOUT)
    with pytest.raises(errors.Superseded):
        successor.run(LAYOUT, go_down_again)

    assert rig.reboots == 2
    assert rig.labels[cluster.STATE_LABEL] == "rebooting"


def test_a_reboot_comes_after_every_gpu_pod_has_left() -> None:
    rig = scenes.node(layout="all-balanced")
    rig.mode_waits = rig.may_reboot = True
    first, second = rig.gpus
    (off,) = fakes.brought_to((first,), model.DesiredGpu(mode=model.MigMode.DISABLED))
    rig.gpus = (off, second)
    rig.add_pod("bystander", devices=frozenset({scenes.device(rig, 1, "3g.20gb")}))

    go_down(rig, "all-balanced")

    assert "bystander" not in {pod.name for pod in rig.pods.values()}


def test_a_budget_that_guards_a_bystander_prevents_the_reboot_and_nothing_stays_taken() -> None:
    rig = scenes.node(layout="all-balanced")
    rig.mode_waits = rig.may_reboot = True
    first, second = rig.gpus
    (off,) = fakes.brought_to((first,), model.DesiredGpu(mode=model.MigMode.DISABLED))
    rig.gpus = (off, second)
    rig.add_pod("bystander", devices=frozenset({scenes.device(rig, 1, "3g.20gb")}))
    rig.budgets["bystander"] = "budget 'pdb-a' allows no disruption"

    outcome = scenes.run(rig, "all-balanced")

    assert outcome.reason is errors.Reason.REBOOT_REQUIRED
    assert "pdb-a" in outcome.message
    assert rig.reboots == 0
    scenes.assert_nothing_taken(rig)


@pytest.mark.parametrize("refusal", ["polkit says no", ""])
def test_a_refused_or_missing_reboot_fails_the_run_and_restores_the_node(
    refusal: str,
) -> None:
    rig = rebooting_node()
    rig.reboot_refusal = refusal

    outcome = scenes.run(rig, LAYOUT)

    assert outcome.reason is errors.Reason.REBOOT_REQUIRED
    assert (refusal or "still up") in outcome.message
    assert {gpu.pending_mode for gpu in rig.gpus} == {model.MigMode.ENABLED}
    scenes.assert_nothing_taken(rig)


@pytest.mark.parametrize("gated", [True, False])
def test_after_a_refused_reboot_device_files_are_refreshed_and_the_plugin_is_a_new_one(
    *, gated: bool
) -> None:
    rig = scenes.node(layout="all-balanced", gated=gated)
    rig.mode_waits = rig.may_reboot = True
    rig.reboot_refusal = "polkit says no"
    rig.refreshed = 0
    before = rig.gpus
    old = set(rig.pods)

    outcome = scenes.run(rig, "all-disabled")

    assert outcome.reason is errors.Reason.REBOOT_REQUIRED
    assert planner.restore(rig.gpus, [gpu.snapshot for gpu in before], keep_pending=True).is_empty
    assert rig.refreshed == 1
    rig.clock.wait(1)
    assert not old & set(rig.pods)
    scenes.assert_nothing_taken(rig)


class Alive(ports.Telemetry):
    """Gives a sign of life wherever the worker gives one."""

    def __init__(self, pulse: loop.Pulse) -> None:
        self._pulse = pulse

    def still_working(self) -> None:
        self._pulse.beat()


def test_slow_services_and_a_long_rollback_do_not_look_like_a_stuck_worker() -> None:
    rig = scenes.node(layout="all-balanced")
    rig.services = {f"s{number}.service": True for number in range(5)}
    pulse = loop.Pulse(lambda: rig.clock.now_s)
    pulse.beat()
    slow_s = 100.0
    silences: list[float] = []

    def take_long() -> None:
        if rig.log[-1] in ("host.stop", "host.start"):
            rig.clock.now_s += slow_s
        silences.append(pulse.silence_s)

    rig.on_call = take_long
    reconciler = scenes.reconciler(rig, telemetry=Alive(pulse))
    outcome = reconciler.run("all-1g.5gb", steadfast(rig))

    assert outcome.state is model.State.SUCCESS
    assert rig.clock.now_s > 10 * slow_s
    assert max(silences) < 2 * slow_s


def test_a_rollback_that_waits_for_the_plugin_to_go_gives_signs_of_life() -> None:
    rig = scenes.node(layout="all-balanced")
    scenes.kill_at(rig, 5, "all-1g.5gb")
    # Another program has resumed the plugin meanwhile, and removed the taint.
    rig.has_hold_taint = False
    rig.labels[cluster.PLUGIN_DEPLOY_LABEL] = "true"
    rig.start_plugin()
    pulse = loop.Pulse(lambda: rig.clock.now_s)
    pulse.beat()
    silences: list[float] = []
    rig.clock.on_wait.append(lambda: silences.append(pulse.silence_s))

    scenes.reconciler(rig, telemetry=Alive(pulse)).recover(None)

    assert silences
    assert max(silences) < 1


def test_a_reboot_that_was_refused_may_be_asked_for_again_by_the_next_agent() -> None:
    rig = rebooting_node()
    rig.reboot_refusal = "polkit says no"
    scenes.run(rig, LAYOUT)
    assert "rebooted" not in json.loads(rig.annotations[cluster.STATUS_ANNOTATION])
    rig.reboot_refusal = ""

    go_down(rig)

    assert rig.reboots == 1


@pytest.mark.parametrize("replaced", [True, False])
def test_a_request_superseded_before_the_reboot_restores_the_node(*, replaced: bool) -> None:
    rig = scenes.hosted_node()
    rig.mode_waits = rig.may_reboot = True
    rig.budgets["spared"] = "budget 'pdb-a' allows no disruption"
    request = fakes.FakeRequest(rig.clock, replaced=replaced)
    request.ends_when = lambda: "gpus.execute" in rig.log

    with pytest.raises(errors.Superseded):
        scenes.reconciler(rig).run("all-disabled-first", request)

    assert rig.reboots == 0
    scenes.assert_nothing_taken(rig)


def test_policy_none_forbids_a_reboot() -> None:
    rig = rebooting_node()
    rig.policy = policies.Policy(drain=policies.Drain.NONE)

    assert scenes.run(rig, LAYOUT).reason is errors.Reason.RESET_REQUIRED
    assert rig.reboots == 0


def test_a_request_removed_during_the_reboot_restores_the_node() -> None:
    rig = rebooting_node()
    go_down(rig)
    rig.restart_machine()
    successor = scenes.reconciler(rig)

    successor.recover(None)
    successor.rest()

    assert rig.labels[cluster.STATE_LABEL] == "failed"
    scenes.assert_nothing_taken(rig)


# -- the next boot -------------------------------------------------------------------------------


def test_each_verified_layout_is_kept_for_the_next_boot_with_its_placements() -> None:
    rig = scenes.node()

    scenes.run(rig, LAYOUT)

    verified = status.VerifiedLayout.from_json(rig.saved[-1])
    assert (verified.config, verified.boot_id) == (LAYOUT, "boot-1")
    assert planner.restore(rig.gpus, verified.snapshot).is_empty


def test_what_is_kept_of_an_unreachable_gpu_outlives_the_next_layout() -> None:
    rig = scenes.node()
    scenes.run(rig, LAYOUT)
    rig.lost.add(rig.gpus[0].uuid)

    outcome = scenes.run(rig, "all-balanced")

    assert outcome.state is model.State.SUCCESS
    verified = status.VerifiedLayout.from_json(rig.saved[-1])
    assert verified.config == "all-balanced"
    assert {gpu.uuid for gpu in verified.snapshot} == {gpu.uuid for gpu in rig.gpus}
    assert planner.restore(rig.gpus, verified.snapshot).is_empty


def test_a_layout_that_fails_is_not_kept() -> None:
    rig = scenes.node()
    rig.plugin_is_broken = True
    rig.pods.clear()

    scenes.run(rig, LAYOUT)

    assert rig.saved == []


@pytest.mark.parametrize("text", ["", "[]", "{" * 9999, '{"version": 9}', '{"version": 1}'])
def test_a_kept_layout_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        status.VerifiedLayout.from_json(text)


def test_the_status_remembers_the_reboot() -> None:
    rig = rebooting_node()

    go_down(rig)

    assert json.loads(rig.annotations[cluster.STATUS_ANNOTATION])["rebooted"] is True


# -- processes that use what is going to be destroyed ---------------------------------------------


def test_a_process_that_stays_ends_the_run_before_anything_is_destroyed() -> None:
    rig = scenes.busy_node()
    rig.gpu_users = "python (pid 4242, unit train.service)"
    rig.refreshed = 0
    before = rig.gpus

    outcome = scenes.run(rig, "one-slice-changed")

    assert outcome.reason is errors.Reason.IN_USE
    assert outcome.should_retry
    assert "in use by python (pid 4242, unit train.service); waited 30 s" in outcome.message
    assert rig.clock.now_s >= 30
    assert (rig.executed, rig.gpus, rig.refreshed) == ([], before, 0)
    assert rig.labels[cluster.APPLIED_LABEL] == "all-balanced"
    scenes.assert_nothing_taken(rig)


def test_a_process_that_ends_is_waited_for() -> None:
    rig = scenes.busy_node()
    rig.gpu_users = "python (pid 4242)"

    def end() -> None:
        if rig.clock.now_s > 10:
            rig.gpu_users = ""

    rig.clock.on_wait.append(end)

    assert scenes.run(rig, "one-slice-changed").state is model.State.SUCCESS
    assert rig.clock.now_s > 10


def test_a_newer_request_ends_the_wait_for_a_process() -> None:
    rig = scenes.busy_node()
    rig.gpu_users = "python (pid 4242)"
    before = rig.gpus
    request = fakes.FakeRequest(rig.clock, replaced=True)
    request.ends_when = lambda: "gpus.execute" in rig.log

    with pytest.raises(errors.Superseded):
        scenes.reconciler(rig).run("one-slice-changed", request)

    assert (rig.executed, rig.gpus) == ([], before)
    scenes.assert_nothing_taken(rig)


def test_an_interrupted_change_is_not_rolled_back_beside_a_process_that_uses_what_it_made() -> (
    None
):
    rig = scenes.node(layout="all-balanced")
    scenes.kill_at(rig, 9, "all-1g.5gb")
    rig.executed.clear()
    rig.gpu_users = "python (pid 4242)"
    successor = scenes.reconciler(rig)

    successor.recover(None)
    assert rig.executed == []
    assert successor.rest()

    rig.gpu_users = ""
    assert not successor.rest()
    assert rig.executed
