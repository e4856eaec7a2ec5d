"""One agent process of the soak: an ``Agent`` in a thread that takes steps.

The product's own loop serves, retries and rests. Only one of the two threads is ever at work: the
agent's from the beginning of a step until it rests, waits for its next try, or is no more.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mig_manager import reasons
from mig_manager.adapters.kubernetes import api
from mig_manager.agent import agent_settings, intake, main
from mig_manager.core import ports
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox.driver import resets, simulated_nvml
from tests.rigs.node import fake_cluster, fakes, inboxes, strikes
from tests.rigs.stage import in_process, process_moments
from tests.soak import driver, script, soak_rig

_MAX_TRIES = 12  # tries in a row that an agent gets to publish its outcome: each strike comes once
_DEADLINE_S = 120.0
_NO_API = api.KubeApi.at("http://127.0.0.1:9")  # all ports are in memory; nothing is sent
_OPTIONS: Mapping[str, object] = {
    "node_name": "node-a",
    "simulate_state": "/nonexistent/gpus.json",
    "drain_timeout_s": "6",
    "plugin_timeout_s": "6",
    "monitor_timeout_s": "2",
    "drift_check_interval_s": "0",
}


class StepOutcome(NamedTuple):
    state: run_status.State
    reason: reasons.Reason
    message: str
    should_retry: bool


class LoopStep(NamedTuple):
    """What became of one step of the agent's loop."""

    is_killed: bool = False
    is_over: bool = True  # whether the process is no more: it was killed, or stopped
    outcome: StepOutcome | None = None
    """None: there was no run, or the last one did not end, or the node has no label."""
    names: tuple[str, ...] = ()  # layouts of the runs, in order
    successes: tuple[str, ...] = ()
    """Those of them that ended with success; a newer request may have come right after it."""


class Process:
    """One agent process; its first step begins with the first look at the node."""

    def __init__(
        self, rig: soak_rig.SoakRig, source: fakes.FakeTextSource, *, heals: bool
    ) -> None:
        self._rig = rig
        simulated_nvml.load(soak_rig.Library(rig))
        self.inbox = _StepInbox(rig)
        in_memory = {
            "gpus": driver.real_adapter(rig.clock),
            "reset": resets.SimulatedReset(rig.state),
            "node": fake_cluster.FakeNode(rig),
            "workloads": soak_rig.Workloads(rig, lambda: self.inbox.served_layout),
            "allocations": fake_cluster.FakeAllocations(rig),
            "layout_source": source,
        }
        heard: dict[str, Any] = {
            n: process_moments.WatchedPort(p, n, rig.script.call) for n, p in in_memory.items()
        }
        agent = in_process.new_agent(
            agent_settings.AgentSettings.read(dict(_OPTIONS) | {"heal_drift": heals}, {}),
            _NO_API,
            boot_id=rig.state.boot_id,
            overrides=main.Overrides(inbox=self.inbox, watches_files=False),
            telemetry=self.inbox,
            pod_watch=fakes.FakePodWatch(),
            # No pod of the soak has a claim, but a run asks whether a DRA driver is awaited.
            slices=fake_cluster.FakeSlices(rig),
            clock=rig.clock,
            lock=fakes.FakeLock(),
            verified_layout_file=rig.verified_layout_file,
            host_copy_file=rig.host_copy_file,
            **heard,
        )
        self._error: BaseException | None = None
        self._is_killed = False
        self._thread = threading.Thread(target=self._serve, args=(agent,), daemon=True)
        rig.script.acts[script.StrikeKind.STOP] = self._stop

    def step(self, planned: Sequence[script.Strike] = ()) -> LoopStep:
        """Let the agent work until it rests, and return how that ended."""
        self._rig.script.begin(planned)
        self.inbox.begin()
        try:
            for _ in range(_MAX_TRIES):
                self.inbox.is_lost = False
                self._go()
                if not self.inbox.is_lost or not self._thread.is_alive():
                    break
            else:
                raise AssertionError("the API answers, and still nothing can be published")
        finally:
            self._rig.script.end()
        end = None if self.inbox.is_dead else self.inbox.last_end
        message = (
            self._rig.node_object.status_messages[-1]
            if self._rig.node_object.status_messages
            else ""
        )
        return LoopStep(
            is_killed=self._is_killed,
            is_over=self.inbox.is_dead,
            outcome=end and StepOutcome(*end, message, should_retry=not self.inbox.is_resting),
            names=tuple(self.inbox.names),
            successes=tuple(self.inbox.successes),
        )

    def abandon(self) -> None:
        """Kill it where it rests."""
        if self._thread.is_alive():
            self.inbox.is_abandoned = True
            self._go()
            assert not self._thread.is_alive()

    def _go(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()
        else:
            self.inbox.may_go.release()
        assert self.inbox.is_step_over.acquire(timeout=_DEADLINE_S), "it neither rests nor ends"
        if self.inbox.is_dead:
            self._thread.join(_DEADLINE_S)
            assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def _serve(self, agent: main.Agent) -> None:
        try:
            agent.loop.serve()
        except strikes.Killed:
            self._is_killed = True
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            self._error = error
        self.inbox.is_dead = True
        self.inbox.is_step_over.release()

    def _stop(self, _pick: int) -> bool:
        self.inbox.stop()
        return True


class _StepInbox(inboxes.NodeInbox, ports.Telemetry):
    """Ends a step where the agent has nothing to do.

    How the runs of a step ended is remembered until the next one.
    """

    def __init__(self, rig: soak_rig.SoakRig) -> None:
        super().__init__(rig, lambda _pause: self._end_step(is_resting=True))
        self.names: list[str] = []
        self.successes: list[str] = []
        self.last_end: tuple[run_status.State, reasons.Reason] | None = None
        self.is_lost = False
        self.may_go = threading.Semaphore(0)
        self.is_step_over = threading.Semaphore(0)
        self.is_resting = False
        self.is_abandoned = False
        self.is_dead = False
        self.served_layout: str | None = None
        """The layout that is served, or was last."""

    def begin(self) -> None:
        """Forget the step before."""
        self.names.clear()
        self.successes.clear()
        self.last_end = None

    def attempt_began(self, number: int) -> None:
        self.last_end = None
        if self.served_layout is not None:
            self.names.append(self.served_layout)

    def run_ended(self, state: run_status.State, reason: reasons.Reason, seconds: float) -> None:
        if self.served_layout is not None:
            self.last_end = state, reason
            if state is run_status.State.SUCCESS:
                self.successes.append(self.served_layout)

    def outcome_lost(self, reason: reasons.Reason) -> None:
        self.is_lost = True

    def wait_until_superseded(
        self, generation: int, *, at_rest: bool = False, timeout_s: float | None = None
    ) -> bool:
        """End the step before the next try and where nothing is newer, and wait no longer."""
        if at_rest:
            super().wait_until_superseded(generation, at_rest=True)
        else:
            self._end_step()
        return True

    def next(self, generation: int) -> intake.ReceivedRequest | None:
        received = super().next(generation)
        if received is not None:
            self.served_layout = received.request.layout or None
        return received

    def _end_step(self, *, is_resting: bool = False) -> None:
        self.is_resting = is_resting
        self.is_step_over.release()
        assert self.may_go.acquire(timeout=10 * _DEADLINE_S)
        if self.is_abandoned:
            raise strikes.Killed
        self.is_resting = False


def state_of(rig: soak_rig.SoakRig) -> run_status.State | None:
    text = rig.node_object.labels.get(well_known.STATE_LABEL)
    return run_status.State(text) if text else None
