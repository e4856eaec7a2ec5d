"""Whether the agent grows: memory, threads and open files over many reconfigurations.

First one agent's loop in this process, over GPUs and a cluster in memory, so that Python's own
heap can be asked; then the agent's process over HTTP with a worker process for each piece of work,
so that the kernel can be asked.
"""

import contextlib
import dataclasses
import gc
import itertools
import os
import pathlib
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from mig_manager import reasons
from mig_manager.core.objects import well_known
from mig_manager.sandbox.driver import simulated_nvml
from tests.rigs import contract, layout_table
from tests.rigs.node import fakes
from tests.rigs.stage import agent_stage
from tests.soak import process, script, soak_rig

_SPEC = "A100-SXM4-40GB"
_LAYOUTS = ("all-1g.5gb", "all-balanced")
_WARM_UP = 0.1  # share of the runs that fill caches, and say nothing about growth
_SAMPLES = 100
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SELF = pathlib.Path("/proc/self")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a process holds after so many reconfigurations."""

    runs: int
    blocks: int  # live small objects of the Python heap; 0 where it cannot be asked
    resident: int  # bytes of memory in use, the interpreter's and the allocator's included
    threads: int
    files: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How the first and the last of the samples differ: medians of tenths, and what lasts."""

    blocks: float  # small objects for each reconfiguration
    resident: float  # bytes for each reconfiguration
    threads: int
    """How many more there always are at the end than there ever were before; at rest 0 or less."""
    files: int


def in_memory(runs: int) -> list[Sample]:
    """Reconfigure GPUs in memory through the loop of an agent; return samples after a warm-up."""
    warm_up = int(runs * _WARM_UP)
    each = max(1, (runs - warm_up) // _SAMPLES)
    samples: list[Sample] = []
    with _agent() as reconfigure:
        reconfigure(warm_up)
        for number in range(1, _SAMPLES + 1):
            reconfigure(each)
            gc.collect()
            samples.append(
                _sample(_SELF, warm_up + number * each, blocks=sys.getallocatedblocks())
            )
    return samples


def growth(samples: Sequence[Sample]) -> Growth:
    """Compare the beginning with the end.

    Threads and files have grown where the last third never has as few as the first half had at
    most: on a busy machine the last Event of a run may still be on its way, and the client keeps a
    second connection for as long as the API server does.
    """
    half = len(samples) // 2
    tenth = max(1, len(samples) // 10)
    first, last = samples[:tenth], samples[-tenth:]
    late = samples[-(len(samples) // 3) :]
    apart = statistics.median(s.runs for s in last) - statistics.median(s.runs for s in first)

    def gain(name: str) -> float:
        return float(
            statistics.median(getattr(s, name) for s in last)
            - statistics.median(getattr(s, name) for s in first)
        )

    return Growth(
        blocks=gain("blocks") / max(apart, 1),
        resident=gain("resident") / max(apart, 1),
        threads=min(s.threads for s in late) - max(s.threads for s in samples[:half]),
        files=min(s.files for s in late) - max(s.files for s in samples[:half]),
    )


@contextlib.contextmanager
def _agent() -> Iterator[Callable[[int], None]]:
    """Yield a function that has an agent apply layouts in turn, to one GPU in memory."""
    rig = soak_rig.SoakRig(_SPEC, label_managed=True, script_=script.Script())
    agent = process.Process(
        rig, fakes.FakeTextSource(layout_table.document(_LAYOUTS)), heals=False
    )
    layouts = itertools.cycle(_LAYOUTS)

    def reconfigure(times: int) -> None:
        for layout in itertools.islice(layouts, times):
            rig.node_object.labels[well_known.CONFIG_LABEL] = layout
            outcome = agent.step().outcome
            if outcome is None or outcome.reason is not reasons.Reason.APPLIED:
                raise RuntimeError(f"a run in peace ended with {outcome}")
            # The fakes note every call for tests; here these notes would be all that grows.
            rig.forget_past()
            contract.check_annotation.cache_clear()

    try:
        yield reconfigure
    finally:
        agent.abandon()
        simulated_nvml.load(None)


def in_a_process(runs: int) -> list[Sample]:
    """Reconfigure through the agent's own process and the embedded API; return samples."""
    samples: list[Sample] = []
    with agent_stage.AgentStage(_SPEC) as stage:
        assert stage.machine.agent is not None
        proc = pathlib.Path(f"/proc/{stage.machine.agent.pid}")
        for number in range(1, runs + 1):
            layout = _LAYOUTS[number % len(_LAYOUTS)]
            stage.apply_layout(layout)
            if number > runs * _WARM_UP:
                samples.append(_sample(proc, number))
    return samples


def _sample(proc: pathlib.Path, runs: int, *, blocks: int = 0) -> Sample:
    resident = int((proc / "statm").read_text(encoding="ascii").split()[1]) * _PAGE
    return Sample(
        runs=runs,
        blocks=blocks,
        resident=resident,
        threads=_at_rest(proc / "task"),
        files=_at_rest(proc / "fd"),
    )


def _at_rest(folder: pathlib.Path) -> int:
    """Return how many entries last: a run that has just ended may still publish its Event."""
    pause = threading.Event()
    fewest = len(list(folder.iterdir()))
    for _ in range(10):
        pause.wait(0.02)
        fewest = min(fewest, len(list(folder.iterdir())))
    return fewest
