"""A node whose GPUs are simulated beneath the real pynvml, and whose cluster is a fake.

A reconfiguration is recorded call by call; then it is played again from the same start with one
of these calls struck by a fault.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import structlog.testing

from mig_manager.adapters.nvml import client as nvml_worker
from mig_manager.adapters.nvml import gpus as nvml_gpus
from mig_manager.agent import outcomes, reconcile, settings
from mig_manager.core import model, ports
from mig_manager.sandbox.driver import library as simulated
from testkit import nvml_faults
from tests import fakes, simulated_rig
from tests.faults import nvml_codes

LAYOUTS = """\
version: v1
mig-configs:
  whole:
  - {devices: all, mig-enabled: false}
  ampere:
  - {devices: all, mig-enabled: true, mig-devices: {1g.6gb: 2, 2g.12gb: 1}}
  hopper:
  - {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 2, 3g.40gb: 1}}
  three:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 1, 2g.10gb: 1, 1g.5gb: 2}}
  one-slice:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 1, 1g.5gb: 4}}
  halves:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 2}}
  inside:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 1, 1c.3g.20gb: 3}}
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A reconfiguration."""

    name: str
    spec: str
    before: str | None
    """The layout that is active; None: a node that was never configured."""
    layout: str
    is_busy: bool = False
    """Whether a pod computes on every device."""
    are_changes_all: bool = False
    """Whether only calls that change something are worth to be struck."""


SCENARIOS = (
    Scenario(name="first-on-ampere", spec="A30", before=None, layout="ampere"),
    Scenario(
        name="first-on-two", spec="2xA30", before=None, layout="ampere", are_changes_all=True
    ),
    Scenario(name="first-on-hopper", spec="H100", before=None, layout="hopper"),
    Scenario(
        name="one-slice", spec="A100-SXM4-40GB", before="three", layout="one-slice", is_busy=True
    ),
    Scenario(name="inside", spec="A100-SXM4-40GB", before="halves", layout="inside"),
    Scenario(name="mode-off", spec="A30", before="ampere", layout="whole"),
    Scenario(name="already-applied", spec="A30", before="ampere", layout="ampere"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One call of a recorded reconfiguration."""

    function: str
    gpu: int | None
    nth: int
    """Among the calls of the function for the GPU, from 1."""

    def __str__(self) -> str:
        where = "" if self.gpu is None else f" of GPU {self.gpu}"
        return f"{self.function}{where}, call {self.nth}"

    @property
    def operation(self) -> str:
        """The function as pynvml and our messages have it, without its version."""
        name = self.function.partition("_v")[0]
        return {"nvmlInitWithFlags": "nvmlInit"}.get(name, name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended, and what it said on the way."""

    outcome: outcomes.Outcome
    tracebacks: Sequence[object]
    """Log lines with one."""

    @property
    def is_good(self) -> bool:
        return self.outcome.state is model.State.SUCCESS


Listen = Callable[[], contextlib.AbstractContextManager[Sequence[Mapping[str, object]]]]
"""Gives what is logged meanwhile."""


class Cluster(simulated_rig.SimulatedRig):
    """The fake cluster around the simulated GPUs, with a device plugin on its node."""

    def __init__(self, state: nvml_faults.SharedState) -> None:
        super().__init__(state, {"nvidia.com/gpu.deploy.device-plugin": "true"})
        self.live()

    def occupy(self) -> None:
        """Have a pod compute on every device."""
        for number, uuid in enumerate(sorted(simulated_rig.devices(self.state))):
            uid = self.add_pod(f"train-{number}", devices=frozenset({uuid}))
            self.client_of[uid] = self.state.add_client(uuid, name="python")


class Node:
    """One simulated node with the pipeline on it, which starts from the same state every time."""

    def __init__(self, scenario: Scenario, path: pathlib.Path) -> None:
        self.scenario = scenario
        simulated.create(scenario.spec, path)
        self.state = nvml_faults.SharedState(path)
        self.listen: Listen = structlog.testing.capture_logs
        self.gpus: ports.Gpus = nvml_gpus.NvmlGpus(in_use_timeout_s=5.0, clock=fakes.FakeClock())
        self._start = self.state.read()
        if scenario.before is not None:
            self.begin()
            assert self.run(scenario.before).is_good
            self._start = self.state.read()

    def put_child_before_gpus(self, *, timeout_s: float) -> None:
        """Have the GPUs reached through a process that can be killed, from the next run on."""
        command = nvml_worker.worker_command(simulate_state=str(self.state.path))
        self.gpus = nvml_worker.WorkerGpus(command=command, timeout_s=timeout_s)

    def begin(self) -> None:
        """Bring everything back to the start of the scenario."""
        self.state.update(lambda _node: (self._start, None))
        # A new one, because a fault may have left the session open.
        nvml_faults.install(self.state.path)
        self.cluster = Cluster(self.state)
        if self.scenario.is_busy:
            self.cluster.occupy()
        self.before = self.shape()
        self._pipeline = self._new_pipeline()

    def run(self, layout: str | None = None) -> Ended:
        """Run the pipeline once."""
        request = fakes.FakeRequest(self.cluster.clock)
        with self.listen() as log:
            outcome = self._pipeline.run(layout or self.scenario.layout, request)
        return Ended(outcome=outcome, tracebacks=[line for line in log if "exc_info" in line])

    def shape(self) -> tuple[simulated_rig.GpuShape, ...]:
        """Return modes, instances, placements and what is inside them, from the driver itself."""
        return simulated_rig.geometry(self.state)

    def taken(self) -> list[str]:
        """Return what is still taken on the node; nothing, if all is well."""
        rig = self.cluster
        journal = [key for key in rig.annotations if key.endswith("journal")]
        paused = [key for key, value in rig.labels.items() if value.startswith("paused")]
        cordon = ["cordon"] if rig.is_unschedulable else []
        taint = ["taint"] if rig.has_hold_taint else []
        return [*journal, *paused, *cordon, *taint]

    def record(self) -> tuple[Site, ...]:
        """Play the reconfiguration in peace and return the calls to strike.

        Of each function the first call for each GPU, the first one after the first look at the
        GPUs, and the last one; and every call that changes something.
        """
        self.begin()
        self.state.log_calls(is_on=True)
        assert self.run().is_good
        calls = nvml_faults.read_calls(self.state.path)
        self.state.log_calls(is_on=False)
        self.after = self.shape()
        sites = _sites(calls)
        if not self.scenario.are_changes_all:
            return sites
        return tuple(site for site in sites if site.function in nvml_codes.CHANGES)

    def _new_pipeline(self) -> reconcile.Reconciler:
        rig = self.cluster
        return reconcile.Reconciler(
            ports.Dependencies(
                gpus=self.gpus,
                node=rig.node,
                workloads=rig.workloads,
                allocations=rig.allocations,
                configs=fakes.FakeConfig(LAYOUTS),
                clock=rig.clock,
            ),
            settings.Limits(drain_timeout_s=20, plugin_timeout_s=20, monitor_timeout_s=5),
        )


def _sites(calls: Sequence[nvml_faults.Call]) -> tuple[Site, ...]:
    counts: dict[tuple[str, int | None], int] = {}
    sessions = 0
    chosen: dict[Site, None] = {}
    seen: set[tuple[str, int | None, bool]] = set()
    for call in calls:
        key = (call.function, call.gpu)
        counts[key] = counts.get(key, 0) + 1
        sessions += call.function == "nvmlInitWithFlags"
        part = (*key, sessions > 1)
        if call.function in nvml_codes.CHANGES or part not in seen:
            seen.add(part)
            chosen[Site(function=call.function, gpu=call.gpu, nth=counts[key])] = None
    for (function, gpu), count in counts.items():
        chosen[Site(function=function, gpu=gpu, nth=count)] = None
    return tuple(chosen)


@contextlib.contextmanager
def prepared(scenario: Scenario, path: pathlib.Path) -> Iterator[Node]:
    """Play a scenario's node for the body."""
    try:
        yield Node(scenario, path)
    finally:
        simulated.uninstall()
