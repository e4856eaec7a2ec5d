"""Compose the agent from adapters, pipeline and loop, and run it until a signal stops it."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable

import structlog

from mig_manager import gpu_ports
from mig_manager.adapters import host
from mig_manager.adapters.host import file_watch
from mig_manager.adapters.kubernetes import api, pods, watch
from mig_manager.adapters.nvml import event_listener
from mig_manager.agent import agent_settings, dependencies, intake, loop, reconcile
from mig_manager.core import liveness, ports
from mig_manager.core.layout import custom_layouts
from mig_manager.core.objects import node_object, well_known

_LAST_EVENTS_S = 5.0  # how long a stopping agent waits for its last Events to be published
_STUCK_MARGIN_S = 300.0
"""Maximum time between two reports of a live loop, beyond its longest operation."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Parts that a test or a benchmark replaces."""

    replace_ports: Callable[[ports.Dependencies], ports.Dependencies] = lambda deps: deps
    """Maps the ports from the settings to the ports to use."""
    pulse: liveness.Pulse = dataclasses.field(
        default_factory=lambda: liveness.Pulse(host.SystemClock().monotonic)
    )
    inbox: intake.Inbox | None = None
    watch_times: watch.WatchTimes | None = None
    watches_files: bool = True
    """False if one process has many agents: the kernel allows a user few inotify instances."""


class Agent:
    """The agent of one node, assembled and not yet started."""

    def __init__(
        self,
        settings: agent_settings.AgentSettings,
        kube: api.KubeApi,
        *,
        boot_id: str,
        overrides: Overrides | None = None,
    ) -> None:
        overrides = overrides or Overrides()
        self._settings = settings
        self._watches_files = overrides.watches_files
        self._stop = threading.Event()
        self._inbox = overrides.inbox or intake.Inbox(on_check=overrides.pulse.beat)
        self._watch = watch.NodeWatch(
            kube,
            name=settings.node_name,
            on_node=self._receive_node,
            stop=self._stop,
            times=overrides.watch_times,
        )
        telemetry = ports.Telemetry()
        self._pages: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if settings.health_port:
            telemetry, self._pages = self._new_pages(overrides.pulse)
        pod_watch = pods.PodWatch(
            kube,
            node_name=settings.node_name,
            on_change=self._inbox.put_cluster_change,
            on_use=self._inbox.put_use_change,
        )
        deps = overrides.replace_ports(
            dependencies.of_node(
                settings,
                kube,
                node_watch=self._watch,
                pod_watch=pod_watch,
                telemetry=telemetry,
                boot_id=boot_id,
            )
        )
        self.reconciler = reconcile.Reconciler(deps, settings)
        self._node = deps.node
        self._events = self._new_events() if settings.watches_gpu_events else None
        self.loop = loop.AgentLoop(
            self.reconciler,
            self._inbox,
            settings,
            telemetry=deps.telemetry,
            pulse=overrides.pulse,
            suspend_gpu_events=self._events.suspended if self._events else contextlib.nullcontext,
        )

    def _new_pages(
        self, pulse: liveness.Pulse
    ) -> tuple[ports.Telemetry, contextlib.AbstractContextManager[object]]:
        """Return the metrics, and the server of metrics and probes, not yet started."""
        # Import only if needed: the libraries cost memory on every node.
        from mig_manager.adapters.host import web_server  # noqa: PLC0415
        from mig_manager.agent.reports import metrics  # noqa: PLC0415

        settings, host_settings = self._settings, self._settings.host

        def contact_age_s() -> float:
            return self._watch.last_contact_s

        counts = metrics.AgentMetrics(contact_age_s=contact_age_s, on_progress=pulse.beat)
        longest_operation_s = max(
            settings.gpu_timeout_s,
            host_settings.service_stop_timeout_s,
            host_settings.service_start_timeout_s,
        )
        checks = liveness.Health(
            pulse,
            stuck_after_s=longest_operation_s + _STUCK_MARGIN_S,
            contact_age_s=contact_age_s,
            is_recovered=lambda: self.reconciler.is_current,
        )
        pages = web_server.served(
            checks,
            counts.exposition,
            address=settings.health_address,
            port=settings.health_port,
        )
        return counts, pages

    def _new_events(self) -> event_listener.GpuEvents:
        """Return the listener for events of the GPUs, not yet started."""
        return event_listener.GpuEvents(
            command=gpu_ports.worker_command(
                self._settings.gpus, "listen", in_use_timeout_s=self._settings.in_use_timeout_s
            ),
            on_change=self._inbox.put_gpu_change,
            on_xids=self.reconciler.faults.add_xids,
        )

    def serve(self) -> None:
        """Follow the node and the files, and serve the node until ``stop``."""
        settings = self._settings
        with contextlib.ExitStack() as stack:
            self._watch.start()
            stack.callback(self._watch.end)
            watched = (
                settings.config_file,
                settings.extra_clients_file,
                settings.hooks_file,
                settings.host.gpu_clients_file,
            )
            for path in filter(None, watched if self._watches_files else ()):
                changes = file_watch.FileWatch(path, self._inbox.put_file_change)
                changes.start()
                stack.callback(changes.stop)
            stack.callback(self._stop.set)
            if self._events:
                self._events.start()
                stack.callback(self._events.stop)
            _log.info(
                "agent_started", node=settings.node_name, config_file=str(settings.config_file)
            )
            stack.enter_context(self._pages)
            self.loop.serve()
            self._node.flush_events(_LAST_EVENTS_S)
        _log.info("agent_stopped", node=settings.node_name)

    def stop(self) -> None:
        """End ``serve`` soon; call from another thread."""
        self._stop.set()
        self._inbox.stop()

    def _receive_node(self, view: node_object.NodeView) -> None:
        name = view.labels.get(well_known.CONFIG_LABEL) or None
        is_on_demand = view.labels.get(well_known.PARTITIONING_LABEL) == well_known.ON_DEMAND
        self._inbox.put_on_demand(is_on_demand=is_on_demand)
        custom = custom_layouts.of_request(view) if self._settings.has_custom_layouts else None
        self._inbox.put_label(name, node_uid=view.uid, custom=custom)
        # A run may be waiting for this change.
        self._inbox.put_cluster_change()


def connect(settings: agent_settings.AgentSettings) -> api.KubeApi:
    """Find the cluster, without a request; UsageError if there are no credentials."""
    return api.KubeApi.connect(
        kubeconfig=str(settings.kubeconfig) if settings.kubeconfig else None
    )


def run(settings: agent_settings.AgentSettings, kube: api.KubeApi, *, boot_id: str) -> int:
    """Run the agent until a signal ends it.

    Raises:
        MigManagerError: It cannot start, for example because its port is in use.
    """
    with contextlib.closing(kube):
        agent = Agent(settings, kube, boot_id=boot_id)
        host.end_on_signals(agent.stop)
        agent.serve()
    return 0
