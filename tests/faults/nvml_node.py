"""A node with simulated GPUs below the real pynvml, and a cluster in memory.

A first run records the calls of a change. Further runs repeat the change from the same start, and
let one of these calls fail.
"""

import collections
import pathlib
from typing import NamedTuple

import structlog.testing

from mig_manager.adapters.nvml import nvml_gpus
from mig_manager.agent import outcomes
from mig_manager.core import ports
from mig_manager.core.records import run_status
from mig_manager.sandbox.driver import state_file
from testkit import nvml_faults
from tests.rigs import layout_table
from tests.rigs.driver import nvml_codes
from tests.rigs.node import agents, fake_cluster, fakes, simulated_rig, unrestored
from tests.rigs.shell import lost_stderr


class NvmlChange(NamedTuple):
    spec: str
    was: str | None  # the layout that is active; None: a node that was never configured
    layout: str
    is_busy: bool = False  # whether a pod computes on every device
    are_changes_all: bool = False  # whether only calls that change something fail


CHANGES = {
    "first-on-ampere": NvmlChange("A30", None, "ampere"),
    "first-on-two": NvmlChange("2xA30", None, "ampere", are_changes_all=True),
    "first-on-hopper": NvmlChange("H100", None, "hopper"),
    "one-slice": NvmlChange("A100-SXM4-40GB", "all-balanced", "one-slice", is_busy=True),
    "inside": NvmlChange("A100-SXM4-40GB", "halves", "inside"),
    "mode-off": NvmlChange("A30", "ampere", "all-disabled"),
    "already-applied": NvmlChange("A30", "ampere", "ampere"),
}


class Moment(NamedTuple):
    """A call of the reconfiguration that can fail."""

    function: str
    gpu: int | None
    nth: int  # among the calls of the function for the GPU, from 1

    @property
    def operation(self) -> str:
        """The function as pynvml and our messages have it, without its version."""
        name = self.function.partition("_v")[0]
        return {"nvmlInitWithFlags": "nvmlInit"}.get(name, name)


class RunEnd(NamedTuple):
    """How a run ended, and how it left the node."""

    outcome: outcomes.Outcome
    geometry: tuple[simulated_rig.GpuGeometry, ...]
    """Modes, instances, placements and what is inside them, from the driver itself."""
    remaining: list[str]  # the kinds of what a change left on the node; nothing, if all is well

    @property
    def is_good(self) -> bool:
        return self.outcome.state is run_status.State.SUCCESS


class StruckNode:
    """One simulated node with an agent on it, which starts from the same state every time."""

    def __init__(self, change: NvmlChange, path: pathlib.Path) -> None:
        self.change = change
        state_file.SharedState(path).create(change.spec)
        self.state = nvml_faults.SharedState(path)
        self.gpus: ports.Gpus = nvml_gpus.NvmlGpus(in_use_timeout_s=5.0, clock=fakes.FakeClock())
        self._start = self.state.read()
        if change.was is not None:
            self.begin()
            assert self.run_agent(change.was).is_good
            self._start = self.state.read()
        self.before = simulated_rig.driver_geometry(self.state)

    def begin(self) -> None:
        """Bring everything back to the start of the change."""
        self.state.update(lambda _node: self._start)
        # A new one, because a fault may have left the session open.
        nvml_faults.install(self.state.path)
        self.rig = rig = simulated_rig.SimulatedRig(self.state)
        rig.advance()
        if self.change.is_busy:
            rig.occupy()
        text = layout_table.document(layout_table.LAYOUTS)
        self._agent = agents.new_agent(rig, layouts=text, gpus=self.gpus)

    def run_agent(
        self, layout: str = "", *, listen: lost_stderr.Listen = structlog.testing.capture_logs
    ) -> RunEnd:
        """Run the agent once; no log line may have a traceback."""
        rig = self.rig
        with listen() as log:
            outcome = self._agent.run(
                layout or self.change.layout, fakes.FakeCancellation(rig.clock)
            )
        assert [line for line in log if "exc_info" in line] == []
        remaining = [
            each.split()[0] for each in unrestored.on_node(fake_cluster.FakeNode(rig).read())
        ]
        return RunEnd(outcome, simulated_rig.driver_geometry(self.state), remaining)

    def strike(
        self,
        moment: Moment,
        *,
        listen: lost_stderr.Listen = structlog.testing.capture_logs,
        code: int | None = None,
        hang_s: float = 0.0,
    ) -> RunEnd:
        """Run with one fault, which must have struck, and leave the node as the run leaves it."""
        self.begin()
        self.state.add_fault(
            nvml_faults.Fault(
                function=moment.function,
                gpu=moment.gpu,
                first=moment.nth,
                code=code,
                hang_s=hang_s,
            )
        )
        end = self.run_agent(listen=listen)
        (armed,) = self.state.faults()
        assert armed.strikes == 1, f"{moment} was not called"
        self.state.clear_faults()
        return end

    def moments(self) -> tuple[Moment, ...]:
        """Return the calls to strike of a reconfiguration without a fault.

        Of each function the first call for each GPU, the first one after the first look at the
        GPUs, and the last one; and every call that changes something.
        """
        self.begin()
        self.state.log_calls(is_on=True)
        end = self.run_agent()
        assert end.is_good
        described = layout_table.devices_in_words(simulated_rig.driver_gpus(self.state))
        assert described == layout_table.gpus_with(self.change.layout, len(described))
        self.after = end.geometry
        calls = nvml_faults.read_calls(self.state.path)
        self.state.log_calls(is_on=False)
        counts: collections.Counter[tuple[str, int | None]] = collections.Counter()
        selected: dict[Moment, None] = {}
        parts: set[tuple[str, int | None, bool]] = set()
        for call in calls:
            counts[call.function, call.gpu] += 1
            part = call.function, call.gpu, counts["nvmlInitWithFlags", None] > 1
            if call.function in nvml_codes.CHANGES or part not in parts:
                parts.add(part)
                selected[Moment(call.function, call.gpu, counts[call.function, call.gpu])] = None
        selected |= {Moment(*key, count): None for key, count in counts.items()}
        return tuple(
            moment
            for moment in selected
            if moment.function in nvml_codes.CHANGES or not self.change.are_changes_all
        )
