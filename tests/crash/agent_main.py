"""The program of an agent process whose every port call is a moment at which it can be struck.

``agent.main`` assembles it with overrides: the ports are watched, GPUs and kubelet
are reached within the process so that it can be struck between two calls of NVML, and pauses that
only serve to be patient with the driver are short.
"""

import dataclasses
import functools
import os
import pathlib
import signal
import sys
from collections.abc import Mapping
from typing import Any

from mig_manager.adapters import host
from mig_manager.adapters.host import line_writer, log
from mig_manager.adapters.kubernetes import api
from mig_manager.agent import agent_settings, main
from mig_manager.core import ports
from mig_manager.sandbox.driver import simulated_nvml
from testkit import nvml_faults
from tests.rigs.stage import in_process, process_moments

IDLE = "idle"  # noted whenever the agent begins to wait: for a request, or for its next retry
_NO_PORTS = frozenset({"clock", "telemetry", "pod_watch"})  # whose calls change nothing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What an agent process is started with."""

    options: Mapping[str, str]  # of the command line, by name
    moments: str  # file to note the moments in
    log: str  # file for the log lines
    strike_at: str | None = None
    strike_with: int = int(signal.SIGKILL)
    has_worker: bool = False  # whether the GPUs are reached through the real child process


def serve(arguments: Arguments) -> int:
    """Run an agent until a signal ends it; return the exit status."""
    output = os.open(arguments.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    log.configure(level="info", is_json=False, lines=line_writer.LineWriter(sys.stderr))
    moments = process_moments.MomentLog(
        pathlib.Path(arguments.moments),
        strike_at=arguments.strike_at,
        strike_with=signal.Signals(arguments.strike_with),
    )
    settings = agent_settings.AgentSettings.read(arguments.options, {})
    assert settings.gpus.simulate_state is not None
    state = nvml_faults.SharedState(settings.gpus.simulate_state)
    kube = api.KubeApi.connect(kubeconfig=str(settings.kubeconfig))
    watched = functools.partial(_with_moments, moments)
    pulse = in_process.Pulse(lambda: moments.begin_moment(IDLE))
    if arguments.has_worker:
        overrides = main.Overrides(replace_ports=watched, pulse=pulse)
        agent = main.Agent(settings, kube, boot_id=state.boot_id, overrides=overrides)
    else:
        simulated_nvml.load(_Library(state, moments))
        agent = in_process.new_agent(
            settings,
            kube,
            boot_id=state.boot_id,
            wrap=watched,
            overrides=main.Overrides(pulse=pulse),
            clock=in_process.QuickClock(),
        )
    host.end_on_signals(agent.stop)
    agent.serve()
    kube.close()
    return 0


def _with_moments(
    moments: process_moments.MomentLog, deps: ports.Dependencies
) -> ports.Dependencies:
    """Return the same with a moment before and after each call of a port, also of later ones."""
    everything = {f.name: getattr(deps, f.name) for f in dataclasses.fields(deps)}
    with_moments: dict[str, Any] = {
        name: process_moments.WatchedPort(port, name, moments.call)
        for name, port in everything.items()
        if name not in _NO_PORTS and port is not None and not isinstance(port, str)
    }
    return dataclasses.replace(deps, clock=in_process.QuickClock(), **with_moments)


class _Library(nvml_faults.CountingLibrary):
    """Comes to a moment before and after each change that a GPU takes."""

    def __init__(self, state: nvml_faults.SharedState, moments: process_moments.MomentLog) -> None:
        super().__init__(state)
        self._moments = moments

    def _change(self, attempt: "simulated_nvml.RunningCall") -> None:
        with self._moments.around(f"gpu{attempt.gpu}.{attempt.name}"):
            super()._change(attempt)
