"""The machine underneath: services, resets, reboots, device files, and the next boot."""

import dataclasses

import pytest
import structlog.testing

from mig_manager import errors
from mig_manager.core import liveness, model, ports, steps
from mig_manager.core.objects import well_known
from mig_manager.core.records import host_copy, journals, requests, run_status, verified_layouts
from mig_manager.reasons import Reason
from tests.rigs.node import (
    agents,
    call_errors,
    ends,
    gpu_values,
    moments,
    node_rig,
    nodes,
    strikes,
)

ALL_1G = "all-1g.5gb"
NO_MIG = model.DesiredGpu(mode=model.MigMode.DISABLED)


def test_services_stop_in_order_and_start_in_reverse_before_the_plugin() -> None:
    rig = nodes.hosted_node()
    switched: list[tuple[str, bool]] = []
    before = dict(rig.host.services)

    def note() -> None:
        switched.extend((n, on) for n, on in rig.host.services.items() if before[n] is not on)
        before.update(rig.host.services)

    rig.callbacks.add(moments.Call, note)
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert switched == [
        ("dcgm.service", False),
        ("nvsm.service", False),
        ("nvsm.service", True),
        ("dcgm.service", True),
    ]
    assert rig.log.index("refresh_files") < rig.log.index("services.start")


def test_services_keep_running_where_no_device_is_removed() -> None:
    rig = nodes.node()
    rig.gpus = gpu_values.with_desired(rig.gpus, model.DesiredGpu(mode=model.MigMode.ENABLED))
    rig.host.services["dcgm.service"] = True

    ends.run_to(rig, ALL_1G, Reason.APPLIED)
    assert "services.stop" not in rig.log
    assert not any("stopping" in message for message in rig.node_object.status_messages)


def test_service_that_does_not_stop_ends_the_run_before_gpus_change() -> None:
    rig = nodes.hosted_node()
    rig.host.broken_services = {"nvsm.service"}
    rig.failures.add(steps.Step, AssertionError())  # it would crash the run
    rig.callbacks.add(
        moments.Call, rig.host.broken_services.clear, when=lambda: "services.start" in rig.log
    )

    with structlog.testing.capture_logs() as log:
        ends.run_to(
            rig, "one-slice-changed", Reason.HOST_SERVICE_FAILED, "nvsm.service does not answer"
        )

    # One that never stopped is not logged as started.
    started = [line["service"] for line in log if line["event"] == "host_service_started"]
    assert started == ["dcgm.service"]


def test_a_service_that_does_not_start_is_reported_and_retried() -> None:
    rig = nodes.hosted_node()
    agent = agents.new_agent(rig)

    rig.callbacks.add(
        moments.Call,
        lambda: rig.host.broken_services.add("nvsm.service"),
        when=lambda: not rig.host.services["nvsm.service"],
        times=1,
    )
    outcome = agents.run(rig, "one-slice-changed", by=agent)

    assert outcome.reason is Reason.HOST_SERVICE_FAILED
    assert outcome.should_retry
    assert rig.node_object.journal.host.stopped_services == ("nvsm.service",)
    assert not rig.node_object.is_unschedulable

    rig.host.broken_services.clear()
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED, by=agent, attempt=2)


@pytest.mark.parametrize("requested", ["one-slice-changed", "all-balanced", None])
def test_a_journal_starts_no_service_that_is_not_in_the_list(requested: str | None) -> None:
    rig = nodes.hosted_node()
    rig.host.services["nvsm.service"] = False
    rig.host.services["debug-shell.service"] = False
    forged = journals.Journal(
        layout="one-slice-changed",
        host=journals.HostEntries(stopped_services=("debug-shell.service", "nvsm.service")),
    )
    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = forged.to_json()
    agent = agents.start(rig, requested, service_names=lambda: ("dcgm.service", "nvsm.service"))
    if requested:
        assert agents.run(rig, requested, by=agent).state is run_status.State.SUCCESS

    assert not rig.host.services["debug-shell.service"]
    assert rig.host.services["nvsm.service"]
    assert "HostServiceRefused" in rig.node_object.events
    assert any("debug-shell.service" in message for message in rig.node_object.event_messages)
    assert well_known.JOURNAL_ANNOTATION not in rig.node_object.annotations


