"""The machine underneath: services, resets, reboots, device files, and the next boot."""

import json

import pytest
import structlog.testing

from mig_manager import errors
from mig_manager.agent import health
from mig_manager.change import instrumentation
from mig_manager.core import model, steps
from mig_manager.core.node import cluster
from mig_manager.core.node import policy as policies
from mig_manager.core.planner import planner
from mig_manager.core.records import status
from tests import fakes, scenes

LAYOUT = "all-1g.5gb"


def steadfast(world: fakes.World) -> fakes.FakeWish:
    return fakes.FakeWish(world.clock, replaced=False)


# -- services ------------------------------------------------------------------------------------


def test_services_that_run_are_stopped_in_order_and_started_in_reverse_before_the_plugin() -> None:
    world = scenes.hosted_node()
    switched: list[tuple[str, bool]] = []
    before = dict(world.services)

    def note() -> None:
        switched.extend((n, on) for n, on in world.services.items() if before[n] is not on)
        before.update(world.services)

    world.on_call = note
    outcome = scenes.run(world, "one-slice-changed")

    assert outcome.state is model.State.SUCCESS
    assert switched == [
        ("dcgm.service", False),
        ("nvsm.service", False),
        ("nvsm.service", True),
        ("dcgm.service", True),
    ]
    calls = [call for call in world.log if call.startswith("host.")]
    assert calls.index("host.refresh") < calls.index("host.start")
    scenes.assert_nothing_taken(world)


def test_services_are_let_be_where_nothing_is_taken_from_anybody() -> None:
    world = scenes.node()
    world.gpus = fakes.brought_to(world.gpus, model.DesiredGpu(mode=model.MigMode.ENABLED))
    world.services["dcgm.service"] = True

    assert scenes.run(world, LAYOUT).state is model.State.SUCCESS
    assert "host.stop" not in world.log


def test_a_service_that_does_not_stop_ends_the_run_before_the_gpus_are_touched() -> None:
    world = scenes.hosted_node()
    world.broken_services = {"nvsm.service"}
    world.step_error = lambda _step: AssertionError()  # it would crash the run

    outcome = scenes.run(world, "one-slice-changed")

    assert outcome.reason is errors.Reason.HOST_SERVICE_FAILED
    assert "nvsm.service does not answer" in outcome.message
    assert world.services["dcgm.service"]


def test_only_a_service_that_was_down_is_logged_as_started() -> None:
    world = scenes.hosted_node()
    world.broken_services = {"nvsm.service"}
    world.on_call = lambda: world.broken_services.clear() if "host.start" in world.log else None

    with structlog.testing.capture_logs() as log:
        scenes.run(world, "one-slice-changed")

    started = [line["service"] for line in log if line["event"] == "host_service_started"]
    assert started == ["dcgm.service"]


def test_a_service_that_does_not_start_again_is_told_and_tried_again() -> None:
    world = scenes.hosted_node()
    world.on_call = lambda: world.broken_services.update(
        {"nvsm.service"} if not world.services["nvsm.service"] else ()
    )
    ours = scenes.reconciler(world)

    outcome = ours.run("one-slice-changed", steadfast(world))

    assert outcome.reason is errors.Reason.HOST_SERVICE_FAILED
    assert outcome.should_retry
    journal = status.Journal.from_json(world.annotations[cluster.JOURNAL_ANNOTATION])
    assert journal.host_services == ("nvsm.service",)
    assert not world.is_unschedulable

    world.on_call = lambda: None
    world.broken_services.clear()
    again = ours.run("one-slice-changed", steadfast(world), attempt=2)
    assert again.state is model.State.SUCCESS
    scenes.assert_nothing_taken(world)


