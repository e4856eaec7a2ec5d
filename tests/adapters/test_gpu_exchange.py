"""A request and an answer over pipes, with processes that behave and processes that do not."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mig_manager.adapters.nvml_worker import gpu_exchange

ECHO = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
LARGE = os.urandom(1 << 20)
"""Far more than a pipe takes at once."""


@contextmanager
def running(script: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(  # noqa: S603 - our own interpreter
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def exchange(script: str, request: bytes = b"", *, timeout_s: float = 30.0) -> bytes | None:
    with running(script) as process:
        answer = gpu_exchange.exchange(process, request, timeout_s=timeout_s)
        # Whoever answered in time has ended and is reaped.
        assert answer is None or process.returncode is not None
    return answer


@pytest.mark.parametrize("request_", [b"", b"a", LARGE], ids=["nothing", "a letter", "a lot"])
def test_all_is_given_and_all_is_taken(request_: bytes) -> None:
    assert exchange(ECHO, request_) == request_


def test_who_answers_before_it_has_read_all_is_understood() -> None:
    assert exchange("import os; os.write(1, b'answer')", LARGE) == b"answer"


@pytest.mark.parametrize(
    "script",
    [
        "import time; time.sleep(60)",
        "import os, time; os.close(0); time.sleep(60)",
        "import os, time; os.write(1, b'answer'); os.close(1); time.sleep(60)",
        "import os\nwhile True: os.write(1, b'answer')",
    ],
    ids=["never reads", "closes its input", "never ends", "never stops talking"],
)
def test_who_has_not_ended_in_time_has_not_answered(script: str) -> None:
    since = time.monotonic()
    assert exchange(script, LARGE, timeout_s=0.5) is None
    assert time.monotonic() - since < 20


def test_who_was_killed_has_said_what_it_said() -> None:
    assert exchange("import os; os.write(1, b'half'); os.kill(os.getpid(), 9)") == b"half"


def test_a_kernel_without_descriptors_of_processes_will_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert exchange(ECHO, LARGE) == LARGE
    stays = "import os, time; os.close(1); time.sleep(60)"
    assert exchange(stays, timeout_s=0.2) is None
