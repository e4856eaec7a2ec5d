"""Compose the agent from adapters, pipeline and loop, and run it until a signal stops it."""

import contextlib
import dataclasses
import pathlib
import threading
from collections.abc import Callable

import structlog

from mig_manager.adapters import host, pod_resources
from mig_manager.adapters.host import (
    config_watch,
    device_nodes,
    files,
    hooks,
    lock_file,
    procfs,
    programs,
)
from mig_manager.adapters.kubernetes import api, claims, node, pods
from mig_manager.adapters.kubernetes import watch as watching
from mig_manager.adapters.nvml import client as nvml_worker
from mig_manager.adapters.nvml import event_listener
from mig_manager.agent import inbox as inboxes
from mig_manager.agent import loop, reconcile
from mig_manager.agent import pulse as pulses
from mig_manager.agent import settings as agent_settings
from mig_manager.core import host_files, ports, standbys
from mig_manager.core.layout import custom as customs
from mig_manager.core.node import cluster

_MOUNTS = pathlib.Path("/proc/self/mountinfo")

_JOIN_TIMEOUT_S = 5.0
_LAST_EVENTS_S = 5.0
"""How long an agent that stops waits for its last Events to be published."""
_STUCK_MARGIN_S = 300.0
"""What a live loop may take between two reports, beyond its longest operation."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Parts that a test or a benchmark replaces."""

    replace_ports: Callable[[ports.Dependencies], ports.Dependencies] = lambda own: own
    """From the ports that the settings ask for to the ports that are used."""
    telemetry: ports.Telemetry | None = None
    pulse: pulses.Pulse = dataclasses.field(default_factory=pulses.Pulse)
    inbox: inboxes.Inbox = dataclasses.field(default_factory=inboxes.Inbox)
    watch_times: watching.Times | None = None
    watches_files: bool = True
    """False where one process has many agents: the kernel allows a user few inotify instances."""
    watches_pods: bool = True
    """False where the API server has no pods."""


