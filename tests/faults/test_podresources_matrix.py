"""Every call of a run to kubelet's PodResources socket fails once in every way of ``FAILURES``.

A case counts only if the agent made the call while another socket was there; every case must.
"""

import contextlib
import functools
import pathlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import grpc
import pytest

from mig_manager.core import ports
from mig_manager.core.objects import pod_object
from tests.faults import api_node
from tests.rigs.cluster import kubelet_rig
from tests.rigs.matrices import matrix_rows

_MATRIX = "kubelet faults"


@contextlib.contextmanager
def missing(path: pathlib.Path) -> Iterator[None]:
    """Take the socket away, as while kubelet restarts."""
    away = path.with_name("away")
    path.rename(away)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        away.rename(path)


@contextlib.contextmanager
def not_a_socket(path: pathlib.Path) -> Iterator[None]:
    with missing(path):
        path.touch()
        yield


@contextlib.contextmanager
def refusing(path: pathlib.Path) -> Iterator[socket.socket]:
    with missing(path), socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
        yield left_over


@contextlib.contextmanager
def hanging(path: pathlib.Path) -> Iterator[socket.socket]:
    with refusing(path) as silent:
        silent.listen()
        yield silent


@contextlib.contextmanager
def garbage(path: pathlib.Path) -> Iterator[None]:
    welcome = b"HTTP/1.1 200 OK\r\n\r\nwelcome\r\n"
    with _serving(path, lambda connection: connection.sendall(welcome)):
        yield


@contextlib.contextmanager
def resetting(path: pathlib.Path) -> Iterator[None]:
    with _serving(path, lambda _connection: None):
        yield


@contextlib.contextmanager
def trickling(path: pathlib.Path) -> Iterator[None]:
    def trickle(connection: socket.socket) -> None:
        # The settings of HTTP/2, and then a frame that is never whole.
        connection.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 1]))
        while True:
            connection.sendall(b"x")
            threading.Event().wait(0.02)

    with _serving(path, trickle):
        yield


@contextlib.contextmanager
def _serving(path: pathlib.Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    serve(connection)

    with hanging(path) as server:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _answering(
    code: grpc.StatusCode | None,
) -> Callable[[pathlib.Path], contextlib.AbstractContextManager[None]]:
    """Return a kubelet that refuses, or (None) answers with bytes that are no message."""

    @contextlib.contextmanager
    def answering(path: pathlib.Path) -> Iterator[None]:
        kubelet = kubelet_rig.GrpcKubelet(path)
        if code is None:
            kubelet.writes = lambda _message: b"\xff\xff\xff\xff"
        else:
            kubelet.refusals, kubelet.code = sys.maxsize, code
        with missing(path):
            kubelet.start()
            try:
                yield
            finally:
                kubelet.stop()

    return answering


FAILURES: Mapping[str, Callable[[pathlib.Path], contextlib.AbstractContextManager[object]]] = {
    "missing": missing,
    "not-a-socket": not_a_socket,
    "refusing": refusing,
    "hanging": hanging,
    "garbage": garbage,
    "resetting": resetting,
    "trickling": trickling,
    "no-message": _answering(None),
    "resource-exhausted": _answering(grpc.StatusCode.RESOURCE_EXHAUSTED),
    "unimplemented": _answering(grpc.StatusCode.UNIMPLEMENTED),
}


SILENT = frozenset({"hanging", "garbage", "refusing", "resetting", "trickling"})
"""Those where the adapter may wait until its deadline."""
_MIN_CALLS, _MAX_CALLS = 8, 12
"""How many calls a reconfiguration makes; how often a wait polls is a matter of time."""


class Flaky:
    """Calls kubelet through the real adapter; another socket is there during one call."""

    def __init__(self, name: str) -> None:
        self.calls = 0
        self.struck = 0
        """The number of the call that fails; 0: none."""
        self._how = FAILURES[name]

    def wrap(
        self, allocations: ports.DeviceAllocations, path: pathlib.Path
    ) -> ports.DeviceAllocations:
        self._allocations, self._path = allocations, path
        return self

    def assigned_devices(self) -> tuple[pod_object.PodDevices, ...]:
        with self._call():
            return self._allocations.assigned_devices()

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        with self._call():
            return self._allocations.allocatable()

    def _call(self) -> contextlib.AbstractContextManager[object]:
        self.calls += 1
        is_struck = self.calls == self.struck
        return self._how(self._path) if is_struck else contextlib.nullcontext()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_kubelet_call_may_fail_once_and_the_layout_is_applied(
    name: str, record_property: matrix_rows.Note, pytestconfig: pytest.Config
) -> None:
    flaky = Flaky(name)
    row = matrix_rows.MatrixRow(_MATRIX, failure=name)
    timeout_s = api_node.SILENCE_TIMEOUT_S if name in SILENT else api_node.REQUEST_TIMEOUT_S
    with api_node.stage_at_rest(wrap=flaky.wrap, kubelet_timeout_s=timeout_s) as stage:

        def calls_with(struck: int) -> int:
            """Reconfigure while one call fails; return how many the agent made."""
            stage.occupy()
            flaky.calls, flaky.struck = 0, struck
            stage.reconfigure()
            return flaky.calls

        def fail_nth(nth: int) -> bool | None:
            is_struck = calls_with(nth) >= nth
            ends, lost = stage.ends()
            # The agent repeats the call, so no run fails.
            assert (set(ends) <= api_node.GOOD, lost, stage.unrestored_on_node()) == (
                True,
                [],
                [],
            ), nth
            return is_struck or None

        least = min(calls_with(0) for _ in range(3))
        assert _MIN_CALLS <= least <= _MAX_CALLS
        for nth in matrix_rows.sample(range(1, least + 1), pytestconfig.getoption("every")):
            row.until_struck(f"call {nth}", functools.partial(fail_nth, nth))
    row.assert_complete(record_property, {"played again": row.played_again}, of=least)


def test_the_published_results_are_of_present_failures() -> None:
    matrix_rows.require_rows(_MATRIX, [{"failure": name} for name in FAILURES])
