"""Evict the pods that use devices a plan destroys, and wait until they are gone.

Which pods are evicted, in which order and with which budgets is in ``eviction``. An API that
refuses or fails during the wait ends no drain before its deadline. Without the right to evict, as
with the rights that NVIDIA's GPU operator gives, a drain waits for the pods as if that were the
policy, and asks again now and then.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import settings
from mig_manager.agent.pods import dra_driver, eviction
from mig_manager.core import messages, model, ports, steps, timing
from mig_manager.core.node import clients, cluster, gpu_use
from mig_manager.core.node import policy as policies

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which pods to drain, how, and how long that may take."""

    affected: frozenset[str]
    """Ids of the devices that are destroyed."""
    limits: settings.Limits
    extra_clients: tuple[clients.ExtraClient, ...] = ()
    """GPU clients that are paused later, and so are not evicted."""
    has_begun: bool = False
    """Whether an earlier attempt at this drain evicted pods."""

    @property
    def is_passive(self) -> bool:
        """Whether the drain only waits."""
        return self.limits.policy.drain is policies.Drain.NONE

    @property
    def is_whole_node(self) -> bool:
        """Whether every pod with a GPU is drained."""
        return self.limits.policy.drain is policies.Drain.NODE

    def affected_pods(self, usage: gpu_use.Usage) -> tuple[cluster.Pod, ...]:
        """Return the pods that the drain is about."""
        affected = None if self.is_whole_node else self.affected
        return usage.users(affected, daemons=self.extra_clients)

    def undecided_pods(self, usage: gpu_use.Usage) -> tuple[cluster.Pod, ...]:
        """Return the pods that are affected or not, as only a silent kubelet knows."""
        if self.is_whole_node:
            return ()
        return usage.undecided(self.affected, daemons=self.extra_clients)


def order(
    limits: settings.Limits,
    plan: steps.Plan,
    gpus: Sequence[model.Gpu],
    *,
    may_evict: bool = True,
    extra_clients: tuple[clients.ExtraClient, ...] = (),
    has_begun: bool = False,
) -> Order:
    """Return the drain that a plan needs."""
    if not may_evict:
        waiting = dataclasses.replace(limits.policy, drain=policies.Drain.NONE, is_forced=False)
        limits = dataclasses.replace(limits, policy=waiting, drain_timeout_s=0.0)
    return Order(
        affected=clients.affected_ids(plan, gpus),
        limits=limits,
        extra_clients=extra_clients,
        has_begun=has_begun,
    )


def whole_node(limits: settings.Limits) -> Order:
    """Return the drain of every pod with a GPU, for a reboot."""
    policy = dataclasses.replace(limits.policy, drain=policies.Drain.NODE)
    return Order(affected=frozenset(), limits=dataclasses.replace(limits, policy=policy))


