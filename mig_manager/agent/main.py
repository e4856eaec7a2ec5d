"""Compose the agent from adapters, pipeline and loop, and run it until a signal stops it."""

import contextlib
import dataclasses
import functools
import pathlib
import signal
import threading
from collections.abc import Callable
from types import FrameType

import structlog

from mig_manager.adapters.host import (
    clock,
    config_watch,
    device_nodes,
    files,
    hooks,
    lock_file,
    procfs,
    programs,
)
from mig_manager.adapters.kubelet import client as kubelet_client
from mig_manager.adapters.kubernetes import advertise, api, node, pods
from mig_manager.adapters.kubernetes import watch as watching
from mig_manager.adapters.nvml_worker import client as nvml_worker
from mig_manager.adapters.nvml_worker import event_listener
from mig_manager.agent import dependencies, health, loop, reconcile, request, run_limits
from mig_manager.agent import settings as agent_settings
from mig_manager.change import instrumentation
from mig_manager.core import ports, timing
from mig_manager.core.host import host_services
from mig_manager.core.node import cluster

_MOUNTS = pathlib.Path("/proc/self/mountinfo")

_JOIN_TIMEOUT_S = 5.0
_LAST_EVENTS_S = 5.0
"""How long an agent that stops waits for its last Events to be published."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Parts that a test or a benchmark replaces."""

    replace_ports: Callable[[dependencies.Dependencies], dependencies.Dependencies] = lambda own: (
        own
    )
    """From the ports that the settings ask for to the ports that are used."""
    replace_limits: Callable[[run_limits.Limits], run_limits.Limits] = lambda own: own
    """The same for the limits."""
    telemetry: instrumentation.Telemetry | None = None
    pulse: health.Pulse | None = None
    inbox: request.Inbox | None = None
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
        boot_id: str,
        own: Overrides,
    ) -> None:
        self._settings = settings
        self._watches_files = own.watches_files
        self._stop = threading.Event()
        self.inbox = own.inbox or request.Inbox()
        self.watch = watching.NodeWatch(
            kube,
            name=settings.node_name,
            on_node=functools.partial(_take, self.inbox),
            stop=self._stop,
            times=own.watch_times,
        )
        pulse = own.pulse or health.Pulse()
        telemetry, self._exposition = _listener(settings, self.watch, pulse)
        telemetry = own.telemetry or telemetry
        pod_watch = pods.PodWatch(
            kube, node_name=settings.node_name, on_change=self.inbox.put_cluster_change
        )
        deps = own.replace_ports(new_dependencies(settings, kube, telemetry, boot_id, pod_watch))
        if own.watches_pods:
            standby = ports.Standbys(deps.standby, pod_watch)
            deps = dataclasses.replace(deps, standby=standby)
        self.reconciler = reconcile.Reconciler(deps, own.replace_limits(settings))
        self._node = deps.node
        self._events = _gpu_events(settings, self.inbox)
        self.loop = loop.Agent(
            self.reconciler,
            self.inbox,
            intervals=loop.Intervals(
                retry_initial_s=settings.retry_initial_s,
                retry_max_s=settings.retry_max_s,
                drift_check_s=settings.drift_check_interval_s,
            ),
            telemetry=telemetry,
            pulse=pulse,
            alone=self._events.suspended if self._events else contextlib.nullcontext,
        )
        self._checks = health.Health(
            pulse,
            stuck_after_s=longest_operation_s(settings) + health.STUCK_MARGIN_S,
            contact_age_s=lambda: self.watch.last_contact_s,
            is_recovered=lambda: self.loop.is_recovered,
        )

    def serve(self) -> None:
        """Follow the node and the files, and serve the node until ``stop``."""
        with contextlib.ExitStack() as stack:
            _start_watch(self.watch, stack)
            if self._watches_files:
                _start_file_watches(self._settings, stack, self.inbox)
            stack.callback(self._stop.set)
            if self._events:
                self._events.start()
                stack.callback(self._events.stop)
            _log.info(
                "agent_started",
                node=self._settings.node_name,
                config_file=str(self._settings.config_file),
            )
            stack.enter_context(_served(self._settings, self._checks, self._exposition))
            self.loop.serve()
            self._node.flush_events(_LAST_EVENTS_S)
        _log.info("agent_stopped", node=self._settings.node_name)

    def stop(self) -> None:
        """End ``serve`` soon; call from another thread."""
        self._stop.set()
        self.inbox.stop()


