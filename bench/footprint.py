"""Measure mig-manager's size on disk, its start, and its agent at rest.

    python -m bench.footprint [--runs 9] [--reconfigurations 5] [--idle-s 60] [--imports]

Start it with ``PYTHONDONTWRITEBYTECODE`` unset: without compiled modules all figures grow. It
prints CPU time, because wall time depends on other work of the machine. The agent is a process on
the sandbox node, over HTTP with a kubeconfig; its GPU workers are not included.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence

from mig_manager.adapters.host import process
from mig_manager.core.records import run_status
from mig_manager.sandbox import stages
from mig_manager.sandbox.driver import states

_SPEC = "8xA100-SXM4-40GB"
_LAYOUTS = ("all-1g.5gb", "all-balanced")
_MIB = 1 << 20
_SHOWN = 8
_WATCHES_READY_S = 3.0  # the time until a new agent's watches are open
_SLOW_US = 20_000  # a slower import is printed
_LAUNCHER = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, spent = os.wait4(pid, 0)
print()
print(spent.ru_utime + spent.ru_stime, spent.ru_maxrss)
sys.exit(status)
"""
"""Small itself, because a process begins with the memory peak of its parent."""
_AGENT = (
    "import mig_manager.__main__, mig_manager.agent.main, mig_manager.agent.reports.metrics\n"
    "import mig_manager.adapters.host.file_watch, mig_manager.adapters.host.web_server\n"
)
"""The imports of an agent with pages for Prometheus until it is ready."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """The resources of a process."""

    resident: int  # bytes of memory, including shared files
    anonymous: int  # bytes of memory of its own
    peak: int  # the largest number of resident bytes so far
    threads: int
    files: int
    cpu_s: float
    wakes: int  # how often one of its threads went to sleep


def weigh(pid: int) -> Weight:
    """Read the resources of a process of ours from ``/proc``."""
    place = pathlib.Path(f"/proc/{pid}")
    memory = (place / "smaps_rollup").read_text()
    tasks = [path for path in (place / "task").iterdir() if path.is_dir()]
    status = (place / "status").read_text()
    return Weight(
        resident=_field(memory, "Rss") << 10,
        anonymous=_field(memory, "Anonymous") << 10,
        peak=_field(status, "VmHWM") << 10,
        threads=len(tasks),
        files=len(list((place / "fd").iterdir())),
        cpu_s=sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9,
        wakes=sum(
            _field((task / "status").read_text(), "voluntary_ctxt_switches") for task in tasks
        ),
    )


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9, help="starts to take the median of")
    parser.add_argument("--reconfigurations", type=int, default=5, help="of the agent")
    parser.add_argument(
        "--idle-s", type=float, default=60.0, help="how long it is watched at rest"
    )
    parser.add_argument("--imports", action="store_true", help="list the slow imports")
    options = parser.parse_args()
    print(f"Python {sys.version.split()[0]}; medians of {options.runs}, [least]")
    _disk()
    with tempfile.TemporaryDirectory() as folder:
        asserted = ("assert", "all-disabled", "--simulate", _SPEC, "--simulate-state")
        commands = {
            "mig-manager --help": ("-m", "mig_manager", "--help"),
            "mig-manager assert": ("-m", "mig_manager", *asserted, f"{folder}/gpus.json"),
        }
        _commands({"python -c pass": ("-c", "pass"), **commands}, options.runs)
        _agent(options.runs, options.reconfigurations, options.idle_s)
        if options.imports:
            _imports({**commands, "agent": ("-c", _AGENT)}, options.runs)


def _disk() -> None:
    sizes = {name: _size(name) for name in sorted(_requirements("mig-manager"))}
    print(f"installed, with dependencies  {sum(sizes.values()) / _MIB:8.1f} MiB")
    for name in sorted(sizes, key=lambda each: -sizes[each])[:_SHOWN]:
        print(f"    {name:25} {sizes[name] / _MIB:8.1f}")


def _requirements(name: str, names: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return a distribution and its requirements here, without extras."""
    names |= {name}
    for requirement in importlib.metadata.requires(name) or ():
        needed = re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
        if "extra ==" not in requirement and needed not in names:
            # Missing if it is for another system or another Python.
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                names |= _requirements(needed, names)
    return names


def _size(name: str) -> int:
    """Return the bytes of a distribution's files; our own may be a checkout."""
    if name == "mig-manager":
        folder = pathlib.Path(__file__).parent.parent / "mig_manager"
        return sum(path.stat().st_size for path in folder.rglob("*.py"))
    paths = [pathlib.Path(str(f.locate())) for f in importlib.metadata.files(name) or ()]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _commands(commands: Mapping[str, Sequence[str]], runs: int) -> None:
    for name, command in commands.items():
        _spent(command)
        spent = [_spent(command) for _ in range(runs)]
        print(f"{name:29} {_each([cpu for cpu, _ in spent])} ms CPU", end="")
        print(f"  peak {statistics.median(peak for _, peak in spent) / _MIB:5.1f} MiB")