class Service:
    """The agent of one node, assembled and not yet started."""

    def __init__(
        self,
        settings: agent_settings.AgentSettings,
        kube: api.KubeApi,
        *,
        boot_id: str,
        overrides: Overrides | None = None,
    ) -> None:
        own = overrides or Overrides()
        self._settings = settings
        self._watches_files = own.watches_files
        self._stop = threading.Event()
        self._inbox = own.inbox
        self._watch = watching.NodeWatch(
            kube,
            name=settings.node_name,
            on_node=self._take,
            stop=self._stop,
            times=own.watch_times,
        )
        telemetry = own.telemetry or ports.Telemetry()
        self._pages: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if settings.health_port:
            # Its libraries cost memory on every node.
            from mig_manager.adapters.host import web_server  # noqa: PLC0415
            from mig_manager.agent import metrics  # noqa: PLC0415

            counts = metrics.Metrics(
                contact_age_s=lambda: self._watch.last_contact_s, on_progress=own.pulse.beat
            )
            telemetry = own.telemetry or counts
            host = settings.host
            longest_operation_s = max(
                settings.gpu_timeout_s, host.service_stop_timeout_s, host.service_start_timeout_s
            )
            checks = metrics.Health(
                own.pulse,
                stuck_after_s=longest_operation_s + _STUCK_MARGIN_S,
                contact_age_s=lambda: self._watch.last_contact_s,
                is_recovered=lambda: self.loop.is_recovered,
            )
            self._pages = web_server.served(
                checks,
                counts.exposition,
                address=settings.health_address,
                port=settings.health_port,
            )
        pod_watch = pods.PodWatch(
            kube,
            node_name=settings.node_name,
            on_change=self._inbox.put_cluster_change,
            on_use=self._inbox.put_use_change,
        )
        deps = own.replace_ports(_dependencies(settings, kube, telemetry, boot_id, pod_watch))
        if own.watches_pods:
            standby = standbys.Standbys(deps.standby, pod_watch)
            deps = dataclasses.replace(deps, standby=standby, pod_watch=pod_watch)
        self.reconciler = reconcile.Reconciler(deps, settings)
        self._node = deps.node
        self._events: event_listener.GpuEvents | None = None
        if settings.watches_gpu_events:
            # Only where it is asked for, because of its memory.
            command = nvml_worker.worker_command(
                "listen",
                library_path=settings.gpus.library_path,
                driver_roots=settings.gpus.driver_roots,
                simulate_state=settings.gpus.simulate_state,
            )
            self._events = event_listener.GpuEvents(
                command=command, on_change=self._inbox.put_gpu_change
            )
        self.loop = loop.Agent(
            self.reconciler,
            self._inbox,
            intervals=loop.Intervals(
                retry_initial_s=settings.retry_initial_s,
                retry_max_s=settings.retry_max_s,
                drift_check_s=settings.drift_check_interval_s,
            ),
            telemetry=telemetry,
            pulse=own.pulse,
            alone=self._events.suspended if self._events else contextlib.nullcontext,
        )

    def serve(self) -> None:
        """Follow the node and the files, and serve the node until ``stop``."""
        settings = self._settings
        with contextlib.ExitStack() as stack:
            watcher = threading.Thread(target=self._watch.run, name="node-watch", daemon=True)
            watcher.start()
            stack.callback(watcher.join, timeout=_JOIN_TIMEOUT_S)
            watched = (
                settings.config_file,
                settings.extra_clients_file,
                settings.hooks_file,
                settings.host.gpu_clients_file,
            )
            for path in filter(None, watched if self._watches_files else ()):
                file_watch = config_watch.ConfigWatch(path, self._inbox.put_file_change)
                file_watch.start()
                stack.callback(file_watch.stop)
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

    def _take(self, view: cluster.NodeView) -> None:
        name = view.labels.get(cluster.CONFIG_LABEL) or None
        is_on_demand = view.labels.get(cluster.PARTITIONING_LABEL) == cluster.ON_DEMAND
        self.reconciler.note_node(view)
        self._inbox.put_on_demand(is_on_demand=is_on_demand)
        custom = customs.requested(view) if self._settings.has_custom_layouts else None
        self._inbox.put_label(name, node_uid=view.uid, custom=custom)
        # A run may wait for what has just changed.
        self._inbox.put_cluster_change()


def run(settings: agent_settings.AgentSettings, *, boot_id: str) -> int:
    """Run the agent until a signal ends it.

    Raises:
        MigManagerError: It cannot start, for example without credentials for the API.
    """
    kube = api.KubeApi.connect(
        kubeconfig=str(settings.kubeconfig) if settings.kubeconfig else None
    )
    with contextlib.closing(kube):
        service = Service(settings, kube, boot_id=boot_id)
        host.end_on_signals(service.stop)
        service.serve()
    return 0


