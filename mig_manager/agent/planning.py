"""Resolve the requested layout, observe the GPUs, and plan the steps between the two."""

import dataclasses
import enum
import functools
import random
from collections.abc import Hashable, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import outcomes, record, settings
from mig_manager.core import messages, model, ports, steps, timing, yaml_tree
from mig_manager.core.layout import config, layouts
from mig_manager.core.node import clients
from mig_manager.core.planner import planner

_SLOT_BACKOFF = timing.Backoff(first_s=0.25, max_s=10.0)
"""Quick enough where many nodes wait, because each asks at a random time."""
_PUBLISH_AGAIN_S = 60.0
"""Hundreds of nodes may wait: each publishes which nodes have the slots only so often."""

_log = structlog.get_logger()

_parsed = functools.lru_cache(maxsize=1)(config.parse)
"""The file seldom changes, and parsing it would take half of the time until ``pending``."""


class Planning:
    """The first steps of one run."""

    def __init__(
        self,
        deps: ports.Dependencies,
        limits: settings.Limits,
        written: record.Record,
    ) -> None:
        self._deps = deps
        self._is_lenient = limits.is_lenient
        self._record = written
        self._warnings: tuple[yaml_tree.Diagnostic, ...] = ()

    def wait_for_slot(self, request: ports.Cancellation) -> None:
        """Take a slot where their number is limited; before the lock, because it may take long.

        Raises:
            ClusterError: The API refused the request as such, or a status.
            Superseded: Another layout is requested, or the agent stops.
        """
        slots, clock = self._deps.slots, self._deps.clock
        if slots is None:
            return
        if self._record.journal.blocks_workloads:
            try:
                denial = slots.take()
            except errors.ClusterError as error:
                denial = error.message
            if denial:
                _log.warning("slot_not_taken_again", why=denial)
            return
        if not self._has_changes():
            return
        published, published_at_s = "", 0.0
        attempt = 0
        while denial := _try_slot(slots):
            now_s = clock.monotonic()
            may_publish = not published or now_s - published_at_s >= _PUBLISH_AGAIN_S
            if denial != published and may_publish:
                published, published_at_s = denial, now_s
                self._record.enter(model.Phase.WAIT, denial, reason=errors.Reason.SLOTS_TAKEN)
            # A random pause, so that waiting nodes do not ask at the same time.
            spread = random.uniform(0.5, 1.0)  # noqa: S311 - a spread
            request.wait(_SLOT_BACKOFF.delay_s(attempt) * spread)
            attempt += 1

    def resolve(self) -> config.Layout:
        """Return the requested layout.

        Raises:
            ConfigError: The file cannot be read or is invalid.
            LayoutError: The file has no such layout.
        """
        source = self._deps.configs
        document = _parsed(source.read(), source=source.name, is_lenient=self._is_lenient)
        layout = document.layout(self._record.config)
        self._warnings = document.warnings
        self._record.note(config_hash=layout.content_hash)
        return layout

    def extra_clients(self) -> tuple[clients.ExtraClient, ...]:
        """Return the GPU clients beside NVIDIA's.

        Raises:
            ConfigError: The file cannot be read or is invalid.
        """
        source = self._deps.extra_clients
        return clients.parse(source.read(), source=source.name) if source else ()

    def observe(self) -> model.ObservedGpus:
        """Observe the GPUs.

        Raises:
            HardwareError: No GPU can be observed; from the second attempt on the message says so.
        """
        try:
            gpus = self._deps.gpus.observe()
        except errors.HardwareError as error:
            if self._record.attempt > 1:
                error.add(f"no GPU can be observed at attempt {self._record.attempt} either")
            raise
        self._record.note(gpus=gpus)
        return gpus

    def warn(self, layout: config.Layout, gpus: model.ObservedGpus) -> None:
        """Log the problems that lenient parsing accepts."""
        for remark in (*self._warnings, *layouts.lenient_warnings(layout, gpus)):
            _log.warning("config_overlooked", place=str(remark.location), problem=remark.message)

    def plan(
        self,
        layout: config.Layout,
        gpus: model.ObservedGpus,
        *,
        restoring: Sequence[model.GpuSnapshot] = (),
        busy: frozenset[str] = frozenset(),
    ) -> steps.Plan:
        """Plan the layout.

        Args:
            layout: The layout.
            gpus: The GPUs as observed.
            restoring: What GPUs outside the layout had before an interrupted change of them.
            busy: UUIDs of devices in use, which are destroyed last.

        Raises:
            LayoutError: The layout is impossible on these GPUs; has the location in the file.
        """
        with layouts.located(layout, gpus):
            plan = planner.plan(gpus, config.select(layout, gpus), busy=busy)
            return planner.combined(plan, planner.restore(gpus, restoring))

    def expects_change(self, layout: config.Layout, remembered: model.ObservedGpus) -> bool:
        """Check whether the layout changes the GPUs as an earlier run observed them.

        An observation takes a moment, and the label's author should see at once that the agent
        read it. No decision depends on this: the plan is made from a new observation.
        """
        if not remembered:
            return False
        try:
            return not self.plan(layout, remembered).is_empty
        except errors.MigManagerError:
            return False

    def _has_changes(self) -> bool:
        if not self._record.journal.is_empty:
            return True
        try:
            return not self.plan(self.resolve(), self.observe()).is_empty
        except errors.MigManagerError:
            # The run itself reports the error before it disturbs any pod.
            return False