@dataclasses.dataclass(eq=False, slots=True)
class Drain:
    """One drain: evict, wait, and ask again where a budget refused."""

    workloads: ports.Workloads
    allocations: ports.DeviceAllocations
    clock: timing.Clock
    _: dataclasses.KW_ONLY
    order: Order
    on_round: Callable[[str], None]
    """Called before the next round of a rolling drain, with a sentence about it."""
    on_force: Callable[[str], None]
    """Called before pods are deleted by force, with their names."""
    telemetry: ports.Telemetry = dataclasses.field(default_factory=ports.Telemetry)
    _evictions: eviction.Evictions = dataclasses.field(init=False)
    _deadline: float = dataclasses.field(default=0.0, init=False)
    _round: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self._evictions = eviction.Evictions(
            workloads=self.workloads,
            clock=self.clock,
            strategy=self.order.limits.policy.strategy,
            on_round=self.on_round,
            telemetry=self.telemetry,
        )

    @property
    def evicted(self) -> int:
        """How many pods were evicted."""
        return self._evictions.evicted

    @property
    def forced(self) -> tuple[str, ...]:
        """Names of the pods that were deleted by force."""
        return tuple(self._evictions.forced)

    def run(
        self,
        usage: gpu_use.Usage,
        request: ports.Cancellation,
        listed: tuple[cluster.Pod, ...],
    ) -> tuple[cluster.Pod, ...]:
        """Wait until no pod uses an affected device.

        Args:
            usage: Who used the devices before.
            request: Ends the wait.
            listed: The node's pods, just listed.

        Returns:
            The node's pods as last listed.

        Raises:
            DrainError: The deadline passed; names each remaining pod, and why. FORBIDDEN or
                API_UNAVAILABLE where the API refused or failed to evict.
            ClusterError: The API refused the request as such, or did not list the pods by the
                deadline.
            Superseded: Another layout is requested, or the agent stops.
        """
        self._begin(is_forcing=False)
        if not (self.order.affected or self.order.is_whole_node):
            return listed
        now: gpu_use.Usage | None = self._usage(listed, usage)
        while True:
            if now is None and not self._may_wait(usage):
                now = self._observe(usage)
            remaining = self.order.affected_pods(now) if now else ()
            if now and not remaining:
                return now.pods
            request.check()
            if now:
                self._act(remaining, now)
            request.pause(self.order.limits.backoff.delay_s(self._round))
            self._round += 1
            now = None

    def require_done(self, usage: gpu_use.Usage) -> None:
        """Fail if a pod uses an affected device again; evict none; raises as ``Workloads.list``.

        Raises:
            DrainError: Names the pods; the node is not kept closed.
        """
        pods = self.remaining(usage, self.workloads.list())
        if pods:
            names = messages.listed([pod.key for pod in pods])
            raise errors.DrainError(f"pods got devices to be removed after the drain: {names}")

    def remaining(
        self, usage: gpu_use.Usage, listed: tuple[cluster.Pod, ...]
    ) -> tuple[cluster.Pod, ...]:
        """Return which of the pods, just listed, use an affected device now."""
        return self.order.affected_pods(self._usage(listed, usage))

    def _begin(self, *, is_forcing: bool) -> None:
        self._evictions.begin(is_forcing=is_forcing)
        self._extend()
        self._round = 0

    def _extend(self) -> None:
        self._deadline = self.clock.monotonic() + self.order.limits.drain_timeout_s

    @property
    def _is_late(self) -> bool:
        return self.clock.monotonic() >= self._deadline

    def _may_wait(self, before: gpu_use.Usage) -> bool:
        """Check, with what the watch reported, whether there is nothing to do but wait.

        Evictions and the end of a drain need a list, because a watch may lag behind.
        """
        pods = None if self._is_late else self.workloads.watched()
        if pods is None:
            return False
        remaining = self.order.affected_pods(self._usage(pods, before))
        if not remaining or self.order.is_passive:
            return bool(remaining)
        return not self._evictions.is_any_ready(remaining)

    def _observe(self, before: gpu_use.Usage) -> gpu_use.Usage | None:
        """Return the usage now; None when the API does not answer and there is time left."""
        try:
            pods = self.workloads.list()
        except errors.ClusterError as error:
            if error.reason is not errors.Reason.API_UNAVAILABLE or self._is_late:
                raise
            _log.warning("pods_not_listed", error=error.message)
            return None
        return self._usage(pods, before)

    def _usage(self, pods: tuple[cluster.Pod, ...], before: gpu_use.Usage) -> gpu_use.Usage:
        if before.assigned is None:
            return dataclasses.replace(before, pods=pods)
        # Kubelet answered before: if it does not now, the drain waits and affects no more pods.
        try:
            assigned = self.allocations.assigned()
        except errors.ClusterError as error:
            _log.warning("pod_resources_unavailable", error=error.message)
            ended = {pod.key for pod in before.pods} - {pod.key for pod in pods}
            assigned = tuple(one for one in before.assigned if one.key not in ended)
        # A kubelet that has just started lists no pods for a moment. A pod keeps its devices.
        known = {pod.uid for pod in before.pods}
        unlisted = {pod.key for pod in pods if pod.uid in known}
        unlisted -= {one.key for one in assigned if one.device_ids}
        kept = (one for one in before.assigned if one.key in unlisted)
        return dataclasses.replace(before, pods=pods, assigned=(*assigned, *kept))

    def _act(self, remaining: Sequence[cluster.Pod], now: gpu_use.Usage) -> None:
        """Evict or delete pods; at the deadline go over to force, or fail with ``DrainError``."""
        if self.order.is_passive:
            blocked = {pod.key: "--drain-policy none evicts no pod" for pod in remaining}
        else:
            evicted = self._evictions.evicted
            blocked = self._evictions.move(remaining)
            if self._evictions.evicted > evicted and self._evictions.is_rolling:
                # A rolling drain takes as long as its successors do: each eviction is progress.
                self._extend()
        if not self._is_late:
            return
        is_movable = not any(map(eviction.why_immovable, remaining))
        may_force = self.order.limits.policy.is_forced and not self.order.is_passive
        if self._evictions.is_forcing or not (may_force and is_movable):
            raise self._timeout(remaining, blocked, now, is_movable=is_movable)
        self._begin(is_forcing=True)
        names = messages.listed([pod.key for pod in remaining if not pod.is_terminating])
        if names:
            self.on_force(names)

    def _timeout(
        self,
        remaining: Sequence[cluster.Pod],
        blocked: Mapping[str, str],
        now: gpu_use.Usage,
        *,
        is_movable: bool,
    ) -> errors.DrainError:
        def cause(pod: cluster.Pod) -> str:
            ending = f"still terminating, which may take {pod.grace_s} s"
            why = blocked.get(pod.key) or (
                ending if pod.is_terminating else "waits for the others"
            )
            return ", ".join(filter(None, (why, now.why_uncertain(pod))))

        causes = messages.by_cause((pod.key, cause(pod)) for pod in remaining)
        has_evicted = self._evictions.evicted > 0 or self.order.has_begun
        reason, more = self._evictions.why_incomplete(remaining, has_evicted=has_evicted)
        count = "1 pod still uses" if len(remaining) == 1 else f"{len(remaining)} pods still use"
        timeout_s = self.order.limits.drain_timeout_s
        by_force = ", and as long again by force" if self._evictions.is_forcing else ""
        lacks_driver = any(pod.may_claim for pod in remaining) and not (
            dra_driver.has_ready(now.pods)
        )
        return errors.DrainError(
            f"{count} devices to be removed after {timeout_s:g} s{by_force}: {causes}"
            + (f"; {more}" if more else ""),
            reason=reason,
            # A pod that cannot be evicted at all keeps the next attempt from evicting any. A DRA
            # driver that is gone comes back only to a node without the taint.
            keeps_closed=has_evicted and is_movable and not lacks_driver,
        )
