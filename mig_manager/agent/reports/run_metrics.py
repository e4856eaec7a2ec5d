"""Prometheus metrics of the runs for a request: states, outcomes, durations and retries."""

from mig_manager import reasons
from mig_manager.adapters import metric_registry
from mig_manager.core.records import run_status

_SUCCESSES = frozenset({reasons.Reason.APPLIED, reasons.Reason.ALREADY_APPLIED})
_BUCKETS_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class RunMetrics:
    """The runs so far, the last outcome, and the next attempt."""

    def __init__(self, registry: metric_registry.MetricRegistry) -> None:
        gauge, counter, histogram = registry.gauge, registry.counter, registry.histogram
        self._state = gauge("state", "1 for the state of the node, else 0.", ("state",))
        self._last_outcome = gauge(
            "last_outcome_info", "How the last run ended; always 1.", ("state", "reason")
        )
        self._runs = counter("runs", "Runs that published their end.", ("state", "reason"))
        self._run_s = histogram(
            "run_duration_seconds", "How long runs took.", ("state",), buckets=_BUCKETS_S
        )
        self._phase_s = histogram(
            "phase_duration_seconds", "How long phases took.", ("phase",), buckets=_BUCKETS_S
        )
        self.superseded = counter("superseded_runs", "Runs that a newer request superseded.")
        self.lost = counter(
            "lost_outcomes", "Runs whose end the Kubernetes API did not accept.", ("reason",)
        )
        self._success_time = gauge(
            "last_success_timestamp_seconds", "When a run last succeeded; 0: not yet."
        )
        for state in run_status.State:
            self._state.labels(state=state.value)
        for reason in reasons.Reason:
            # Start at zero: increase() misses the first event of a series that appears as 1.
            state = run_status.State.SUCCESS if reason in _SUCCESSES else run_status.State.FAILED
            self._runs.labels(state=state.value, reason=reason.value)
        self._attempt = gauge("attempt", "Number of the last attempt at the present request.")
        self._retries = counter("retries", "Attempts that will be repeated.")
        self._retry_time = gauge(
            "retry_timestamp_seconds", "When the next attempt begins; 0: none is scheduled."
        )

    def begin_attempt(self, number: int) -> None:
        """Show an attempt; none is scheduled."""
        self._attempt.set(number)
        self._retry_time.set(0)

    def set_state(self, state: run_status.State) -> None:
        """Show the state of the node."""
        for each in run_status.State:
            self._state.labels(state=each.value).set(each is state)

    def end_phase(self, phase: run_status.Phase, seconds: float) -> None:
        """Count the duration of a phase."""
        self._phase_s.labels(phase=phase.value).observe(seconds)

    def end_run(
        self, state: run_status.State, reason: reasons.Reason, seconds: float, *, at_s: float
    ) -> None:
        """Count a run, and show its outcome."""
        self._runs.labels(state=state.value, reason=reason.value).inc()
        self._run_s.labels(state=state.value).observe(seconds)
        metric_registry.replace(self._last_outcome, {(state.value, reason.value): 1})
        if state is run_status.State.SUCCESS:
            self._success_time.set(at_s)

    def schedule_retry(self, at_s: float) -> None:
        """Count an attempt that is repeated, and show when."""
        self._retries.inc()
        self._retry_time.set(at_s)

    def forget_outcome(self) -> None:
        """Show no outcome: nothing is requested."""
        metric_registry.replace(self._last_outcome, {})