def test_a_service_that_leaves_the_list_while_it_is_stopped_is_started() -> None:
    rig = nodes.hosted_node()
    listed = ["dcgm.service", "nvsm.service"]
    rig.callbacks.add("gpus.execute", listed.clear)

    agent = agents.new_agent(rig, service_names=lambda: tuple(listed))
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED, by=agent)

    assert not listed
    assert "HostServiceRefused" not in rig.node_object.events


def test_a_failed_change_starts_the_services_again() -> None:
    rig = nodes.hosted_node()
    rig.failures.add(steps.CreateGpuInstance, call_errors.REFUSED, times=1)

    ends.run_to(rig, "one-slice-changed", Reason.INSUFFICIENT_RESOURCES)


@pytest.mark.parametrize("may_reset", [True, False])
def test_refused_or_forbidden_reset_leaves_the_mode_pending(*, may_reset: bool) -> None:
    rig = nodes.resetting_node()
    rig.resets.are_available = may_reset
    in_use = "GPU 0 is in use by dcgm (pid 7)"
    rig.failures.add("reset.reset", errors.HostError(in_use, reason=Reason.RESET_REQUIRED))

    why = in_use if may_reset else ""
    ends.run_to(rig, ALL_1G, Reason.RESET_REQUIRED, why)

    assert {gpu.pending_mode for gpu in rig.gpus} == {model.MigMode.ENABLED}
    assert {gpu.current_mode for gpu in rig.gpus} == {model.MigMode.DISABLED}


TWO_ROUNDS = """
version: v1
mig-configs:
  old:
  - {devices: [0], mig-enabled: false}
  - {devices: [1], mig-enabled: true, mig-devices: {2g.10gb: 2}}
  new:
  - {devices: all, mig-enabled: true, mig-devices: {2g.10gb: 3}}
"""


def node_before_reset(layout: str) -> node_rig.NodeRig:
    """Return a node with a layout whose GPU 0 must be reset for MIG, and a pod on GPU 1."""
    rig = nodes.node()
    rig.driver.mode_waits = True
    ends.run_to(rig, layout, Reason.APPLIED, layouts=TWO_ROUNDS)
    rig.gpus = (*gpu_values.with_desired(rig.gpus[:1], NO_MIG), rig.gpus[1])
    rig.pods.add("spared", devices=frozenset({nodes.device(rig, 1, "2g.10gb")}))
    return rig


def test_a_gpu_that_returns_at_a_reset_was_not_drained_and_is_not_changed() -> None:
    rig = node_before_reset("old")
    rig.driver.lost = {rig.gpus[1].uuid}
    before = rig.gpus[1]
    rig.callbacks.add("reset.reset", rig.driver.lost.clear)

    agents.run(rig, "new", layouts=TWO_ROUNDS)

    assert len(rig.gpus[0].mig_uuids) == 3
    assert rig.gpus[1] == before


def test_a_gpu_altered_at_a_reset_was_not_drained_and_is_not_changed() -> None:
    rig = node_before_reset("new")
    altered = dataclasses.replace(rig.gpus[1], gpu_instances=rig.gpus[1].gpu_instances[:2])

    def alter() -> None:
        rig.gpus = (rig.gpus[0], altered)

    rig.callbacks.add("reset.reset", alter)
    agents.run(rig, "new", layouts=TWO_ROUNDS)

    assert len(rig.gpus[0].mig_uuids) == 3
    assert rig.gpus[1] == altered


class Alive(ports.Telemetry):
    """Calls the heartbeat wherever the worker does."""

    def __init__(self, pulse: liveness.Pulse) -> None:
        self._pulse = pulse

    def still_working(self) -> None:
        self._pulse.beat()


def test_slow_services_and_a_long_rollback_do_not_look_like_a_stuck_worker() -> None:
    rig = nodes.node(layout="all-balanced")
    rig.host.services = {f"s{number}.service": True for number in range(5)}
    pulse = liveness.Pulse(lambda: rig.clock.now_s)
    pulse.beat()
    slow_s = 100.0

    def delay() -> None:
        rig.clock.now_s += slow_s

    rig.callbacks.add("services.stop", delay)
    rig.callbacks.add("services.start", delay)
    silences = rig.note(lambda: pulse.silence_s)
    agent = agents.new_agent(rig, telemetry=Alive(pulse))
    ends.run_to(rig, ALL_1G, Reason.APPLIED, by=agent)

    assert rig.clock.now_s > 10 * slow_s
    assert max(silences) < 2 * slow_s


