"""The object that stands in for ``libnvidia-ml.so.1`` beneath pynvml."""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mig_manager.sandbox import (
    nvml_calls,
    nvml_instances,
    nvml_model,
    nvml_queries,
    nvml_state,
)

_FUNCTIONS = {**nvml_queries.FUNCTIONS, **nvml_instances.FUNCTIONS}
_LOG_SUFFIX = "calls"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One logged call."""

    function: str
    gpu: int | None
    code: int
    started_ns: int
    """On the monotonic clock, which all processes of a machine share."""
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

    def __init__(self, state: nvml_state.SharedState) -> None:
        self.state = state
        self.counts: collections.Counter[str] = collections.Counter()
        self._session = nvml_calls.Session()

    def __getattr__(self, name: str) -> EntryPoint:
        if name == "nvmlErrorString":
            return EntryPoint(lambda arguments: nvml_queries.error_text(*arguments))
        function = _FUNCTIONS.get(name)
        if function is None or self._is_absent(name):
            raise AttributeError(f"undefined symbol: {name}")
        return EntryPoint(lambda arguments: self._call(name, function, arguments))

    def _is_absent(self, name: str) -> bool:
        try:
            return name in self.state.read().options.absent_functions
        except FileNotFoundError:
            return False

    def _call(self, name: str, function: nvml_calls.Function, arguments: Sequence[Any]) -> int:
        self.counts[name] += 1
        started = time.monotonic_ns()
        target: nvml_calls.Target | None = None
        try:
            self._require_session(function)
            target = self._target(function, arguments)
            self._run(name, function, target, arguments)
            code = int(nvml_model.Code.SUCCESS)
        except nvml_model.Refused as refused:
            code = refused.code
        except FileNotFoundError:
            return nvml_model.Code.DRIVER_NOT_LOADED
        self._log(name, target, code, started)
        return code

    def _require_session(self, function: nvml_calls.Function) -> None:
        if function.needs_session and not self._session.is_open:
            raise nvml_model.Refused(nvml_model.Code.UNINITIALIZED)

    def _target(
        self, function: nvml_calls.Function, arguments: Sequence[Any]
    ) -> nvml_calls.Target | None:
        if not function.takes:
            return None
        target = self._session.target(arguments[0])
        if target.kind not in function.takes:
            raise nvml_model.Refused(nvml_model.Code.INVALID_ARGUMENT)
        return target

    def _run(
        self,
        name: str,
        function: nvml_calls.Function,
        target: nvml_calls.Target | None,
        arguments: Sequence[Any],
    ) -> None:
        rest = arguments if target is None else arguments[1:]
        with self._hold(function, target):
            self._strike(name, target)
            view = self._view(self.state.read(), target)
            _wait(function.price(view, *rest))
            if target is None or not function.is_change:
                function.body(self._view(self.state.read(), target), *rest)
                return
            index = target.gpu

            def change(
                node: nvml_model.NodeState,
            ) -> tuple[nvml_model.NodeState, None]:
                gpu = function.body(self._view(node, target), *rest)
                return (node if gpu is node.gpus[index] else node.with_gpu(index, gpu)), None

            self.state.update(change)

    @contextlib.contextmanager
    def _hold(
        self, function: nvml_calls.Function, target: nvml_calls.Target | None
    ) -> Iterator[None]:
        if target is None or not function.is_change:
            yield
            return
        with self.state.gpu_lock(target.gpu):
            yield

    def _view(
        self, node: nvml_model.NodeState, target: nvml_calls.Target | None
    ) -> nvml_calls.View:
        boards = self.state.boards
        if target is None:
            return nvml_calls.View(session=self._session, node=node, boards=boards)
        view = nvml_calls.DeviceView(
            session=self._session, node=node, boards=boards, target=target
        )
        view.check()
        return view

    def _strike(self, name: str, target: nvml_calls.Target | None) -> None:
        """Suffer the faults that are due, all of their hangs and the first of their codes."""
        for fault in self.state.strike(name, None if target is None else target.gpu):
            _wait(fault.hang_s)
            if fault.crashes:
                os.abort()
            if fault.code is not None:
                raise nvml_model.Refused(fault.code)

    def _log(
        self, name: str, target: nvml_calls.Target | None, code: int, started_ns: int
    ) -> None:
        if not self.state.read().options.logs_calls:
            return
        call = Call(
            function=name,
            gpu=None if target is None else target.gpu,
            code=code,
            started_ns=started_ns,
            ended_ns=time.monotonic_ns(),
            pid=os.getpid(),
            thread=threading.get_ident(),
        )
        line = json.dumps(dataclasses.asdict(call)) + "\n"
        # One write in append mode: lines of concurrent processes do not mix.
        with self.state.beside(_LOG_SUFFIX).open("ab", buffering=0) as file:
            file.write(line.encode())


def read_calls(path: pathlib.Path) -> tuple[Call, ...]:
    """Return the logged calls of all processes, in the order in which they ended.

    Args:
        path: The state file; its node must have been created with ``logs_calls``.
    """
    log = nvml_state.SharedState(path).beside(_LOG_SUFFIX)
    if not log.exists():
        return ()
    return tuple(Call(**json.loads(line)) for line in log.read_text("utf-8").splitlines())


def _wait(seconds: float) -> None:
    if seconds > 0:
        threading.Event().wait(seconds)
