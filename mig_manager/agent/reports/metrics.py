"""The agent's Prometheus metrics; docs/metrics.md explains each.

There are few series: label values are enumerations, NVML functions, this node's profiles and its
one layout.
"""

import functools
import threading
import time
from collections.abc import Callable, Mapping

import structlog

from mig_manager import reasons
from mig_manager.adapters import metric_registry
from mig_manager.adapters.host import line_writer
from mig_manager.agent.reports import gpu_metrics, run_metrics
from mig_manager.core import model, ports
from mig_manager.core.records import run_status

_GPU_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

_log = structlog.get_logger()


def _contain_errors(cls: type["AgentMetrics"]) -> type["AgentMetrics"]:
    """Log errors of ``Telemetry``'s methods instead of raising: a metric must not fail a run."""

    def contain(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def call(*arguments: object, **named: object) -> None:
            try:
                method(*arguments, **named)
            except Exception:  # noqa: BLE001 - a bug in a metric must not fail a run
                _log.exception("telemetry_failed", method=method.__name__)

        return call

    for name in vars(ports.Telemetry).keys() & vars(cls).keys():
        if not name.startswith("_"):
            setattr(cls, name, contain(vars(cls)[name]))
    return cls


@_contain_errors
class AgentMetrics(ports.Telemetry):
    """Counts what is reported, in its own registry."""

    def __init__(
        self,
        *,
        contact_age_s: Callable[[], float],
        on_progress: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.registry = registry = metric_registry.MetricRegistry(
            "mig_manager", program="agent", contact_age_s=contact_age_s
        )
        gauge, counter = registry.gauge, registry.counter
        self._on_progress = on_progress
        self._now = now
        self._exposing = threading.Lock()
        self._lines_counted = line_writer.LineWriter.dropped
        self._runs = run_metrics.RunMetrics(registry)
        self._evictions = counter("evictions", "Pods evicted.")
        self._lines_dropped = counter(
            "log_lines_dropped", "Log lines that standard error did not take."
        )
        self._operation_s = registry.histogram(
            "gpu_operation_duration_seconds",
            "How long it took to observe all GPUs or to execute a plan.",
            ("operation", "result"),
            buckets=_GPU_BUCKETS_S,
        )
        self._nvml_calls = counter("nvml_calls", "Calls of NVML functions.", ("function",))
        self._nvml_s = counter(
            "nvml_call_seconds", "Time spent in NVML functions, all GPUs added up.", ("function",)
        )
        self._gpus = gpu_metrics.GpuMetrics(registry)
        self._use = gpu_metrics.UseMetrics(registry)
        self._drifted = gauge(
            "drifted", "1 while the GPUs do not have the layout last verified, else 0."
        )
        self._phantoms = gauge(
            "phantom_devices",
            "Advertised devices that no GPU has, and that the agent may not remove.",
        )
        self._config_unusable = gauge(
            "config_unusable",
            "1 while the layout file cannot be used for the requested layout, else 0.",
        )
        self._layout = gauge(
            "layout_info", "The layout last verified; always 1.", ("layout", "hash")
        )

    def exposition(self) -> bytes:
        """Return all metrics in the text format 0.0.4."""
        with self._exposing:
            # Read the count here: a thread that drops a line must not wait.
            dropped = line_writer.LineWriter.dropped
            self._lines_dropped.inc(dropped - self._lines_counted)
            self._lines_counted = dropped
        return self.registry.exposition()

    def attempt_began(self, number: int) -> None:
        self._runs.begin_attempt(number)

    def state_published(self, state: run_status.State) -> None:
        self._runs.set_state(state)

    def phase_ended(self, phase: run_status.Phase, seconds: float) -> None:
        self._runs.end_phase(phase, seconds)
        self._on_progress()

    def run_ended(self, state: run_status.State, reason: reasons.Reason, seconds: float) -> None:
        self._runs.end_run(state, reason, seconds, at_s=self._now())

    def run_superseded(self) -> None:
        self._runs.superseded.inc()

    def outcome_lost(self, reason: reasons.Reason) -> None:
        self._runs.lost.labels(reason=reason.value).inc()

    def retry_scheduled(self, delay_s: float) -> None:
        self._runs.schedule_retry(self._now() + delay_s)

    def pod_evicted(self) -> None:
        self._evictions.inc()
        self._on_progress()

    def still_working(self) -> None:
        self._on_progress()

    def gpus_observed(self, gpus: model.ObservedGpus) -> None:
        self._gpus.set_gpus(gpus)
        if not gpus:
            self._use.set_use(gpus, {}, at_s=0)

    def xid_reported(self, uuid: str, xid: int) -> None:
        self._gpus.count_xid(uuid, xid)

    def repair_ended(self, *, is_good: bool) -> None:
        self._gpus.count_repair(is_good=is_good)

    def gpu_operation_ended(self, name: str, seconds: float, *, is_good: bool) -> None:
        result = "ok" if is_good else "error"
        self._operation_s.labels(operation=name, result=result).observe(seconds)
        self._on_progress()

    def use_observed(
        self, gpus: model.ObservedGpus, in_use: Mapping[str, frozenset[model.Placement]]
    ) -> None:
        self._use.set_use(gpus, in_use, at_s=self._now())

    def nvml_called(self, function: str, calls: int, seconds: float) -> None:
        self._nvml_calls.labels(function=function).inc(calls)
        self._nvml_s.labels(function=function).inc(seconds)

    def layout_applied(self, name: str, content_hash: str) -> None:
        metric_registry.replace(self._layout, {(name, content_hash): 1})

    def layout_file_read(self, *, is_usable: bool) -> None:
        self._config_unusable.set(not is_usable)

    def nothing_requested(self) -> None:
        self._drifted.set(0)
        self._config_unusable.set(0)
        self._phantoms.set(0)
        self._runs.forget_outcome()

    def drift_found(self, *, is_drifted: bool) -> None:
        self._drifted.set(is_drifted)

    def phantoms_found(self, advertised: Mapping[str, int], *, are_removed: bool) -> None:
        self._phantoms.set(0 if are_removed else sum(advertised.values()))
