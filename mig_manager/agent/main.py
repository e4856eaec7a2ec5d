"""The agent as a whole: adapters, pipeline and loop put together, until a signal ends them."""

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
from mig_manager.agent import dependencies, health, loop, reconcile, request, settings
from mig_manager.change import instrumentation
from mig_manager.core import ports, timing
from mig_manager.core.host import host_services
from mig_manager.core.node import cluster

_MOUNTS = pathlib.Path("/proc/self/mountinfo")

_JOIN_TIMEOUT_S = 5.0
_LAST_EVENTS_S = 5.0
"""How long an agent that ends waits for its last Events to be published."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Parts that a test or a benchmark replaces; the agent itself replaces none."""

    replace_ports: Callable[[dependencies.Dependencies], dependencies.Dependencies] = lambda own: (
        own
    )
    """From the ports that the settings call for to the ports that are used."""
    replace_limits: Callable[[dependencies.Limits], dependencies.Limits] = lambda own: own
    """The same for the limits."""
    telemetry: instrumentation.Telemetry | None = None
    pulse: health.Pulse | None = None
    inbox: request.Inbox | None = None
    watch_times: watching.Times | None = None
    watches_files: bool = True
    """False where one process has many agents: the kernel allows a user few inotify instances."""
    watches_pods: bool = True
    """False where no API has any pods to watch."""


class Service:
    """The agent of one node, assembled and not yet started; ``assemble`` makes it.

    Attributes:
        inbox: Where watches put what they see, and the loop takes it from.
        reconciler: The pipeline.
        loop: Serves the mailbox with the pipeline.
        watch: Follows the node and fills the mailbox.
    """

    def __init__(
        self, wanted: settings.AgentSettings, kube: api.KubeApi, boot_id: str, own: Overrides
    ) -> None:
        self._wanted = wanted
        self._watches_files = own.watches_files
        self._stop = threading.Event()
        self.inbox = own.inbox or request.Inbox()
        self.watch = watching.NodeWatch(
            kube,
            name=wanted.node_name,
            on_node=functools.partial(_take, self.inbox),
            stop=self._stop,
            times=own.watch_times,
        )
        pulse = own.pulse or health.Pulse()
        telemetry, self._exposition = _listener(wanted, self.watch, pulse)
        telemetry = own.telemetry or telemetry
        pod_watch = pods.PodWatch(
            kube, node_name=wanted.node_name, on_change=self.inbox.put_cluster_change
        )
        reached = own.replace_ports(world(wanted, kube, telemetry, boot_id, pod_watch))
        if own.watches_pods:
            standby = ports.Standbys(reached.standby, pod_watch)
            reached = dataclasses.replace(reached, standby=standby)
        self.reconciler = reconcile.Reconciler(reached, own.replace_limits(limits(wanted)))
        self._node = reached.node
        self._events = _gpu_events(wanted, self.inbox)
        self.loop = loop.Agent(
            self.reconciler,
            self.inbox,
            intervals=loop.Intervals(
                retry_initial_s=wanted.retry_initial_s,
                retry_max_s=wanted.retry_max_s,
                drift_check_s=wanted.drift_check_interval_s,
            ),
            telemetry=telemetry,
            pulse=pulse,
            alone=self._events.suspended if self._events else contextlib.nullcontext,
        )
        self._checks = health.Health(
            pulse,
            stuck_after_s=longest_operation_s(wanted) + health.STUCK_MARGIN_S,
            contact_age_s=lambda: self.watch.last_contact_s,
            is_recovered=lambda: self.loop.is_recovered,
        )

    def serve(self) -> None:
        """Follow the node and the files, and serve the node until ``stop``."""
        with contextlib.ExitStack() as stack:
            _start_watch(self.watch, stack)
            if self._watches_files:
                _start_file_watches(self._wanted, stack, self.inbox)
            stack.callback(self._stop.set)
            if self._events:
                self._events.start()
                stack.callback(self._events.stop)
            _log.info(
                "agent_started",
                node=self._wanted.node_name,
                config_file=str(self._wanted.config_file),
            )
            stack.enter_context(_served(self._wanted, self._checks, self._exposition))
            self.loop.serve()
            self._node.flush_events(_LAST_EVENTS_S)
        _log.info("agent_stopped", node=self._wanted.node_name)

    def stop(self) -> None:
        """End ``serve`` soon, in good order; for any thread but the one that serves."""
        self._stop.set()
        self.inbox.stop()


def assemble(
    wanted: settings.AgentSettings,
    kube: api.KubeApi,
    *,
    boot_id: str,
    overrides: Overrides | None = None,
) -> Service:
    """Put mailbox, pipeline, watches and loop of one agent together; nothing is started.

    Args:
        wanted: The agent's settings.
        kube: The API server.
        boot_id: Tells this boot of the machine from others.
        overrides: Replaces parts; None: nothing.
    """
    return Service(wanted, kube, boot_id, overrides or Overrides())