def test_a_rollback_that_waits_for_the_plugin_to_go_gives_signs_of_life() -> None:
    rig = nodes.node(layout="all-balanced")
    strikes.kill_before(rig, steps.CreateGpuInstance, ALL_1G)
    # Another program has resumed the plugin meanwhile, and removed the taint.
    rig.node_object.has_reconfiguring_taint = False
    rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] = "true"
    rig.start_plugin()
    pulse = liveness.Pulse(lambda: rig.clock.now_s)
    pulse.beat()
    silences = rig.note(lambda: pulse.silence_s, at=moments.Wait)

    agents.start(rig, None, telemetry=Alive(pulse))

    assert silences
    assert max(silences) < 1


FIRST_ONLY = """
version: v1
mig-configs:
  first:
  - {devices: [0], mig-enabled: true, mig-devices: {2g.10gb: 3}}
"""


def test_verified_layouts_are_kept_for_the_next_boot() -> None:
    rig = nodes.node()
    ends.run_to(rig, "first", Reason.APPLIED, layouts=FIRST_ONLY)
    ends.run_to(rig, ALL_1G, Reason.APPLIED)
    rig.driver.lost.add(rig.gpus[0].uuid)

    ends.run_to(rig, "all-balanced", Reason.APPLIED)

    kept = [
        verified_layouts.VerifiedLayout.from_json(text) for text in rig.verified_layout_file.saved
    ]
    first, second = sorted(gpu.uuid for gpu in rig.gpus)
    assert [(each.layout, each.boot_id, each.covered) for each in kept] == [
        ("first", "boot-1", (first,)),
        (ALL_1G, "boot-1", (first, second)),
        ("all-balanced", "boot-1", (second,)),
    ]
    assert {gpu.uuid for gpu in kept[-1].snapshots} == {gpu.uuid for gpu in rig.gpus}
    assert ends.is_as_before(rig, kept[-1].snapshots)


def test_a_layout_that_fails_is_not_kept() -> None:
    rig = nodes.node()
    rig.plugin.is_broken = True
    rig.pods.clear()

    agents.run(rig, ALL_1G)

    assert rig.verified_layout_file.saved == []


@pytest.mark.parametrize("is_rebooted", [True, False])
@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("layout", [ALL_1G, None])
def test_persistence_mode_is_restored_by_the_next_agent_until_a_reboot(
    layout: str | None, *, is_silent: bool, is_rebooted: bool
) -> None:
    rig = nodes.resetting_node()
    rig.resets.need_persistence_off = True

    if is_silent:
        away = errors.ClusterError("away", reason=Reason.API_UNAVAILABLE)
        rig.callbacks.add("gpus.execute", lambda: rig.failures.add("node.patch", away))
    rig.failures.add("reset.reset", strikes.Killed(), times=1)

    with pytest.raises(strikes.Killed):
        agents.run(rig, "all-1g.5gb")
    rig.callbacks.clear()
    rig.failures.clear()
    assert len(rig.resets.without_persistence) == len(rig.gpus)
    # What is to be undone needs a reset, too.
    rig.resets.need_persistence_off = False
    rig.failures.add("reset.reset", errors.HostError("no", reason=Reason.RESET_REQUIRED))
    if is_rebooted:
        rig.host.boot_id = "boot-2"

    agents.take_over(rig, layout)

    assert bool(rig.resets.without_persistence) is is_rebooted


@pytest.mark.parametrize(("boot_id", "is_restored"), [("boot-1", True), ("boot-0", False)])
def test_persistence_of_the_hosts_copy_counts_only_in_its_boot(
    boot_id: str, *, is_restored: bool
) -> None:
    rig = nodes.node(layout="all-balanced")
    uuid = rig.gpus[0].uuid
    rig.resets.without_persistence = {uuid}
    on_node = journals.Journal(layout="all-balanced", boot_id=rig.host.boot_id)
    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = on_node.to_json()
    entries = journals.GpuEntries(persistent_gpus=(uuid,))
    copy = dataclasses.replace(on_node, boot_id=boot_id, gpus=entries)
    rig.host_copy_file.text = host_copy.to_json(
        requests.RequestRecord(layout="all-balanced"), copy
    )

    agents.take_over(rig, "all-balanced")

    assert (rig.resets.without_persistence == set()) is is_restored


