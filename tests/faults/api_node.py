"""A sandbox node with the whole agent on it in this process, and an API server that can fail.

The server's faults strike only the agent, known by its token: the scenery (kubelet, scheduler,
DaemonSet controller) asks the same server and must not be hurt.
"""

import contextlib
import dataclasses
import logging
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import structlog.testing

from mig_manager import errors
from mig_manager.adapters import host, pod_resources
from mig_manager.adapters.kubernetes import api, watch
from mig_manager.adapters.nvml import gpus as nvml_gpus
from mig_manager.agent import loop, main, settings
from mig_manager.core import model, ports, timing
from mig_manager.core.node import cluster
from mig_manager.sandbox import stages
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import node_options, objects
from testkit import apiserver

TOKEN = "agent"  # noqa: S105 - marks one client of the embedded server, and opens nothing
DEADLINE_S = 60.0
"""After this long a node that is not served is one that stays so."""
DRAIN_TIMEOUT_S = 7.0
"""Longer than the pause after an eviction that got no proper answer."""
LAYOUTS = """\
version: v1
mig-configs:
  ones:
  - {devices: all, mig-enabled: true, mig-devices: {1g.6gb: 4}}
  twos:
  - {devices: all, mig-enabled: true, mig-devices: {2g.12gb: 2}}
"""
RESOURCES = {"ones": "nvidia.com/mig-1g.6gb", "twos": "nvidia.com/mig-2g.12gb"}
QUICK = node_options.NodeOptions(
    tick_s=0.03, pod_start_s=0.02, pod_stop_s=0.02, plugin_start_s=0.02
)
REQUEST_TIMEOUT_S = 15.0
"""Longer than a slow machine takes to answer."""
SILENCE_TIMEOUT_S = 0.7
"""In its place where the silence itself is what is tried."""
_LONGEST_SLEEP_S = 0.02
_WATCH = watch.Times(
    watch_s=1.0, stall_s=1.7, steady_s=0.0, first_wait_s=0.02, longest_wait_s=0.05
)
_BACKOFF = timing.Backoff(first_s=0.01, max_s=0.05)

GOOD = frozenset({errors.Reason.APPLIED, errors.Reason.ALREADY_APPLIED})

Wrap = Callable[[ports.DeviceAllocations, pathlib.Path], ports.DeviceAllocations]
"""Given what asks kubelet, and kubelet's socket, return what asks in its place."""

Listen = Callable[[], contextlib.AbstractContextManager[Sequence[Mapping[str, object]]]]
"""Gives what is logged meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a reconfiguration."""

    verb: str
    resource: str
    nth: int
    """Among the requests of this verb for this resource, from 1."""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.nth}"


