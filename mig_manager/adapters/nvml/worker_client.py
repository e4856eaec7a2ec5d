"""The GPUs through worker processes, because a call into a hung driver never returns.

A process can be killed, or left behind in an uninterruptible wait. A crash in the vendor's library
becomes an error with a reason. At rest this process has neither the library nor a session, which
could prevent a reset.
"""

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters.host import device_users, procfs, subprocesses, worker_messages
from mig_manager.adapters.nvml import last_calls
from mig_manager.core import gpu_processes, model, ports, steps

if TYPE_CHECKING:
    from mig_manager.core.acceptance import surveys

_MODULE = "mig_manager.adapters.nvml.worker"
REPORTS_STEPS = "--reports-steps"  # makes a worker of ``worker_command`` report each step

_log = structlog.get_logger()


def worker_command(
    task: str = "serve",
    *,
    library_path: str | None = None,
    driver_roots: Sequence[str] = (),
    in_use_timeout_s: float = 30.0,
    proc_root: pathlib.Path | str | None = None,
    program: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the command line of a worker.

    Args:
        task: ``serve`` or ``listen``.
        library_path: File of the NVML library.
        driver_roots: Where to look for the library when the loader does not find it.
        in_use_timeout_s: How long to retry while GPUs are in use.
        proc_root: Where to look for processes.
        program: Starts a worker for simulated GPUs.
    """
    arguments = [task, "--in-use-timeout-s", str(in_use_timeout_s)]
    for root in driver_roots:
        arguments += ["--driver-root", root]
    for option, value in {"--library-path": library_path, "--proc-root": proc_root}.items():
        if value is not None:
            arguments += [option, str(value)]
    return (*(program or subprocesses.python(_MODULE)), *arguments)


class _Worker:
    """A worker process, and the memory with its last calls."""

    def __init__(self, command: Sequence[str]) -> None:
        with contextlib.ExitStack() as stack:
            try:
                self._last_calls = stack.enter_context(contextlib.closing(last_calls.LastCalls()))
                self.child = subprocesses.Child(
                    (*command, "--last-calls-fd", str(self._last_calls.fd)),
                    pass_fds=(self._last_calls.fd,),
                )
            except OSError as error:
                raise errors.HardwareError(
                    f"the GPU worker cannot be started: {error}", reason=reasons.Reason.INTERNAL
                ) from error
            stack.pop_all()

    def end(self) -> "_EndedWorker":
        """Kill it and release everything."""
        ended_s = time.monotonic()
        self.child.end()
        calls = self._last_calls.read()
        self._last_calls.close()
        return _EndedWorker(child=self.child, calls=calls, ended_s=ended_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _EndedWorker:
    """A worker that was killed, or had ended before."""

    child: subprocesses.Child
    calls: tuple[last_calls.LastCall, ...]
    """The last call of each of its threads, the oldest first."""
    ended_s: float  # when it was killed, on the monotonic clock

    @property
    def is_stuck(self) -> bool:
        """Whether the kernel still keeps it alive; reaps it once it is gone."""
        return self.child.status is None

    @property
    def running(self) -> list[last_calls.LastCall]:
        """Its calls that had not returned at its end."""
        return [call for call in self.calls if call.is_running]

    @property
    def doing(self) -> str:
        """Its running calls as text; empty if unknown."""
        return device_users.name_users(self.running)

    @property
    def stuck_s(self) -> float:
        """How long ago it was killed."""
        return round(time.monotonic() - self.ended_s, 3)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class WorkerGpus:
    """Implements ``ports.Gpus``: each call in a process of its own; for one thread at a time.

    Every call raises HardwareError, also NVML_TIMEOUT if the worker did not answer in time and
    NVML_ERROR if a signal killed it.

    Within ``kept_ready`` the process of the next call is started ahead. It imports what it needs
    and waits without touching the driver.
    """

    command: Sequence[str]
    timeout_s: float
    """For a call and the start of its process; must be well above the time-out of a worker's
    retries while GPUs are in use."""
    telemetry: ports.Telemetry = dataclasses.field(default_factory=ports.Telemetry)
    proc_root: pathlib.Path = procfs.ROOT
    _stuck: list[_EndedWorker] = dataclasses.field(default_factory=list, init=False)
    _observed: model.ObservedGpus = dataclasses.field(default=model.NO_GPUS, init=False)
    _by_index: dict[int, model.Gpu] = dataclasses.field(default_factory=dict, init=False)
    _ready: _Worker | None = dataclasses.field(default=None, init=False)
    _is_kept_ready: bool = dataclasses.field(default=False, init=False)

    @contextlib.contextmanager
    def kept_ready(self) -> Iterator[None]:
        """Keep a worker ready for the next call in the context, up to the execution of a plan."""
        self._is_kept_ready = True
        try:
            self._start_ahead()
            yield
        finally:
            self._is_kept_ready = False
            self._end_ready()

    def _start_ahead(self) -> None:
        """Start the worker of the next call; a failure shows when the worker is needed."""
        if self._is_kept_ready and self._ready is None:
            with contextlib.suppress(errors.HardwareError):
                self._ready = _Worker(self.command)

    def _end_ready(self) -> None:
        worker, self._ready = self._ready, None
        if worker is not None:
            self._end(worker)

    def observe(self) -> model.ObservedGpus:
        """Return every GPU, ascending by index."""
        self._observed = model.NO_GPUS
        try:
            with self._timed("observe"):
                self._observed = self._identify_lost(self._ask(("observe",)))
        finally:
            self.telemetry.gpus_observed(self._observed)
        return self._observed

    def execute(self, plan: steps.Plan, observed: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        """Execute a plan; if the worker did not answer, it is unknown which steps were done."""
        uuids = {gpu.gpu_uuid for gpu in plan.gpus}
        # The worker lists their instances again, so only lasting facts are sent.
        without_instances = tuple(
            dataclasses.replace(gpu, gpu_instances=()) for gpu in observed if gpu.uuid in uuids
        )
        self.telemetry.steps_began(plan)
        # Only a rollback needs another worker.
        self._is_kept_ready = False
        with self._timed("execute"):
            gpus: model.ObservedGpus = self._ask(("execute", plan, without_instances))
        self._observed = self._observed.with_newer(gpus)
        self.telemetry.gpus_observed(self._observed)
        return gpus

    def inspect(self) -> gpu_processes.Inspection:
        """Return the driver's versions and the GPU processes."""
        inspection: gpu_processes.Inspection = self._ask(("inspect",))
        return inspection

    def survey(self) -> "surveys.Survey":
        """Return what each NVML function answers for each GPU."""
        survey: surveys.Survey = self._ask(("survey",))
        return survey

    def processes(self) -> dict[str, tuple[gpu_processes.GpuProcess, ...]]:
        """Return the processes of each GPU that answers, by UUID."""
        return dict(self.inspect().processes)

    def _identify_lost(self, observed: model.ObservedGpus) -> model.ObservedGpus:
        """Complete unreachable GPUs with facts from their last observation."""
        reachable = {gpu.uuid for gpu in observed}
        self._by_index |= {gpu.index: gpu for gpu in observed}
        return model.ObservedGpus(
            observed,
            (
                lost.with_identity(last)
                if (last := self._by_index.get(lost.index)) is not None
                and last.uuid not in reachable
                and lost.uuid in ("", last.uuid)
                else lost
                for lost in observed.unreachable
            ),
        )

    @contextlib.contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        since = time.monotonic()
        is_good = False
        try:
            yield
            is_good = True
        finally:
            seconds = time.monotonic() - since
            self.telemetry.gpu_operation_ended(operation, seconds, is_good=is_good)

    def _ask(self, request: tuple[object, ...]) -> Any:
        """Have a worker answer a request, and end the worker."""
        for stuck in self._stuck_workers():
            _log.warning(
                "gpu_worker_still_stuck",
                pid=stuck.child.pid,
                doing=stuck.doing,
                seconds=stuck.stuck_s,
            )
        # It may have died while it waited.
        if self._ready is not None and self._ready.child.status is not None:
            self._end_ready()
        worker, self._ready = self._ready or _Worker(self.command), None
        answer: Any = None
        failure = None
        try:
            answer = self._answer(worker.child, request)
        except (TimeoutError, EOFError, ValueError) as error:
            failure = error
        finally:
            old_worker = self._end(worker)
        stderr = old_worker.child.stderr.text().strip()
        if stderr:
            _log.warning("gpu_worker_stderr", stderr=stderr)
        match failure:
            case None:
                self._start_ahead()
                outcome, totals = answer
                for function, count, seconds in totals:
                    self.telemetry.nvml_called(function, count, seconds)
                return worker_messages.result(outcome)
            case TimeoutError():
                raise self._hung(old_worker) from failure
            case _:
                raise _worker_error(old_worker, failure, stderr) from failure

    def _answer(self, child: subprocesses.Child, request: tuple[object, ...]) -> Any:
        """Return a worker's answer, and pass on the steps that it reports before."""
        deadline_s = time.monotonic() + self.timeout_s
        message = child.ask(request, timeout_s=self.timeout_s)
        while message[0] == "step":
            self.telemetry.step_ended(message[1])
            message = child.receive(max(0.0, deadline_s - time.monotonic()))
        return message

    def _end(self, worker: _Worker) -> _EndedWorker:
        old_worker = worker.end()
        if old_worker.is_stuck:
            _log.error("gpu_worker_unkillable", pid=old_worker.child.pid, doing=old_worker.doing)
            self._stuck.append(old_worker)
        return old_worker

    def _stuck_workers(self) -> list[_EndedWorker]:
        """Return the unkillable workers that still run."""
        self._stuck = [each for each in self._stuck if each.is_stuck]
        return self._stuck

    def _hung(self, worker: _EndedWorker) -> errors.HardwareError:
        fate = "was killed"
        if worker.is_stuck:
            fate = f"(pid {worker.child.pid}) cannot be killed and was left behind"
        if worker.running:
            verbs = "has not returned for", *["for"] * (len(worker.running) - 1)
            calls = device_users.name_users(
                f"{call} {verb} {round(max(0.0, worker.ended_s - call.since_s), 1):g} s"
                for call, verb in zip(worker.running, verbs, strict=True)
            )
            message = f"{calls}; the GPU worker {fate}"
        else:
            message = f"the GPU worker gave no answer within {self.timeout_s:g} s and {fate}"
            if worker.calls:
                message += f"; no NVML call was under way, the last was {worker.calls[-1]}"
        error = _error(message, worker, reasons.Reason.NVML_TIMEOUT)
        if worker.running and worker.running[0].minor is not None:
            # Do not read files that the driver serves now, such as the capabilities.
            processes = device_users.find_users(self.proc_root, ignore=(os.getpid(),))
            if users := device_users.name_users(
                device_users.using_gpu(processes, worker.running[0].minor)
            ):
                error.add(
                    f"{error.gpu} is open in {users}, "
                    "and maybe in others that cannot be seen from here"
                )
        for stuck in self._stuck_workers():
            if stuck is not worker:
                error.add(
                    f"an earlier GPU worker (pid {stuck.child.pid}) is still stuck in "
                    f"{stuck.doing or 'the driver'}, {stuck.stuck_s:.0f} s after it was given up"
                )
        return error


def _worker_error(worker: _EndedWorker, failure: Exception, stderr: str) -> errors.HardwareError:
    status = worker.child.status
    is_signal = status is not None and status < 0
    message = "the GPU worker "
    if isinstance(failure, ValueError):
        message += f"sent no valid message ({failure}) and "
    message += subprocesses.ending(status)
    if worker.running:
        message += f" in {worker.doing}"
    if not is_signal:
        message += " and no answer"
    if stderr:
        message += f"; it last wrote: {stderr.splitlines()[-1]}"
    # Within a call the vendor's library is the cause.
    is_nvml = is_signal or worker.running
    return _error(
        message, worker, reasons.Reason.NVML_ERROR if is_nvml else reasons.Reason.INTERNAL
    )


def _error(message: str, worker: _EndedWorker, reason: reasons.Reason) -> errors.HardwareError:
    if not worker.running:
        return errors.HardwareError(message, reason=reason)
    first = worker.running[0]
    return errors.HardwareError(message, reason=reason, operation=first.function, gpu=first.gpu)
