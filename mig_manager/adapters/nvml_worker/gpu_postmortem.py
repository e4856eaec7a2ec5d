"""What is said of a GPU worker that gave no answer: what it was doing, and who is involved."""

import dataclasses
import signal
from collections.abc import Sequence

from mig_manager import errors
from mig_manager.adapters.host import procfs
from mig_manager.adapters.nvml import gpu_progress
from mig_manager.core import messages

_MAX_CALLS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A worker that the kernel does not let go, as it is told in later errors."""

    pid: int
    doing: str
    """What it was doing; empty when that is not known."""
    seconds: float
    """Since it was given up."""

    def __str__(self) -> str:
        return (
            f"an earlier GPU worker (pid {self.pid}) is still stuck in "
            f"{self.doing or 'the driver'}, {self.seconds:.0f} s after it was given up"
        )


def timed_out(
    calls: Sequence[gpu_progress.Call],
    *,
    now_s: float,
    timeout_s: float,
    left_behind: int | None,
    holders: Sequence[procfs.GpuProcess] = (),
    stuck: Sequence[Stuck] = (),
) -> errors.HardwareError:
    """Build the error for a worker that did not answer in time.

    Args:
        calls: The last calls of its threads, the oldest first.
        now_s: When its time was up; on the monotonic clock.
        timeout_s: The time it had.
        left_behind: Its pid when it could not be killed; None when it was.
        holders: Who else has the GPU's device node open.
        stuck: Earlier workers that could not be killed either.
    """
    under_way = [call for call in calls if call.is_under_way]
    if under_way:
        said = f"{_hung(under_way, now_s)}; the GPU worker {_fate(left_behind)}"
    else:
        said = f"the GPU worker gave no answer within {timeout_s:g} s and {_fate(left_behind)}"
        if calls:
            said += f"; no NVML call was under way, the last was {calls[-1]}"
    if holders:
        said += (
            f"; {under_way[0].gpu} is open in {procfs.named(holders)}, "
            "and maybe in others that cannot be seen from here"
        )
    for each in stuck:
        said += f"; {each}"
    return _error(said, under_way, errors.Reason.NVML_TIMEOUT)


def died(calls: Sequence[gpu_progress.Call], *, status: int, stderr: str) -> errors.HardwareError:
    """Build the error for a worker that ended without an answer.

    Args:
        calls: The last calls of its threads, the oldest first.
        status: Its exit status; negative for a signal.
        stderr: What it last wrote.
    """
    under_way = [call for call in calls if call.is_under_way]
    where = f" in {doing(calls)}" if under_way else ""
    words = f"; it last wrote: {stderr.splitlines()[-1]}" if stderr else ""
    if status < 0:
        said = f"the GPU worker was killed by {_signal_name(-status)}{where}{words}"
        return _error(said, under_way, errors.Reason.NVML_ERROR)
    said = f"the GPU worker ended with status {status}{where} and no answer{words}"
    # Within a call it is the vendor's library that ends a process.
    reason = errors.Reason.NVML_ERROR if under_way else errors.Reason.INTERNAL
    return _error(said, under_way, reason)


def doing(calls: Sequence[gpu_progress.Call]) -> str:
    """Return in words which calls are under way; empty when none is."""
    return _joined([str(call) for call in calls if call.is_under_way])


def _hung(under_way: Sequence[gpu_progress.Call], now_s: float) -> str:
    first, *others = under_way
    said = [f"{first} has not returned for {_since(first, now_s)}"]
    said += [f"{call} for {_since(call, now_s)}" for call in others]
    return _joined(said)


def _since(call: gpu_progress.Call, now_s: float) -> str:
    return f"{round(max(0.0, now_s - call.since_s), 1):g} s"


def _joined(said: Sequence[str]) -> str:
    return messages.listed(said, most=_MAX_CALLS)


def _fate(left_behind: int | None) -> str:
    if left_behind is None:
        return "was killed"
    return f"(pid {left_behind}) cannot be killed and was left behind"


def _error(
    said: str, under_way: Sequence[gpu_progress.Call], reason: errors.Reason
) -> errors.HardwareError:
    return errors.HardwareError(
        said,
        reason=reason,
        operation=under_way[0].function if under_way else "",
        gpu=under_way[0].gpu if under_way else "",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
