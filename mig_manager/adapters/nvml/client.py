"""The GPUs through worker processes, because a call into a hung driver never returns.

A thread that waits in the driver cannot be stopped. A process can be killed, and if the kernel
holds it in an uninterruptible wait, it can be left behind. A crash in the vendor's library becomes
an error with a reason. And at rest this process has neither the library nor a session, which could
prevent a reset.
"""

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from mig_manager import errors
from mig_manager.adapters.host import procfs, subprocesses
from mig_manager.adapters.nvml import hung_call
from mig_manager.core import model, ports, steps

if TYPE_CHECKING:
    from mig_manager.adapters.nvml import processes

_MODULE = "mig_manager.adapters.nvml.worker"

_log = structlog.get_logger()


def worker_command(
    *,
    library_path: str | None = None,
    driver_roots: Sequence[str] = (),
    simulate_state: str | None = None,
    in_use_timeout_s: float = 30.0,
    proc_root: str | None = None,
) -> tuple[str, ...]:
    """Return the command line of a worker that serves requests; see ``gpus.NvmlGpus``.

    Args:
        library_path: File of the NVML library.
        driver_roots: Where to look for the library when the loader does not find it.
        simulate_state: State file of a simulated node; None for real GPUs.
        in_use_timeout_s: How long steps are retried while a GPU is in use.
        proc_root: None: ``/proc``, or nowhere on a simulated node.
    """
    gpus = _library_arguments(library_path, driver_roots, simulate_state)
    proc = () if proc_root is None else ("--proc-root", proc_root)
    timeout = ("--in-use-timeout-s", str(in_use_timeout_s))
    return subprocesses.python(_MODULE, "serve", *gpus, *timeout, *proc)


def listener_command(
    *,
    library_path: str | None = None,
    driver_roots: Sequence[str] = (),
    simulate_state: str | None = None,
) -> tuple[str, ...]:
    """Return the command line of a worker that listens; see ``worker_command``."""
    gpus = _library_arguments(library_path, driver_roots, simulate_state)
    return subprocesses.python(_MODULE, "listen", *gpus)


def _library_arguments(
    library_path: str | None, driver_roots: Sequence[str], simulate_state: str | None
) -> list[str]:
    """Return the arguments that say which GPUs a worker works on."""
    arguments = [] if library_path is None else ["--library-path", library_path]
    for root in driver_roots:
        arguments += ["--driver-root", root]
    if simulate_state is not None:
        arguments += ["--simulate-state", simulate_state]
    return arguments


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    child: subprocesses.Child
    last_calls: hung_call.LastCalls


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StuckWorker:
    """A worker that could not be killed."""

    child: subprocesses.Child
    doing: str
    """Its calls that have not returned; empty if unknown."""
    since_s: float

    @property
    def age_s(self) -> float:
        return round(time.monotonic() - self.since_s, 3)

    def __str__(self) -> str:
        return (
            f"an earlier GPU worker (pid {self.child.pid}) is still stuck in "
            f"{self.doing or 'the driver'}, {self.age_s:.0f} s after it was given up"
        )