def assemble(
    settings: agent_settings.AgentSettings,
    kube: api.KubeApi,
    *,
    boot_id: str,
    overrides: Overrides | None = None,
) -> Service:
    """Assemble the agent of one node; nothing is started."""
    return Service(settings, kube, boot_id, overrides or Overrides())


def run(settings: agent_settings.AgentSettings, *, boot_id: str) -> int:
    """Run the agent until SIGTERM or SIGINT.

    Raises:
        MigManagerError: It cannot start, for example without credentials for the API.
    """
    kube = api.KubeApi.connect(
        kubeconfig=str(settings.kubeconfig) if settings.kubeconfig else None
    )
    with contextlib.closing(kube):
        service = assemble(settings, kube, boot_id=boot_id)
        end_on_signals(service.stop)
        service.serve()
    return 0


def _take(inbox: request.Inbox, view: cluster.NodeView) -> None:
    inbox.put_label(view.labels.get(cluster.CONFIG_LABEL) or None)
    # A run may wait for what has just changed.
    inbox.put_cluster_change()


def _start_watch(watch: watching.NodeWatch, stack: contextlib.ExitStack) -> None:
    """Follow the node; the stack waits until its own event has ended the watch."""
    watcher = threading.Thread(target=watch.run, name="node-watch", daemon=True)
    watcher.start()
    stack.callback(watcher.join, timeout=_JOIN_TIMEOUT_S)


def _start_file_watches(
    settings: agent_settings.AgentSettings, stack: contextlib.ExitStack, inbox: request.Inbox
) -> None:
    """Watch the files of the settings until the stack ends."""
    watched = (
        settings.config_file,
        settings.extra_clients_file,
        settings.hooks_file,
        settings.host.gpu_clients_file,
    )
    for path in filter(None, watched):
        file_watch = config_watch.ConfigWatch(path, inbox.put_file_change)
        file_watch.start()
        stack.callback(file_watch.stop)


def _gpu_events(
    settings: agent_settings.AgentSettings, inbox: request.Inbox
) -> event_listener.GpuEvents | None:
    """Return the listener for GPU events; None unless the settings ask for it, for its memory."""
    if not settings.watches_gpu_events:
        return None
    state = settings.gpus.simulate_state
    command = nvml_worker.listener_command(
        library_path=settings.gpus.library_path,
        driver_roots=settings.gpus.driver_roots,
        simulate_state=str(state) if state else None,
    )
    return event_listener.GpuEvents(command=command, on_change=inbox.put_gpu_change)


def _listener(
    settings: agent_settings.AgentSettings, watch: watching.NodeWatch, pulse: health.Pulse
) -> tuple[instrumentation.Telemetry, Callable[[], bytes]]:
    """Return the metrics and their text; none without a port to serve them."""
    if not settings.health_port:
        return instrumentation.Telemetry(), bytes
    from mig_manager.agent import metrics  # noqa: PLC0415 - its library costs memory on every node

    served = metrics.Metrics(contact_age_s=lambda: watch.last_contact_s, on_progress=pulse.beat)
    return served, served.exposition


def _served(
    settings: agent_settings.AgentSettings, checks: health.Health, exposition: Callable[[], bytes]
) -> contextlib.AbstractContextManager[int]:
    if not settings.health_port:
        return contextlib.nullcontext(0)
    return health.served(
        checks, exposition, address=settings.health_address, port=settings.health_port
    )


