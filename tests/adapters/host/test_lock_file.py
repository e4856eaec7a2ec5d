"""The node's lock: exclusive among processes and threads, and released with its process."""

import contextlib
import fcntl
import json
import os
import pathlib
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures

import pytest
import structlog.testing

from mig_manager import errors, reasons
from mig_manager.adapters import host
from mig_manager.adapters.host import lock_file, procfs
from tests.rigs.node import fakes

HOLDER = """
import pathlib, sys
from mig_manager.adapters import host
from mig_manager.adapters.host import lock_file
lock = lock_file.LockFile(
    pathlib.Path(sys.argv[1]), program="other", clock=host.SystemClock(), is_required=True
)
with lock.hold("apply all-1g.5gb"):
    print("locked", flush=True)
    sys.stdin.read()
"""


def lock_at(path: pathlib.Path, *, is_required: bool = True) -> lock_file.LockFile:
    return lock_file.LockFile(
        path, program="test", clock=host.SystemClock(), is_required=is_required
    )


def description(path: pathlib.Path) -> pathlib.Path:
    """Return the file that describes the manager that has the lock."""
    return path.with_name("lock.owner")


@contextlib.contextmanager
def other_process(path: pathlib.Path) -> Iterator["subprocess.Popen[str]"]:
    """Let another process take the lock for the body."""
    with subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "run" / "mig-manager" / "lock"


def test_the_error_names_the_owner_of_the_lock_and_its_work(path: pathlib.Path) -> None:
    with (
        other_process(path) as process,
        pytest.raises(errors.LockedError) as caught,
        lock_at(path).hold("x"),
    ):
        pass

    assert caught.value.reason is reasons.Reason.LOCKED
    assert f"other (pid {process.pid} on {os.uname().nodename}), apply all-1g.5gb, since 20" in (
        caught.value.message
    )


def test_after_a_kill_the_lock_is_free_and_a_script_that_takes_it_is_named(
    path: pathlib.Path,
) -> None:
    with other_process(path) as process:
        process.kill()
    assert "apply all-1g.5gb" in description(path).read_text()
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        with pytest.raises(errors.LockedError) as caught, lock_at(path).hold("x"):
            pass
        manager = lock_file.manager(path)

    assert manager is not None
    assert caught.value.message.endswith(manager.description)
    assert f"(pid {os.getpid()})" in manager.description
    assert "apply" not in manager.description
    with lock_at(path).hold("x"):
        assert '"program": "test"' in description(path).read_text()


def test_a_probe_of_the_lock_by_another_program_is_waited_for(path: pathlib.Path) -> None:
    clock = fakes.FakeClock()
    lock = lock_file.LockFile(path, program="test", clock=clock, is_required=True)
    with lock.hold("x"):
        pass

    with path.open("rb") as probe:
        fcntl.flock(probe, fcntl.LOCK_SH)
        with pytest.raises(errors.LockedError), lock.hold("x"):
            pass
        assert clock.now_s < 1

        clock.on_wait.append(lambda: fcntl.flock(probe, fcntl.LOCK_UN))
        with lock.hold("x"):
            assert '"doing": "x"' in description(path).read_text()