@pytest.mark.parametrize("wanted", ["one-slice-changed", "all-balanced", None])
def test_a_journal_has_no_service_started_that_the_list_does_not_name(wanted: str | None) -> None:
    world = scenes.hosted_node()
    world.services["nvsm.service"] = False
    world.services["debug-shell.service"] = False
    forged = status.Journal(
        config="one-slice-changed", host_services=("debug-shell.service", "nvsm.service")
    )
    world.annotations[cluster.JOURNAL_ANNOTATION] = forged.to_json()
    ours = scenes.reconciler(world, service_names=lambda: ("dcgm.service", "nvsm.service"))

    ours.recover(wanted)
    if wanted:
        assert ours.run(wanted, steadfast(world)).state is model.State.SUCCESS

    assert not world.services["debug-shell.service"]
    assert world.services["nvsm.service"]
    assert "HostServiceRefused" in world.events
    assert any("debug-shell.service" in message for message in world.messages)
    assert cluster.JOURNAL_ANNOTATION not in world.annotations


def test_a_change_that_fails_starts_the_services_all_the_same() -> None:
    world = scenes.hosted_node()
    world.step_error = scenes.refuse(steps.CreateGpuInstance, times=1)

    outcome = scenes.run(world, "one-slice-changed")

    assert outcome.reason is errors.Reason.INSUFFICIENT_RESOURCES
    scenes.assert_nothing_taken(world)


# -- resets --------------------------------------------------------------------------------------


def test_a_mode_that_waits_is_brought_into_force_by_resetting_that_gpu_alone() -> None:
    world = scenes.resetting_node()
    first, second = world.gpus
    (ready,) = fakes.brought_to((first,), model.DesiredGpu(mode=model.MigMode.ENABLED))
    world.gpus = (ready, second)
    world.reset_only = {second.uuid}

    outcome = scenes.run(world, LAYOUT)

    assert outcome.state is model.State.SUCCESS
    assert world.log.count("host.reset") == 1


def test_a_reset_that_is_refused_says_so_and_leaves_the_mode_waiting() -> None:
    world = scenes.resetting_node()
    world.reset_refusal = "GPU 0 is held by dcgm (pid 7)"

    outcome = scenes.run(world, LAYOUT)

    assert outcome.reason is errors.Reason.RESET_REQUIRED
    assert "dcgm (pid 7)" in outcome.message
    assert {gpu.pending_mode for gpu in world.gpus} == {model.MigMode.ENABLED}
    assert {gpu.current_mode for gpu in world.gpus} == {model.MigMode.DISABLED}
    scenes.assert_nothing_taken(world)


def test_without_leave_to_reset_a_mode_that_waits_is_a_reset_required() -> None:
    world = scenes.resetting_node()
    world.has_reset = False

    assert scenes.run(world, LAYOUT).reason is errors.Reason.RESET_REQUIRED
    scenes.assert_nothing_taken(world)


# -- reboots -------------------------------------------------------------------------------------


def rebooting_node() -> fakes.World:
    """Only a reboot helps; a pod holds a whole GPU."""
    world = scenes.node()
    world.mode_waits = world.may_reboot = True
    return world


def go_down(world: fakes.World, layout: str = LAYOUT) -> None:
    """Run until the machine goes down: the signal to end comes while it is waited for."""
    patient = fakes.FakeWish(world.clock, replaced=False)
    patient.ends_when = lambda: world.reboots > 0
    with pytest.raises(errors.Superseded):
        scenes.reconciler(world).run(layout, patient)


def test_where_only_a_reboot_helps_there_is_one_and_the_layout_is_in_force_after_it() -> None:
    world = rebooting_node()

    go_down(world)

    assert world.reboots == 1
    assert world.labels[cluster.STATE_LABEL] == "rebooting"
    assert world.has_hold_taint
    assert "Rebooting" in world.events
    world.mode_waits = False
    world.restart_machine()
    successor = scenes.reconciler(world)
    successor.recover(LAYOUT)
    outcome = successor.run(LAYOUT, steadfast(world))

    assert outcome.state is model.State.SUCCESS
    assert world.reboots == 1
    scenes.assert_nothing_taken(world)