class WorkerGpus(ports.Standby):
    """Implements ``ports.Gpus``: each call in a process of its own; for one thread at a time.

    As ``ports.Standby`` it starts the process of the next call ahead, which imports what it needs
    and waits without touching the driver.

    Args:
        command: Starts a worker; the descriptor of its ``LastCalls`` is added.
        timeout_s: How long a call may take, start of the process included, before it is killed;
            well above the time for which a worker retries while GPUs are in use.
        telemetry: Notified of what each call observed and how long it took.
        proc_root: Where to look for processes that use a GPU on which the driver hangs.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        timeout_s: float,
        telemetry: ports.Telemetry | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        proc_root: pathlib.Path = procfs.ROOT,
    ) -> None:
        self._command = tuple(command)
        self._timeout_s = timeout_s
        self._telemetry = telemetry or ports.Telemetry()
        self._monotonic = monotonic
        self._proc_root = proc_root
        self._left_behind: list[_StuckWorker] = []
        self._seen = model.NO_GPUS
        """All GPUs as last observed."""
        self._last: dict[int, model.Gpu] = {}
        """Each GPU by index, as it was when it was last reachable."""
        self._ready: _Worker | None = None

    def prepare(self) -> None:
        """Start the worker of the next call; a failure shows when the worker is needed."""
        if self._ready is None:
            with contextlib.suppress(errors.HardwareError):
                self._ready = self._start()

    def dismiss(self) -> None:
        """End the worker that was started ahead."""
        worker, self._ready = self._ready, None
        if worker is not None:
            self._end(worker)
            worker.last_calls.close()

    def observe(self) -> model.ObservedGpus:
        """Return every GPU, ascending by index.

        Raises:
            HardwareError: NVML refused or failed. NVML_TIMEOUT: the worker did not answer in time;
                names the calls that have not returned and the processes that have that GPU open.
                NVML_ERROR: a signal killed the worker.
        """
        with self._timed("observe"):
            gpus = self._identified(self._ask(("observe",)))
        self._seen = gpus
        self._telemetry.gpus_observed(gpus)
        return gpus

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        """Execute the steps of every GPU, and return the GPUs of the plan afterwards.

        Raises:
            HardwareError: As ``observe``; after NVML_TIMEOUT and NVML_ERROR it is unknown which
                steps were executed.
        """
        uuids = {gpu.gpu_uuid for gpu in plan.gpus}
        # Their instances are listed again, so only lasting facts are sent.
        known = tuple(
            dataclasses.replace(gpu, gpu_instances=()) for gpu in seen if gpu.uuid in uuids
        )
        with self._timed("execute"):
            gpus: model.ObservedGpus = self._ask(("execute", plan, known))
        self._seen = self._seen.updated(gpus)
        self._telemetry.gpus_observed(self._seen)
        return gpus

    def inspect(self) -> "processes.Inspection":
        """Return the driver's versions and the processes that use the GPUs.

        Raises:
            HardwareError: As ``observe``.
        """
        inspection: processes.Inspection = self._ask(("inspect",))
        return inspection

    def _identified(self, observed: model.ObservedGpus) -> model.ObservedGpus:
        """Complete unreachable GPUs with facts from the last observation of each."""
        reachable = {gpu.uuid for gpu in observed}
        self._last |= {gpu.index: gpu for gpu in observed}
        return model.ObservedGpus(
            observed,
            (
                lost.identified(last)
                if (last := self._last.get(lost.index)) is not None
                and last.uuid not in reachable
                and lost.uuid in ("", last.uuid)
                else lost
                for lost in observed.unreachable
            ),
        )

    @contextlib.contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        since = self._monotonic()
        is_good = False
        try:
            yield
            is_good = True
        finally:
            seconds = self._monotonic() - since
            self._telemetry.gpu_operation_ended(operation, seconds, is_good=is_good)

    def _ask(self, request: tuple[object, ...]) -> Any:
        """Have a worker answer a request; nothing of it is left but what the kernel holds."""
        for stuck in self._stuck_workers():
            _log.warning(
                "gpu_worker_still_stuck",
                pid=stuck.child.pid,
                doing=stuck.doing,
                seconds=stuck.age_s,
            )
        worker, self._ready = self._ready, None
        if worker is not None and worker.child.status is not None:
            # It died while it waited.
            self._end(worker)
            worker.last_calls.close()
            worker = None
        worker = worker or self._start()
        with contextlib.closing(worker.last_calls):
            answer: Any = None
            failure = None
            try:
                answer = worker.child.ask(request, timeout_s=self._timeout_s)
            except (TimeoutError, EOFError, ValueError) as error:
                failure = error
            finally:
                # The worker reads the same clock, which no argument can replace there.
                now_s = time.monotonic()
                self._end(worker)
            stderr = worker.child.stderr.text().strip()
            if stderr:
                _log.warning("gpu_worker_stderr", stderr=stderr)
            if failure is not None:
                raise self._explained(worker, failure, now_s=now_s, stderr=stderr) from failure
        outcome, calls = answer
        for function, count, seconds in calls:
            self._telemetry.nvml_called(function, count, seconds)
        return subprocesses.result(outcome)

    def _start(self) -> _Worker:
        with contextlib.ExitStack() as stack:
            try:
                last_calls = stack.enter_context(contextlib.closing(hung_call.LastCalls()))
                child = subprocesses.Child(
                    (*self._command, "--last-calls-fd", str(last_calls.fd)),
                    pass_fds=(last_calls.fd,),
                )
            except OSError as error:
                raise errors.HardwareError(
                    f"the GPU worker cannot be started: {error}", reason=errors.Reason.INTERNAL
                ) from error
            stack.pop_all()
        return _Worker(child=child, last_calls=last_calls)

    def _end(self, worker: _Worker) -> None:
        if not worker.child.end():
            doing = hung_call.running_calls(worker.last_calls.read())
            _log.error("gpu_worker_unkillable", pid=worker.child.pid, doing=doing)
            stuck = _StuckWorker(child=worker.child, doing=doing, since_s=time.monotonic())
            self._left_behind.append(stuck)

    def _stuck_workers(self) -> list[_StuckWorker]:
        """Return the workers left behind that still run; the others are reaped."""
        self._left_behind = [each for each in self._left_behind if each.child.status is None]
        return self._left_behind

    def _explained(
        self, worker: _Worker, failure: Exception, *, now_s: float, stderr: str
    ) -> errors.HardwareError:
        calls = worker.last_calls.read()
        status = worker.child.status
        if not isinstance(failure, TimeoutError):
            ending = subprocesses.ending(status)
            if isinstance(failure, ValueError):
                ending = f"sent no valid message ({failure}) and {ending}"
            return hung_call.died(calls, ending=ending, is_signal=(status or 0) < 0, stderr=stderr)
        open_in = ""
        hung = next((call for call in calls if call.is_running), None)
        if hung is not None and hung.minor is not None:
            # Files that the driver serves, such as the capabilities, must not be read now.
            found = procfs.gpu_processes(self._proc_root, ignore=(os.getpid(),))
            open_in = procfs.named(procfs.using_gpu(found, hung.minor))
        fate = "was killed"
        if status is None:
            fate = f"(pid {worker.child.pid}) cannot be killed and was left behind"
        error = hung_call.hung(
            calls, now_s=now_s, timeout_s=self._timeout_s, fate=fate, processes=open_in
        )
        for stuck in self._stuck_workers():
            if stuck.child is not worker.child:
                error.add(str(stuck))
        return error
