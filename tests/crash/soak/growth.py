"""Whether the agent grows: memory, threads and open files over many reconfigurations.

    python -m tests.crash.soak.growth [--runs 10000] [--traced-runs 500] [--process-runs 300]

First one agent's loop in this process, over GPUs and a cluster in memory, so that Python's own
heap can be asked; then the agent's process over HTTP with a worker process for each piece of work,
so that the kernel can be asked.
"""

import argparse
import dataclasses
import gc
import os
import pathlib
import queue
import statistics
import sys
import threading
import tracemalloc
from collections.abc import Sequence
from typing import Self

from mig_manager import errors
from mig_manager.adapters.host import log
from mig_manager.adapters.kubernetes import api
from mig_manager.adapters.nvml import gpus as nvml_gpus
from mig_manager.agent import intake, settings
from mig_manager.agent import main as agent_main
from mig_manager.core import model, ports, standbys
from mig_manager.sandbox import stages
from mig_manager.sandbox.driver import library as simulated
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import sandbox_node
from tests.crash.soak import cluster, script
from tests.node import fakes, simulated_rig

_SPEC = "A100-SXM4-40GB"
_LAYOUTS = ("all-1g.5gb", "all-balanced")
_CONFIG = pathlib.Path(__file__).parents[3] / "profiles" / "mig-parted.yaml"
_SHORT = """
version: v1
mig-configs:
  all-1g.5gb:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
  all-balanced:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 2, 2g.10gb: 1, 3g.20gb: 1}}
"""
"""The same layouts; reading the whole file would be half of the time."""
_TIMEOUT_S = 60.0
_WARM_UP = 0.1
"""Share of the runs that fill caches, and say nothing about growth."""
_SAMPLES = 100
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SELF = pathlib.Path("/proc/self")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a process holds after so many reconfigurations."""

    runs: int
    blocks: int
    """Live small objects of the Python heap; 0 where it cannot be asked."""
    resident: int
    """Bytes of memory in use, the interpreter's and the allocator's included."""
    threads: int
    files: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How the first and the last of the samples differ: medians of tenths, and what lasts."""

    blocks: float
    """Small objects for each reconfiguration."""
    resident: float
    """Bytes for each reconfiguration."""
    threads: int
    """How many more there always are at the end than there ever were before; at rest 0 or less."""
    files: int