def new_dependencies(
    settings: agent_settings.AgentSettings,
    kube: api.KubeApi,
    telemetry: instrumentation.Telemetry,
    boot_id: str,
    pod_watch: pods.PodWatch,
) -> dependencies.Dependencies:
    """Return the ports of the pipeline: this node's API server, kubelet, GPUs and files."""
    system = clock.SystemClock()
    workers = gpu_workers(settings, telemetry)
    kubelet = kubelet_client.WorkerPodResources(str(settings.pod_resources_socket))
    deps = dependencies.Dependencies(
        gpus=gpus(settings, kube, workers),
        standby=ports.Standbys(workers, kubelet),
        node=node.KubeNode(kube, name=settings.node_name, clock=system),
        workloads=pods.KubeWorkloads(kube, node_name=settings.node_name, watch=pod_watch),
        allocations=kubelet,
        configs=files.ConfigFile(settings.config_file),
        extra_clients=files.ConfigFile(settings.extra_clients_file)
        if settings.extra_clients_file
        else None,
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
        hooks=_hooks(settings),
        own_pod_uid=procfs.own_pod_uid(settings.own_pod_uid, _MOUNTS),
        boot_layout=files.VerifiedLayoutFile(settings.verified_layout_file),
        slots=_slots(settings, kube, system),
    )
    # A simulated GPU never changes the real machine.
    return deps if settings.gpus.is_simulated else _with_machine(deps, settings)


def _hooks(settings: agent_settings.AgentSettings) -> ports.Hooks | None:
    if settings.hooks_file is None:
        return None
    return hooks.HookPrograms(
        settings.hooks_file,
        variables={
            "MIG_PARTED_CONFIG_FILE": str(settings.config_file),
            "MIG_PARTED_SKIP_RESET": str(not settings.host.gpu_reset).lower(),
            "MIG_PARTED_MODE_CHANGE_ONLY": "false",
        },
        search_path=settings.search_path,
        timeout_s=settings.hook_timeout_s,
    )


def _slots(
    settings: agent_settings.AgentSettings, kube: api.KubeApi, system: timing.Clock
) -> ports.Slots | None:
    if not settings.max_concurrent_nodes:
        return None
    from mig_manager.adapters.kubernetes import leases  # noqa: PLC0415 - only where there is a budget

    return leases.LeaseSlots(
        kube,
        namespace=settings.slots_namespace,
        node_name=settings.node_name,
        limit=settings.max_concurrent_nodes,
        clock=system,
    )


def _with_machine(
    deps: dependencies.Dependencies, settings: agent_settings.AgentSettings
) -> dependencies.Dependencies:
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
            service_names=lambda: host_services.parse(listed.read(), source=listed.name),
        )
    if host.with_reboot:
        deps = dataclasses.replace(deps, reboot=systemd.Reboot(host.dbus_address))
    return deps


def gpu_workers(
    settings: agent_settings.AgentSettings, telemetry: instrumentation.Telemetry
) -> nvml_worker.WorkerGpus:
    """Return the GPUs, each operation in a worker process."""
    state = settings.gpus.simulate_state
    command = nvml_worker.worker_command(
        library_path=settings.gpus.library_path,
        driver_roots=settings.gpus.driver_roots,
        simulate_state=str(state) if state else None,
        in_use_timeout_s=settings.in_use_timeout_s,
    )
    return nvml_worker.WorkerGpus(
        command=command, timeout_s=settings.gpu_timeout_s, telemetry=telemetry
    )


def gpus(
    settings: agent_settings.AgentSettings, kube: api.KubeApi, workers: nvml_worker.WorkerGpus
) -> ports.Gpus:
    """Return the GPUs; simulated ones are advertised too where no plugin does."""
    if not settings.advertises_simulated:
        return workers
    offer = advertise.NodeResources(kube, name=settings.node_name)
    advertising = advertise.AdvertisingGpus(workers, offer)
    advertising.start()
    return advertising


def longest_operation_s(settings: agent_settings.AgentSettings) -> float:
    """Return how long one operation may take without a report that the loop is alive."""
    host = settings.host
    return max(settings.gpu_timeout_s, host.service_stop_timeout_s, host.service_start_timeout_s)


def end_on_signals(stop: Callable[[], None]) -> None:
    """Have SIGTERM and SIGINT call ``stop``, in a thread of its own."""

    def end(_number: int, _frame: FrameType | None) -> None:
        # A handler runs between two bytecodes of the main thread, which may hold the mailbox's
        # lock; another thread can wait for it.
        threading.Thread(target=stop, name="stop").start()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
