"""Agents as light as can be: they follow the published contract on labels and annotations.

One thread plays the agents of all nodes, straight on the server's store: each sees its label,
publishes ``pending`` and taints its node, and after a while says how it ended.
"""

import contextlib
import dataclasses
import heapq
import json
import queue
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from mig_manager import reasons
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox.apiserver import kinds, store
from testkit import apiserver
from tests.rigs import api_objects
from tests.rigs.node import gpu_values

_GPUS = api_objects.annotations_of_agent(gpu_values.gpus_of("A100-SXM4-40GB"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """How a node fails, each time it tries."""

    reason: reasons.Reason
    message: str
    is_retried: bool = False


class FakeAgents:
    def __init__(
        self,
        server: apiserver.ApiServer,
        names: Collection[str],
        *,
        failures: Mapping[str, NodeFailure] | None = None,
        dead: Collection[str] = (),
        work_s: float = 0.05,
    ) -> None:
        self._server = server
        self._names = frozenset(names)
        self.failures = dict(failures or {})
        self.dead = set(dead)
        """Nodes without an agent that reacts."""
        self.unreachable: dict[str, list[dict[str, object]]] = {}
        """``unreachableGpus`` of the status of a node."""
        self.work_s = work_s
        """How long an agent works on a request."""
        self._last_requests: dict[str, str | None] = {}
        self._runs: dict[str, int] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._random = random.Random(0)  # noqa: S311 - no secret
        self._news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake-agents", daemon=True)
        self._unsubscribe = server.store.subscribe(self._notice)

    def repair(self, name: str) -> None:
        """Let a node be well from now on; its agent tries again."""
        self.failures.pop(name, None)
        self._last_requests.pop(name, None)
        self._news.put(name)

    def wake(self) -> None:
        """Let every agent be alive from now on."""
        self.dead.clear()
        for name in self._names:
            self._news.put(name)

    def start(self) -> None:
        for name in self._names:
            self._server.merge(kinds.NODES, name, {"metadata": {"annotations": _GPUS}})
            self._news.put(name)
        self._thread.start()

    def stop(self) -> None:
        self._unsubscribe()
        self._news.put(None)
        self._thread.join(30)

    def _notice(self, record: store.Record) -> None:
        if record.key[0] == kinds.NODES.plural and record.key[2] in self._names:
            self._news.put(record.key[2])

    def _run(self) -> None:
        while True:
            timeout_s = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else None
            with contextlib.suppress(queue.Empty):
                name = self._news.get(timeout=timeout_s)
                if name is None:
                    return
                self._observe(name)
            while self._queue and self._queue[0][0] <= time.monotonic():
                heapq.heappop(self._queue)[2]()

    def _observe(self, name: str) -> None:
        labels = self._node(name)["metadata"].get("labels") or {}
        requested = labels.get(well_known.CONFIG_LABEL)
        if name in self.dead or requested is None or self._last_requests.get(name) == requested:
            return
        self._last_requests[name] = requested
        # A newer run takes the place of the retries of an older one.
        self._runs[name] = run = self._runs.get(name, 0) + 1
        self._after(0.01, lambda: self._begin(name, requested, run))

    def _begin(self, name: str, requested: str, run: int) -> None:
        if self._runs[name] != run:
            return
        failure = self.failures.get(name)
        if failure and failure.reason is reasons.Reason.DOES_NOT_FIT:
            # Refused before anything is touched.
            self._end(name, requested, run)
            return
        self._write(name, requested, run_status.State.PENDING, phase=run_status.Phase.TAINT)
        self._after(self.work_s, lambda: self._end(name, requested, run))

    def _end(self, name: str, requested: str, run: int) -> None:
        if self._runs[name] != run:
            return
        failure = self.failures.get(name)
        self._write(
            name,
            requested,
            run_status.State.FAILED if failure else run_status.State.SUCCESS,
            phase=run_status.Phase.DONE,
            failure=failure,
        )
        if failure and failure.is_retried:
            self._after(4 * self.work_s, lambda: self._begin(name, requested, run))

    def _write(
        self,
        name: str,
        requested: str,
        state: run_status.State,
        *,
        phase: run_status.Phase,
        failure: NodeFailure | None = None,
    ) -> None:
        members: dict[str, object] = {}
        if failure:
            retry_at = "soon" if failure.is_retried else None
            members = {"reason": failure.reason.value, "message": failure.message}
            members |= {"retryAt": retry_at}
        text = api_objects.a_status(requested, state, phase=phase.value, **members)
        if name in self.unreachable:
            # Not all of them are as an agent writes them.
            text = json.dumps(json.loads(text) | {"unreachableGpus": self.unreachable[name]})
        applied = (
            {well_known.APPLIED_LABEL: requested} if state is run_status.State.SUCCESS else {}
        )
        metadata = {
            "labels": {well_known.STATE_LABEL: state.value} | applied,
            "annotations": {well_known.STATUS_ANNOTATION: text},
        }
        taints = [api_objects.RECONFIGURING_TAINT] if state is run_status.State.PENDING else []
        change = {"metadata": metadata, "spec": {"taints": taints}}
        self._server.merge(kinds.NODES, name, change)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._serial += 1
        at_s = time.monotonic() + seconds * self._random.uniform(0.5, 1.5)
        heapq.heappush(self._queue, (at_s, self._serial, act))

    def _node(self, name: str) -> store.Object:
        return self._server.get(kinds.NODES, name)


@contextlib.contextmanager
def running(agents: FakeAgents) -> Iterator[FakeAgents]:
    agents.start()
    try:
        yield agents
    finally:
        agents.stop()
