"""Publish which GPU instances are in use, and what could still be created beside them.

The agent publishes at the end of every run. With on-demand partitioning it also watches the node's
pods: when a pod that may use a GPU changes, it asks kubelet and the driver once. Between changes
it sends no request.
"""

import dataclasses
import math

import structlog

from mig_manager import errors
from mig_manager.agent import node_context, node_patches
from mig_manager.agent.pods import device_usage
from mig_manager.core import model, timing
from mig_manager.core.node import instance_use
from mig_manager.core.objects import well_known
from mig_manager.core.records import capacity

_QUIET_S, _MAX_S = 1.0, 5.0
"""Delay: pods often come and go together, and get their devices shortly after binding."""
_BACKOFF = timing.Backoff(first_s=1.0, max_s=60.0, factor=2.0)

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Retry:
    """When to observe again without an event."""

    at_s: float = math.inf
    attempt: int = 0


_NO_RETRY = _Retry()


class CapacityReport:
    """The published use of the node's GPU instances; for the loop's thread."""

    def __init__(self, context: node_context.NodeContext) -> None:
        self._context = context
        self._deps = context.deps
        self._gpus = model.NO_GPUS
        self._is_followed = False
        self._burst = timing.Burst(quiet_s=_QUIET_S, max_s=_MAX_S)
        self._retry = _NO_RETRY

    # -- at the end of a run ----------------------------------------------------------------------

    def observe_annotations(
        self, gpus: model.ObservedGpus, present: str = ""
    ) -> dict[str, str | None]:
        """Observe the use, and return the annotation to write with these GPUs.

        An unknown use removes the annotation. If the node's annotation ``present`` has the same
        facts, it stays. Without GPUs, ``node_patches.of_gpus`` removes it.
        """
        self.update_gpus(gpus)
        if not gpus:
            return {}
        self._burst.clear()
        text, is_stable = "", False
        try:
            text, is_stable = self._observe_use(gpus)
        except errors.MigManagerError as error:
            _log.info("use_not_found", reason=error.reason.value, error=error.message)
        except Exception:  # noqa: BLE001 - a bug in a report must not fail a run
            _log.exception("capacity_error")
        self._retry = self._next_retry(is_stable=is_stable)
        if capacity.has_same_facts(present, text):
            text = present
        return {well_known.CAPACITY_ANNOTATION: text or None}

    # -- at rest ----------------------------------------------------------------------------------

    def follow(self, *, is_on_demand: bool, has_changed: bool) -> None:
        """Start or stop following the use, as the node's label says; note a change of use."""
        if is_on_demand is not self._is_followed:
            self._is_followed = has_changed = is_on_demand
            self._retry = _NO_RETRY
            self._burst.clear()
            (self._deps.pod_watch.keep if is_on_demand else self._deps.pod_watch.release)()
        if has_changed:
            self._expect()

    def update_gpus(self, gpus: model.ObservedGpus) -> None:
        """Record a newer observation of the GPUs, whose instances may differ."""
        has_changed = gpus != self._gpus
        # Also if equal: the recovery actions, which are published, are not compared.
        self._gpus = gpus
        if has_changed:
            self._expect()

    def forget_node(self) -> None:
        """Publish again: the Node was deleted and registered again."""
        self._expect()

    @property
    def next_in_s(self) -> float:
        """How long to wait before the next ``refresh``; inf until something changes."""
        now = self._deps.clock.monotonic()
        burst_s = self._burst.ends_in_s(now)
        retry_s = max(0.0, self._retry.at_s - now)
        return retry_s if burst_s is None else min(burst_s, retry_s)

    def refresh(self) -> None:
        """Observe the use, and publish what has changed; a failure is logged and retried."""
        self._burst.clear()
        is_stable = False
        try:
            is_stable = self._refresh()
        except errors.MigManagerError as error:
            _log.warning("use_not_published", reason=error.reason.value, error=error.message)
        except Exception:  # noqa: BLE001 - a bug in a report must not end the agent
            _log.exception("capacity_error")
        self._retry = self._next_retry(is_stable=is_stable)

    def _refresh(self) -> bool:
        """Observe and publish; return whether only a pod event can change the use."""
        if not self._gpus:
            self._gpus = self._context.observe()
        if not self._gpus:
            return False
        text, is_stable = self._observe_use(self._gpus)
        change = node_patches.of_gpus(self._gpus)
        old = self._context.publisher.written(well_known.CAPACITY_ANNOTATION)
        if not capacity.has_same_facts(text, old):
            change[well_known.CAPACITY_ANNOTATION] = text
        self._context.publisher.annotate(change)
        return is_stable

    def _observe_use(self, gpus: model.ObservedGpus) -> tuple[str, bool]:
        """Return the annotation's value, and whether only a pod event can change the use."""
        deps = self._deps
        usage = device_usage.report_usage(
            deps, gpus, has_processes=self._is_followed, extra_clients=deps.extra_clients()
        )
        use = instance_use.find(gpus, usage)
        if use is None:
            raise errors.KubeletError(usage.why_incomplete)
        deps.telemetry.use_observed(gpus, use.in_use)
        text = capacity.to_json(gpus, use.in_use, at=deps.clock.now_iso())
        return text, use.is_stable

    def _expect(self) -> None:
        if self._is_followed:
            self._burst.add(self._deps.clock.monotonic())

    def _next_retry(self, *, is_stable: bool) -> _Retry:
        if is_stable or not self._is_followed:
            return _NO_RETRY
        attempt = self._retry.attempt
        at_s = self._deps.clock.monotonic() + _BACKOFF.delay_s(attempt)
        return _Retry(at_s=at_s, attempt=attempt + 1)
