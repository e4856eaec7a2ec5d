"""How long reconfigurations take through the GPU worker, against what a perfect executor needs.

The limit of a transition follows from the latency model alone: one NVML session, and for each
GPU its changes one after the other; the GPUs at once, or, where the driver serialises all of
them, one after the other. No process, no query and no proof is in it.

Our executor's time runs from the plan to the proof that the GPUs are as requested. The read that
the plan is made from has its own session, since none stays open while pods are drained; its time
is printed beside it, and set against the limit with that session.
"""

import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mig_manager.adapters import host
from mig_manager.adapters.nvml import client as nvml_worker
from mig_manager.adapters.nvml import gpus as nvml_gpus
from mig_manager.adapters.nvml import library as nvml
from mig_manager.adapters.nvml import observe
from mig_manager.core import ports, steps
from mig_manager.core.planner import planner
from mig_manager.sandbox.driver import library as simulated
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.driver import worker as simulated_worker
from testkit import matrix, nvml_faults

CHANGES = frozenset(
    {
        "nvmlDeviceSetMigMode",
        "nvmlDeviceCreateGpuInstance",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceDestroy",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
        "nvmlComputeInstanceDestroy",
    }
)
"""The functions that change a GPU, as pynvml has them."""

_READY_TIMEOUT_S = 30.0
_QUERY_ROUNDS = 20
MEMORY = pathlib.Path("/dev/shm")  # noqa: S108 - folders in it are made safely


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The NVML calls of a reconfiguration."""

    changes: int
    sessions: int
    calls: int
    """All of them, the first look at the node included."""
    observe_calls: int
    """The calls of the first read."""

    @property
    def beyond(self) -> int:
        """The calls beyond the first read and the changes."""
        return self.calls - self.observe_calls - self.changes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One transition, measured several times."""

    transition: matrix.Transition
    asked: Asked
    limit_s: float
    """What a perfect executor needs."""
    overhead_s: float
    """What our executor needed beyond that; median."""
    observe_s: float
    """What the read took beyond its session, and planning; median."""

    @property
    def ratio(self) -> float:
        """Our time to the perfect one's."""
        return 1 + self.overhead_s / self.limit_s

    @property
    def whole_ratio(self) -> float:
        """The same for read and change together; the limit has two sessions then."""
        return 1 + (self.overhead_s + self.observe_s) / (self.limit_s + states.REALISTIC.init_s)

    def net_ratio(self, query_s: float) -> float:
        """Return ``ratio`` without what the simulation itself takes to answer queries.

        The model has them for nothing; a simulation in Python does not.
        """
        return self.ratio - self.asked.beyond * query_s / self.limit_s

    def net_whole_ratio(self, query_s: float) -> float:
        """Return ``whole_ratio`` without that."""
        queries = self.asked.beyond + self.asked.observe_calls
        return self.whole_ratio - queries * query_s / (self.limit_s + states.REALISTIC.init_s)


