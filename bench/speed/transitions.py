"""Measure reconfigurations through the GPU worker against the time of a perfect executor.

The limit of a transition follows from the latency model alone: one NVML session, and for each
GPU its changes one after the other; all GPUs at once, or one after the other if the driver
serialises them. It contains no process, no query and no verification.

Our executor's time is from the plan to the verification. The observation before the plan has its
own session, because none stays open while pods are drained; its time is printed beside it, and
compared with the limit of two sessions.
"""

import collections
import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator

from mig_manager.adapters import host
from mig_manager.adapters.nvml import library as nvml
from mig_manager.adapters.nvml import nvml_gpus, observation, worker_client
from mig_manager.core import ports, steps
from mig_manager.core.planner import planner
from mig_manager.sandbox.driver import simulated_nvml, simulated_worker, state_file, states
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
"""The functions of pynvml that change a GPU."""

_READY_TIMEOUT_S = 30.0
_QUERY_ROUNDS = 20
MEMORY = pathlib.Path("/dev/shm")  # noqa: S108 - folders in it are made safely


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The NVML calls of a reconfiguration."""

    changes: int
    sessions: int
    total: int
    observing: int  # the calls of the observation before the plan

    @property
    def others(self) -> int:
        """Number of calls besides the observation and the changes."""
        return self.total - self.observing - self.changes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One transition, measured several times."""

    transition: matrix.Transition
    calls: Calls
    limit_s: float  # the time of a perfect executor
    overhead_s: float  # the time of our executor beyond the limit; median
    observe_s: float  # the time of the observation beyond its session, and of planning; median
    init_s: float  # the driver's time for a session

    @property
    def ratio(self) -> float:
        """Ratio of our time to the limit."""
        return 1 + self.overhead_s / self.limit_s

    @property
    def whole_ratio(self) -> float:
        """The ratio for observation and change together, with a limit of two sessions."""
        return 1 + (self.overhead_s + self.observe_s) / (self.limit_s + self.init_s)

    def net_ratio(self, query_s: float) -> float:
        """Return ``ratio`` without the simulation's time for queries, which the model lacks."""
        return self.ratio - self.calls.others * query_s / self.limit_s

    def net_whole_ratio(self, query_s: float) -> float:
        """Return ``whole_ratio`` without the simulation's own time for queries."""
        queries = self.calls.others + self.calls.observing
        return self.whole_ratio - queries * query_s / (self.limit_s + self.init_s)


class Counts(ports.Telemetry):
    """Counts NVML calls."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()

    def nvml_called(self, function: str, calls: int, seconds: float) -> None:
        """Add the calls of one observation or change."""
        self.calls[function] += calls


def limit_s(plan: steps.Plan, latency: states.Latency, *, is_serial: bool) -> float:
    """Return the driver's time for a plan."""
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
        case steps.Reset():
            return 0.0  # no layout needs one
        case steps.SetMode():
            return latency.mode_with_reset_s if step.needs_reset else latency.mode_without_reset_s


def scale_latency(latency: states.Latency, factor: float) -> states.Latency:
    """Return the latency of a driver that takes ``factor`` times as long."""
    seconds = dataclasses.asdict(latency)
    return states.Latency(**{name: value * factor for name, value in seconds.items()})


def measure(
    transitions: Iterable[matrix.Transition],
    *,
    is_serial: bool,
    scale: float,
    repeats: int,
    driver: states.Latency = states.REALISTIC,
) -> Iterable[Measurement]:
    """Measure transitions, and yield each as soon as it is measured.

    Args:
        transitions: The transitions to measure.
        is_serial: Whether the driver changes one GPU of the node at a time.
        scale: Factor of the driver's latencies in transitions of more than a second; our own time
            is not scaled.
        repeats: Number of measurements of each.
        driver: The driver's latencies.
    """
    for transition in transitions:
        with _folder() as path:
            start = matrix.prepare(transition, path)
            is_short = _driver_s(transition, path, driver, is_serial=is_serial) <= 1
            latency = scale_latency(driver, 1.0 if is_short else scale)
            options = states.Options(latency=latency, serialise_all_gpus=is_serial)
            start = dataclasses.replace(start, options=options)
            runs = [_run(transition, path, start) for _ in range(repeats)]
        plan = runs[0].plan
        played_s = limit_s(plan, latency, is_serial=is_serial)
        yield Measurement(
            transition=transition,
            calls=runs[0].calls,
            limit_s=limit_s(plan, driver, is_serial=is_serial),
            overhead_s=statistics.median(run.change_s for run in runs) - played_s,
            observe_s=statistics.median(run.observe_s for run in runs) - latency.init_s,
            init_s=driver.init_s,
        )


