"""A simulated NVML instead of ``libnvidia-ml.so.1`` beneath pynvml.

``install`` replaces the loaded C library, so that all code above it, pynvml included, runs as on
a GPU node. The node's state is a file that successive and concurrent processes share.
"""

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pynvml

from mig_manager.sandbox.driver import calls, device_functions, sessions, state_file, states, views
from mig_manager.sandbox.driver import mig_functions as _mig_functions  # noqa: F401 - registers


def install(path: pathlib.Path) -> "SimulatedLibrary":
    """Replace pynvml's library by a simulated one, in this process.

    Until the file exists, NVML answers as if no driver were loaded.
    """
    simulated = SimulatedLibrary(state_file.SharedState(path))
    load(simulated)
    return simulated


def load(library: "SimulatedLibrary | None") -> None:
    """Make pynvml use a library; None: it loads the real one at its next use."""
    # pynvml caches the function pointers of the first library that it loaded.
    with pynvml.libLoadLock:
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - pynvml has no other way
        pynvml._nvmlLib_refcount = 0  # noqa: SLF001 - the refcount of another library


class SimulatedLibrary:
    """A loaded NVML library over the state of a simulated node.

    Its attributes are the C functions. A function that the simulated driver does not export raises
    AttributeError, as with ctypes. Safe for use by any number of threads.
    """

    def __init__(self, state: state_file.SharedState) -> None:
        self.state = state
        self._session = sessions.Session()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "nvmlErrorString":
            return device_functions.error_text
        function = calls.FUNCTIONS.get(name)
        with contextlib.suppress(FileNotFoundError):
            if name in self.state.read().options.absent_functions:
                function = None
        if function is None:
            raise AttributeError(f"undefined symbol: {name}")
        return lambda *arguments: self._answer(RunningCall(name, function, arguments))

    def _answer(self, attempt: "RunningCall") -> int:
        """Run a call and return its code."""
        try:
            attempt.resolve_handle(self._session)
            if attempt.gpu is not None and attempt.function.is_change:
                with self.state.gpu_lock(attempt.gpu):
                    self._run(attempt)
            else:
                self._run(attempt)
        except states.Refused as refused:
            return int(refused.code)
        except FileNotFoundError:
            return int(states.Code.DRIVER_NOT_LOADED)
        return int(states.Code.SUCCESS)

    def _run(self, attempt: "RunningCall") -> None:
        function = attempt.function
        attempt.enter()
        node = self.state.read()
        view = self._view(node, attempt.target)
        latency = function.latency
        field = latency if isinstance(latency, str) else latency(view, *attempt.rest)
        seconds = float(getattr(node.options.latency, field))
        if function.is_change:
            self._change(attempt)
        else:
            function.body(view, *attempt.rest)
        # Wait after the change: a killed process does not stop a real driver, and refusals are
        # quick. Our own time counts, so that a loaded machine does not make the driver slower.
        seconds -= (time.monotonic_ns() - attempt.entered_ns) / 1e9
        if seconds > 0:
            threading.Event().wait(seconds)

    def _change(self, attempt: "RunningCall") -> None:
        def change(node: states.MachineState) -> states.MachineState:
            assert attempt.target is not None  # noqa: S101 - changes take a handle
            index = attempt.target.gpu
            gpu = attempt.function.body(self._view(node, attempt.target), *attempt.rest)
            return node if gpu == node.gpus[index] else node.with_gpu(index, gpu)

        self.state.update(change)

    def _view(
        self, node: states.MachineState, target: sessions.HandleTarget | None
    ) -> views.DriverView:
        boards = states.boards_of(node)
        session = self._session
        read = self.state.read
        if target is None:
            return views.DriverView(session=session, node=node, boards=boards, read=read)
        view = views.DeviceView(
            session=session, node=node, boards=boards, read=read, target=target
        )
        view.check()
        return view


class RunningCall:
    """One call while it runs."""

    def __init__(self, name: str, function: calls.Function, arguments: tuple[Any, ...]) -> None:
        self.name = name
        self.function = function
        self.rest = arguments
        self.target: sessions.HandleTarget | None = None
        self.entered_ns = time.monotonic_ns()
        """When the driver began; for a change, when it had locked the GPU."""

    @property
    def gpu(self) -> int | None:
        """The index of the call's GPU, if it has one."""
        return None if self.target is None else self.target.gpu

    def enter(self) -> None:
        """Note that the driver begins."""
        self.entered_ns = time.monotonic_ns()

    def resolve_handle(self, session: sessions.Session) -> None:
        """Resolve the first argument if the function takes a handle."""
        if self.function.needs_session and not session.is_open:
            raise states.Refused(states.Code.UNINITIALIZED)
        if self.function.takes:
            target = session.target(self.rest[0])
            if target.kind not in self.function.takes:
                raise states.Refused(states.Code.INVALID_ARGUMENT)
            self.target, self.rest = target, self.rest[1:]