class Heard(ports.Telemetry):
    """Remembers how runs ended; read and written from different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: list[errors.Reason] = []
        self._lost: list[errors.Reason] = []

    def run_ended(self, state: model.State, reason: errors.Reason, seconds: float) -> None:
        with self._lock:
            self._ends.append(reason)

    def outcome_lost(self, reason: errors.Reason) -> None:
        with self._lock:
            self._lost.append(reason)

    @property
    def has_ended_well(self) -> bool:
        """Whether the last run ended with a layout active."""
        with self._lock:
            return bool(self._ends) and self._ends[-1] in GOOD

    def take(self) -> tuple[list[errors.Reason], list[errors.Reason]]:
        """Return the reasons of the runs that ended and of those with unknown outcome, once."""
        with self._lock:
            found = self._ends, self._lost
            self._ends, self._lost = [], []
        return found


class _Pulse(loop.Pulse):
    """Knows whether the agent waits for something that may never come."""

    def __init__(self, on_rest: Callable[[], None]) -> None:
        super().__init__()
        self.is_resting = False
        self._on_rest = on_rest

    def rest(self) -> None:
        super().rest()
        self.is_resting = True
        self._on_rest()

    def beat(self) -> None:
        super().beat()
        self.is_resting = False


class Stage(stages.Stage):
    """The demonstration's stage, with the agent in this process and in a hurry."""

    server: apiserver.ApiServer

    def __init__(
        self,
        *,
        style: node_options.DeployStyle,
        wrap: Wrap | None = None,
        api_timeout_s: float = REQUEST_TIMEOUT_S,
        kubelet_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        super().__init__(
            "A30",
            LAYOUTS,
            latency=states.Latency(),
            node_options=dataclasses.replace(QUICK, deploy_style=style),
            server=apiserver.ApiServer(),
        )
        self.heard = Heard()
        self._wrap: Wrap = wrap or (lambda allocations, _socket: allocations)
        self._running: contextlib.ExitStack | None = None
        self._pods = 0
        self._api_timeout_s = api_timeout_s
        self._kubelet_timeout_s = kubelet_timeout_s
        self._pulse = _Pulse(self._changed.set)

    def start_agent(self) -> None:
        with contextlib.ExitStack() as running:
            self._start_threads(running)
            self._running = running.pop_all()

    def stop_agent(self, signal_number: int = 0) -> int:
        running, self._running = self._running, None
        if running is not None:
            running.close()
        return 0

    def _start_threads(self, running: contextlib.ExitStack) -> None:
        stopped = threading.Event()
        kube = api.KubeApi.at(
            self.server.url,
            token=TOKEN,
            request_timeout_s=self._api_timeout_s,
            # Servers ask for whole seconds, and the adapter for fractions: too long here.
            sleep=lambda seconds: stopped.wait(min(seconds, _LONGEST_SLEEP_S)),
        )
        running.callback(kube.close)
        served = main.Service(
            dataclasses.replace(settings.agent_settings(self._settings(), {}), backoff=_BACKOFF),
            kube,
            boot_id="boot-1",
            overrides=main.Overrides(
                replace_ports=self._ports,
                telemetry=self.heard,
                pulse=self._pulse,
                watch_times=_WATCH,
            ),
        )
        thread = threading.Thread(target=served.serve, name="agent")
        thread.start()
        running.callback(thread.join)
        running.callback(stopped.set)
        running.callback(served.stop)

    def _settings(self) -> dict[str, str]:
        return {
            "node_name": stages.NODE_NAME,
            "config_file": str(self.config_file),
            "pod_resources_socket": str(self.socket),
            "simulate_state": str(self.state_file),
            "retry_initial_s": "0.02",
            "retry_max_s": "0.1",
            "drain_timeout_s": str(DRAIN_TIMEOUT_S),
            "plugin_timeout_s": "20",
            "monitor_timeout_s": "1",
            "drift_check_interval_s": "0",
        }

    def _ports(self, own: ports.Dependencies) -> ports.Dependencies:
        """Return the same with GPUs and kubelet reached within this process."""
        kubelet = pod_resources.PodResources(
            str(self.socket), timeout_s=self._kubelet_timeout_s, sleep=_hurry
        )
        return dataclasses.replace(
            own,
            gpus=nvml_gpus.NvmlGpus(clock=host.SystemClock()),
            allocations=self._wrap(kubelet, self.socket),
            standby=ports.Standbys(),
        )

    # -- what people do ------------------------------------------------------------------

    def applied(self) -> str | None:
        """Return the layout that is said to be active."""
        return objects.labels(self.node()).get(cluster.APPLIED_LABEL)

    def other(self) -> str:
        """Return the layout that is not active."""
        return "twos" if self.applied() == "ones" else "ones"

    def occupy(self) -> None:
        """Have a pod compute on a device of the layout active."""
        self._pods += 1
        name = f"train-{self._pods}"
        self.run_pods([(name, RESOURCES[self.applied() or "ones"], {})])

    def reconfigure(self) -> None:
        """Ask for the other layout, and wait until it is active."""
        layout = self.other()
        self.heard.take()
        self.label(layout)
        self.wait(lambda: self.is_at_rest_in(layout), f"{layout}", timeout_s=DEADLINE_S)

    def is_at_rest_in(self, layout: str) -> bool:
        """Return whether the node says success for a layout."""
        labels, status = objects.labels(self.node()), self.status()
        return (
            self._pulse.is_resting
            and self.heard.has_ended_well
            and labels.get(cluster.APPLIED_LABEL) == layout
            and labels.get(cluster.STATE_LABEL) == model.State.SUCCESS.value
            and status.get("config") == layout
            and "finishedAt" in status
        )

    def taken(self) -> list[str]:
        """Return what is still taken on the node; nothing, if all is well."""
        seen = self.node()
        found = [key for key in objects.annotations(seen) if key == cluster.JOURNAL_ANNOTATION]
        found += [k for k, v in objects.labels(seen).items() if v == cluster.PAUSED_VALUE]
        found += ["cordon"] if seen["spec"].get("unschedulable") else []
        return found + [taint["key"] for taint in seen["spec"].get("taints") or ()]

    def asked(self) -> list[Request]:
        """Return the agent's requests so far, without its watch, each with its number."""
        counts: dict[tuple[str, str], int] = {}
        found: list[Request] = []
        for each in self.server.log.requests():
            if each.token == TOKEN and each.verb != "watch":
                key = (each.verb, each.resource)
                counts[key] = counts.get(key, 0) + 1
                found.append(Request(verb=each.verb, resource=each.resource, nth=counts[key]))
        return found


@contextlib.contextmanager
def _tracebacks() -> Iterator[list[logging.LogRecord]]:
    """Collect what libraries log with a traceback."""
    found: list[logging.LogRecord] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info:
            found.append(record)
        return False

    handler = logging.Handler()
    handler.addFilter(keep)
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


def _hurry(_seconds: float) -> None:
    """Wait for nothing where an adapter would."""


@contextlib.contextmanager
def staged(
    *,
    style: node_options.DeployStyle = node_options.DeployStyle.GPU_OPERATOR,
    wrap: Wrap | None = None,
    api_timeout_s: float = REQUEST_TIMEOUT_S,
    kubelet_timeout_s: float = REQUEST_TIMEOUT_S,
    listen: Listen = structlog.testing.capture_logs,
) -> Iterator[Stage]:
    """Give a stage at rest in a first layout; at its end no line of any log has a traceback."""
    with listen() as log, _tracebacks() as others:
        with Stage(
            style=style,
            wrap=wrap,
            api_timeout_s=api_timeout_s,
            kubelet_timeout_s=kubelet_timeout_s,
        ) as stage:
            stage.reconfigure()
            stage.heard.take()
            yield stage
        assert [line for line in log if "exc_info" in line] == []
        assert others == []
