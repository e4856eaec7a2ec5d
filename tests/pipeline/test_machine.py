"""The machine underneath: services, resets, reboots, device files, and the next boot."""

import pytest
import structlog.testing

from mig_manager import errors
from mig_manager.agent import loop
from mig_manager.core import model, ports, steps
from mig_manager.core.node import cluster
from mig_manager.core.planner import planner
from mig_manager.core.records import status
from tests import fakes, gpu_values, scenes

LAYOUT = "all-1g.5gb"


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
    rig.gpus = gpu_values.brought_to(rig.gpus, model.DesiredGpu(mode=model.MigMode.ENABLED))
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

    outcome = ours.run("one-slice-changed", fakes.FakeRequest(rig.clock))

    assert outcome.reason is errors.Reason.HOST_SERVICE_FAILED
    assert outcome.should_retry
    journal = status.Journal.from_json(rig.annotations[cluster.JOURNAL_ANNOTATION])
    assert journal.host_services == ("nvsm.service",)
    assert not rig.is_unschedulable

    rig.on_call = lambda: None
    rig.broken_services.clear()
    again = ours.run("one-slice-changed", fakes.FakeRequest(rig.clock), attempt=2)
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
        assert ours.run(wanted, fakes.FakeRequest(rig.clock)).state is model.State.SUCCESS

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
    outcome = reconciler.run("all-1g.5gb", fakes.FakeRequest(rig.clock))

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