def _driver_s(
    transition: matrix.Transition, path: pathlib.Path, driver: states.Latency, *, is_serial: bool
) -> float:
    nvml_faults.install(path)
    try:
        gpus = nvml_gpus.NvmlGpus(clock=host.SystemClock()).observe()
    finally:
        simulated_nvml.load(None)
    plan = planner.plan(gpus, transition.desired_gpus(gpus))
    return limit_s(plan, driver, is_serial=is_serial)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One run of a transition."""

    plan: steps.Plan
    calls: Calls
    observe_s: float  # from the first call to the plan
    change_s: float  # from the plan to the verification


def _run(transition: matrix.Transition, path: pathlib.Path, start: states.MachineState) -> _Run:
    """Run a transition as the pipeline does.

    The workers are started ahead, as in the pipeline: before the config is read, and while the
    node is drained. ``start_up_s`` measures their start.
    """
    nvml_faults.SharedState(path).update(lambda _: start)
    counts = Counts()
    gpus = worker_client.WorkerGpus(
        command=worker_client.worker_command(program=simulated_worker.program(path)),
        timeout_s=600.0,
        telemetry=counts,
    )
    with gpus.kept_ready():
        wait_ready(gpus)
        since = time.monotonic()
        observed = gpus.observe()
        desired = transition.desired_gpus(observed)
        plan = planner.plan(observed, desired)
        observe_s, observing = time.monotonic() - since, counts.calls.total()
        wait_ready(gpus)
        since = time.monotonic()
        changed = {gpu.uuid: gpu for gpu in gpus.execute(plan, observed)}
    after = [changed.get(gpu.uuid, gpu) for gpu in observed]
    if not planner.plan(after, desired).is_empty:
        raise RuntimeError(f"{transition.name} is not active")
    change_s = time.monotonic() - since
    calls = Calls(
        changes=sum(counts.calls[name] for name in CHANGES),
        sessions=counts.calls["nvmlInit"],
        total=counts.calls.total(),
        observing=observing,
    )
    return _Run(plan=plan, calls=calls, observe_s=observe_s, change_s=change_s)


def start_up_s(repeats: int) -> float:
    """Return how long a worker takes to start; median."""
    times_s: list[float] = []
    with _folder() as path:
        state_file.SharedState(path).create("a30")
        command = worker_client.worker_command(program=simulated_worker.program(path))
        for _ in range(repeats):
            gpus = worker_client.WorkerGpus(command=command, timeout_s=60.0)
            cold_s = _duration_s(gpus.observe)
            with gpus.kept_ready():
                wait_ready(gpus)
                times_s.append(cold_s - _duration_s(gpus.observe))
    return statistics.median(times_s)


def measured_query_s() -> float:
    """Return the simulated library's time for one query: the least mean of several rounds."""
    spent = 0.0
    rounds: list[float] = []

    class TimedLibrary(nvml_faults.CountingLibrary):
        def _answer(self, attempt: simulated_nvml.RunningCall) -> int:
            nonlocal spent
            since = time.perf_counter()
            try:
                return super()._answer(attempt)
            finally:
                spent += time.perf_counter() - since

    with _folder() as path:
        full = max(matrix.TRANSITIONS, key=_instances)
        matrix.prepare(full, path)
        library = TimedLibrary(nvml_faults.SharedState(path))
        simulated_nvml.load(library)
        try:
            with nvml.session(None):
                for _ in range(_QUERY_ROUNDS):
                    spent = 0.0
                    library.counts.clear()
                    for index in range(matrix.GPUS):
                        observation.observe(index)
                    rounds.append(spent / library.counts.total())
        finally:
            simulated_nvml.load(None)
    return min(rounds)


def _instances(transition: matrix.Transition) -> int:
    return sum(sum((devices or {}).values()) for devices in transition.before)


@contextlib.contextmanager
def _folder() -> Iterator[pathlib.Path]:
    """Yield a path in memory for a node's state, because a driver does not wait for a disk."""
    with tempfile.TemporaryDirectory(prefix="mig-", dir=MEMORY if MEMORY.is_dir() else None) as f:
        yield pathlib.Path(f) / "gpus.json"


def wait_ready(gpus: worker_client.WorkerGpus) -> None:
    """Wait until the worker that was started ahead waits for a request."""
    worker = gpus._ready  # noqa: SLF001 - it does not report when it is ready
    if worker is None:
        raise RuntimeError("no worker")
    wait = pathlib.Path(f"/proc/{worker.child.pid}/syscall")
    deadline = time.monotonic() + _READY_TIMEOUT_S
    # Reading from stdin, whose number is 0 and which is still empty.
    while not wait.read_text(encoding="ascii").startswith(("0 0x0 ", "63 0x0 ")):
        if time.monotonic() > deadline:
            raise RuntimeError("the worker is not ready")
        time.sleep(0.002)  # noqa: TID251 - no test, and no wait to interrupt


def _duration_s(work: Callable[[], object]) -> float:
    since = time.monotonic()
    work()
    return time.monotonic() - since
