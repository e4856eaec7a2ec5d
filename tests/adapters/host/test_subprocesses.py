"""Messages to and from child processes, those that behave and those that do not."""

import errno
import os
import pickle
import signal

import pytest

from mig_manager import errors, reasons
from mig_manager.adapters.host import subprocesses, worker_messages
from tests.rigs.host import processes

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

ECHO = "while (message := parent.receive()) is not None: parent.send(message)"
LARGE = os.urandom(1 << 20)  # far more than a pipe takes at once


def worker(script: str) -> subprocesses.Child:
    return subprocesses.Child(processes.worker_command(script))


def ask(script: str, request: object = "x", *, timeout_s: float = 30.0) -> object:
    child = worker(script)
    try:
        return child.ask(request, timeout_s=timeout_s)
    finally:
        assert child.end()


def test_messages_of_any_size_are_exchanged_one_after_the_other() -> None:
    child = worker(ECHO)
    for message in (("observe",), LARGE, [LARGE, 1], "last"):
        assert child.ask(message, timeout_s=30.0) == message
    assert child.end()


@pytest.mark.parametrize("then", ["time.sleep(60)", "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_an_answer_before_the_request_was_read_counts_whatever_follows(then: str) -> None:
    assert ask(f"parent.send(1); {then}", LARGE) == 1


def test_a_message_that_arrives_in_pieces_is_reassembled() -> None:
    script = """
data = worker_messages.encode("one") + worker_messages.encode("two")
for byte in data:
    os.write(parent._out, bytes([byte]))
time.sleep(60)
"""
    child = worker(script)
    assert [child.receive(30.0), child.receive(30.0)] == ["one", "two"]
    with pytest.raises(TimeoutError):
        child.receive(0.01)
    assert child.end()


@pytest.mark.parametrize(
    "kind", [errors.HardwareError, errors.GpuInUseError, errors.OutdatedPlanError]
)
def test_an_error_keeps_its_kind_and_all_its_fields(kind: type[errors.HardwareError]) -> None:
    def fail() -> None:
        fields = {
            "reason": reasons.Reason.IN_USE,
            "operation": "nvmlX",
            "gpu": "GPU 3",
            "code": 19,
        }
        error = kind("busy", **(fields if kind is errors.HardwareError else {}))  # type: ignore[arg-type]
        error.add("undone")
        raised.append(error)
        raise error

    raised: list[errors.HardwareError] = []
    outcome = pickle.loads(pickle.dumps(worker_messages.attempt(fail)))  # noqa: S301 - our own
    with pytest.raises(kind, match=r"^busy; undone$") as caught:
        worker_messages.result(outcome)
    assert vars(caught.value) == vars(raised[0])


@pytest.mark.parametrize(
    ("script", "error", "status", "timeout_s"),
    [
        ("time.sleep(60)", TimeoutError, -signal.SIGKILL, 0.5),
        ("os.close(0); time.sleep(60)", TimeoutError, -signal.SIGKILL, 3.0),
        ("os.close(parent._out); time.sleep(60)", EOFError, -signal.SIGKILL, 60.0),
        (
            "os.write(parent._out, b'hello' * 99); time.sleep(60)",
            ValueError,
            -signal.SIGKILL,
            60.0,
        ),
        (
            "os.write(parent._out, bytes([0, 0, 0, 2]) + b'xx'); time.sleep(60)",
            ValueError,
            -9,
            60.0,
        ),
        ("os.write(parent._out, worker_messages.encode(1)[:-1]); sys.exit(3)", EOFError, 3, 60.0),
        ("os.kill(os.getpid(), signal.SIGSEGV)", EOFError, -signal.SIGSEGV, 60.0),
    ],
)
def test_a_worker_without_an_answer_is_ended_by_the_deadline(
    script: str, error: type[Exception], status: int, timeout_s: float
) -> None:
    child = worker(script)
    with pytest.raises(error):
        child.ask(LARGE, timeout_s=timeout_s)
    assert child.end()
    assert child.status == status


def test_a_kernel_without_process_descriptors_suffices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert ask(ECHO, LARGE) == LARGE
    with pytest.raises(EOFError):
        ask("sys.exit(3)")


def test_a_process_that_keeps_the_pipes_open_does_not_delay_the_end() -> None:
    child = worker("os.fork() or time.sleep(60); os._exit(3)")
    with pytest.raises(EOFError):
        child.receive(30.0)
    assert child.end()
    assert child.status == 3


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (3, "ended with status 3"),
        (-11, "was killed by SIGSEGV"),
        (-99, "was killed by signal 99"),
        (None, "cannot be killed"),
    ],
)
def test_the_end_of_a_process_is_described(status: int | None, words: str) -> None:
    assert subprocesses.ending(status) == words