def main() -> None:
    """Measure, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000, help="in this process")
    parser.add_argument("--process-runs", type=int, default=300, help="in an agent's process")
    parser.add_argument(
        "--traced-runs", type=int, default=500, help="with every allocation traced"
    )
    wanted = parser.parse_args()
    log.configure(level="error", is_json=True, stream=sys.stderr)
    _report("one process", in_memory(wanted.runs))
    each = traced(wanted.traced_runs)
    print(f"  Python heap  {each:+.1f} B each, traced for {wanted.traced_runs} more")
    _report("the agent's process", in_a_process(wanted.process_runs))


def in_memory(runs: int) -> list[Sample]:
    """Reconfigure GPUs in memory through the loop of an agent; return samples after a warm-up."""
    warm_up = int(runs * _WARM_UP)
    each = max(1, (runs - warm_up) // _SAMPLES)
    samples: list[Sample] = []
    with _Loop() as loop:
        loop.reconfigure(warm_up)
        for number in range(1, _SAMPLES + 1):
            loop.reconfigure(each)
            gc.collect()
            samples.append(
                _sample(_SELF, warm_up + number * each, blocks=sys.getallocatedblocks())
            )
    return samples


def traced(runs: int) -> float:
    """Return how many bytes of Python objects each reconfiguration leaves behind.

    Every allocation is traced, which is slow: a tenth of ``in_memory``'s speed.
    """
    parts = 20
    each = max(2, runs // parts)
    sizes: list[int] = []
    with _Loop() as loop:
        loop.reconfigure(each)
        tracemalloc.start()
        try:
            # What was made before the trace is seen to end in it, and never to have begun.
            loop.reconfigure(each)
            for _ in range(parts):
                loop.reconfigure(each)
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    # Tables that grow by doubling have done so in the first half.
    late = sizes[parts // 2 :]
    return statistics.linear_regression([number * each for number in range(len(late))], late).slope


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

    def gained(name: str) -> float:
        return float(
            statistics.median(getattr(s, name) for s in last)
            - statistics.median(getattr(s, name) for s in first)
        )

    return Growth(
        blocks=gained("blocks") / max(apart, 1),
        resident=gained("resident") / max(apart, 1),
        threads=min(s.threads for s in late) - max(s.threads for s in samples[:half]),
        files=min(s.files for s in late) - max(s.files for s in samples[:half]),
    )


class _Heard(ports.Telemetry):
    """Passes on how each run ended."""

    def __init__(self) -> None:
        self.ends: queue.SimpleQueue[tuple[model.State, errors.Reason]] = queue.SimpleQueue()

    def run_ended(self, state: model.State, reason: errors.Reason, seconds: float) -> None:
        self.ends.put((state, reason))


class _Brisk(cluster.Cluster):
    """Lives whenever it is asked something, because the mailbox waits in real time."""

    def called(self, name: str) -> None:
        self.live()
        # The fakes keep a diary, for tests; here it would be all that grows.
        for diary in (self.statuses, self.states, self.messages, self.events):
            diary.clear()


class _Loop:
    """An agent at work in a thread of this process, over one simulated GPU."""

    def __init__(self) -> None:
        self._rig = _Brisk(_SPEC, is_gated=True, script_=script.Script())
        self._heard = _Heard()
        self._box = intake.Inbox()
        self._served = 0
        agent = agent_main.Service(
            settings.agent_settings(
                {
                    "node_name": "node-a",
                    "simulate_state": str(pathlib.Path("/nonexistent/gpus.json")),
                    "retry_initial_s": "1.0",
                    "retry_max_s": "1.0",
                },
                {},
            ),
            api.KubeApi.at("http://127.0.0.1:9"),
            boot_id="boot-1",
            overrides=agent_main.Overrides(
                replace_ports=self._in_memory,
                telemetry=self._heard,
                inbox=self._box,
                watches_files=False,
                watches_pods=False,
            ),
        )
        self._thread = threading.Thread(target=agent.loop.serve, daemon=True)

    def _in_memory(self, own: ports.Dependencies) -> ports.Dependencies:
        """Return the same with a cluster in memory, and GPUs within this process."""
        rig = self._rig
        return dataclasses.replace(
            own,
            gpus=nvml_gpus.NvmlGpus(clock=rig.clock),
            node=rig.node,
            workloads=rig.workloads,
            allocations=rig.allocations,
            configs=fakes.FakeConfig(_SHORT),
            clock=rig.clock,
            processes=simulated_rig.processes,
            standby=standbys.Standbys(),
            lock=None,
            boot_layout=None,
        )

    def __enter__(self) -> Self:
        simulated.load(cluster.Library(self._rig))
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._box.stop()
        self._thread.join(_TIMEOUT_S)
        simulated.load(None)

    def reconfigure(self, times: int) -> None:
        """Have the layouts applied in turn, and see each come into force."""
        for _ in range(times):
            self._box.put_label(_LAYOUTS[self._served % len(_LAYOUTS)])
            self._served += 1
            ended = self._heard.ends.get(timeout=_TIMEOUT_S)
            if ended != (model.State.SUCCESS, errors.Reason.APPLIED):
                raise RuntimeError(f"a run in peace ended with {ended}")


def in_a_process(runs: int) -> list[Sample]:
    """Reconfigure through the agent's own process and the embedded API; return samples."""
    quick = sandbox_node.NodeOptions(
        tick_s=0.02, pod_start_s=0.01, pod_stop_s=0.01, plugin_start_s=0.01
    )
    stage = stages.Stage(
        _SPEC,
        _CONFIG.read_text(encoding="utf-8"),
        latency=states.Latency(),
        node_options=quick,
        agent_options=("--poll-interval-s", "0.1"),
    )
    samples: list[Sample] = []
    with stage:
        assert stage.machine.agent is not None
        process = pathlib.Path(f"/proc/{stage.machine.agent.pid}")
        for number in range(1, runs + 1):
            layout = _LAYOUTS[number % len(_LAYOUTS)]
            stage.label(layout)
            if stage.wait_for_end(layout) is not model.State.SUCCESS:
                raise RuntimeError(f"run {number} ended with {stage.status()}")
            if number > runs * _WARM_UP:
                samples.append(_sample(process, number))
    return samples


def _sample(process: pathlib.Path, runs: int, *, blocks: int = 0) -> Sample:
    resident = int((process / "statm").read_text(encoding="ascii").split()[1]) * _PAGE
    return Sample(
        runs=runs,
        blocks=blocks,
        resident=resident,
        threads=_at_rest(process / "task"),
        files=_at_rest(process / "fd"),
    )


def _at_rest(folder: pathlib.Path) -> int:
    """Return how many entries last: a run that has just ended may still publish its Event."""
    pause = threading.Event()
    fewest = len(list(folder.iterdir()))
    for _ in range(10):
        pause.wait(0.02)
        fewest = min(fewest, len(list(folder.iterdir())))
    return fewest


def _report(title: str, samples: Sequence[Sample]) -> None:
    found = growth(samples)
    first, last = samples[0], samples[-1]
    print(f"{title}: {last.runs} reconfigurations")
    if last.blocks:
        print(
            f"  objects      {first.blocks:12,} -> {last.blocks:12,}    {found.blocks:+8.3f} each"
        )
    resident = f"{first.resident:12,} -> {last.resident:12,}"
    print(f"  resident     {resident} B  {found.resident:+8.1f} B each")
    print(f"  threads      {first.threads:12} -> {last.threads:12}")
    print(f"  open files   {first.files:12} -> {last.files:12}")


if __name__ == "__main__":
    main()
