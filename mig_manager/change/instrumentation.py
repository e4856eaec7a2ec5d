"""Report the progress of runs, for metrics: states, phases, evictions, NVML calls."""

import functools
from collections.abc import Callable

import structlog

from mig_manager import errors
from mig_manager.core import model

_log = structlog.get_logger()


def _contained(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def contained(*arguments: object, **named: object) -> None:
        try:
            method(*arguments, **named)
        except Exception:  # noqa: BLE001 - a bug in a metric must not fail a run
            _log.exception("telemetry_failed", method=method.__name__)

    return contained


class Telemetry:
    """Receives what happens; never blocks and never raises.

    Its methods may be called from any thread, and do nothing unless overridden. An error in an
    overridden method is logged: a change does not fail because it could not be counted.
    """

    def __init_subclass__(cls) -> None:
        """Contain the errors of the methods that a class overrides."""
        for name in vars(Telemetry).keys() & vars(cls).keys():
            if not name.startswith("_"):
                setattr(cls, name, _contained(vars(cls)[name]))

    def attempt_began(self, number: int) -> None:
        """The ``number``-th attempt at a request began, from 1."""

    def state_published(self, state: model.State) -> None:
        """The node has this state now."""

    def phase_ended(self, phase: model.Phase, seconds: float) -> None:
        """A run left a phase."""

    def run_ended(self, state: model.State, reason: errors.Reason, seconds: float) -> None:
        """A run published how it ended."""

    def run_superseded(self) -> None:
        """A newer request superseded a run."""

    def outcome_lost(self, reason: errors.Reason) -> None:
        """A run could not publish its outcome, because the API refused or did not answer."""

    def retry_scheduled(self, delay_s: float) -> None:
        """The request will be retried."""

    def still_working(self) -> None:
        """The loop is in a wait or an operation that has a deadline of its own."""

    def pod_evicted(self) -> None:
        """The API accepted an eviction or a deletion."""

    def gpus_observed(self, gpus: model.ObservedGpus) -> None:
        """The GPUs were observed."""

    def gpu_operation_ended(self, name: str, seconds: float, *, is_good: bool) -> None:
        """All GPUs were observed, or a plan was executed."""

    def nvml_called(self, function: str, calls: int, seconds: float) -> None:
        """An NVML function was called ``calls`` times."""

    def layout_applied(self, name: str, content_hash: str) -> None:
        """A layout is active and verified."""

    def drift_found(self, *, is_drifted: bool) -> None:
        """The GPUs were compared with the layout that was applied."""
