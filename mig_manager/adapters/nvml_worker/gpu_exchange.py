"""One request and one answer over the pipes of a GPU worker, and its end, with one deadline.

As ``subprocess.Popen.communicate``, which looks for the end of the process now and then only, and
so is some milliseconds late for each look at the GPUs and for each change.
"""

import os
import select
import subprocess
import time

_CHUNK_BYTES = 64 * 1024


def exchange(
    process: subprocess.Popen[bytes], request: bytes, *, timeout_s: float
) -> bytes | None:
    """Give a process its request, and return all that it writes until it has ended.

    Args:
        process: With pipes for input and output.
        request: What it shall read, followed by the end of its input.
        timeout_s: How long that may take.

    Returns:
        The answer; None when the process has not ended in time.
    """
    deadline_s = time.monotonic() + timeout_s
    answer = _talk(process, request, deadline_s)
    if answer is None or not _has_ended(process, deadline_s):
        return None
    return answer


def _talk(process: subprocess.Popen[bytes], request: bytes, deadline_s: float) -> bytes | None:
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None  # noqa: S101, PT018 - as it was ordered
    os.set_blocking(stdin.fileno(), False)
    poll = select.poll()
    poll.register(stdin, select.POLLOUT)
    poll.register(stdout, select.POLLIN)
    left, answer = memoryview(request), bytearray()
    while ready := poll.poll(_left_ms(deadline_s)):
        for fd, _ in ready:
            if fd == stdout.fileno():
                chunk = os.read(fd, _CHUNK_BYTES)
                if not chunk:
                    return bytes(answer)
                answer += chunk
            else:
                left = left[_written(fd, left) :]
                if not left:
                    poll.unregister(fd)
                    stdin.close()
    return None


def _written(fd: int, data: memoryview) -> int:
    """Write what there is room for; to a reader that has gone, all of it."""
    try:
        return os.write(fd, data[:_CHUNK_BYTES])
    except BrokenPipeError:
        return len(data)


def _has_ended(process: subprocess.Popen[bytes], deadline_s: float) -> bool:
    """Wait for the end of a process; tell whether it came in time."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        # Linux before 5.3.
        return _is_reaped(process, _left_ms(deadline_s) / 1000)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(_left_ms(deadline_s))
    finally:
        os.close(pidfd)
    return _is_reaped(process, 0.0)


def _is_reaped(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _left_ms(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic()) * 1000
