"""GPU work in a child process, because a call into a hung driver never returns.

A thread that waits in the driver cannot be stopped. A process can be killed, and where even that
takes no effect, since the kernel holds it in an uninterruptible wait, it can be left behind. A
crash in the vendor's library is then an error with a reason. And at rest this process has neither
the library nor a session, which could hold off a reset.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from mig_manager import errors, ports
from mig_manager.adapters import gpu_protocol
from mig_manager.core import model

_STDERR_KEPT_BYTES = 16 * 1024
_REAP_TIMEOUT_S = 2.0

_log = structlog.get_logger()


def worker_command(
    *,
    library_path: str | None = None,
    driver_roots: Sequence[str] = (),
    simulate_state: str | None = None,
    in_use_timeout_s: float = 30.0,
) -> tuple[str, ...]:
    """Return the command line of ``mig_manager.gpu_worker``.

    Args:
        library_path: File of the NVML library; None leaves the search to the loader.
        driver_roots: Where to look for the library when the loader does not find it.
        simulate_state: State file of a simulated node; None for real GPUs.
        in_use_timeout_s: How long a step is tried again while a GPU is in use.
    """
    # -P: a module in whatever folder we were started from must not stand in for a library's.
    command = [sys.executable, "-P", "-m", "mig_manager.gpu_worker"]
    command += ["--in-use-timeout-s", str(in_use_timeout_s)]
    if library_path is not None:
        command += ["--library-path", library_path]
    for root in driver_roots:
        command += ["--driver-root", root]
    if simulate_state is not None:
        command += ["--simulate-state", simulate_state]
    return tuple(command)


class ChildGpus:
    """Implements ``ports.Gpus``: each call in a process of its own.

    For one thread at a time.

    Args:
        command: Starts a worker that reads one request and writes one answer.
        timeout_s: How long a call may take, start of the process included, before it is killed;
            well above the worker's own patience with GPUs in use.
        telemetry: Hears what each call found and what it took.
        monotonic: Seconds from some fixed point.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        timeout_s: float,
        telemetry: ports.Telemetry | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = tuple(command)
        self._timeout_s = timeout_s
        self._telemetry = telemetry or ports.Telemetry()
        self._monotonic = monotonic
        self._unkillable: list[subprocess.Popen[bytes]] = []

    def observe(self) -> tuple[model.Gpu, ...]:
        """Return every GPU, ascending by index.

        Raises:
            HardwareError: What the worker was told by NVML; with NVML_TIMEOUT when it did not
                answer in time, and with NVML_ERROR when it was killed by a signal.
        """
        match self._timed("observe", gpu_protocol.Observe()):
            case gpu_protocol.Observed(gpus=gpus):
                self._telemetry.gpus_observed(gpus)
                return gpus
            case answer:
                raise _unexpected(answer)

    def execute(self, plan: model.Plan) -> None:
        """Run the steps of every GPU.

        Raises:
            HardwareError: As ``observe``; after NVML_TIMEOUT and NVML_ERROR nobody knows which
                steps have run.
        """
        match self._timed("execute", gpu_protocol.Execute(plan=plan)):
            case gpu_protocol.Executed():
                return
            case answer:
                raise _unexpected(answer)

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
        # Those left behind become zombies once the kernel lets go of them.
        self._unkillable = [process for process in self._unkillable if process.poll() is None]
        tail = _Tail()
        try:
            output, status = self._exchange(gpu_protocol.encode(request), tail)
        finally:
            stderr = tail.close()
        if stderr:
            _log.warning("gpu_worker_stderr", stderr=stderr)
        answer = gpu_protocol.decode_answer(output)
        for each in answer.calls if answer else ():
            self._telemetry.nvml_called(each.function, each.count, each.seconds)
        # A complete answer counts, even if the vendor's library then crashes while unloading.
        match answer:
            case None:
                raise _died(status, stderr)
            case gpu_protocol.Failed():
                raise answer.to_error()
            case _:
                return answer

    def _exchange(self, request: bytes, tail: "_Tail") -> tuple[bytes, int]:
        """Run the worker; return what it answered and its exit status, which leaves nothing."""
        process = self._start(tail)
        try:
            output, _ = process.communicate(request, timeout=self._timeout_s)
        except subprocess.TimeoutExpired as error:
            raise errors.HardwareError(
                f"the GPU worker gave no answer within {self._timeout_s:g} s and was killed",
                reason=errors.Reason.NVML_TIMEOUT,
            ) from error
        finally:
            self._end(process)
        return output, process.returncode

    def _start(self, tail: "_Tail") -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(  # noqa: S603 - our own command line, without a shell
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=tail.writer,
                # A group of its own, to be killed with whatever it starts.
                start_new_session=True,
            )
        except OSError as error:
            raise errors.HardwareError(
                f"the GPU worker cannot be started: {error}", reason=errors.Reason.INTERNAL
            ) from error

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(_REAP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _log.error("gpu_worker_unkillable", pid=process.pid)
                self._unkillable.append(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class _Tail:
    """Keeps the end of what a child writes to stderr, so that no flood of it fills the memory."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._drain, name="gpu-worker-stderr", daemon=True)
        self._thread.start()

    def close(self) -> str:
        """Return what was kept, once the child has closed its end."""
        os.close(self.writer)
        self._thread.join(_REAP_TIMEOUT_S)
        return bytes(self._kept).decode(errors="replace").strip()

    def _drain(self) -> None:
        with os.fdopen(self._reader, "rb", buffering=0) as stream:
            while chunk := stream.read(_STDERR_KEPT_BYTES):
                self._kept += chunk
                del self._kept[:-_STDERR_KEPT_BYTES]


def _died(status: int, stderr: str) -> errors.HardwareError:
    said = f"; it last wrote: {stderr.splitlines()[-1]}" if stderr else ""
    if status < 0:
        return errors.HardwareError(
            f"the GPU worker was killed by {_signal_name(-status)}{said}",
            reason=errors.Reason.NVML_ERROR,
        )
    return errors.HardwareError(
        f"the GPU worker ended with status {status} and no answer{said}",
        reason=errors.Reason.INTERNAL,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _unexpected(answer: object) -> errors.HardwareError:
    return errors.HardwareError(
        f"the GPU worker answered with {type(answer).__name__}", reason=errors.Reason.INTERNAL
    )
