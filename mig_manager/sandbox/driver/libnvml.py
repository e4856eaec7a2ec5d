"""The object that stands in for ``libnvidia-ml.so.1`` beneath pynvml."""

import collections
import dataclasses
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mig_manager.sandbox.driver import calls, events, instances, mig, queries, statefile, states

_FUNCTIONS = {
    **queries.FUNCTIONS,
    **events.FUNCTIONS,
    **mig.FUNCTIONS,
    **instances.FUNCTIONS,
}
_LOG_SUFFIX = "calls"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One logged call."""

    function: str
    gpu: int | None
    code: int
    started_ns: int
    """When the process called; on the monotonic clock, which all processes share."""
    entered_ns: int
    """When the driver began, which for a change is when it had the GPU to itself."""
    ended_ns: int
    pid: int
    thread: int


class EntryPoint:
    """One C function as ctypes gives it: callable, with a result type that may be set."""

    def __init__(self, run: Callable[[Sequence[Any]], Any]) -> None:
        self._run = run
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Make the call with raw C arguments."""
        return self._run(arguments)


class SimulatedLibrary:
    """A loaded NVML library over the state of a simulated node.

    Attributes are the C functions; one that the simulated driver does not export raises
    AttributeError, as ctypes does. Safe for use by any number of threads.

    Attributes:
        state: The node.
        counts: Calls of this process by C function, whatever they returned.
    """

    def __init__(self, state: statefile.SharedState) -> None:
        self.state = state
        self.counts: collections.Counter[str] = collections.Counter()
        self._counts_lock = threading.Lock()
        self._session = calls.Session()

    def __getattr__(self, name: str) -> EntryPoint:
        if name == "nvmlErrorString":
            return EntryPoint(lambda arguments: queries.error_text(*arguments))
        function = _FUNCTIONS.get(name)
        if function is None or self._is_absent(name):
            raise AttributeError(f"undefined symbol: {name}")
        return EntryPoint(lambda arguments: self._call(name, function, arguments))

    def _is_absent(self, name: str) -> bool:
        try:
            return name in self.state.read().options.absent_functions
        except FileNotFoundError:
            return False

    def _call(self, name: str, function: calls.Function, arguments: Sequence[Any]) -> int:
        with self._counts_lock:
            self.counts[name] += 1
        attempt = _Attempt(name, function, arguments)
        try:
            attempt.aim(self._session)
            if attempt.gpu is not None and function.is_change:
                with self.state.gpu_lock(attempt.gpu):
                    self._run(attempt)
            else:
                self._run(attempt)
        except states.Refused as refused:
            attempt.code = int(refused.code)
        except FileNotFoundError:
            return states.Code.DRIVER_NOT_LOADED
        if attempt.is_logged is None:
            attempt.is_logged = self.state.read().options.logs_calls
        if attempt.is_logged:
            self._log(attempt)
        return attempt.code

    def _run(self, attempt: "_Attempt") -> None:
        attempt.entered_ns = time.monotonic_ns()
        # Who opens a session has waited for whatever happened to the node before.
        node = self.state.read() if attempt.function.needs_session else self.state.read_anew()
        attempt.is_logged = node.options.logs_calls
        if node.faults:
            self._suffer(attempt)
        view = self._view(node, attempt.target)
        seconds = attempt.function.price(view, *attempt.rest)
        if attempt.function.is_change:
            self._change(attempt)
        else:
            attempt.function.body(view, *attempt.rest)
        # The time is spent after the act, because a killed process does not stop the driver
        # either, and because refusals are quick. What we took ourselves is a part of it, lest a
        # loaded machine make the driver slower.
        if seconds:
            _wait(seconds - (time.monotonic_ns() - attempt.entered_ns) / 1e9)

    def _change(self, attempt: "_Attempt") -> None:
        def change(node: states.NodeState) -> tuple[states.NodeState, None]:
            assert attempt.target is not None  # noqa: S101 - changes take a handle
            index = attempt.target.gpu
            gpu = attempt.function.body(self._view(node, attempt.target), *attempt.rest)
            return (node if gpu == node.gpus[index] else node.with_gpu(index, gpu)), None

        self.state.update(change)

    def _view(self, node: states.NodeState, target: calls.Target | None) -> calls.View:
        boards = statefile.boards_of(node)
        if target is None:
            return calls.View(
                session=self._session, node=node, boards=boards, look=self.state.read
            )
        view = calls.DeviceView(
            session=self._session, node=node, boards=boards, look=self.state.read, target=target
        )
        view.check()
        return view

    def _suffer(self, attempt: "_Attempt") -> None:
        """Suffer the faults that are due: hangs up to the first crash or code."""
        for fault in self.state.strike(attempt.name, attempt.gpu):
            _wait(fault.hang_s)
            if fault.crashes:
                os.abort()
            if fault.loses_gpu and attempt.gpu is not None:
                self.state.lose_gpu(attempt.gpu)
                raise states.Refused(states.Code.GPU_IS_LOST)
            if fault.code is not None:
                raise states.Refused(fault.code)

    def _log(self, attempt: "_Attempt") -> None:
        line = json.dumps(dataclasses.asdict(attempt.logged())) + "\n"
        # One write in append mode: lines of concurrent processes do not mix.
        with self.state.beside(_LOG_SUFFIX).open("ab", buffering=0) as file:
            file.write(line.encode())


class _Attempt:
    """One call while it runs."""

    def __init__(self, name: str, function: calls.Function, arguments: Sequence[Any]) -> None:
        self.name = name
        self.function = function
        self.rest = arguments
        self.target: calls.Target | None = None
        self.code = int(states.Code.SUCCESS)
        self.is_logged: bool | None = None
        """None: the call was refused before the node was looked at."""
        self.started_ns = self.entered_ns = time.monotonic_ns()

    @property
    def gpu(self) -> int | None:
        """Index of the GPU that the call is about, if it is about one."""
        return None if self.target is None else self.target.gpu

    def aim(self, session: calls.Session) -> None:
        """Turn the first argument into what it is a handle of, where the function takes one.

        Raises:
            Refused: UNINITIALIZED, or INVALID_ARGUMENT: it is no such handle.
        """
        if self.function.needs_session and not session.is_open:
            raise states.Refused(states.Code.UNINITIALIZED)
        if self.function.takes:
            target = session.target(self.rest[0])
            if target.kind not in self.function.takes:
                raise states.Refused(states.Code.INVALID_ARGUMENT)
            self.target, self.rest = target, self.rest[1:]

    def logged(self) -> Call:
        """Return the finished call as it is logged."""
        return Call(
            function=self.name,
            gpu=self.gpu,
            code=self.code,
            started_ns=self.started_ns,
            entered_ns=self.entered_ns,
            ended_ns=time.monotonic_ns(),
            pid=os.getpid(),
            thread=threading.get_ident(),
        )


def read_calls(path: pathlib.Path) -> tuple[Call, ...]:
    """Return the logged calls of all processes, in the order in which they ended.

    Args:
        path: The state file; its node must have been created with ``logs_calls``.
    """
    log = statefile.SharedState(path).beside(_LOG_SUFFIX)
    if not log.exists():
        return ()
    return tuple(Call(**json.loads(line)) for line in log.read_text("utf-8").splitlines())


def _wait(seconds: float) -> None:
    if seconds > 0:
        threading.Event().wait(seconds)
