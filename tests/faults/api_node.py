"""A sandbox node with the whole agent on it in this process, and an API server that can fail.

The server's faults strike only the agent, known by its token: the scenery (kubelet, scheduler,
DaemonSet controller) uses the same server and must not be disturbed.
"""

import collections
import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import structlog.testing

from mig_manager import reasons
from mig_manager.adapters import pod_resources
from mig_manager.adapters.kubernetes import watch
from mig_manager.agent import agent_settings, main
from mig_manager.core import ports, timing
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox import stages
from mig_manager.sandbox.node import objects, sandbox_node
from tests.rigs import layout_table
from tests.rigs.node import fakes
from tests.rigs.shell import lost_stderr
from tests.rigs.stage import agent_stage, in_process

TOKEN = "agent"  # noqa: S105 - marks one client of the embedded server, and opens nothing
DEADLINE_S = 60.0  # after this long a node that is not served is one that stays so
DRAIN_TIMEOUT_S = 7.0  # longer than the pause after an eviction that got no proper answer
RESOURCES = {"ones": "nvidia.com/mig-1g.6gb", "twos": "nvidia.com/mig-2g.12gb"}
QUICK = sandbox_node.NodeOptions(
    tick_s=0.03, pod_start_s=0.02, pod_stop_s=0.02, plugin_start_s=0.02
)
REQUEST_TIMEOUT_S = 15.0  # longer than a slow machine takes to answer
SILENCE_TIMEOUT_S = 1.5  # in its place where the silence itself is what is tried
_BACKOFF = timing.Backoff(first_s=0.01, max_s=0.05)
_WATCH = watch.WatchTimes(watch_s=1.0, stall_s=1.7, steady_s=0.0, pauses=_BACKOFF)

GOOD = frozenset({reasons.Reason.APPLIED, reasons.Reason.ALREADY_APPLIED})

Wrap = Callable[[ports.DeviceAllocations, pathlib.Path], ports.DeviceAllocations]
"""Given the adapter that calls kubelet, and the socket, return an adapter in its place."""


class Request(NamedTuple):
    verb: str
    resource: str
    nth: int  # among the requests of this verb for this resource, from 1


class InProcessStage(agent_stage.AgentStage):
    """The stage with the agent in this process."""

    def __init__(
        self,
        *,
        style: objects.DeployStyle = objects.DeployStyle.GPU_OPERATOR,
        wrap: Wrap = lambda allocations, _socket: allocations,
        api_timeout_s: float = REQUEST_TIMEOUT_S,
        kubelet_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        super().__init__(
            "A30",
            text=layout_table.document(RESOURCES),
            node_options=dataclasses.replace(QUICK, deploy_style=style),
        )
        self.telemetry = fakes.FakeTelemetry()
        self._wrap = wrap
        self._running = contextlib.ExitStack()
        self._pods = 0
        self._api_timeout_s = api_timeout_s
        self._kubelet_timeout_s = kubelet_timeout_s
        self._pulse = in_process.Pulse(self.changed.set)

    def start_agent(self) -> None:
        options = {
            "node_name": stages.NODE_NAME,
            "config_file": str(self.config_file),
            "pod_resources_socket": str(self.machine.socket),
            "simulate_state": str(self.machine.state_file),
            "retry_initial_s": "0.02",
            "retry_max_s": "0.1",
            "drain_timeout_s": str(DRAIN_TIMEOUT_S),
            "plugin_timeout_s": "20",
            "monitor_timeout_s": "1",
            "drift_check_interval_s": "0",
        }
        kubelet = pod_resources.PodResources(
            str(self.machine.socket),
            timeout_s=self._kubelet_timeout_s,
            sleep=lambda _seconds: None,
        )
        agent = in_process.HostedAgent(
            self.server,
            TOKEN,
            dataclasses.replace(agent_settings.AgentSettings.read(options, {}), backoff=_BACKOFF),
            request_timeout_s=self._api_timeout_s,
            allocations=self._wrap(kubelet, self.machine.socket),
            telemetry=self.telemetry,
            overrides=main.Overrides(pulse=self._pulse, watch_times=_WATCH),
        )
        self._running.callback(agent.end)

    def stop_agent(self, *_signals: int) -> int:
        self._running.close()
        return 0

    def applied_layout(self) -> str | None:
        """Return the layout that is said to be active."""
        return objects.labels(self.node()).get(well_known.APPLIED_LABEL)

    def ends(self) -> tuple[list[reasons.Reason], list[reasons.Reason]]:
        """Return the reasons of the runs that ended, and of those whose outcome is unknown."""
        endings, lost = (self.telemetry.events[name] for name in ("run_ended", "outcome_lost"))
        return [reason for _, reason, _ in endings], [reason for (reason,) in lost]

    def occupy(self) -> None:
        """Have a pod compute on a device of the layout active."""
        self._pods += 1
        self.run_pods([(f"train-{self._pods}", RESOURCES[self.applied_layout() or "ones"], {})])

    def reconfigure(self) -> None:
        """Ask for the other layout, and wait until it is active."""
        layout = "twos" if self.applied_layout() == "ones" else "ones"
        self.telemetry.events.clear()
        self.label(layout)

        def is_at_rest() -> bool:
            labels, status = objects.labels(self.node()), self.status()
            return (
                self._pulse.is_resting
                and bool({*self.ends()[0][-1:]} & GOOD)
                and labels.get(well_known.APPLIED_LABEL) == layout
                and labels.get(well_known.STATE_LABEL) == run_status.State.SUCCESS.value
                and status.get("config") == layout
                and "finishedAt" in status
            )

        self.wait(is_at_rest, layout, timeout_s=DEADLINE_S)

    def requests(self) -> list[Request]:
        """Return the agent's requests so far, without its watch, each with its number."""
        counts: collections.Counter[tuple[str, str]] = collections.Counter()
        rows = []
        for each in self.server.log.requests():
            if each.token == TOKEN and each.verb != "watch":
                counts[each.verb, each.resource] += 1
                rows.append(Request(each.verb, each.resource, counts[each.verb, each.resource]))
        return rows


class _Tracebacks(logging.Handler):
    """Collects what libraries log with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.records.append(record)


@contextlib.contextmanager
def stage_at_rest(
    *, listen: lost_stderr.Listen = structlog.testing.capture_logs, **how: Any
) -> Iterator[InProcessStage]:
    """Give a stage at rest in a first layout; at its end no line of any log has a traceback."""
    others = _Tracebacks()
    logging.getLogger().addHandler(others)
    try:
        with listen() as log, InProcessStage(**how) as stage:
            stage.reconfigure()
            stage.telemetry.events.clear()
            yield stage
    finally:
        logging.getLogger().removeHandler(others)
    assert [line for line in log if "exc_info" in line] == []
    assert others.records == []
