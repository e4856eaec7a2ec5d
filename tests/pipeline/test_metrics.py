"""What becomes a metric when something happens, read back as Prometheus would read it."""

import io
import sys

import pytest
import structlog.testing
from prometheus_client import parser

import mig_manager
from mig_manager import errors
from mig_manager.adapters.host import log
from mig_manager.adapters.nvml import client as nvml_worker
from mig_manager.adapters.nvml import hung_call, library
from mig_manager.agent import metrics
from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name
from tests import gpu_values

NOW = 1_700_000_000.0


class Contact:
    age_s = 3.0


@pytest.fixture
def heard() -> metrics.Metrics:
    return metrics.Metrics(contact_age_s=lambda: Contact.age_s, now=lambda: NOW)


def series(heard: metrics.Metrics, name: str) -> dict[str, float]:
    """Return the values of one metric by its labels' values, in the order of their names."""
    families = parser.text_string_to_metric_families(heard.exposition().decode())
    return {
        ",".join(text for _, text in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"mig_manager_{name}"
    }


def value(heard: metrics.Metrics, name: str, labels: str = "") -> float:
    return series(heard, name)[labels]


def partitioned(wanted: dict[str, int]) -> model.ObservedGpus:
    gpus = tuple(hardware.template(hardware.find("A100-SXM4-40GB"), i) for i in range(2))
    devices = {profile_name.parse(name): count for name, count in wanted.items()}
    wanted_each = model.DesiredGpu.of(model.MigMode.ENABLED, devices)
    return model.ObservedGpus(gpu_values.brought_to(gpus, wanted_each))


def test_no_state_is_claimed_before_one_is_published_and_then_one_alone(
    heard: metrics.Metrics,
) -> None:
    none = {"pending": 0, "rebooting": 0, "success": 0, "failed": 0}
    assert series(heard, "state") == none
    assert value(heard, "last_success_timestamp_seconds") == 0
    assert series(heard, "last_outcome_info") == series(heard, "layout_info") == {}

    heard.state_published(model.State.PENDING)
    heard.state_published(model.State.FAILED)

    assert series(heard, "state") == none | {"failed": 1}


def test_every_reason_is_counted_with_its_state_from_zero_on_so_that_the_first_is_an_increase(
    heard: metrics.Metrics,
) -> None:
    before = series(heard, "runs_total")
    heard.run_ended(model.State.FAILED, errors.Reason.IN_USE, 12.0)

    kinds = [labels.split(",") for labels in before]
    assert {reason for reason, _ in kinds} == {reason.value for reason in errors.Reason}
    assert {reason for reason, state in kinds if state == "success"} == {
        "Applied",
        "AlreadyApplied",
    }
    assert set(before.values()) == {0.0}
    assert series(heard, "runs_total") == {**before, "InUse,failed": 1}


def test_the_last_outcome_is_one_series_and_success_leaves_its_time(
    heard: metrics.Metrics,
) -> None:
    heard.run_ended(model.State.FAILED, errors.Reason.IN_USE, 12.0)
    assert value(heard, "last_success_timestamp_seconds") == 0
    heard.run_ended(model.State.SUCCESS, errors.Reason.APPLIED, 4.0)

    assert series(heard, "last_outcome_info") == {"Applied,success": 1}
    assert value(heard, "last_success_timestamp_seconds") == NOW


def test_durations_are_summed_by_state_and_by_phase(heard: metrics.Metrics) -> None:
    heard.run_ended(model.State.SUCCESS, errors.Reason.APPLIED, 4.0)
    heard.phase_ended(model.Phase.DRAIN, 2.0)
    heard.phase_ended(model.Phase.DRAIN, 0.5)

    assert value(heard, "run_duration_seconds_sum", "success") == 4.0
    assert value(heard, "phase_duration_seconds_sum", "Drain") == 2.5
    assert value(heard, "phase_duration_seconds_count", "Drain") == 2


def test_a_retry_is_announced_until_its_attempt_begins(heard: metrics.Metrics) -> None:
    heard.attempt_began(1)
    heard.retry_scheduled(30.0)
    assert value(heard, "retry_timestamp_seconds") == NOW + 30.0
    heard.attempt_began(2)

    assert value(heard, "retry_timestamp_seconds") == 0
    assert value(heard, "retries_total") == 1
    assert value(heard, "attempt") == 2


def test_evictions_superseded_runs_and_lost_ends_are_counted(heard: metrics.Metrics) -> None:
    heard.pod_evicted()
    heard.run_superseded()
    heard.outcome_lost(errors.Reason.API_UNAVAILABLE)

    assert value(heard, "evictions_total") == 1
    assert value(heard, "superseded_runs_total") == 1
    assert series(heard, "lost_outcomes_total") == {"ApiUnavailable": 1}


def test_instances_and_layout_are_the_last_ones_alone(heard: metrics.Metrics) -> None:
    heard.gpus_observed(partitioned({"1g.5gb": 7}))
    heard.gpus_observed(partitioned({"3g.20gb": 2}))
    heard.layout_applied("a", "1")
    heard.layout_applied("b", "2")

    assert series(heard, "instances") == {"3g.20gb": 4}
    assert series(heard, "layout_info") == {"2,b": 1}


def test_operations_on_the_gpus_are_timed_by_how_they_ended(heard: metrics.Metrics) -> None:
    heard.gpu_operation_ended("observe", 0.5, is_good=True)
    heard.gpu_operation_ended("execute", 3.0, is_good=False)

    durations = series(heard, "gpu_operation_duration_seconds_sum")
    assert durations == {"observe,ok": 0.5, "execute,error": 3.0}


def test_nvml_calls_are_added_up_by_function(heard: metrics.Metrics) -> None:
    heard.nvml_called("nvmlInit", 1, 0.25)
    heard.nvml_called("nvmlInit", 2, 0.5)

    assert series(heard, "nvml_calls_total") == {"nvmlInit": 3}
    assert series(heard, "nvml_call_seconds_total") == {"nvmlInit": 0.75}


def test_the_contact_with_the_api_is_asked_for_at_each_scrape(
    heard: metrics.Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert value(heard, "api_contact_age_seconds") == 3.0
    monkeypatch.setattr(Contact, "age_s", float("inf"))

    assert value(heard, "api_contact_age_seconds") == float("inf")


def test_the_version_is_reported_and_no_series_has_a_creation_time(heard: metrics.Metrics) -> None:
    assert series(heard, "build_info") == {mig_manager.__version__: 1}
    assert b"_created" not in heard.exposition()


def test_phases_evictions_and_operations_are_signs_of_life() -> None:
    signs: list[None] = []
    heard = metrics.Metrics(contact_age_s=lambda: 0.0, on_progress=lambda: signs.append(None))
    heard.phase_ended(model.Phase.DRAIN, 1.0)
    heard.pod_evicted()
    heard.gpu_operation_ended("observe", 1.0, is_good=True)

    assert len(signs) == 3


def test_two_sets_of_metrics_in_one_process_do_not_disturb_each_other(
    heard: metrics.Metrics,
) -> None:
    other = metrics.Metrics(contact_age_s=lambda: 0.0)
    other.pod_evicted()

    assert value(heard, "evictions_total") == 0


def test_dropped_log_lines_are_counted(heard: metrics.Metrics) -> None:
    before = value(heard, "log_lines_dropped_total")
    log.LineWriter(io.StringIO()).drop()

    assert value(heard, "log_lines_dropped_total") - before == 1
    assert value(heard, "log_lines_dropped_total") - before == 1


def test_a_listener_that_fails_costs_a_log_line_and_nothing_else() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    heard = metrics.Metrics(contact_age_s=lambda: 0.0, on_progress=fail)
    with structlog.testing.capture_logs() as lines:
        heard.phase_ended(model.Phase.DRAIN, 1.0)

    assert [(line["event"], line["method"]) for line in lines] == [
        ("telemetry_failed", "phase_ended")
    ]


# -- what the hardware's adapters report --------------------------------------------------------


def test_an_operation_that_had_to_be_killed_is_an_error_of_its_whole_length(
    heard: metrics.Metrics,
) -> None:
    times = iter(range(100))
    gpus = nvml_worker.WorkerGpus(
        command=[sys.executable, "-c", "import signal; signal.pause()"],
        timeout_s=0.2,
        telemetry=heard,
        # Each look at the clock finds it half a second later.
        monotonic=lambda: next(times) / 2,
    )

    with pytest.raises(errors.HardwareError, match="gave no answer"):
        gpus.observe()

    assert series(heard, "gpu_operation_duration_seconds_sum") == {"observe,error": 0.5}
    assert series(heard, "instances") == {}


def test_a_worker_reports_what_it_spent_on_nvml_also_when_nvml_refused(
    heard: metrics.Metrics,
) -> None:
    script = """
import pynvml
from mig_manager.adapters.nvml import worker
def nvmlInit():
    raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
pynvml.nvmlInit = nvmlInit
worker.main(["serve"])
"""
    gpus = nvml_worker.WorkerGpus(
        command=[sys.executable, "-c", script], timeout_s=60.0, telemetry=heard
    )
    with pytest.raises(errors.HardwareError):
        gpus.observe()

    assert series(heard, "nvml_calls_total") == {"nvmlInit": 1}


def test_calls_are_counted_by_function_and_the_count_restarts_once_read() -> None:
    hung_call.RECORDER.take_totals()
    library.call(len, "abc")
    library.call(len, "abc")
    library.call(abs, -1)

    counts = [(function, count) for function, count, _ in hung_call.RECORDER.take_totals()]
    assert counts == [("abs", 1), ("len", 2)]
    assert hung_call.RECORDER.take_totals() == ()
