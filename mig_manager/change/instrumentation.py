"""What listeners hear of a run: states, phases, evictions, NVML calls."""

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
        except Exception:  # noqa: BLE001 - whatever it is, the run is not to blame
            _log.exception("telemetry_failed", method=method.__name__)

    return contained


class Telemetry:
    """Hears what happens, for those who watch many nodes; never blocks and never raises.

    Its methods may be called from any thread. This one, unlike a protocol, can be made: whatever
    is not overridden is not listened to. An error in a method that is overridden is logged: a
    change does not fail because it could not be counted.
    """

    def __init_subclass__(cls) -> None:
        """Contain the errors of the methods that a class overrides."""
        for name in vars(Telemetry).keys() & vars(cls).keys():
            if not name.startswith("_"):
                setattr(cls, name, _contained(vars(cls)[name]))

    def attempt_began(self, number: int) -> None:
        """The worker turned to a wish for the ``number``-th time, from 1."""

    def state_published(self, state: model.State) -> None:
        """The node now says this state."""

    def phase_ended(self, phase: model.Phase, seconds: float) -> None:
        """A run left a phase."""

    def run_ended(self, state: model.State, reason: errors.Reason, seconds: float) -> None:
        """A run published how it ended."""

    def run_superseded(self) -> None:
        """A run gave way to a newer wish."""

    def outcome_lost(self, reason: errors.Reason) -> None:
        """A run could not publish how it ended, because the API refused or was silent."""

    def retry_scheduled(self, delay_s: float) -> None:
        """The same wish will be tried again."""

    def still_working(self) -> None:
        """The worker is in a wait or an operation that has a deadline of its own."""

    def pod_evicted(self) -> None:
        """A pod was asked to leave, and the API agreed."""

    def gpus_observed(self, gpus: model.ObservedGpus) -> None:
        """This is what there is on the GPUs now."""

    def gpu_operation_ended(self, name: str, seconds: float, *, is_good: bool) -> None:
        """All GPUs were observed, or a plan was executed."""

    def nvml_called(self, function: str, calls: int, seconds: float) -> None:
        """An NVML function was called so often, and took so long in all."""

    def layout_applied(self, name: str, content_hash: str) -> None:
        """A layout is in force and proven."""

    def drift_found(self, *, is_drifted: bool) -> None:
        """The GPUs were compared with the layout that is believed to be in force."""
