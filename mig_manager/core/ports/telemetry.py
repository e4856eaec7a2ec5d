"""The events that metrics and progress displays are made of."""

from collections.abc import Mapping

from mig_manager import reasons
from mig_manager.core import model, steps
from mig_manager.core.records import run_status


class Telemetry:
    """Receives events from any thread, without blocking; does nothing unless overridden."""

    def attempt_began(self, number: int) -> None:
        """The ``number``-th attempt at a request began, from 1."""

    def state_published(self, state: run_status.State) -> None:
        """This state was published on the node."""

    def phase_ended(self, phase: run_status.Phase, seconds: float) -> None:
        """A run left a phase."""

    def run_ended(self, state: run_status.State, reason: reasons.Reason, seconds: float) -> None:
        """A run published its outcome."""

    def run_superseded(self) -> None:
        """A newer request superseded a run."""

    def outcome_lost(self, reason: reasons.Reason) -> None:
        """A run published no outcome, because the API refused or did not answer."""

    def retry_scheduled(self, delay_s: float) -> None:
        """The request will be retried."""

    def still_working(self) -> None:
        """The loop is in a wait or an operation with a deadline of its own."""

    def pod_evicted(self) -> None:
        """The API accepted an eviction or a deletion."""

    def gpus_observed(self, gpus: model.ObservedGpus) -> None:
        """The GPUs were observed."""

    def xid_reported(self, uuid: str, xid: int) -> None:
        """The driver reported a critical error of a GPU."""

    def repair_ended(self, *, is_good: bool) -> None:
        """The repair of a GPU ended."""

    def gpu_operation_ended(self, name: str, seconds: float, *, is_good: bool) -> None:
        """All GPUs were observed, or a plan was executed."""

    def steps_began(self, plan: steps.Plan) -> None:
        """The steps of a plan are about to be executed, on all GPUs at the same time."""

    def step_ended(self, gpu_index: int) -> None:
        """A step of a GPU succeeded."""

    def nvml_called(self, function: str, calls: int, seconds: float) -> None:
        """An NVML function was called ``calls`` times."""

    def layout_applied(self, name: str, content_hash: str) -> None:
        """A layout is active and verified."""

    def layout_file_read(self, *, is_usable: bool) -> None:
        """The layout file was read for the requested layout."""

    def nothing_requested(self) -> None:
        """No layout is requested any more."""

    def drift_found(self, *, is_drifted: bool) -> None:
        """The GPUs were compared with the layout that was applied."""

    def phantoms_found(self, advertised: Mapping[str, int], *, are_removed: bool) -> None:
        """The node was checked for phantom devices: their number by resource."""

    def use_observed(
        self, gpus: model.ObservedGpus, in_use: Mapping[str, frozenset[model.Placement]]
    ) -> None:
        """The instances in use were determined, by UUID of the GPU, as far as known."""