@pytest.mark.parametrize("obstacle", ["refused", "unreachable", "not allowed"])
@pytest.mark.parametrize("layout", ["all-balanced", None])
def test_persistence_mode_is_restored_once_that_is_possible(
    obstacle: str, layout: str | None
) -> None:
    rig = nodes.node(layout="all-balanced")
    uuid = rig.gpus[0].uuid
    rig.resets.without_persistence = {uuid}
    rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = journals.Journal(
        layout="all-balanced",
        boot_id=rig.host.boot_id,
        gpus=journals.GpuEntries(persistent_gpus=(uuid,)),
    ).to_json()
    rig.resets.are_available = obstacle != "not allowed"
    rig.resets.keep_persistence_off = obstacle == "refused"
    rig.driver.lost = {uuid} if obstacle == "unreachable" else set()

    agents.take_over(rig, layout)
    assert rig.resets.without_persistence == {uuid}
    rig.resets.are_available, rig.resets.keep_persistence_off = True, False
    rig.driver.lost.clear()
    agents.take_over(rig, layout)

    assert rig.resets.without_persistence == set()
    assert well_known.JOURNAL_ANNOTATION not in rig.node_object.annotations


@pytest.mark.parametrize("is_label_gone", [True, False])
def test_stale_device_files_are_refreshed_by_a_new_agent(*, is_label_gone: bool) -> None:
    rig = nodes.node(layout="all-balanced")
    rig.failures.add(
        "refresh_files", errors.HostError("nvidia-ctk failed", reason=Reason.DEVICE_FILES_FAILED)
    )
    ends.run_to(rig, "all-1g.5gb", Reason.DEVICE_FILES_FAILED)
    assert not is_label_gone or agents.undo(rig)
    rig.failures.clear()
    rig.host.refreshes = 0

    if is_label_gone:
        assert not agents.undo(rig)
    else:
        assert agents.resume(rig, "all-1g.5gb").reason is Reason.ALREADY_APPLIED
        assert "Recovered" not in rig.node_object.events

    assert rig.host.refreshes == 1
    ends.assert_restored(rig)


def test_a_process_that_stays_ends_the_run_before_anything_is_destroyed() -> None:
    rig = nodes.busy_node()
    rig.driver.clients = "python (pid 4242, unit train.service)"
    rig.host.refreshes = 0
    before = rig.gpus

    ends.run_to(
        rig,
        "one-slice-changed",
        Reason.IN_USE,
        "in use by python (pid 4242, unit train.service); waited 30 s",
    )

    assert rig.clock.now_s >= 30
    assert (rig.driver.executed_steps, rig.gpus, rig.host.refreshes) == ([], before, 0)
    assert rig.node_object.labels[well_known.APPLIED_LABEL] == "all-balanced"


def test_a_process_that_ends_is_waited_for() -> None:
    rig = nodes.busy_node()
    rig.driver.clients = "python (pid 4242)"
    rig.set_at(moments.Time(10), rig.driver, clients="")

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)
    assert rig.clock.now_s > 10


def test_a_newer_request_ends_the_wait_for_a_process() -> None:
    rig = nodes.busy_node()
    rig.driver.clients = "python (pid 4242)"
    before = rig.gpus

    ends.supersede(
        rig, "one-slice-changed", ends_when=lambda: "gpus.execute" in rig.log, is_replaced=True
    )
    ends.assert_restored(rig)

    assert (rig.driver.executed_steps, rig.gpus) == ([], before)


def test_rollback_waits_for_a_process_that_uses_new_instances() -> None:
    rig = nodes.node(layout="all-balanced")
    strikes.kill_before(rig, steps.CreateGpuInstance, ALL_1G, number=3)
    rig.driver.executed_steps.clear()
    rig.driver.clients = "python (pid 4242)"
    successor = agents.start(rig, None)
    assert rig.driver.executed_steps == []
    assert successor.restore_without_request()

    rig.driver.clients = ""
    assert not successor.restore_without_request()
    assert rig.driver.executed_steps