def test_a_reboot_that_did_not_help_is_not_followed_by_another_not_even_after_a_restart() -> None:
    world = rebooting_node()
    go_down(world)
    world.restart_machine()
    # The mode was lost in the reboot, and waits again.
    world.gpus = scenes.node().gpus

    for _ in range(3):
        successor = scenes.reconciler(world)
        successor.recover(LAYOUT)
        outcome = successor.run(LAYOUT, steadfast(world))

        assert outcome.reason is errors.Reason.RESET_REQUIRED
        assert world.reboots == 1
        scenes.assert_nothing_taken(world)


def test_another_layout_does_not_start_a_run_on_a_machine_that_goes_down() -> None:
    world = rebooting_node()
    impatient = fakes.FakeWish(world.clock, replaced=True)
    impatient.ends_when = lambda: world.reboots > 0

    outcome = scenes.reconciler(world).run(LAYOUT, impatient)

    assert outcome.reason is errors.Reason.REBOOT_REQUIRED
    assert "the machine is still up 600 s after it was asked" in outcome.message
    assert world.clock.now_s >= 600
    assert world.reboots == 1
    scenes.assert_nothing_taken(world)


def test_an_agent_that_starts_before_the_machine_went_down_asks_for_the_reboot_again() -> None:
    world = rebooting_node()
    go_down(world)

    go_down_again = fakes.FakeWish(world.clock, replaced=False)
    go_down_again.ends_when = lambda: world.reboots > 1
    successor = scenes.reconciler(world)
    successor.recover(LAYOUT)
    with pytest.raises(errors.Superseded):
        successor.run(LAYOUT, go_down_again)

    assert world.reboots == 2
    assert world.labels[cluster.STATE_LABEL] == "rebooting"


def test_a_reboot_comes_after_every_gpu_pod_has_left() -> None:
    world = scenes.node(layout="all-balanced")
    world.mode_waits = world.may_reboot = True
    first, second = world.gpus
    (off,) = fakes.brought_to((first,), model.DesiredGpu(mode=model.MigMode.DISABLED))
    world.gpus = (off, second)
    world.add_pod("bystander", devices=frozenset({scenes.device(world, 1, "3g.20gb")}))

    go_down(world, "all-balanced")

    assert "bystander" not in {pod.name for pod in world.pods.values()}


def test_a_budget_that_guards_a_bystander_prevents_the_reboot_and_nothing_stays_taken() -> None:
    world = scenes.node(layout="all-balanced")
    world.mode_waits = world.may_reboot = True
    first, second = world.gpus
    (off,) = fakes.brought_to((first,), model.DesiredGpu(mode=model.MigMode.DISABLED))
    world.gpus = (off, second)
    world.add_pod("bystander", devices=frozenset({scenes.device(world, 1, "3g.20gb")}))
    world.budgets["bystander"] = "budget 'pdb-a' allows no disruption"

    outcome = scenes.run(world, "all-balanced")

    assert outcome.reason is errors.Reason.REBOOT_REQUIRED
    assert "pdb-a" in outcome.message
    assert world.reboots == 0
    scenes.assert_nothing_taken(world)


@pytest.mark.parametrize("refusal", ["polkit says no", ""])
def test_a_reboot_that_is_refused_or_does_not_come_ends_the_run_with_everything_given_back(
    refusal: str,
) -> None:
    world = rebooting_node()
    world.reboot_refusal = refusal

    outcome = scenes.run(world, LAYOUT)

    assert outcome.reason is errors.Reason.REBOOT_REQUIRED
    assert (refusal or "still up") in outcome.message
    assert {gpu.pending_mode for gpu in world.gpus} == {model.MigMode.ENABLED}
    scenes.assert_nothing_taken(world)