class Action(enum.Enum):
    """What to do after a drift check."""

    REST = "rest"
    HEAL = "heal"
    """Run the pipeline without evicting a pod."""
    RUN = "run"


class Finding(enum.Enum):
    """What a drift check found."""

    AS_BEFORE = "as before"
    DRIFTED = "drifted"
    STILL_DRIFTED = "still drifted"
    BACK = "back"
    """The layout is active again, and this agent did not apply it."""
    CHANGED = "changed"
    """A run that failed for good may now end differently, or a GPU was lost or is back."""


def drift_message(name: str, pods: tuple[str, ...]) -> str:
    """Say that the GPUs have another layout than the one applied, and which pods keep it so."""
    why = (
        "; it is not applied again while pods use devices that would be removed: "
        f"{messages.listed(pods)}"
        if pods
        else ""
    )
    return f"the GPUs no longer have layout {name}, and this agent did not change them{why}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The GPUs compared with a layout."""

    gpus: model.ObservedGpus
    plan: steps.Plan | None
    """What the layout would change; None: the check failed."""
    error: errors.Reason | None = None
    """Why the check failed."""


def observe(plans: Planning) -> Observation:
    """Observe the GPUs, and plan the layout of a run without executing anything."""
    gpus: model.ObservedGpus = model.NO_GPUS
    try:
        layout = plans.resolve()
        gpus = plans.observe()
        plan = plans.plan(layout, gpus)
    except errors.MigManagerError as error:
        _log.info("drift_check_failed", reason=error.reason.value, error=error.message)
        return Observation(gpus=gpus, plan=None, error=error.reason)
    return Observation(gpus=gpus, plan=plan)


class DriftCheck:
    """Remembers the observations since the last run ended."""

    def __init__(self) -> None:
        self._ended: outcomes.Outcome | None = None
        self._baseline: Hashable = None
        self._is_drifted = False

    def judge(self, ended: outcomes.Outcome, now: Observation) -> Finding:
        """Compare an observation with the end of the last run and with earlier observations."""
        # What the outcome of a run depends on.
        fingerprint = (now.error, *map(_fingerprint, now.gpus))
        if ended is not self._ended:
            self._ended = ended
            self._baseline = fingerprint
            self._is_drifted = ended.reason is errors.Reason.DRIFTED
        is_success = ended.state is model.State.SUCCESS
        if is_success and (now.gpus or now.error is None):
            unreachable = {gpu.index for gpu in now.gpus.unreachable}
            if unreachable != {gpu.index for gpu in ended.gpus.unreachable}:
                # A GPU was lost, or is back: apply the layout to it, or publish the loss.
                return Finding.CHANGED
        if not (is_success or ended.reason is errors.Reason.DRIFTED):
            # The first observation after a failure is what the next ones are compared with.
            return Finding.AS_BEFORE if fingerprint == self._baseline else Finding.CHANGED
        if now.plan is None:
            return Finding.AS_BEFORE
        was_drifted, self._is_drifted = self._is_drifted, not now.plan.is_empty
        if self._is_drifted:
            return Finding.STILL_DRIFTED if was_drifted else Finding.DRIFTED
        return Finding.BACK if was_drifted else Finding.AS_BEFORE


def _fingerprint(gpu: model.Gpu) -> Hashable:
    return (
        gpu.uuid,
        gpu.current_mode,
        gpu.pending_mode,
        frozenset((info.profile, info.placements) for info in gpu.profiles or ()),
        frozenset(
            (gi.profile, gi.placement, len(gi.compute_instances)) for gi in gpu.gpu_instances
        ),
    )


def _try_slot(slots: ports.Slots) -> str:
    try:
        return slots.take()
    except errors.ClusterError as error:
        if error.reason is errors.Reason.FORBIDDEN:
            raise
        _log.warning("slots_unknown", reason=error.reason.value, error=error.message)
        return f"waiting for a slot for nodes under change: {error.message}"
