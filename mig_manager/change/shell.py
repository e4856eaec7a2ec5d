"""What changes at a shell work with: dependencies, lock, observation, transaction."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

from mig_manager import errors, reasons
from mig_manager.change import (
    change_recorder,
    hook_points,
    layout_store,
    node_lock,
    plan_executor,
    pod_use,
    transaction,
)
from mig_manager.core import gpu_processes, model, ports, timing

SignalsDeferred = Callable[[], contextlib.AbstractContextManager[hook_points.Check]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShellDependencies:
    """The ports and settings of a change from the command line."""

    gpus: ports.Gpus
    lock: ports.NodeLock
    journal: ports.SavedFile  # journal of a change under way
    verified_layout_file: ports.SavedFile
    clock: timing.Clock
    boot_id: str  # differs after each reboot; empty: unknown
    lock_timeout_s: float
    notify: Callable[[str], object]
    uninterrupted: SignalsDeferred = lambda: contextlib.nullcontext(hook_points.no_check)
    """Makes the context of a change, which delays signals. Entering it returns a check, for hooks
    and waits, that raises ``Superseded`` after a signal."""
    reset: ports.GpuReset | None = None
    """Resets GPUs with a pending mode; None: the mode stays pending."""
    may_reset: bool = True
    hooks: ports.Hooks | None = None
    processes: Callable[[], gpu_processes.Processes] = dict
    """Returns the processes that use each GPU; raises HardwareError if the driver refuses."""
    pods: pod_use.PodUse  # the pods whose devices a change must not destroy
    refresh_files: Callable[[], object] = lambda: None
    """Brings device nodes and CDI specs up to date, if no other program writes them; raises
    HostError DEVICE_FILES_FAILED."""
    idle_timeout_s: float = 0.0
    """How long to wait for processes and pods that use instances to be destroyed; 0: fail at
    once."""
    in_use_timeout_s: float = 0.0  # how long to retry what the driver refuses as in use
    driver_timeout_s: float = 0.0
    """How long to wait for a driver that is not loaded yet; 0: fail at once."""

    @property
    def verified_layout(self) -> layout_store.VerifiedLayoutStore:
        """The verified layout, saved for the next boot."""
        return layout_store.VerifiedLayoutStore(self.verified_layout_file, self.boot_id)

    @contextlib.contextmanager
    def hold_lock(self, doing: str) -> Iterator[None]:
        """Wait for the node's lock, and hold it in the context.

        Raises:
            HardwareError: On entering: the lock file cannot be written, nor the GPUs observed.
            LockedError: On entering: another manager had the lock until the deadline.
            UsageError: On entering: the lock file cannot be written.
        """
        lock = node_lock.hold(self.lock, doing, self.new_wait(self.lock_timeout_s))
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock)
            except errors.UsageError:
                # Without a driver, the right to lock would not help.
                self.gpus.observe()
                raise
            yield

    def observe_when_loaded(self) -> model.ObservedGpus:
        """Observe the GPUs, and wait for a driver that is not loaded yet.

        For the first observation only: a driver that is unloaded during a change is an error.

        Raises:
            HardwareError: The driver was not loaded in time, or NVML refused or failed.
        """
        return self.new_wait(self.driver_timeout_s).retry(
            self.gpus.observe,
            may_pass=lambda error: error.reason is reasons.Reason.DRIVER_NOT_LOADED,
            goal=" for it",
        )

    def new_wait(
        self, timeout_s: float, *, check: hook_points.Check = hook_points.no_check
    ) -> timing.Wait:
        """Return a wait that notifies people when it begins; exceptions of ``check`` end it."""

        def sleep(seconds: float) -> None:
            check()
            self.clock.wait(seconds)
            check()

        return timing.Wait(
            clock=self.clock,
            timeout_s=timeout_s,
            sleep=sleep,
            on_wait=lambda error: self.notify(
                f"{error.message}; waiting up to {round(timeout_s, 1):g} s"
            ),
        )

    def new_transaction(
        self,
        recorder: change_recorder.ChangeRecorder,
        *,
        check: hook_points.Check = hook_points.no_check,
        may_stay_pending: bool = False,
        kept_snapshots: model.Snapshots = (),
    ) -> transaction.Transaction:
        """Build the transaction of a change at a shell."""
        return transaction.Transaction(
            executor=plan_executor.PlanExecutor(
                gpus=self.gpus,
                reset=self.reset if self.may_reset else None,
                record_persistence=functools.partial(change_recorder.record_persistence, recorder),
                clock=self.clock,
                require_unused=self.pods.require_unused,
                in_use_timeout_s=self.in_use_timeout_s,
                may_stay_pending=may_stay_pending,
            ),
            recorder=recorder,
            refresh_files=self.refresh_files,
            idle_wait=self.new_wait(self.idle_timeout_s, check=check),
            kept_snapshots=kept_snapshots,
        )