@pytest.mark.parametrize("gated", [True, False])
def test_after_a_refused_reboot_device_files_are_refreshed_and_the_plugin_is_a_new_one(
    *, gated: bool
) -> None:
    world = scenes.node(layout="all-balanced", gated=gated)
    world.mode_waits = world.may_reboot = True
    world.reboot_refusal = "polkit says no"
    world.refreshed = 0
    before = world.gpus
    old = set(world.pods)

    outcome = scenes.run(world, "all-disabled")

    assert outcome.reason is errors.Reason.REBOOT_REQUIRED
    assert planner.restore(
        world.gpus, [gpu.snapshot for gpu in before], keep_pending=True
    ).is_empty
    assert world.refreshed == 1
    world.clock.wait(1)
    assert not old & set(world.pods)
    scenes.assert_nothing_taken(world)


class Alive(instrumentation.Telemetry):
    """Gives a sign of life wherever the worker gives one."""

    def __init__(self, pulse: health.Pulse) -> None:
        self._pulse = pulse

    def still_working(self) -> None:
        self._pulse.beat()


def test_slow_services_and_a_long_rollback_do_not_look_like_a_stuck_worker() -> None:
    world = scenes.node(layout="all-balanced")
    world.services = {f"s{number}.service": True for number in range(5)}
    pulse = health.Pulse(lambda: world.clock.now_s)
    pulse.beat()
    slow_s = 100.0
    silences: list[float] = []

    def take_long() -> None:
        if world.log[-1] in ("host.stop", "host.start"):
            world.clock.now_s += slow_s
        silences.append(pulse.silence_s)

    world.on_call = take_long
    reconciler = scenes.reconciler(world, telemetry=Alive(pulse))
    outcome = reconciler.run("all-1g.5gb", steadfast(world))

    assert outcome.state is model.State.SUCCESS
    assert world.clock.now_s > 10 * slow_s
    assert max(silences) < 2 * slow_s


def test_a_rollback_that_waits_for_the_plugin_to_go_gives_signs_of_life() -> None:
    world = scenes.node(layout="all-balanced")
    scenes.kill_at(world, 5, "all-1g.5gb")
    # Somebody has let the plugin come back meanwhile, and taken the taint away.
    world.has_hold_taint = False
    world.labels[cluster.PLUGIN_DEPLOY_LABEL] = "true"
    world.start_plugin()
    pulse = health.Pulse(lambda: world.clock.now_s)
    pulse.beat()
    silences: list[float] = []
    world.clock.on_wait.append(lambda: silences.append(pulse.silence_s))

    scenes.reconciler(world, telemetry=Alive(pulse)).recover(None)

    assert silences
    assert max(silences) < 1


def test_a_reboot_that_was_refused_may_be_asked_for_again_by_the_next_agent() -> None:
    world = rebooting_node()
    world.reboot_refusal = "polkit says no"
    scenes.run(world, LAYOUT)
    assert "rebooted" not in json.loads(world.annotations[cluster.STATUS_ANNOTATION])
    world.reboot_refusal = ""

    go_down(world)

    assert world.reboots == 1


@pytest.mark.parametrize("replaced", [True, False])
def test_a_wish_that_ends_before_the_reboot_is_asked_for_gives_everything_back(
    *, replaced: bool
) -> None:
    world = scenes.hosted_node()
    world.mode_waits = world.may_reboot = True
    world.budgets["spared"] = "budget 'pdb-a' allows no disruption"
    wish = fakes.FakeWish(world.clock, replaced=replaced)
    wish.ends_when = lambda: "gpus.execute" in world.log

    with pytest.raises(errors.Superseded):
        scenes.reconciler(world).run("all-disabled-first", wish)

    assert world.reboots == 0
    scenes.assert_nothing_taken(world)


def test_where_nobody_may_be_sent_away_there_is_no_reboot() -> None:
    world = rebooting_node()
    world.policy = policies.Policy(drain=policies.Drain.NONE)

    assert scenes.run(world, LAYOUT).reason is errors.Reason.RESET_REQUIRED
    assert world.reboots == 0


def test_a_wish_that_is_gone_after_the_reboot_gives_everything_back() -> None:
    world = rebooting_node()
    go_down(world)
    world.restart_machine()
    successor = scenes.reconciler(world)

    successor.recover(None)
    successor.rest()

    assert world.labels[cluster.STATE_LABEL] == "failed"
    scenes.assert_nothing_taken(world)