def _dependencies(
    settings: agent_settings.AgentSettings,
    kube: api.KubeApi,
    telemetry: ports.Telemetry,
    boot_id: str,
    pod_watch: pods.PodWatch,
) -> ports.Dependencies:
    """Return the ports of the pipeline: this node's API server, kubelet, GPUs and files."""
    system = host.SystemClock()
    workers = nvml_worker.WorkerGpus(
        command=nvml_worker.worker_command(
            library_path=settings.gpus.library_path,
            driver_roots=settings.gpus.driver_roots,
            simulate_state=settings.gpus.simulate_state,
            in_use_timeout_s=settings.in_use_timeout_s,
        ),
        timeout_s=settings.gpu_timeout_s,
        telemetry=telemetry,
    )
    gpus: ports.Gpus = workers
    if settings.advertises_simulated:
        gpus = advertising = node.AdvertisingGpus(workers, kube, name=settings.node_name)
        advertising.start()
    slots: ports.Slots | None = None
    if settings.max_concurrent_nodes:
        # Only where there is a budget.
        from mig_manager.adapters.kubernetes import leases  # noqa: PLC0415

        slots = leases.LeaseSlots(
            kube,
            namespace=settings.slots_namespace,
            node_name=settings.node_name,
            limit=settings.max_concurrent_nodes,
            clock=system,
        )
    write_layouts: Callable[[str], bool] | None = None
    if settings.pod_name and settings.pod_namespace:
        # Only where NVIDIA's operator, or a manifest like its, names the pod.
        from mig_manager.adapters.kubernetes import node_layouts  # noqa: PLC0415

        write_layouts = node_layouts.KubeNodeLayouts(
            kube,
            node_name=settings.node_name,
            namespace=settings.pod_namespace,
            pod_name=settings.pod_name,
            pod_uid=settings.own_pod_uid,
        ).write
    kubelet = pod_resources.WorkerPodResources(str(settings.pod_resources_socket))
    extra_clients = settings.extra_clients_file
    deps = ports.Dependencies(
        gpus=gpus,
        standby=standbys.Standbys(workers, kubelet),
        node=node.KubeNode(kube, name=settings.node_name, clock=system),
        workloads=pods.KubeWorkloads(kube, node_name=settings.node_name, watch=pod_watch),
        allocations=kubelet,
        is_advertiser=settings.advertises_simulated,
        processes=workers.processes,
        slices=claims.KubeSlices(kube, node_name=settings.node_name),
        configs=files.ConfigFile(settings.config_file),
        extra_clients=files.ConfigFile(extra_clients) if extra_clients else None,
        clock=system,
        telemetry=telemetry,
        lock=lock_file.LockFile(
            settings.lock_file,
            program=f"mig-manager's agent on node {settings.node_name}",
            clock=system,
            # A pod may lack the mount, and one manager alone needs no lock.
            is_required=False,
        ),
        boot_id=boot_id,
        own_pod_uid=procfs.own_pod_uid(settings.own_pod_uid, _MOUNTS),
        boot_layout=files.VerifiedLayoutFile(settings.verified_layout_file),
        request_file=files.RequestFile(settings.verified_layout_file),
        write_layouts=write_layouts,
        slots=slots,
    )
    if settings.hooks_file:
        deps = dataclasses.replace(
            deps,
            hooks=hooks.HookPrograms(
                settings.hooks_file,
                variables={
                    "MIG_PARTED_CONFIG_FILE": str(settings.config_file),
                    "MIG_PARTED_SKIP_RESET": str(not settings.host.gpu_reset).lower(),
                    "MIG_PARTED_MODE_CHANGE_ONLY": "false",
                },
                search_path=settings.search_path,
                timeout_s=settings.hook_timeout_s,
            ),
        )
    # A simulated GPU never changes the real machine.
    return deps if settings.gpus.is_simulated else _with_machine(deps, settings)


def _with_machine(
    deps: ports.Dependencies, settings: agent_settings.AgentSettings
) -> ports.Dependencies:
    """Add the ports to the host that the settings allow."""
    host = settings.host
    deps = dataclasses.replace(
        deps,
        device_files=device_nodes.DeviceFiles(host.roots, is_cdi_enabled=host.cdi_enabled),
    )
    if host.gpu_reset:
        from mig_manager.adapters.host import gpu_reset  # noqa: PLC0415 - reads XML

        found = programs.Programs(
            gpu_reset.roots(host.roots),
            search_path=settings.search_path,
            loader_variables=settings.gpus.loader_variables,
        )
        deps = dataclasses.replace(deps, reset=gpu_reset.SmiReset(found))
    if not (host.with_reboot or host.shuts_host_clients):
        return deps
    from mig_manager.adapters.host import systemd  # noqa: PLC0415 - its library is not for everybody

    if host.shuts_host_clients and host.gpu_clients_file:
        listed = files.ConfigFile(host.gpu_clients_file)
        deps = dataclasses.replace(
            deps,
            services=systemd.Systemd(
                host.dbus_address,
                stop_timeout_s=host.service_stop_timeout_s,
                start_timeout_s=host.service_start_timeout_s,
            ),
            service_names=lambda: host_files.parse_services(listed.read(), source=listed.name),
        )
    if host.with_reboot:
        deps = dataclasses.replace(deps, reboot=systemd.Reboot(host.dbus_address))
    return deps
