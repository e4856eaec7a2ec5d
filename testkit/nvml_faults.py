"""Inject faults into the simulated driver, and log its calls.

Files beside the state file keep both, for all processes of the node. A process that imports this
module has an ``InstrumentedLibrary`` in place of the simulated one; ``startup/sitecustomize.py``
imports it in the processes that tests start.
"""

import collections
import dataclasses
import fnmatch
import functools
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from mig_manager.sandbox.driver import simulated_nvml, state_file, states, transitions

_FAULTS = "faults"
_LOG = "calls"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A failure of the driver; without a code, hang, crash or loss it only counts calls.

    Calls are counted over all processes that share the state.
    """

    function: str  # C function name or glob, such as ``nvmlDeviceCreateGpuInstance*`` or ``*``
    gpu: int | None = None  # NVML index; None matches calls on any GPU and calls on none
    first: int = 1  # the first matching call that it strikes, from 1
    count: int | None = 1
    """Number of consecutive calls that it strikes; None: all from ``first`` on."""
    code: int | None = None
    """Returned by the call, which then has no effect; None: it does its work."""
    hang_s: float = 0.0  # seconds that the call blocks first, with the driver's locks
    crashes: bool = False
    """Whether the process dies in the call, as in a bug of the vendor library."""
    loses_gpu: bool = False  # whether the GPU falls off the bus in the call


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArmedFault:
    """A fault with its counters."""

    fault: Fault
    calls: int = 0  # matching calls so far
    strikes: int = 0  # calls struck so far

    def matches(self, function: str, gpu: int | None) -> bool:
        """Return whether this fault counts a call."""
        is_gpu = self.fault.gpu is None or self.fault.gpu == gpu
        return is_gpu and fnmatch.fnmatchcase(function, self.fault.function)

    def after_match(self) -> "ArmedFault":
        """Return the fault after a matching call."""
        number, fault = self.calls + 1, self.fault
        strikes = number >= fault.first and (
            fault.count is None or number < fault.first + fault.count
        )
        return dataclasses.replace(self, calls=number, strikes=self.strikes + strikes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One logged call."""

    function: str
    gpu: int | None
    code: int
    started_ns: int  # when the process called; on the monotonic clock, which all processes share
    entered_ns: int  # when the driver began; for a change, when it had the GPU's lock
    ended_ns: int
    pid: int
    thread: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """The content of the file of faults."""

    faults: tuple[ArmedFault, ...] = ()
    logs_calls: bool = False


class SharedState(state_file.SharedState):
    """The state of a simulated node with faults, a call log, and GPUs that fall off the bus."""

    def add_fault(self, fault: Fault) -> None:
        """Arm a fault; its calls count from now."""
        armed = ArmedFault(fault=fault)
        self._edit_instruments(lambda it: dataclasses.replace(it, faults=(*it.faults, armed)))

    def reset_gpus(self, indices: Sequence[int]) -> transitions.ResetResult:
        """Reset GPUs; also ends the faults for which they require a reset."""
        code = states.Code.RESET_REQUIRED

        def end_faults(it: Instruments) -> Instruments:
            kept = (a for a in it.faults if a.fault.code != code or a.fault.gpu not in indices)
            return dataclasses.replace(it, faults=tuple(kept))

        result = super().reset_gpus(indices)
        self._edit_instruments(end_faults)
        return result

    def clear_faults(self) -> None:
        """Disarm all faults and drop their counters."""
        self._edit_instruments(lambda it: dataclasses.replace(it, faults=()))

    def faults(self) -> tuple[ArmedFault, ...]:
        """Return the armed faults with their counters, oldest first."""
        return self._instruments().faults

    def log_calls(self, *, is_on: bool = True) -> None:
        """Append every call of every process to a log from now on, or stop doing so."""
        self._edit_instruments(lambda it: dataclasses.replace(it, logs_calls=is_on))

    def set_options(self, options: states.Options) -> None:
        """Replace the options of a running node."""
        self.update(lambda node: dataclasses.replace(node, options=options))

    def reset_gpu(self, index: int) -> states.Code:
        """Reset one GPU as ``nvidia-smi --gpu-reset`` does; return SUCCESS or its refusal."""
        return self.reset_gpus([index]).code

    def return_gpu(self, index: int, *, keeps_mode: bool = True) -> None:
        """Let a lost GPU come back, reset: without instances.

        Args:
            index: NVML index.
            keeps_mode: Whether an Ampere GPU still has its MIG mode; newer ones never do.
        """

        def change(node: states.MachineState) -> states.MachineState:
            back = transitions.reboot(self.boards[index], node.gpus[index])
            if not keeps_mode:
                back = dataclasses.replace(back, is_enabled=False, is_pending=False)
            return node.with_gpu(index, dataclasses.replace(back, is_lost=False))

        self.update(change)

    def strike(self, function: str, gpu: int | None) -> tuple[Fault, ...]:
        """Count a call; return the faults that strike it."""
        if not any(armed.matches(function, gpu) for armed in self.faults()):
            return ()
        struck: list[Fault] = []

        def count(it: Instruments) -> Instruments:
            faults: list[ArmedFault] = []
            for armed in it.faults:
                counted = armed.after_match() if armed.matches(function, gpu) else armed
                if counted.strikes > armed.strikes:
                    struck.append(armed.fault)
                faults.append(counted)
            return dataclasses.replace(it, faults=tuple(faults))

        self._edit_instruments(count)
        return tuple(struck)

    def log(self, call: Call) -> None:
        """Append a call to the log, if it is on."""
        if self._instruments().logs_calls:
            # One write in append mode: lines of concurrent processes do not mix.
            with self.beside(_LOG).open("ab", buffering=0) as file:
                file.write(json.dumps(dataclasses.asdict(call)).encode() + b"\n")

    def _instruments(self) -> Instruments:
        file = self.beside(_FAULTS)
        try:
            return _parse(file, state_file.version_of(file.stat()))
        except FileNotFoundError:
            return Instruments()

    def _edit_instruments(self, change: Callable[[Instruments], Instruments]) -> None:
        with self._exclusively(f"{_FAULTS}.lock"):
            changed = change(self._instruments())
            state_file.replace(self.beside(_FAULTS), changed)


