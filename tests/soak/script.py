"""Faults at the n-th call of a run: kills, errors, and other people's acts, some between runs."""

import enum
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from mig_manager import errors, reasons
from mig_manager.sandbox.driver import states
from tests.rigs.node import strikes
from tests.soak import layouts


class FaultKind(enum.Enum):
    """What may strike in the middle of a run."""

    KILL_BEFORE = "kill before the call"
    KILL_AFTER = "kill after the call has worked"
    KILL_IN_DRIVER = "kill before a change of a GPU"
    KILL_AFTER_CHANGE = "kill after a change of a GPU"
    FAIL_BEFORE = "the call fails"
    FAIL_AFTER = "the call works and its answer is lost"
    POD_STARTS = "a pod starts"
    POD_ENDS = "a pod ends"
    SILENCE = "kubelet falls silent"
    CORDON = "an administrator cordons"
    UNCORDON = "an administrator uncordons"
    DECIDE_MONITOR = "an administrator sets a monitor's label"
    DECIDE_PLUGIN = "an administrator sets the device plugin's label"
    LABEL = "another layout is requested"
    UNLABEL = "the label is removed"
    STOP = "the agent is stopped"


DEADLY = (
    FaultKind.KILL_BEFORE,
    FaultKind.KILL_AFTER,
    FaultKind.KILL_IN_DRIVER,
    FaultKind.KILL_AFTER_CHANGE,
)
IN_DRIVER = frozenset({FaultKind.KILL_IN_DRIVER, FaultKind.KILL_AFTER_CHANGE})
"""Their number is that of a change of a GPU, and not of a call."""
_AFTER = frozenset({FaultKind.KILL_AFTER, FaultKind.FAIL_AFTER})
_BEFORE = frozenset(FaultKind) - IN_DRIVER - _AFTER


class PortFault(NamedTuple):
    moment: int  # the n-th call of a port, or change of a GPU, of this run; from 1
    kind: FaultKind
    pick: int


SPECS = (
    *("A100-SXM4-40GB", "2xA100-SXM4-40GB", "H100"),
    *("A30", "A100-SXM4-40GB+A30", "2xH100+A30"),
)
CODES = (
    *(states.Code.IN_USE, states.Code.INSUFFICIENT_RESOURCES, states.Code.UNKNOWN),
    *(states.Code.TIMEOUT, states.Code.NO_PERMISSION, states.Code.GPU_IS_LOST),
    *(states.Code.RESET_REQUIRED, states.Code.NOT_FOUND),
)
FUNCTIONS = (
    "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstance*",
    "nvmlGpuInstanceCreateComputeInstance*",
    "nvmlGpuInstanceDestroy",
    "nvmlComputeInstanceDestroy",
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceGetMigMode",
    "nvmlInitWithFlags",
)
picks = st.integers(min_value=0, max_value=999)
names = st.sampled_from((*layouts.NAMES, layouts.NAMES[0], layouts.UNKNOWN))
many_picks = st.tuples(picks, picks, picks)
_OTHERS = (
    *(FaultKind.POD_STARTS, FaultKind.POD_ENDS, FaultKind.CORDON, FaultKind.UNCORDON),
    *(FaultKind.DECIDE_MONITOR, FaultKind.DECIDE_PLUGIN),
)
"""What others do between the runs; pods start most often."""


def _faults_of(seed: bytes, kinds: Sequence[FaultKind], most: int) -> list[PortFault]:
    """Choose faults and their calls evenly: hypothesis' own numbers crowd at the edges."""
    dice = random.Random(seed)  # noqa: S311 - acts of a test
    faults = []
    for _ in range(dice.randint(1, most)):
        kind = dice.choice(kinds)
        # Many runs are short: most find their layout active.
        last = 14 if kind in IN_DRIVER else dice.choice((8, 25, 55))
        faults.append(PortFault(dice.randint(1, last), kind, dice.randrange(1000)))
    return faults


_seeds = st.binary(min_size=8, max_size=8)
faults = _seeds.map(lambda seed: _faults_of(seed, tuple(FaultKind), 6))
kills = _seeds.map(lambda seed: _faults_of(seed, DEADLY, 1))
no_faults = st.just(list[PortFault]())
acts = st.lists(
    st.tuples(st.sampled_from((*_OTHERS, *_OTHERS[:1] * 3)), picks), min_size=1, max_size=6
)


class Script:
    """Counts the calls of one run, and strikes at those that have a fault."""

    def __init__(self) -> None:
        self.acts: dict[FaultKind, Callable[[int], object]] = {}
        """What other people do."""
        self.struck: list[FaultKind] = []
        self.failed_ports: set[str] = set()
        self._faults: Sequence[PortFault] = ()
        self._calls = 0
        self._changes = 0
        self._is_dead = False

    def begin(self, faults: Sequence[PortFault]) -> None:
        self._faults = faults
        self._calls = self._changes = 0
        self._is_dead = False
        self.struck = []
        self.failed_ports = set()

    def end(self) -> None:
        self._faults = ()
        self._is_dead = False

    def call(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Make a call of a port, with the faults before and after it."""

        def decide(view: Any) -> Any:
            # A fault before the write strikes once the write is decided, when it is too late.
            change = args[0](view)
            self._before(name)
            return change

        if name == "node.update":
            answer = method(decide)
        else:
            self._before(name)
            answer = method(*args, **kwargs)
        self._strike(name, self._calls, _AFTER)
        return answer

    def _before(self, port: str) -> None:
        """Count a call of a port; it may never be made."""
        self._raise_if_dead()
        self._calls += 1
        self._strike(port, self._calls, _BEFORE)

    def before_change(self) -> None:
        self._raise_if_dead()
        self._changes += 1
        self._strike("gpus", self._changes, {FaultKind.KILL_IN_DRIVER})

    def after_change(self) -> None:
        """Strike after the same change."""
        self._strike("gpus", self._changes, {FaultKind.KILL_AFTER_CHANGE})

    def _strike(self, port: str, number: int, kinds: Collection[FaultKind]) -> None:
        for fault in self._faults:
            if fault.moment != number or fault.kind not in kinds:
                continue
            if fault.kind in DEADLY:
                self.struck.append(fault.kind)
                self._is_dead = True
                self._raise_if_dead()
            elif fault.kind in (FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER):
                error = _failure(port, fault.pick)
                if error is not None:
                    self.struck.append(fault.kind)
                    self.failed_ports.add(port.partition(".")[0])
                    raise error
            elif self.acts[fault.kind](fault.pick):
                self.struck.append(fault.kind)

    def _raise_if_dead(self) -> None:
        # Whatever still runs of a dead process must not reach the rig.
        if self._is_dead:
            raise strikes.Killed


_PASSING = (reasons.Reason.API_UNAVAILABLE, reasons.Reason.API_ERROR, reasons.Reason.FORBIDDEN)
_OF_DRIVER = (reasons.Reason.NVML_TIMEOUT, reasons.Reason.DRIVER_NOT_LOADED)


def _failure(port: str, pick: int) -> Exception | None:
    """Return what a port may raise; None where it never does."""
    if port in {"node.emit", "node.announce"}:
        return None
    message = "made to fail"
    match port.partition(".")[0]:
        case "node" | "workloads":
            return errors.ClusterError(message, reason=_PASSING[pick % len(_PASSING)])
        case "allocations":
            return errors.KubeletError(message)
        case "configs":
            return errors.ConfigError(message)
        case "gpus":
            return errors.HardwareError(message, reason=_OF_DRIVER[pick % len(_OF_DRIVER)])
        case _:
            return None