def test_a_lock_removed_while_its_owner_is_looked_up_is_made_again(
    path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lock_at(path).hold("x"):
        pass
    os.mkfifo(tmp_path / "locks")
    monkeypatch.setattr(procfs, "ROOT", tmp_path)

    def remove() -> None:
        with (tmp_path / "locks").open("w"):
            path.unlink()

    with path.open("rb") as other, futures.ThreadPoolExecutor() as pool:
        fcntl.flock(other, fcntl.LOCK_EX)
        removed = pool.submit(remove)
        with lock_at(path, is_required=False).hold("x"):
            removed.result()
            with path.open("rb") as again, pytest.raises(BlockingIOError):
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_file_replaced_before_it_is_locked_is_opened_again(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def replace_and_lock(file: int, operation: int) -> None:
        monkeypatch.undo()
        path.unlink()
        path.touch()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", replace_and_lock)

    with lock_at(path).hold("x"), path.open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_optional_lock_still_excludes_threads_of_one_process(path: pathlib.Path) -> None:
    lock = lock_at(path, is_required=False)

    def message() -> str:
        with pytest.raises(errors.LockedError) as caught, lock.hold("second"):
            pass
        return caught.value.message

    with lock.hold("first"), futures.ThreadPoolExecutor() as pool:
        assert "first" in pool.submit(message).result()


def test_lock_is_released_after_errors_and_beside_a_child(path: pathlib.Path) -> None:
    lock = lock_at(path)
    children = []

    def fail() -> None:
        child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, close_fds=False)
        children.append(stack.enter_context(child))
        stack.callback(child.kill)
        raise ValueError("work")

    with contextlib.ExitStack() as stack:
        with pytest.raises(ValueError, match="work"), lock.hold("x"):
            fail()
        assert description(path).read_text() == ""
        with lock.hold("y"):
            assert children[0].poll() is None
    assert description(path).read_text() == ""


@pytest.mark.parametrize("is_open_to_all", [True, False])
@pytest.mark.parametrize("umask", [0o077, 0o000])
def test_all_users_may_read_the_description_and_only_the_owner_may_lock(
    path: pathlib.Path, umask: int, *, is_open_to_all: bool
) -> None:
    path.parent.mkdir(parents=True)
    if is_open_to_all:
        path.touch()
        path.chmod(0o666)
    before = os.umask(umask)
    try:
        with lock_at(path).hold("x"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(description(path).stat().st_mode) == 0o644
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other PID namespaces")
def test_a_manager_in_a_container_is_named_with_its_pid_in_our_namespace(
    path: pathlib.Path,
) -> None:
    path.parent.mkdir(parents=True)
    path.touch()
    started = subprocess.Popen(  # noqa: S603 - our own program
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", HOLDER, str(path)],  # noqa: S607 - of the system
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with started as outside:
        assert outside.stdout is not None
        if outside.stdout.readline() != "locked\n":
            pytest.skip("a PID namespace is not permitted here")
        inside = pathlib.Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text()
        assert json.loads(description(path).read_text())["pid"] == 1

        manager = lock_file.manager(path)
        assert manager is not None
        assert manager.description.startswith(f"other (pid {int(inside)} on ")
        outside.kill()


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 3000, '{"pid": {}}', "\xff\x00"])
def test_owner_without_a_valid_description_may_change_the_gpus(
    path: pathlib.Path, text: str
) -> None:
    with lock_at(path).hold("x", changes_gpus=False):
        description(path).write_text(text, encoding="latin-1")

        with (
            pytest.raises(errors.LockedError, match="another manager is at work"),
            lock_at(path).hold("y"),
        ):
            pass
        manager = lock_file.manager(path)

    assert manager is not None
    assert manager.may_change_gpus


def _link_in_place_of_the_folder(path: pathlib.Path, precious: pathlib.Path) -> None:
    path.parent.rmdir()
    path.parent.symlink_to(precious)


Trap = Callable[[pathlib.Path, pathlib.Path], object]
TRAPS: dict[str, Trap] = {
    "link": lambda path, precious: path.symlink_to(precious),
    "second name": lambda path, precious: path.hardlink_to(precious),
    "pipe": lambda path, _precious: os.mkfifo(path),
    "folder": lambda path, _precious: path.mkdir(),
    "no folder": _link_in_place_of_the_folder,
}


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS)
def test_anything_but_a_plain_file_is_refused_and_not_written_to(
    path: pathlib.Path, tmp_path: pathlib.Path, trap: Trap
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path.parent.mkdir(parents=True)
    trap(path, precious)

    with (
        pytest.raises(errors.UsageError, match="cannot lock "),
        lock_at(path).hold("x"),
    ):
        pass

    assert precious.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True)
    path.touch()
    os.chown(path, 12345, 12345)

    with pytest.raises(errors.UsageError, match="user 12345"), lock_at(path).hold("x"):
        pass


def test_an_unavailable_optional_lock_is_warned_about_once(
    path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "run").touch()
    lock = lock_at(path, is_required=False)
    done = []

    with structlog.testing.capture_logs() as logs:
        for number in range(2):
            with lock.hold("x"):
                done.append(number)

    assert done == [0, 1]
    assert [line["event"] for line in logs] == ["lock_unavailable"]
    assert logs[0]["detail"] == "Not a directory"
