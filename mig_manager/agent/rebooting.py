"""A reboot of the machine for a MIG mode that nothing else brings: once a wish, if allowed."""

import dataclasses

from mig_manager import errors
from mig_manager.agent import clearing, dependencies, record
from mig_manager.core import model, ports
from mig_manager.core.node import policy as policies

_LOOK_S = 1.0
"""Pause between two looks for the signal to end."""


class Rebooting:
    """The reboot of one run.

    Args:
        world: What it reaches.
        limits: What it may do.
        written: What is published of the run, and its journal.
        clears: Has everybody leave whom a reboot would hurt.
        name: The layout.
    """

    def __init__(
        self,
        world: dependencies.Dependencies,
        limits: dependencies.Limits,
        written: record.Record,
        clears: clearing.Clearing,
        *,
        name: str,
    ) -> None:
        self._world = world
        self._limits = limits
        self._record = written
        self._clearing = clears
        self._name = name
        self.is_under_way = False
        """Whether the machine is about to go down: what is taken stays taken."""

    def may_help(self, error: errors.MigManagerError, *, is_had: bool) -> bool:
        """Tell whether a reboot can help, is allowed, and was not done before for this layout.

        It helps where a GPU's new MIG mode is pending, and where a process prevents a reset.

        Args:
            error: Why the run failed.
            is_had: Whether the wish has had one, as far as the node tells; the journal knows
                better.
        """
        before = self._record.journal.rebooted_from
        if before:
            is_had = before != self._world.boot_id
        # Who holds off a reset is gone after a reboot as well.
        is_missing = error.reason.means_mode_waits or (
            isinstance(error, errors.HostError) and error.reason is errors.Reason.IN_USE
        )
        return (
            is_missing
            and self._world.reboot is not None
            and self._limits.policy.drain is not policies.Drain.NONE
            and not is_had
            and (isinstance(error, errors.HostError) or self._is_mode_pending())
        )

    def _is_mode_pending(self) -> bool:
        """Check whether a GPU has a pending MIG mode that differs from its current one."""
        try:
            return any(gpu.has_pending_mode for gpu in self._world.gpus.observe())
        except errors.HardwareError:
            return False

    def request(self, error: errors.MigManagerError, wish: ports.Cancellation) -> str:
        """Have everybody leave whom a reboot would hurt, ask for it, and wait for it to come.

        Returns:
            Why it does not come, as a part of a sentence.

        Raises:
            Superseded: The signal to end, as it comes when the machine goes down.
        """
        try:
            drainage, holders = self._clearing.whole_node()
            drainage.run(holders, wish)
            self._announce(error.message)
            if self._world.reboot is not None:
                self._world.reboot.request(f"MIG layout {self._name} needs it")
            self.is_under_way = True
            self._wait_for_end(wish)
        except errors.MigManagerError as refused:
            self._record.rebooted(is_so=False)
            return refused.message
        self.is_under_way = False
        limit = self._limits.reboot_timeout_s
        return f"the machine is still up {limit:g} s after it was asked"

    def _wait_for_end(self, wish: ports.Cancellation) -> None:
        """Wait for the signal to end; another layout does not cut it short.

        A run for that layout would work on a machine that is going down.

        Raises:
            Superseded: The signal to end.
        """
        clock = self._world.clock
        deadline = clock.monotonic() + self._limits.reboot_timeout_s
        while (left_s := deadline - clock.monotonic()) > 0:
            try:
                wish.wait(min(left_s, _LOOK_S))
            except errors.Superseded as end:
                if end.is_stopping:
                    raise
                clock.wait(min(left_s, _LOOK_S))

    def _announce(self, why: str) -> None:
        self._record.rebooted()
        self._record.enter(
            model.Phase.REBOOT,
            f"rebooting: {why}",
            take=dataclasses.replace(
                self._record.journal, rebooted_from=self._world.boot_id or "unknown"
            ),
            state=model.State.REBOOTING,
        )
        self._world.node.emit(reason="Rebooting", message=f"{self._name}: {why}", is_warning=True)