class Counts(ports.Telemetry):
    """Counts NVML calls, one read or change after the other."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def nvml_called(self, function: str, calls: int, seconds: float) -> None:
        """Add up."""
        self.calls[function] = self.calls.get(function, 0) + calls

    @property
    def total(self) -> int:
        """All calls so far."""
        return sum(self.calls.values())


def limit_s(plan: steps.Plan, latency: states.Latency, *, is_serial: bool) -> float:
    """Return what a plan takes where nothing but the driver takes time."""
    each = [sum(_price_s(step, latency) for step in gpu.steps) for gpu in plan.gpus]
    return latency.init_s + (sum(each) if is_serial else max(each, default=0.0))


def _price_s(step: steps.Step, latency: states.Latency) -> float:
    match step:
        case steps.DestroyComputeInstance():
            return latency.destroy_compute_instance_s
        case steps.DestroyGpuInstance():
            return latency.destroy_gpu_instance_s
        case steps.CreateGpuInstance():
            return latency.create_gpu_instance_s
        case steps.CreateComputeInstance():
            return latency.create_compute_instance_s
        case steps.SetMode():
            return latency.mode_with_reset_s if step.needs_reset else latency.mode_without_reset_s


def scaled(latency: states.Latency, factor: float) -> states.Latency:
    """Return a driver that takes ``factor`` times as long."""
    seconds = dataclasses.asdict(latency)
    return states.Latency(**{name: value * factor for name, value in seconds.items()})


def measure(
    transitions: Iterable[matrix.Transition],
    *,
    is_serial: bool,
    scale: float,
    repeats: int,
) -> Iterable[Measured]:
    """Yield each transition as it is measured.

    Args:
        transitions: What to measure.
        is_serial: Whether the driver changes one GPU of the node at a time.
        scale: The driver's latencies are played that much shorter where they take more than a
            second; what we need ourselves is not.
        repeats: How often each is measured.
    """
    for transition in transitions:
        with _folder() as path:
            start = matrix.prepare(transition, path)
            factor = _factor(transition, path, is_serial=is_serial, scale=scale)
            latency = scaled(states.REALISTIC, factor)
            options = states.Options(latency=latency, serialise_all_gpus=is_serial)
            start = dataclasses.replace(start, options=options)
            ours = [_once(transition, path, start) for _ in range(repeats)]
        plan, asked = ours[0].plan, ours[0].asked
        played = limit_s(plan, latency, is_serial=is_serial)
        yield Measured(
            transition=transition,
            asked=asked,
            limit_s=limit_s(plan, states.REALISTIC, is_serial=is_serial),
            overhead_s=statistics.median(each.change_s for each in ours) - played,
            observe_s=statistics.median(each.observe_s for each in ours) - latency.init_s,
        )


def _factor(
    transition: matrix.Transition, path: pathlib.Path, *, is_serial: bool, scale: float
) -> float:
    nvml_faults.install(path)
    try:
        gpus = nvml_gpus.NvmlGpus(clock=host.SystemClock()).observe()
    finally:
        simulated.load(None)
    plan = planner.plan(gpus, transition.desired(gpus))
    return 1.0 if limit_s(plan, states.REALISTIC, is_serial=is_serial) <= 1 else scale


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """One transition, played once."""

    plan: steps.Plan
    asked: Asked
    observe_s: float
    """From the first question to the plan."""
    change_s: float
    """From the plan to the proof."""


def _once(
    transition: matrix.Transition, path: pathlib.Path, start: states.MachineState
) -> _Played:
    """Play a transition as the pipeline does.

    The workers were started ahead, as the pipeline starts them: before the config is read, and
    while the node is closed and drained. See ``start_up_s`` for what that takes.
    """
    nvml_faults.SharedState(path).update(lambda _: (start, None))
    counts = Counts()
    gpus = nvml_worker.WorkerGpus(
        command=nvml_worker.worker_command(program=simulated_worker.program(path)),
        timeout_s=600.0,
        telemetry=counts,
    )
    ready(gpus)
    since = time.monotonic()
    seen = gpus.observe()
    wanted = transition.desired(seen)
    plan = planner.plan(seen, wanted)
    observe_s, observe_calls = time.monotonic() - since, counts.total
    ready(gpus)
    since = time.monotonic()
    changed = {gpu.uuid: gpu for gpu in gpus.execute(plan, seen)}
    after = [changed.get(gpu.uuid, gpu) for gpu in seen]
    if not planner.plan(after, wanted).is_empty:
        raise RuntimeError(f"{transition.name} did not come into force")
    change_s = time.monotonic() - since
    asked = Asked(
        changes=sum(counts.calls.get(name, 0) for name in CHANGES),
        sessions=counts.calls["nvmlInit"],
        calls=counts.total,
        observe_calls=observe_calls,
    )
    return _Played(plan=plan, asked=asked, observe_s=observe_s, change_s=change_s)


def start_up_s(repeats: int) -> float:
    """Return how long a worker takes to start, nothing being done meanwhile; median."""
    taken: list[float] = []
    with _folder() as path:
        simulated.create("a30", path)
        command = nvml_worker.worker_command(program=simulated_worker.program(path))
        for _ in range(repeats):
            gpus = nvml_worker.WorkerGpus(command=command, timeout_s=60.0)
            cold = _timed(gpus.observe)
            ready(gpus)
            taken.append(cold - _timed(gpus.observe))
    return statistics.median(taken)


def query_s() -> float:
    """Return what the simulated library takes for one query, on average and at the least."""
    spent = 0.0
    rounds: list[float] = []

    class Watched(nvml_faults.CountingLibrary):
        def _call(self, *args: Any) -> int:
            nonlocal spent
            since = time.perf_counter()
            try:
                return super()._call(*args)
            finally:
                spent += time.perf_counter() - since

    with _folder() as path:
        full = max(matrix.TRANSITIONS, key=_instances)
        matrix.prepare(full, path)
        library = Watched(nvml_faults.SharedState(path))
        simulated.load(library)
        try:
            with nvml.session(None):
                for _ in range(_QUERY_ROUNDS):
                    spent = 0.0
                    library.counts.clear()
                    for index in range(matrix.GPUS):
                        observe.gpu(index)
                    rounds.append(spent / library.counts.total())
        finally:
            simulated.load(None)
    return min(rounds)


def _instances(transition: matrix.Transition) -> int:
    return sum(sum((devices or {}).values()) for devices in transition.before)


@contextlib.contextmanager
def _folder() -> Iterator[pathlib.Path]:
    """Give a place for a node's state in memory: a driver does not wait for a disk."""
    with tempfile.TemporaryDirectory(prefix="mig-", dir=MEMORY if MEMORY.is_dir() else None) as f:
        yield pathlib.Path(f) / "gpus.json"


def ready(gpus: nvml_worker.WorkerGpus) -> None:
    """Have a worker started, and wait until it waits."""
    gpus.prepare()
    worker = gpus._ready  # noqa: SLF001 - it does not say when it has loaded what it needs
    if worker is None:
        raise RuntimeError("no worker")
    wait = pathlib.Path(f"/proc/{worker.child.pid}/syscall")
    deadline = time.monotonic() + _READY_TIMEOUT_S
    # Reading from stdin, whose number is 0 and which is still empty.
    while not wait.read_text(encoding="ascii").startswith(("0 0x0 ", "63 0x0 ")):
        if time.monotonic() > deadline:
            raise RuntimeError("the worker does not come to wait")
        time.sleep(0.002)  # noqa: TID251 - no test, and nothing to interrupt


def _timed(work: Callable[[], object]) -> float:
    since = time.monotonic()
    work()
    return time.monotonic() - since