def run(wanted: settings.AgentSettings, *, boot_id: str) -> int:
    """Run the agent until SIGTERM or SIGINT.

    Args:
        wanted: Its settings.
        boot_id: Tells this boot of the machine from others.

    Returns:
        The exit status: 0 after a signal.

    Raises:
        MigManagerError: It cannot start, for example without credentials for the API.
    """
    kube = api.KubeApi.connect(kubeconfig=str(wanted.kubeconfig) if wanted.kubeconfig else None)
    with contextlib.closing(kube):
        service = assemble(wanted, kube, boot_id=boot_id)
        end_on_signals(service.stop)
        service.serve()
    return 0


def _take(inbox: request.Inbox, view: cluster.NodeView) -> None:
    inbox.put_label(view.labels.get(cluster.CONFIG_LABEL) or None)
    # What a run waits for may be among what kubelet has just told.
    inbox.put_cluster_change()


def _start_watch(watch: watching.NodeWatch, stack: contextlib.ExitStack) -> None:
    """Follow the node; the stack waits for the end, which the watch's own event brings."""
    watcher = threading.Thread(target=watch.run, name="node-watch", daemon=True)
    watcher.start()
    stack.callback(watcher.join, timeout=_JOIN_TIMEOUT_S)


def _start_file_watches(
    wanted: settings.AgentSettings, stack: contextlib.ExitStack, inbox: request.Inbox
) -> None:
    """Watch the owner's files until the stack ends."""
    watched = (
        wanted.config_file,
        wanted.extra_clients_file,
        wanted.hooks_file,
        wanted.host.gpu_clients_file,
    )
    for path in filter(None, watched):
        file_watch = config_watch.ConfigWatch(path, inbox.put_file_change)
        file_watch.start()
        stack.callback(file_watch.stop)


def _gpu_events(
    wanted: settings.AgentSettings, inbox: request.Inbox
) -> event_listener.GpuEvents | None:
    """Return who tells of changes that others make; nobody unless asked for: it has a price."""
    if not wanted.watches_gpu_events:
        return None
    state = wanted.gpus.simulate_state
    command = nvml_worker.listener_command(
        library_path=wanted.gpus.library_path,
        driver_roots=wanted.gpus.driver_roots,
        simulate_state=str(state) if state else None,
    )
    return event_listener.GpuEvents(command=command, on_change=inbox.put_gpu_change)


def _listener(
    wanted: settings.AgentSettings, watch: watching.NodeWatch, pulse: health.Pulse
) -> tuple[instrumentation.Telemetry, Callable[[], bytes]]:
    """Return who hears what happens, and what it has to tell; nobody where nobody asks."""
    if not wanted.health_port:
        return instrumentation.Telemetry(), bytes
    from mig_manager.agent import metrics  # noqa: PLC0415 - its library costs memory on every node

    heard = metrics.Metrics(contact_age_s=lambda: watch.last_contact_s, on_progress=pulse.beat)
    return heard, heard.exposition


def _served(
    wanted: settings.AgentSettings, checks: health.Health, exposition: Callable[[], bytes]
) -> contextlib.AbstractContextManager[int]:
    if not wanted.health_port:
        return contextlib.nullcontext(0)
    return health.served(
        checks, exposition, address=wanted.health_address, port=wanted.health_port
    )


def world(
    wanted: settings.AgentSettings,
    kube: api.KubeApi,
    telemetry: instrumentation.Telemetry,
    boot_id: str,
    pod_watch: pods.PodWatch,
) -> dependencies.Dependencies:
    """Return what the pipeline reaches: this node's cluster, kubelet, GPUs and files."""
    system = clock.SystemClock()
    workers = gpu_workers(wanted, telemetry)
    kubelet = kubelet_client.WorkerPodResources(str(wanted.pod_resources_socket))
    reached = dependencies.Dependencies(
        gpus=gpus(wanted, kube, workers),
        standby=ports.Standbys(workers, kubelet),
        node=node.KubeNode(kube, name=wanted.node_name, clock=system),
        workloads=pods.KubeWorkloads(kube, node_name=wanted.node_name, watch=pod_watch),
        allocations=kubelet,
        configs=files.ConfigFile(wanted.config_file),
        extra_clients=files.ConfigFile(wanted.extra_clients_file)
        if wanted.extra_clients_file
        else None,
        clock=system,
        telemetry=telemetry,
        exclusion=lock_file.LockFile(
            wanted.lock_file,
            program=f"mig-manager's agent on node {wanted.node_name}",
            clock=system,
            # A pod may lack the mount, and one manager alone needs no lock.
            is_required=False,
        ),
        boot_id=boot_id,
        hooks=_hooks(wanted),
        own_pod_uid=procfs.own_pod_uid(wanted.own_pod_uid, _MOUNTS),
        proven=files.VerifiedLayoutFile(wanted.proven_file),
        slots=_slots(wanted, kube, system),
    )
    # Simulated GPUs are no reason to do anything to the real machine.
    return reached if wanted.gpus.is_simulated else _with_machine(reached, wanted)


