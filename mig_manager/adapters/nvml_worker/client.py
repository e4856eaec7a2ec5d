"""GPU work in a child process, because a call into a hung driver never returns.

A thread that waits in the driver cannot be stopped. A process can be killed, and where even that
takes no effect, since the kernel holds it in an uninterruptible wait, it can be left behind. A
crash in the vendor's library is then an error with a reason. And at rest this process has neither
the library nor a session, which could hold off a reset.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

import structlog

from mig_manager import errors
from mig_manager.adapters.host import procfs
from mig_manager.adapters.nvml import gpu_progress
from mig_manager.adapters.nvml_worker import (
    gpu_exchange,
    gpu_postmortem,
    gpu_process,
    gpu_protocol,
    gpu_tail,
)
from mig_manager.change import instrumentation
from mig_manager.core import model, ports, steps

_REAP_TIMEOUT_S = 2.0

_log = structlog.get_logger()


def worker_command(
    *,
    library_path: str | None = None,
    driver_roots: Sequence[str] = (),
    simulate_state: str | None = None,
    in_use_timeout_s: float = 30.0,
    proc_root: str | None = None,
) -> tuple[str, ...]:
    """Return the command line of ``mig_manager.adapters.nvml_worker.gpu_worker``.

    Args:
        library_path: File of the NVML library; None leaves the search to the loader.
        driver_roots: Where to look for the library when the loader does not find it.
        simulate_state: State file of a simulated node; None for real GPUs.
        in_use_timeout_s: How long a step is tried again while a GPU is in use.
        proc_root: Where to look for processes that hold a GPU; None: ``/proc``, and nowhere on a
            simulated node.
    """
    command = gpu_process.command(
        "mig_manager.adapters.nvml_worker.gpu_worker",
        library_path=library_path,
        driver_roots=driver_roots,
        simulate_state=simulate_state,
    )
    line = (*command, "--in-use-timeout-s", str(in_use_timeout_s))
    return line if proc_root is None else (*line, "--proc-root", proc_root)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LeftBehind:
    """A worker that the kernel did not let go."""

    process: subprocess.Popen[bytes]
    doing: str
    since_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """What is left of a worker."""

    output: bytes | None
    """What it answered; None when it took too long."""
    status: int
    """Its exit status; negative for a signal."""
    is_left_behind: bool
    """Whether the kernel did not let it go."""
    pid: int
    calls: tuple[gpu_progress.Call, ...]
    ended_s: float
    stderr: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """A worker that has not been asked anything yet, and what is shared with it."""

    process: subprocess.Popen[bytes]
    board: gpu_progress.Board
    tail: gpu_tail.Tail

    @property
    def can_be_asked(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.tail.close()
        self.board.close()


class WorkerGpus(ports.Standby):
    """Implements ``ports.Gpus``: each call in a process of its own.

    For one thread at a time. As ``ports.Standby`` it starts the process of the next call ahead,
    which loads what it needs and then waits; the driver is not touched before it is asked.

    Args:
        command: Starts a worker that reads one request and writes one answer; it is told the
            descriptor of its ``gpu_progress.Board`` as well.
        timeout_s: How long a call may take, start of the process included, before it is killed;
            well above the worker's own patience with GPUs in use.
        telemetry: Hears what each call found and what it took.
        monotonic: Seconds from some fixed point.
        proc_root: Where to look for processes that hold a GPU on which the driver hangs.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        timeout_s: float,
        telemetry: instrumentation.Telemetry | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        proc_root: pathlib.Path = procfs.ROOT,
    ) -> None:
        self._command = tuple(command)
        self._timeout_s = timeout_s
        self._telemetry = telemetry or instrumentation.Telemetry()
        self._monotonic = monotonic
        self._proc_root = proc_root
        self._left_behind: list[_LeftBehind] = []
        self._seen = model.NO_GPUS
        """All GPUs as last observed."""
        self._last: dict[int, model.Gpu] = {}
        """Each GPU by index, as it was when it was last reachable."""
        self._ready: _Worker | None = None

    def prepare(self) -> None:
        """Start the worker of the next call; what is wrong with it shows when it is needed."""
        if self._ready is None:
            with contextlib.suppress(errors.HardwareError):
                self._ready = self._new_worker()

    def dismiss(self) -> None:
        """End the worker that was started for a call which does not come."""
        worker, self._ready = self._ready, None
        if worker is not None:
            self._discard(worker)

    def observe(self) -> model.ObservedGpus:
        """Return every GPU, ascending by index.

        Raises:
            HardwareError: What the worker was told by NVML; with NVML_TIMEOUT when it did not
                answer in time, naming the calls that were under way and who has that GPU
                open; with NVML_ERROR when it was killed by a signal.
        """
        match self._timed("observe", gpu_protocol.Observe()):
            case gpu_protocol.Observed(gpus=observed):
                gpus = self._identified(observed)
                self._seen = gpus
                self._telemetry.gpus_observed(gpus)
                return gpus
            case answer:
                raise _unexpected(answer)

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        """Run the steps of every GPU.

        Returns:
            The GPUs of the plan afterwards.

        Raises:
            HardwareError: As ``observe``; after NVML_TIMEOUT and NVML_ERROR nobody knows which
                steps have run.
        """
        match self._timed("execute", gpu_protocol.Execute.of(plan, seen)):
            case gpu_protocol.Executed(gpus=gpus):
                self._seen = self._seen.updated(gpus)
                self._telemetry.gpus_observed(self._seen)
                return gpus
            case answer:
                raise _unexpected(answer)

    def _identified(self, observed: model.ObservedGpus) -> model.ObservedGpus:
        """Complete what is known of unreachable GPUs by the last observation of each."""
        here = {gpu.uuid for gpu in observed}
        self._last |= {gpu.index: gpu for gpu in observed}
        return model.ObservedGpus(
            observed,
            (
                lost.identified(last)
                if (last := self._last.get(lost.index)) is not None
                and last.uuid not in here
                and lost.uuid in ("", last.uuid)
                else lost
                for lost in observed.unreachable
            ),
        )

    def _timed(self, name: str, request: gpu_protocol.Request) -> gpu_protocol.Answer:
        since = self._monotonic()
        is_good = False
        try:
            answer = self._ask(request)
            is_good = True
        finally:
            seconds = self._monotonic() - since
            self._telemetry.gpu_operation_ended(name, seconds, is_good=is_good)
        return answer

    def _ask(self, request: gpu_protocol.Request) -> gpu_protocol.Answer:
        for stuck in self._stuck():
            _log.warning(
                "gpu_worker_still_stuck", pid=stuck.pid, doing=stuck.doing, seconds=stuck.seconds
            )
        ended = self._exchange(gpu_protocol.encode(request))
        if ended.stderr:
            _log.warning("gpu_worker_stderr", stderr=ended.stderr)
        if ended.output is None:
            raise self._timed_out(ended)
        answer = gpu_protocol.decode_answer(ended.output)
        for each in answer.calls if answer else ():
            self._telemetry.nvml_called(each.function, each.count, each.seconds)
        # A complete answer counts, even if the vendor's library then crashes while unloading.
        match answer:
            case None:
                raise gpu_postmortem.died(ended.calls, status=ended.status, stderr=ended.stderr)
            case gpu_protocol.Failed():
                raise answer.to_error()
            case _:
                return answer

    def _exchange(self, request: bytes) -> _Ended:
        """Run the worker to its end; nothing of it is left but what the kernel keeps."""
        worker = self._take_worker()
        process = worker.process
        with contextlib.closing(worker):
            try:
                output = gpu_exchange.exchange(process, request, timeout_s=self._timeout_s)
            finally:
                # The worker reads the same clock, which no argument can replace there.
                ended_s = time.monotonic()
                self._end(process, worker.board)
            return _Ended(
                output=output,
                status=-signal.SIGKILL if process.returncode is None else process.returncode,
                is_left_behind=process.returncode is None,
                pid=process.pid,
                calls=worker.board.calls(),
                ended_s=ended_s,
                stderr=worker.tail.close(),
            )

    def _take_worker(self) -> _Worker:
        """Return a worker to ask: the one that waits, unless it came to harm meanwhile."""
        worker, self._ready = self._ready, None
        if worker is not None and worker.can_be_asked:
            return worker
        if worker is not None:
            self._discard(worker)
        return self._new_worker()

    def _new_worker(self) -> _Worker:
        with contextlib.ExitStack() as stack:
            try:
                board = stack.enter_context(contextlib.closing(gpu_progress.Board()))
                tail = gpu_tail.Tail()
                stack.callback(tail.close)
                worker = _Worker(process=self._start(board, tail), board=board, tail=tail)
            except (OSError, RuntimeError) as error:
                raise errors.HardwareError(
                    f"the GPU worker cannot be started: {error}", reason=errors.Reason.INTERNAL
                ) from error
            stack.pop_all()
        return worker

    def _discard(self, worker: _Worker) -> None:
        with contextlib.closing(worker):
            self._end(worker.process, worker.board)

    def _start(self, board: gpu_progress.Board, tail: gpu_tail.Tail) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - our own command line, without a shell
            (*self._command, "--progress-fd", str(board.fd)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=tail.writer,
            pass_fds=(board.fd,),
            # A group of its own, to be killed with whatever it starts.
            start_new_session=True,
        )

    def _end(self, process: subprocess.Popen[bytes], board: gpu_progress.Board) -> None:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(_REAP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                doing = gpu_postmortem.doing(board.calls())
                _log.error("gpu_worker_unkillable", pid=process.pid, doing=doing)
                self._left_behind.append(
                    _LeftBehind(process=process, doing=doing, since_s=time.monotonic())
                )
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _stuck(self, *, but: int | None = None) -> tuple[gpu_postmortem.Stuck, ...]:
        """Return the workers left behind; the others became zombies, and are reaped."""
        self._left_behind = [each for each in self._left_behind if each.process.poll() is None]
        return tuple(
            gpu_postmortem.Stuck(
                pid=each.process.pid,
                doing=each.doing,
                seconds=round(time.monotonic() - each.since_s, 3),
            )
            for each in self._left_behind
            if each.process.pid != but
        )

    def _timed_out(self, ended: _Ended) -> errors.HardwareError:
        hung = next((call for call in ended.calls if call.is_under_way), None)
        holders: tuple[procfs.GpuProcess, ...] = ()
        if hung is not None and hung.minor is not None:
            # Nothing that the driver serves, such as the capabilities, may be read now.
            found = procfs.gpu_processes(self._proc_root, ignore=(os.getpid(),))
            holders = procfs.using_gpu(found, hung.minor)
        return gpu_postmortem.timed_out(
            ended.calls,
            now_s=ended.ended_s,
            timeout_s=self._timeout_s,
            left_behind=ended.pid if ended.is_left_behind else None,
            holders=holders,
            stuck=self._stuck(but=ended.pid),
        )


def _unexpected(answer: object) -> errors.HardwareError:
    return errors.HardwareError(
        f"the GPU worker answered with {type(answer).__name__}", reason=errors.Reason.INTERNAL
    )
