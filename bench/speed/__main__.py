"""Measure the speed of the executor, of the agent and of the planner.

    python -m bench.speed [--repeats 3] [--scale 0.4] [--serial-scale 0.1] [--runs 9]
                          [--only transitions|agent|planner] [--latencies FILE.json]

All but our own time is simulated. Figures of docs/performance.md come from here.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Sequence

from bench.speed import planning, reconfiguration, transitions
from mig_manager.adapters.host import line_writer, log
from mig_manager.sandbox import node_spec
from mig_manager.sandbox.driver import states
from testkit import matrix

_PARTS = ("transitions", "agent", "planner")


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="of each transition (default: 3)")
    parser.add_argument(
        "--scale",
        type=float,
        default=0.4,
        help="how much of the driver's latency is played, GPUs at once, where a transition takes "
        "more than a second (default: 0.4)",
    )
    parser.add_argument(
        "--serial-scale",
        type=float,
        default=0.1,
        help="the same where the driver serialises all GPUs (default: 0.1)",
    )
    parser.add_argument("--runs", type=int, default=9, help="through the agent (default: 9)")
    parser.add_argument("--only", choices=_PARTS, help="measure only this part")
    parser.add_argument(
        "--latencies",
        type=pathlib.Path,
        metavar="FILE.json",
        help="play the durations that 'mig-manager acceptance' wrote; those it lacks are the "
        "usual ones",
    )
    arguments = parser.parse_args()
    log.configure(level="error", is_json=True, lines=line_writer.LineWriter(sys.stderr))
    parts = (arguments.only,) if arguments.only else _PARTS
    driver = states.REALISTIC
    if arguments.latencies is not None:
        driver = dataclasses.replace(driver, **node_spec.durations_s(arguments.latencies))
        print(f"the driver's durations are those of {arguments.latencies}: {driver}\n")
    if "planner" in parts:
        _planner()
    if "transitions" in parts:
        _transitions(driver, arguments.scale, arguments.serial_scale, arguments.repeats)
    if "agent" in parts:
        _agent(driver, arguments.runs)


def _transitions(driver: states.Latency, scale: float, serial_scale: float, repeats: int) -> None:
    query_s = max(transitions.measured_query_s(), driver.query_s)
    print(
        f"a worker starts in {transitions.start_up_s(repeats) * 1000:.0f} ms, ahead of its work;"
    )
    print(f"the simulated library takes {query_s * 1e6:.0f} us for a query, at the least\n")
    for title, is_serial, factor, times in (
        ("GPUs at once", False, scale, repeats),
        ("all GPUs serialised", True, serial_scale, 1),
    ):
        print(
            f"{title}; the driver's latencies played at {factor:g}, of short transitions in full"
        )
        print(
            f"{'product':15} {'transition':72} {'changes':>7} {'calls':>6} {'reads':>5} "
            f"{'sessions':>8} {'limit':>8} {'ours':>8} {'ratio':>6} {'net':>6} "
            f"{'read':>6} {'whole':>6} {'net':>6}"
        )
        measured = []
        for each in transitions.measure(
            matrix.TRANSITIONS, is_serial=is_serial, scale=factor, repeats=times, driver=driver
        ):
            measured.append(each)
            print(_row(each, query_s), flush=True)
        _summary(measured, query_s)


def _row(each: transitions.Measurement, query_s: float) -> str:
    calls = each.calls
    return (
        f"{each.transition.product:15} {each.transition.name:72} {calls.changes:7} "
        f"{calls.total:6} {calls.observing:5} {calls.sessions:8} {each.limit_s:7.3f}s "
        f"{each.limit_s + each.overhead_s:7.3f}s {each.ratio:6.3f} {each.net_ratio(query_s):6.3f} "
        f"{each.observe_s * 1000:4.0f}ms {each.whole_ratio:6.3f} "
        f"{each.net_whole_ratio(query_s):6.3f}"
    )


def _summary(measured: Sequence[transitions.Measurement], query_s: float) -> None:
    def summary(ratios: Sequence[float]) -> str:
        within = sum(ratio <= 1.10 for ratio in ratios)  # noqa: PLR2004 - the goal
        return (
            f"median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}, "
            f"{within} of {len(ratios)} within 1.10"
        )

    print("ratio to the limit, and net of the simulation's own time for queries")
    print(f"  change: {summary([each.ratio for each in measured])}")
    print(f"          {summary([each.net_ratio(query_s) for each in measured])}")
    print(f"  read and change: {summary([each.whole_ratio for each in measured])}")
    print(f"                   {summary([each.net_whole_ratio(query_s) for each in measured])}")
    overheads = [each.overhead_s * 1000 for each in measured]
    reads = [each.observe_s * 1000 for each in measured]
    print(
        f"beyond the limit, median: {statistics.median(overheads):.0f} ms for the change "
        f"({min(overheads):.0f} to {max(overheads):.0f}), {statistics.median(reads):.0f} ms for "
        f"the read ({min(reads):.0f} to {max(reads):.0f})\n"
    )


def _agent(driver: states.Latency, runs: int) -> None:
    courses = reconfiguration.measure(repeats=runs, latency=driver)

    def ms(name: str) -> str:
        seconds = [getattr(course, name) * 1000 for course in courses]
        return f"{statistics.median(seconds):6.0f} ms  ({min(seconds):.0f} to {max(seconds):.0f})"

    print(f"through the agent, {runs} reconfigurations of 8 GPUs, one pod drained; medians")
    print(f"  label to pending       {ms('pending_s')}")
    print(f"  label to success       {ms('success_s')}")
    print(f"  driver, pods, plugin   {ms('waited_s')}")
    print(f"  our own part           {ms('overhead_s')}")
    print(f"  processor time         {ms('processor_s')}")
    for phase in dict.fromkeys(name for course in courses for name, _ in course.phases):
        spent = [seconds for course in courses for name, seconds in course.phases if name == phase]
        print(f"    {phase:14} {statistics.median(spent) * 1000:6.0f} ms")
    print()


def _planner() -> None:
    print("planner, every pair of maximal layouts; and nodes of 16 GPUs that all differ")
    for each in planning.measure():
        print(
            f"  {each.product:44} {each.layouts:3} layouts {each.pairs:5} pairs: "
            f"median {each.median_s * 1000:.1f} ms, worst {each.worst_s * 1000:.1f} ms; "
            f"node {each.node_s * 1000:.1f} ms"
        )
        print(f"    worst: {each.worst}", flush=True)
    print()


if __name__ == "__main__":
    main()