class InstrumentedLibrary(simulated_nvml.SimulatedLibrary):
    """A simulated library that strikes calls with the armed faults, and logs calls."""

    state: SharedState

    def __init__(self, state: state_file.SharedState) -> None:
        super().__init__(state if isinstance(state, SharedState) else SharedState(state.path))

    def _answer(self, attempt: simulated_nvml.RunningCall) -> int:
        started_ns = time.monotonic_ns()
        code = super()._answer(attempt)
        self.state.log(
            Call(
                function=attempt.name,
                gpu=attempt.gpu,
                code=code,
                started_ns=started_ns,
                entered_ns=attempt.entered_ns,
                ended_ns=time.monotonic_ns(),
                pid=os.getpid(),
                thread=threading.get_ident(),
            )
        )
        return code

    def _run(self, attempt: simulated_nvml.RunningCall) -> None:
        """Strike a call with the faults that match it: hangs up to the first crash or code.

        As in the driver, it has the GPU's lock if the call changes the GPU.
        """
        for fault in self.state.strike(attempt.name, attempt.gpu):
            if fault.hang_s:
                threading.Event().wait(fault.hang_s)
            if fault.crashes:
                os.abort()
            if fault.loses_gpu and attempt.gpu is not None:
                self.state.lose_gpu(attempt.gpu)
                raise states.Refused(states.Code.GPU_IS_LOST)
            if fault.code is not None:
                raise states.Refused(fault.code)
        super()._run(attempt)


Alteration = Callable[..., int]
"""Makes a call otherwise: takes the driver's own function, then the arguments."""


class CountingLibrary(InstrumentedLibrary):
    """A simulated library that counts the calls of this process, also failed ones.

    ``alterations`` are of a driver that does some things otherwise, by the C function's name.
    """

    def __init__(
        self, state: SharedState, alterations: Mapping[str, Alteration] | None = None
    ) -> None:
        super().__init__(state)
        self.counts: collections.Counter[str] = collections.Counter()
        self._counts_lock = threading.Lock()
        self._alterations = alterations or {}

    def _answer(self, attempt: simulated_nvml.RunningCall) -> int:
        name, function = attempt.name, attempt.function
        with self._counts_lock:
            self.counts[name] += 1
        answer = super()._answer
        alter = self._alterations.get(name)
        if alter is None:
            return answer(attempt)
        return alter(
            lambda *changed: answer(simulated_nvml.RunningCall(name, function, changed)),
            *attempt.rest,
        )


def install(
    path: pathlib.Path, alterations: Mapping[str, Alteration] | None = None
) -> CountingLibrary:
    """Replace pynvml's library in this process by a simulated one that counts its calls."""
    counting = CountingLibrary(SharedState(path), alterations)
    simulated_nvml.load(counting)
    return counting


def read_calls(path: pathlib.Path) -> tuple[Call, ...]:
    """Return the logged calls of all processes, in the order in which they ended."""
    log = state_file.SharedState(path).beside(_LOG)
    if not log.exists():
        return ()
    return tuple(Call(**json.loads(line)) for line in log.read_text("utf-8").splitlines())


@functools.lru_cache(maxsize=8)
def _parse(file: pathlib.Path, _version: state_file.Version) -> Instruments:
    raw = json.loads(file.read_text("utf-8"))
    faults = (ArmedFault(**{**each, "fault": Fault(**each["fault"])}) for each in raw["faults"])
    return Instruments(faults=tuple(faults), logs_calls=raw["logs_calls"])


simulated_nvml.SimulatedLibrary = InstrumentedLibrary  # type: ignore[misc]
