"""An agent process whose every port call is a point at which it can be struck.

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
from mig_manager.adapters.host import log
from mig_manager.adapters.kubernetes import api
from mig_manager.agent import main, settings
from mig_manager.core import ports
from mig_manager.sandbox.driver import library as simulated
from testkit import nvml_faults
from tests.crash import points as points_
from tests.stage import in_process

IDLE = "idle"
"""Noted whenever the agent begins to wait: for a request, or for its next retry."""
_NO_PORTS = frozenset({"clock", "telemetry"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    options: Mapping[str, str]
    """Of the command line, by name."""
    points: str
    """File to note the points in."""
    log: str
    """File for the log lines."""
    strike_at: str | None = None
    strike_with: int = int(signal.SIGKILL)
    has_worker: bool = False
    """Whether the GPUs are reached through the real child process."""


def serve(order: Order) -> int:
    """Be an agent until a signal; return the exit status."""
    output = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    log.configure(level="info", is_json=False, stream=sys.stderr)
    points = points_.Points(
        pathlib.Path(order.points),
        strike_at=order.strike_at,
        strike_with=signal.Signals(order.strike_with),
    )
    wanted = settings.AgentSettings.read(order.options, {})
    assert wanted.gpus.simulate_state is not None
    state = nvml_faults.SharedState(wanted.gpus.simulate_state)
    kube = api.KubeApi.connect(kubeconfig=str(wanted.kubeconfig))
    watched = functools.partial(_watched, points)
    pulse = in_process.Pulse(lambda: points.come_to(IDLE))
    if order.has_worker:
        overrides = main.Overrides(replace_ports=watched, pulse=pulse)
        agent = main.AgentService(wanted, kube, boot_id=state.boot_id, overrides=overrides)
    else:
        simulated.load(_Library(state, points))
        agent = in_process.assembled(
            wanted,
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


def _watched(points: points_.Points, own: ports.Dependencies) -> ports.Dependencies:
    """Return the same with a point before and after each call of a port, also of later ones."""
    everything = {f.name: getattr(own, f.name) for f in dataclasses.fields(own)}
    watched: dict[str, Any] = {
        name: points_.Port(port, name, points.call)
        for name, port in everything.items()
        if name not in _NO_PORTS and port is not None and not isinstance(port, str)
    }
    return dataclasses.replace(own, clock=in_process.QuickClock(), **watched)


class _Library(nvml_faults.CountingLibrary):
    """Comes to a point before and after each change that a GPU takes."""

    def __init__(self, state: nvml_faults.SharedState, points: points_.Points) -> None:
        super().__init__(state)
        self._points = points

    def _change(self, attempt: "simulated.RunningCall") -> None:
        with self._points.around(f"gpu{attempt.gpu}.{attempt.name}"):
            super()._change(attempt)