# -- the next boot -------------------------------------------------------------------------------


def test_each_proven_layout_is_kept_for_the_next_boot_with_its_places() -> None:
    world = scenes.node()

    scenes.run(world, LAYOUT)

    proven = status.VerifiedLayout.from_json(world.saved[-1])
    assert (proven.config, proven.boot_id) == (LAYOUT, "boot-1")
    assert planner.restore(world.gpus, proven.snapshot).is_empty


def test_what_is_kept_of_an_unreachable_gpu_outlives_the_next_layout() -> None:
    world = scenes.node()
    scenes.run(world, LAYOUT)
    world.lost.add(world.gpus[0].uuid)

    outcome = scenes.run(world, "all-balanced")

    assert outcome.state is model.State.SUCCESS
    proven = status.VerifiedLayout.from_json(world.saved[-1])
    assert proven.config == "all-balanced"
    assert {gpu.uuid for gpu in proven.snapshot} == {gpu.uuid for gpu in world.gpus}
    assert planner.restore(world.gpus, proven.snapshot).is_empty


def test_a_layout_that_fails_is_not_kept() -> None:
    world = scenes.node()
    world.plugin_is_broken = True
    world.pods.clear()

    scenes.run(world, LAYOUT)

    assert world.saved == []


@pytest.mark.parametrize("text", ["", "[]", "{" * 9999, '{"version": 9}', '{"version": 1}'])
def test_a_kept_layout_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        status.VerifiedLayout.from_json(text)


def test_the_status_remembers_the_reboot() -> None:
    world = rebooting_node()

    go_down(world)

    assert json.loads(world.annotations[cluster.STATUS_ANNOTATION])["rebooted"] is True


# -- processes that use what is going to be destroyed ---------------------------------------------


def test_a_process_that_stays_ends_the_run_before_anything_is_destroyed() -> None:
    world = scenes.busy_node()
    world.gpu_users = "python (pid 4242, unit train.service)"
    world.refreshed = 0
    before = world.gpus

    outcome = scenes.run(world, "one-slice-changed")

    assert outcome.reason is errors.Reason.IN_USE
    assert outcome.should_retry
    assert "in use by python (pid 4242, unit train.service); waited 30 s" in outcome.message
    assert world.clock.now_s >= 30
    assert (world.executed, world.gpus, world.refreshed) == ([], before, 0)
    assert world.labels[cluster.APPLIED_LABEL] == "all-balanced"
    scenes.assert_nothing_taken(world)


def test_a_process_that_ends_is_waited_for() -> None:
    world = scenes.busy_node()
    world.gpu_users = "python (pid 4242)"

    def end() -> None:
        if world.clock.now_s > 10:
            world.gpu_users = ""

    world.clock.on_wait.append(end)

    assert scenes.run(world, "one-slice-changed").state is model.State.SUCCESS
    assert world.clock.now_s > 10


def test_a_newer_wish_ends_the_wait_for_a_process() -> None:
    world = scenes.busy_node()
    world.gpu_users = "python (pid 4242)"
    before = world.gpus
    wish = fakes.FakeWish(world.clock, replaced=True)
    wish.ends_when = lambda: "gpus.execute" in world.log

    with pytest.raises(errors.Superseded):
        scenes.reconciler(world).run("one-slice-changed", wish)

    assert (world.executed, world.gpus) == ([], before)
    scenes.assert_nothing_taken(world)


def test_an_interrupted_change_is_not_rolled_back_beside_a_process_that_uses_what_it_made() -> (
    None
):
    world = scenes.node(layout="all-balanced")
    scenes.kill_at(world, 9, "all-1g.5gb")
    world.executed.clear()
    world.gpu_users = "python (pid 4242)"
    successor = scenes.reconciler(world)

    successor.recover(None)
    assert world.executed == []
    assert successor.rest()

    world.gpu_users = ""
    assert not successor.rest()
    assert world.executed
