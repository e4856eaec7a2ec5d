"""The loop of the partitioner: wait until demand is quiet, and decide while this replica leads."""

from mig_manager.core import liveness
from mig_manager.partitioner import term

_MIN_PAUSE_S = 0.01


class Partitioner:
    """Campaigns for the Lease, and serves the terms that it wins."""

    def __init__(self, parts: term.Parts) -> None:
        self._parts = parts
        self.pulse = liveness.Pulse(parts.clock.monotonic)
        self.pulse.beat()
        self._was_leader = False
        self._term = term.Term(parts)

    def run(self) -> None:
        """Step until the signal ends the loop, then release the Lease."""
        signal = self._parts.signal
        try:
            while not signal.is_over:
                signal.wait(self.step())
        finally:
            self._parts.leader.release()

    def step(self) -> float:
        """Decide if a decision is due; return the seconds to wait for a signal."""
        leader = self._parts.leader
        self.pulse.beat()
        is_leader = leader.campaign()
        self._parts.telemetry.leader.set(is_leader)
        if is_leader is not self._was_leader:
            # A term reads the wall clock only when it is won; a lost one leaves its metrics.
            self._term = term.Term(self._parts)
        self._was_leader = is_leader
        if not is_leader:
            return max(_MIN_PAUSE_S, leader.next_in_s)
        self._term.leave_out_blind_time()
        if self._term.next_in_s <= 0:
            self._term.decide()
        return max(_MIN_PAUSE_S, min(leader.next_in_s, self._term.next_in_s))