def _spent(command: Sequence[str]) -> tuple[float, int]:
    """Run a Python command; return milliseconds of CPU and its peak of memory in bytes."""
    done = subprocess.run(  # noqa: S603 - our own program
        (sys.executable, "-c", _LAUNCHER, sys.executable, *command),
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    cpu_s, peak_kib = done.stdout.split()[-2:]
    return float(cpu_s) * 1e3, int(peak_kib) << 10


def _agent(runs: int, reconfigurations: int, idle_s: float) -> None:
    stage = stages.Stage(
        _SPEC,
        process.packaged_config().read_text(encoding="utf-8"),
        latency=states.Latency(),
        agent_options=("--health-port", "18734", "--health-address", "127.0.0.1"),
    )
    with stage:
        starts = [_restart(stage) for _ in range(runs)]
        print(f"agent, from start to ready    {_each([cpu for cpu, _ in starts])} ms CPU")
        _print_weights("agent after its start", [weight for _, weight in starts])
        for number in range(reconfigurations):
            stage.label(_LAYOUTS[number % len(_LAYOUTS)])
            if (
                stage.wait_for_end(_LAYOUTS[number % len(_LAYOUTS)])
                is not run_status.State.SUCCESS
            ):
                raise RuntimeError(f"a run ended with {stage.status()}")
        before = _weight_at_rest(stage)
        _print_weights(f"after {reconfigurations} reconfigurations", [before])
        threading.Event().wait(idle_s)
        after = weigh(_pid(stage))
        cpu, wakes = (
            (getattr(after, n) - getattr(before, n)) / idle_s for n in ("cpu_s", "wakes")
        )
        print(f"at rest, for {idle_s:.0f} s             {cpu * 3600:8.2f} s CPU an hour,", end="")
        print(f" {wakes:.2f} wakes a second")


def _restart(stage: stages.Stage) -> tuple[float, Weight]:
    """Restart the agent; return milliseconds of CPU until it was ready, and its resources."""
    stage.stop_agent()
    starts_before = stage.machine.log.read_text().count("health_served")
    stage.start_agent()
    stage.wait(
        lambda: stage.machine.log.read_text().count("health_served") > starts_before, "the agent"
    )
    cpu_s = weigh(_pid(stage)).cpu_s
    return cpu_s * 1e3, _weight_at_rest(stage)


def _weight_at_rest(stage: stages.Stage) -> Weight:
    threading.Event().wait(_WATCHES_READY_S)
    return weigh(_pid(stage))


def _pid(stage: stages.Stage) -> int:
    agent = stage.machine.agent
    if agent is None:
        raise RuntimeError("the agent does not run")
    return agent.pid


def _print_weights(what: str, weights: Sequence[Weight]) -> None:
    def median(name: str) -> float:
        return statistics.median(float(getattr(weight, name)) for weight in weights)

    print(f"{what:29} {median('resident') / _MIB:8.1f} MiB resident,", end=" ")
    print(
        f"{median('anonymous') / _MIB:.1f} anonymous, {median('peak') / _MIB:.1f} at the peak;",
        end=" ",
    )
    print(f"{median('threads'):.0f} threads, {median('files'):.0f} files")


def _imports(commands: Mapping[str, Sequence[str]], runs: int) -> None:
    for name, command in commands.items():
        print(f"{name}: imports of {_SLOW_US / 1e3:.0f} ms with nested ones, [by itself]")
        for module, (total_us, self_us) in _import_times(command, runs).items():
            if total_us >= _SLOW_US:
                print(f"    {total_us / 1e3:8.1f} [{self_us / 1e3:6.1f}] ms  {module}")


def _import_times(command: Sequence[str], runs: int) -> dict[str, tuple[int, int]]:
    """Return the least microseconds of each module, with and without nested imports."""
    least: dict[str, tuple[int, int]] = {}
    for _ in range(runs):
        done = subprocess.run(  # noqa: S603 - our own program
            (sys.executable, "-X", "importtime", *command),
            check=True,
            capture_output=True,
            text=True,
        )
        for self_us, total_us, module in re.findall(
            r"import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)", done.stderr
        ):
            former = least.get(module, (int(total_us), int(self_us)))
            least[module] = (min(former[0], int(total_us)), min(former[1], int(self_us)))
    return least


def _each(values: Sequence[float]) -> str:
    return f"{statistics.median(values):8.1f} [{min(values):.1f}]"


def _field(text: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"the kernel does not report {name}")
    return int(match[1])


if __name__ == "__main__":
    main()
