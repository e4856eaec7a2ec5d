"""What becomes a metric when something happens, read back as Prometheus would read it."""

import io
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import structlog.testing
from prometheus_client import parser

import mig_manager
from mig_manager import errors
from mig_manager.adapters.host import line_writer
from mig_manager.adapters.nvml import last_calls, library, worker_client
from mig_manager.agent.reports import metrics
from mig_manager.core import model, steps
from mig_manager.core.records import run_status
from mig_manager.reasons import Reason
from tests.rigs.node import agents, call_errors, ends, gpu_values, nodes

NOW = 1_700_000_000.0


@pytest.fixture
def agent_metrics() -> metrics.AgentMetrics:
    return metrics.AgentMetrics(contact_age_s=lambda: 3.0, now=lambda: NOW)


def series(agent_metrics: metrics.AgentMetrics, name: str) -> dict[str, float]:
    """Return the values of one metric by its labels' values, in the order of their names."""
    families = parser.text_string_to_metric_families(agent_metrics.exposition().decode())
    return {
        ",".join(text for _, text in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"mig_manager_{name}"
    }


def gpus_with(desired: dict[str, int]) -> model.ObservedGpus:
    return model.ObservedGpus(gpu_values.gpus_of("2xA100-SXM4-40GB", desired))


STATES = {"pending": 0, "rebooting": 0, "success": 0, "failed": 0}
FAILED = (run_status.State.FAILED, Reason.IN_USE, 12.0)
APPLIED = (run_status.State.SUCCESS, Reason.APPLIED, 4.0)
DRAIN = run_status.Phase.DRAIN
CASES: Mapping[str, tuple[list[tuple[Any, ...]], Mapping[str, object]]] = {
    "no state is claimed before one is published": (
        [],
        {
            "state": STATES,
            "last_success_timestamp_seconds": {"": 0},
            "last_outcome_info": {},
            "layout_info": {},
            "build_info": {mig_manager.__version__: 1},
        },
    ),
    "the last published state stands alone": (
        [
            ("state_published", run_status.State.PENDING),
            ("state_published", run_status.State.FAILED),
        ],
        {"state": STATES | {"failed": 1}},
    ),
    "a failure leaves no time of success": (
        [("run_ended", *FAILED)],
        {"last_outcome_info": {"InUse,failed": 1}, "last_success_timestamp_seconds": {"": 0}},
    ),
    "the last outcome is one series, and success leaves its time": (
        [("run_ended", *FAILED), ("run_ended", *APPLIED)],
        {
            "last_outcome_info": {"Applied,success": 1},
            "last_success_timestamp_seconds": {"": NOW},
            "run_duration_seconds_sum": {"failed": 12.0, "success": 4.0},
        },
    ),
    "durations are summed by phase": (
        [("phase_ended", DRAIN, 2.0), ("phase_ended", DRAIN, 0.5)],
        {
            "phase_duration_seconds_sum": {"Drain": 2.5},
            "phase_duration_seconds_count": {"Drain": 2},
        },
    ),
    "a retry is announced": (
        [("attempt_began", 1), ("retry_scheduled", 30.0)],
        {"retry_timestamp_seconds": {"": NOW + 30.0}, "attempt": {"": 1}},
    ),
    "a retry is announced until its attempt begins": (
        [("retry_scheduled", 30.0), ("attempt_began", 2)],
        {"retry_timestamp_seconds": {"": 0}, "retries_total": {"": 1}, "attempt": {"": 2}},
    ),
    "evictions, superseded runs and lost ends are counted": (
        [("pod_evicted",), ("run_superseded",), ("outcome_lost", Reason.API_UNAVAILABLE)],
        {
            "evictions_total": {"": 1},
            "superseded_runs_total": {"": 1},
            "lost_outcomes_total": {"ApiUnavailable": 1},
        },
    ),
    "the last layout stands alone": (
        [("layout_applied", "a", "1"), ("layout_applied", "b", "2")],
        {"layout_info": {"2,b": 1}},
    ),
    "nothing of a request is left once none is there": (
        [("run_ended", *FAILED), ("nothing_requested",)],
        {"last_outcome_info": {}, "drifted": {"": 0}, "config_unusable": {"": 0}},
    ),
    "critical errors are counted by GPU and number": (
        [("xid_reported", "GPU-1", 79), ("xid_reported", "GPU-1", 79)],
        {"xids_total": {"GPU-1,79": 2}},
    ),
    "NVML calls are added up by function": (
        [("nvml_called", "nvmlInit", 1, 0.25), ("nvml_called", "nvmlInit", 2, 0.5)],
        {"nvml_calls_total": {"nvmlInit": 3}, "nvml_call_seconds_total": {"nvmlInit": 0.75}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_reports_become_metric_series(agent_metrics: metrics.AgentMetrics, case: str) -> None:
    reports, expected = CASES[case]

    for method, *arguments in reports:
        getattr(agent_metrics, method)(*arguments)

    assert {name: series(agent_metrics, name) for name in expected} == expected
    assert b"_created" not in agent_metrics.exposition()


def test_instances_are_the_last_ones_and_operations_are_timed_by_result(
    agent_metrics: metrics.AgentMetrics,
) -> None:
    for desired in ({"1g.5gb": 7}, {"3g.20gb": 2}):
        agent_metrics.gpus_observed(gpus_with(desired))
    agent_metrics.gpu_operation_ended("observe", 0.5, is_good=True)
    agent_metrics.gpu_operation_ended("execute", 3.0, is_good=False)

    assert series(agent_metrics, "instances") == {"3g.20gb": 4}
    durations = series(agent_metrics, "gpu_operation_duration_seconds_sum")
    assert durations == {"observe,ok": 0.5, "execute,error": 3.0}


def test_a_new_use_replaces_the_room_of_the_gpu_measured_before(
    agent_metrics: metrics.AgentMetrics,
) -> None:
    gpus = gpus_with({"1g.5gb": 1, "3g.20gb": 1})
    first, second = gpus
    spans = {str(gi.profile): gi.placement for gi in first.gpu_instances}
    agent_metrics.use_observed(
        gpus, {first.uuid: frozenset(), second.uuid: frozenset({spans["3g.20gb"]})}
    )
    assert series(agent_metrics, "room")["7g.40gb"] == 1

    agent_metrics.use_observed(gpus, {first.uuid: frozenset(spans.values())})

    labels = f"0,{first.uuid}"
    assert series(agent_metrics, "free_memory_slices") == {labels: 3}
    assert series(agent_metrics, "stranded_memory_slices") == {labels: 0}
    assert series(agent_metrics, "fragmentation_ratio") == {labels: pytest.approx(1 / 3)}
    room = series(agent_metrics, "room")
    assert (room["1g.5gb"], room["2g.10gb"], room["7g.40gb"]) == (3, 1, 0)
    assert series(agent_metrics, "instances_in_use") == {"1g.5gb": 1, "3g.20gb": 1}
    assert series(agent_metrics, "use_timestamp_seconds") == {"": NOW}

    agent_metrics.gpus_observed(model.NO_GPUS)

    for name in ("free_memory_slices", "room", "instances_in_use"):
        assert series(agent_metrics, name) == {}


def test_every_reason_is_counted_from_zero(agent_metrics: metrics.AgentMetrics) -> None:
    before = series(agent_metrics, "runs_total")
    agent_metrics.run_ended(*FAILED)

    kinds = [labels.split(",") for labels in before]
    assert {reason for reason, _ in kinds} == {reason.value for reason in Reason}
    assert {reason for reason, state in kinds if state == "success"} == {
        "Applied",
        "AlreadyApplied",
    }
    assert set(before.values()) == {0.0}
    assert series(agent_metrics, "runs_total") == {**before, "InUse,failed": 1}


def test_the_age_of_the_api_contact_is_read_at_each_scrape() -> None:
    ages_s = [float("inf"), 3.0]
    agent_metrics = metrics.AgentMetrics(contact_age_s=ages_s.pop, now=lambda: NOW)

    for age_s in (3.0, float("inf")):
        assert series(agent_metrics, "api_contact_age_seconds") == {"": age_s}


def test_phases_evictions_and_operations_are_signs_of_life() -> None:
    signs: list[None] = []
    agent_metrics = metrics.AgentMetrics(
        contact_age_s=lambda: 0.0, on_progress=lambda: signs.append(None)
    )
    agent_metrics.phase_ended(run_status.Phase.DRAIN, 1.0)
    agent_metrics.pod_evicted()
    agent_metrics.gpu_operation_ended("observe", 1.0, is_good=True)

    assert len(signs) == 3


def test_two_sets_of_metrics_in_one_process_do_not_disturb_each_other(
    agent_metrics: metrics.AgentMetrics,
) -> None:
    other = metrics.AgentMetrics(contact_age_s=lambda: 0.0)
    other.pod_evicted()

    assert series(agent_metrics, "evictions_total") == {"": 0}


def test_dropped_log_lines_are_counted(agent_metrics: metrics.AgentMetrics) -> None:
    before = series(agent_metrics, "log_lines_dropped_total")[""]
    line_writer.LineWriter(io.StringIO()).drop()

    for _ in range(2):
        assert series(agent_metrics, "log_lines_dropped_total") == {"": before + 1}


def test_a_failing_listener_is_logged_and_disturbs_nothing() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    agent_metrics = metrics.AgentMetrics(contact_age_s=lambda: 0.0, on_progress=fail)
    with structlog.testing.capture_logs() as lines:
        agent_metrics.phase_ended(run_status.Phase.DRAIN, 1.0)

    assert [(line["event"], line["method"]) for line in lines] == [
        ("telemetry_failed", "phase_ended")
    ]


def test_the_last_phase_of_a_superseded_run_is_measured(
    agent_metrics: metrics.AgentMetrics,
) -> None:
    rig = nodes.busy_node()
    agent = agents.new_agent(rig, telemetry=agent_metrics)

    ends.supersede(
        rig,
        "one-slice-changed",
        by=agent,
        ends_when=lambda: rig.node_object.has_reconfiguring_taint,
        is_replaced=True,
    )

    assert series(agent_metrics, "phase_duration_seconds_count")["Drain"] == 1


def test_each_phase_of_a_run_that_rolls_back_is_measured_once(
    agent_metrics: metrics.AgentMetrics,
) -> None:
    rig = nodes.node(layout="all-balanced")
    rig.failures.add(steps.CreateGpuInstance, call_errors.REFUSED, times=1)

    agents.run(rig, "one-slice-changed", by=agents.new_agent(rig, telemetry=agent_metrics))

    counts = series(agent_metrics, "phase_duration_seconds_count")
    assert (counts["Execute"], counts["RollBack"]) == (1, 1)


# -- what the hardware's adapters report ------------------------------------------------------


def test_killed_operation_is_an_error_of_its_whole_duration(
    agent_metrics: metrics.AgentMetrics,
) -> None:
    agent_metrics.gpus_observed(gpus_with({"1g.5gb": 7}))
    gpus = worker_client.WorkerGpus(
        command=[sys.executable, "-c", "import signal; signal.pause()"],
        timeout_s=0.2,
        telemetry=agent_metrics,
    )

    with pytest.raises(errors.HardwareError, match="gave no answer"):
        gpus.observe()

    ((labels, seconds),) = series(agent_metrics, "gpu_operation_duration_seconds_sum").items()
    assert labels == "observe,error"
    assert seconds >= gpus.timeout_s
    assert series(agent_metrics, "instances") == {}


def test_a_worker_reports_its_nvml_calls_also_after_a_refusal(
    agent_metrics: metrics.AgentMetrics,
) -> None:
    script = """
import pynvml
from mig_manager.adapters.nvml import worker
def nvmlInit():
    raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
pynvml.nvmlInit = nvmlInit
worker.main(["serve"])
"""
    gpus = worker_client.WorkerGpus(
        command=[sys.executable, "-c", script], timeout_s=60.0, telemetry=agent_metrics
    )
    with pytest.raises(errors.HardwareError):
        gpus.observe()

    assert series(agent_metrics, "nvml_calls_total") == {"nvmlInit": 1}


def test_calls_are_counted_by_function_and_the_count_restarts_once_read() -> None:
    last_calls.RECORDER.take_totals()
    library.call(len, "abc")
    library.call(len, "abc")
    library.call(abs, -1)

    counts = [(function, count) for function, count, _ in last_calls.RECORDER.take_totals()]
    assert counts == [("abs", 1), ("len", 2)]
    assert last_calls.RECORDER.take_totals() == ()
