"""Strikes at the n-th call of a run: kills, errors, and other people's acts, some between runs."""

import enum
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from mig_manager import errors, reasons
from mig_manager.sandbox.driver import states
from tests.rigs.node import strikes
from tests.soak import layouts


class StrikeKind(enum.Enum):
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
    StrikeKind.KILL_BEFORE,
    StrikeKind.KILL_AFTER,
    StrikeKind.KILL_IN_DRIVER,
    StrikeKind.KILL_AFTER_CHANGE,
)
IN_DRIVER = frozenset({StrikeKind.KILL_IN_DRIVER, StrikeKind.KILL_AFTER_CHANGE})
"""Their number is that of a change of a GPU, and not of a call."""
_AFTER = frozenset({StrikeKind.KILL_AFTER, StrikeKind.FAIL_AFTER})
_BEFORE = frozenset(StrikeKind) - IN_DRIVER - _AFTER


class Strike(NamedTuple):
    moment: int  # the n-th call of a port, or change of a GPU, of this run; from 1
    kind: StrikeKind
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
    *(StrikeKind.POD_STARTS, StrikeKind.POD_ENDS, StrikeKind.CORDON, StrikeKind.UNCORDON),
    *(StrikeKind.DECIDE_MONITOR, StrikeKind.DECIDE_PLUGIN),
)
"""What others do between the runs; pods start most often."""


def _strikes_of(seed: bytes, kinds: Sequence[StrikeKind], most: int) -> list[Strike]:
    """Choose strikes and their calls evenly: hypothesis' own numbers crowd at the edges."""
    dice = random.Random(seed)  # noqa: S311 - acts of a test
    planned = []
    for _ in range(dice.randint(1, most)):
        kind = dice.choice(kinds)
        # Many runs are short: most find their layout active.
        last = 14 if kind in IN_DRIVER else dice.choice((8, 25, 55))
        planned.append(Strike(dice.randint(1, last), kind, dice.randrange(1000)))
    return planned


_seeds = st.binary(min_size=8, max_size=8)
any_strikes = _seeds.map(lambda seed: _strikes_of(seed, tuple(StrikeKind), 6))
kills = _seeds.map(lambda seed: _strikes_of(seed, DEADLY, 1))
no_strikes = st.just(list[Strike]())
acts = st.lists(
    st.tuples(st.sampled_from((*_OTHERS, *_OTHERS[:1] * 3)), picks), min_size=1, max_size=6
)


class Script:
    """Counts the calls of one run, and strikes at those for which one is planned."""

    def __init__(self) -> None:
        self.acts: dict[StrikeKind, Callable[[int], object]] = {}
        """What other people do."""
        self.struck: list[StrikeKind] = []
        self.failed_ports: set[str] = set()
        self._strikes: Sequence[Strike] = ()
        self._calls = 0
        self._changes = 0
        self._is_dead = False

    def begin(self, planned: Sequence[Strike]) -> None:
        self._strikes = planned
        self._calls = self._changes = 0
        self._is_dead = False
        self.struck = []
        self.failed_ports = set()

    def end(self) -> None:
        self._strikes = ()
        self._is_dead = False

    def call(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Make a call of a port, with the strikes before and after it."""

        def decide(view: Any) -> Any:
            # A strike before the write comes once the write is decided, when it is too late.
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
        self._strike("gpus", self._changes, {StrikeKind.KILL_IN_DRIVER})

    def after_change(self) -> None:
        """Strike after the same change."""
        self._strike("gpus", self._changes, {StrikeKind.KILL_AFTER_CHANGE})

    def _strike(self, port: str, number: int, kinds: Collection[StrikeKind]) -> None:
        for strike in self._strikes:
            if strike.moment != number or strike.kind not in kinds:
                continue
            if strike.kind in DEADLY:
                self.struck.append(strike.kind)
                self._is_dead = True
                self._raise_if_dead()
            elif strike.kind in (StrikeKind.FAIL_BEFORE, StrikeKind.FAIL_AFTER):
                error = _failure(port, strike.pick)
                if error is not None:
                    self.struck.append(strike.kind)
                    self.failed_ports.add(port.partition(".")[0])
                    raise error
            elif self.acts[strike.kind](strike.pick):
                self.struck.append(strike.kind)

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
        case "layout_source":
            return errors.ConfigError(message)
        case "gpus":
            return errors.HardwareError(message, reason=_OF_DRIVER[pick % len(_OF_DRIVER)])
        case _:
            return None