def _hooks(wanted: settings.AgentSettings) -> ports.Hooks | None:
    if wanted.hooks_file is None:
        return None
    return hooks.HookPrograms(
        wanted.hooks_file,
        variables={
            "MIG_PARTED_CONFIG_FILE": str(wanted.config_file),
            "MIG_PARTED_SKIP_RESET": str(not wanted.host.gpu_reset).lower(),
            "MIG_PARTED_MODE_CHANGE_ONLY": "false",
        },
        search_path=wanted.search_path,
        timeout_s=wanted.hook_timeout_s,
    )


def _slots(
    wanted: settings.AgentSettings, kube: api.KubeApi, system: timing.Clock
) -> ports.Slots | None:
    if not wanted.max_concurrent_nodes:
        return None
    from mig_manager.adapters.kubernetes import leases  # noqa: PLC0415 - only where there is a budget

    return leases.LeaseSlots(
        kube,
        namespace=wanted.slots_namespace,
        node_name=wanted.node_name,
        limit=wanted.max_concurrent_nodes,
        clock=system,
    )


def _with_machine(
    reached: dependencies.Dependencies, wanted: settings.AgentSettings
) -> dependencies.Dependencies:
    """Return the same with what the owner allows of the machine underneath."""
    host = wanted.host
    reached = dataclasses.replace(
        reached,
        device_files=device_nodes.DeviceFiles(host.roots, is_cdi_enabled=host.cdi_enabled),
    )
    if host.gpu_reset:
        from mig_manager.adapters.host import gpu_reset  # noqa: PLC0415 - reads XML

        found = programs.Programs(
            gpu_reset.roots(host.roots),
            search_path=wanted.search_path,
            loader_variables=wanted.gpus.loader_variables,
        )
        reached = dataclasses.replace(reached, reset=gpu_reset.SmiReset(found))
    if not (host.with_reboot or host.shuts_host_clients):
        return reached
    from mig_manager.adapters.host import systemd  # noqa: PLC0415 - its library is not for everybody

    if host.shuts_host_clients and host.gpu_clients_file:
        listed = files.ConfigFile(host.gpu_clients_file)
        reached = dataclasses.replace(
            reached,
            services=systemd.Systemd(
                host.dbus_address,
                stop_timeout_s=host.service_stop_timeout_s,
                start_timeout_s=host.service_start_timeout_s,
            ),
            service_names=lambda: host_services.parse(listed.read(), source=listed.name),
        )
    if host.with_reboot:
        reached = dataclasses.replace(reached, reboot=systemd.Reboot(host.dbus_address))
    return reached


def gpu_workers(
    wanted: settings.AgentSettings, telemetry: instrumentation.Telemetry
) -> nvml_worker.WorkerGpus:
    """Return the GPUs, each operation in a process of its own."""
    state = wanted.gpus.simulate_state
    command = nvml_worker.worker_command(
        library_path=wanted.gpus.library_path,
        driver_roots=wanted.gpus.driver_roots,
        simulate_state=str(state) if state else None,
        in_use_timeout_s=wanted.in_use_timeout_s,
    )
    return nvml_worker.WorkerGpus(
        command=command, timeout_s=wanted.gpu_timeout_s, telemetry=telemetry
    )


def gpus(
    wanted: settings.AgentSettings, kube: api.KubeApi, workers: nvml_worker.WorkerGpus
) -> ports.Gpus:
    """Return the GPUs; simulated ones that no plugin offers are advertised as well."""
    if not wanted.advertises_simulated:
        return workers
    offer = advertise.NodeResources(kube, name=wanted.node_name)
    advertising = advertise.AdvertisingGpus(workers, offer)
    advertising.start()
    return advertising


def longest_operation_s(wanted: settings.AgentSettings) -> float:
    """Return how long one operation may take during which the worker gives no sign of life."""
    host = wanted.host
    return max(wanted.gpu_timeout_s, host.service_stop_timeout_s, host.service_start_timeout_s)


def limits(wanted: settings.AgentSettings) -> dependencies.Limits:
    """Return what the node's owner allows."""
    return dependencies.Limits(
        drain_timeout_s=wanted.drain_timeout_s,
        plugin_timeout_s=wanted.plugin_timeout_s,
        monitor_timeout_s=wanted.monitor_timeout_s,
        lock_timeout_s=wanted.lock_timeout_s,
        in_use_timeout_s=wanted.in_use_timeout_s,
        allows_foreign_managers=wanted.allows_foreign_managers,
        is_lenient=wanted.is_lenient,
        heals_drift=wanted.heals_drift,
        reboot_timeout_s=wanted.host.reboot_timeout_s,
        policy=wanted.policy,
        pace=timing.Backoff(max_s=wanted.poll_interval_s),
    )


def end_on_signals(stop: Callable[[], None]) -> None:
    """Have SIGTERM and SIGINT call ``stop``, in a thread of its own."""

    def end(_number: int, _frame: FrameType | None) -> None:
        # A handler runs between two bytecodes of the main thread, which may hold the mailbox's
        # lock; another thread can wait for it.
        threading.Thread(target=stop, name="stop").start()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
