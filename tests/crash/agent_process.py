"""An agent process whose every port call is a point at which it can be struck.

``service.assemble`` puts it together with overrides: the ports are watched, GPUs and kubelet
are reached within the process so that it can be struck between two calls of NVML, and pauses that
only serve to be patient with the driver are short.
"""

import dataclasses
import os
import pathlib
import signal
import sys
from collections.abc import Mapping
from typing import Any

from mig_manager.adapters import host, pod_resources
from mig_manager.adapters.host import log
from mig_manager.adapters.kubernetes import api
from mig_manager.adapters.nvml import gpus as nvml_gpus
from mig_manager.agent import intake, main, settings
from mig_manager.core import ports, standbys
from mig_manager.sandbox.driver import library as simulated
from testkit import nvml_faults
from tests.crash import points as points_
from tests.node import simulated_rig

IDLE = "idle"
"""Noted whenever the agent begins to wait for a request."""
RETRY = "retry"
"""Noted whenever a retry of a failed request is scheduled."""
_NO_PORTS = frozenset({"clock", "telemetry"})
_MAX_PAUSE_S = 0.02


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
    agent = main.AgentService(
        wanted,
        kube,
        boot_id=state.boot_id,
        overrides=main.Overrides(
            replace_ports=lambda own: _watched(
                own if order.has_worker else _within_process(own, wanted, state, points), points
            ),
            telemetry=_Telemetry(points),
            inbox=_Mailbox(points),
        ),
    )
    host.end_on_signals(agent.stop)
    agent.serve()
    kube.close()
    return 0


def _within_process(
    own: ports.Dependencies,
    wanted: settings.AgentSettings,
    state: nvml_faults.SharedState,
    points: points_.Points,
) -> ports.Dependencies:
    """Return the same without worker processes for the GPUs and for kubelet."""
    simulated.load(_Library(state, points))
    return dataclasses.replace(
        own,
        gpus=nvml_gpus.NvmlGpus(clock=_Clock(), in_use_timeout_s=wanted.in_use_timeout_s),
        allocations=pod_resources.PodResources(str(wanted.pod_resources_socket)),
        processes=simulated_rig.processes,
        standby=standbys.Standbys(),
    )


def _watched(own: ports.Dependencies, points: points_.Points) -> ports.Dependencies:
    """Return the same with a point before and after each call of a port, also of later ones."""
    everything = {f.name: getattr(own, f.name) for f in dataclasses.fields(own)}
    watched: dict[str, Any] = {
        name: points_.Port(port, name, points)
        for name, port in everything.items()
        if name not in _NO_PORTS and port is not None and not isinstance(port, str)
    }
    return dataclasses.replace(own, clock=_Clock(), **watched)


class _Mailbox(intake.Inbox):
    """Notes when the agent has nothing to do."""

    def __init__(self, points: points_.Points) -> None:
        super().__init__()
        self._points = points

    def wait_until_superseded(
        self, generation: int, *, at_rest: bool = False, timeout_s: float | None = None
    ) -> bool:
        """Note that the agent is idle, and wait."""
        if at_rest:
            self._points.come_to(IDLE)
        return super().wait_until_superseded(generation, at_rest=at_rest, timeout_s=timeout_s)


class _Telemetry(ports.Telemetry):
    def __init__(self, points: points_.Points) -> None:
        self._points = points

    def retry_scheduled(self, delay_s: float) -> None:
        self._points.come_to(RETRY)


class _Library(nvml_faults.CountingLibrary):
    """Comes to a point before and after each change that a GPU takes."""

    def __init__(self, state: nvml_faults.SharedState, points: points_.Points) -> None:
        super().__init__(state)
        self._points = points

    def _change(self, attempt: "simulated.RunningCall") -> None:
        with self._points.around(f"gpu{attempt.gpu}.{attempt.name}"):
            super()._change(attempt)


class _Clock(host.SystemClock):
    """Does not let the driver take its time."""

    def wait(self, seconds: float) -> None:
        """Sleep through, but not for long."""
        super().wait(min(seconds, _MAX_PAUSE_S))
