"""Expect pods by recent arrivals, so that devices for them can be ready before they come."""

import contextlib
import dataclasses
import math

from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.nodes import node_index

_MEMORY_S = 600.0  # after this time an arrival counts for a third
_MIN_PROBABILITY = 0.2
"""Pods at least this likely are expected. A higher bound makes room too late, a lower one blocks
other devices."""
_MIN_PROBABILITY_OF_FIRST = 0.05
"""The bound for one pod of each kind: a device of a rare size hardly blocks others."""
_MAX_EXPECTED = 500  # more only make decisions in a large cluster longer
_MIN_RATE = 0.01 / _MEMORY_S


class Arrivals:
    """The rates at which pods arrive that are equal but for resources other than MIG devices.

    Threads that share it give it a lock.
    """

    def __init__(self, *, lock: contextlib.AbstractContextManager[object] | None = None) -> None:
        self._lock = lock or contextlib.nullcontext()
        self._rates: dict[demand.Needs, tuple[float, float]] = {}
        """Arrivals a second, and when that was true."""
        self._present_s = -math.inf
        """When the pods that no longer arrive were last forgotten."""

    def add(self, needs: demand.Needs, now_s: float) -> None:
        """Count the arrival of a pod that requests MIG devices."""
        alike = dataclasses.replace(needs, amounts=needs.mig)
        with self._lock:
            self._rates[alike] = self._rate(alike, now_s) + 1 / _MEMORY_S, now_s
            # Replicas that only count do not ask what to expect.
            if now_s > self._present_s + _MEMORY_S:
                self._forget(now_s)

    def expected_pods(
        self, now_s: float, within_s: float, index: node_index.NodeIndex
    ) -> tuple[demand.PendingPod, ...]:
        """Return the pods that likely arrive within a time for each of their slices.

        The slices of a pod's largest device count: the larger it is, the more pods must end
        before a GPU has room again. Pods that request equal devices and may use equal nodes are
        alike. Arrivals are independent of each other (Poisson). The order mixes kinds in
        proportion to their means, so that frequent pods alone do not reach the limit.
        """
        with self._lock:
            present = self._forget(now_s)
        rates = dict[object, float]()
        alike: dict[object, demand.Needs] = {}
        for needs, (rate, _) in present.items():
            key: object = needs.amounts, index.excluded_nodes(needs)
            alike.setdefault(key, needs)
            rates[key] = rates.get(key, 0.0) + rate
        likely: list[tuple[float, demand.Amounts, demand.Needs]] = []
        for key, needs in alike.items():
            slices = max((profile.gpu_slices for profile in needs.profiles), default=1)
            mean = rates[key] * within_s * slices
            exactly = fewer = math.exp(-mean)
            for count in range(1, _MAX_EXPECTED + 1):
                if 1 - fewer < (_MIN_PROBABILITY_OF_FIRST if count == 1 else _MIN_PROBABILITY):
                    break
                likely.append((count / mean, needs.amounts, needs))
                exactly *= mean / count
                fewer += exactly
        likely.sort(key=lambda each: each[:2])
        return tuple(
            demand.PendingPod(namespace="", name="expected", uid=f"{number:04}", needs=needs)
            for number, (_, _, needs) in enumerate(likely[:_MAX_EXPECTED])
        )

    def _forget(self, now_s: float) -> dict[demand.Needs, tuple[float, float]]:
        """Forget the pods that no longer arrive; return the present rates."""
        present = {needs: (self._rate(needs, now_s), now_s) for needs in self._rates}
        self._present_s = now_s
        self._rates = {needs: rate for needs, rate in present.items() if rate[0] > _MIN_RATE}
        return self._rates

    def _rate(self, needs: demand.Needs, now_s: float) -> float:
        rate, at_s = self._rates.get(needs, (0.0, now_s))
        return rate * math.exp((at_s - now_s) / _MEMORY_S)
