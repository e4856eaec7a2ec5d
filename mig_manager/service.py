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

from mig_manager import agent, clocks, health, hostsettings, mailbox, ports, reconcile, settings
from mig_manager.adapters import (
    clock,
    devicefiles,
    files,
    gpu_child,
    gpu_events,
    hooks,
    identity,
    journalfile,
    lockfile,
    podresources_child,
    tools,
)
from mig_manager.adapters.kube import advertise, api, node, nodewatch, podnews, pods
from mig_manager.core import cluster, hostclients
from mig_manager.core import pace as pacing

_MOUNTS = pathlib.Path("/proc/self/mountinfo")

_JOIN_TIMEOUT_S = 5.0

_log = structlog.get_logger()


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
    box = mailbox.Mailbox()
    stop = threading.Event()
    kube = api.KubeApi.connect(kubeconfig=str(wanted.kubeconfig) if wanted.kubeconfig else None)
    watch = nodewatch.NodeWatch(
        kube,
        name=wanted.node_name,
        on_node=functools.partial(_take, box),
        stop=stop,
    )
    pulse = health.Pulse()
    telemetry, exposition = _listener(wanted, watch, pulse)
    events = _gpu_events(wanted, box)
    served = agent.Agent(
        reconcile.Reconciler(
            _with_news(world(wanted, kube, telemetry, boot_id), wanted, kube, box), limits(wanted)
        ),
        box,
        patience=agent.Patience(
            retry_initial_s=wanted.retry_initial_s,
            retry_max_s=wanted.retry_max_s,
            look_after_s=wanted.drift_check_interval_s,
        ),
        telemetry=telemetry,
        pulse=pulse,
        alone=events.suspended if events else contextlib.nullcontext,
    )
    checks = health.Health(
        pulse,
        stuck_after_s=wanted.gpu_timeout_s + health.STUCK_MARGIN_S,
        contact_age_s=lambda: watch.last_contact_s,
        is_recovered=lambda: served.is_recovered,
    )
    end_on_signals(box, stop)
    with contextlib.ExitStack() as stack:
        stack.callback(kube.close)
        _start_watches(wanted, stack, box, watch)
        stack.callback(stop.set)
        if events:
            events.start()
            stack.callback(events.stop)
        _log.info("agent_started", node=wanted.node_name, config_file=str(wanted.config_file))
        stack.enter_context(_served(wanted, checks, exposition))
        served.serve()
    _log.info("agent_stopped", node=wanted.node_name)
    return 0


def _with_news(
    reached: reconcile.World,
    wanted: settings.AgentSettings,
    kube: api.KubeApi,
    box: mailbox.Mailbox,
) -> reconcile.World:
    """Return the same with waits that end as soon as there is something to see."""
    news = podnews.PodNews(kube, node_name=wanted.node_name, on_news=box.put_news)
    standby = ports.Standbys(reached.standby, news)
    return dataclasses.replace(reached, standby=standby)


def _take(box: mailbox.Mailbox, view: cluster.NodeView) -> None:
    box.put_label(view.labels.get(cluster.CONFIG_LABEL) or None)
    # What a run waits for may be among what kubelet has just told.
    box.put_news()


def _start_watches(
    wanted: settings.AgentSettings,
    stack: contextlib.ExitStack,
    box: mailbox.Mailbox,
    watch: nodewatch.NodeWatch,
) -> None:
    """Follow the node and the files; they end with the stack, the node's once it is told to."""
    watcher = threading.Thread(target=watch.run, name="node-watch", daemon=True)
    watcher.start()
    stack.callback(watcher.join, timeout=_JOIN_TIMEOUT_S)
    watched = (
        wanted.config_file,
        wanted.extra_clients_file,
        wanted.hooks_file,
        wanted.host.gpu_clients_file,
    )
    for path in filter(None, watched):
        file_watch = files.ConfigWatch(path, box.put_file_change)
        file_watch.start()
        stack.callback(file_watch.stop)


def _gpu_events(
    wanted: settings.AgentSettings, box: mailbox.Mailbox
) -> gpu_events.GpuEvents | None:
    """Return who tells of changes that others make; nobody unless asked for: it has a price."""
    if not wanted.watches_gpu_events:
        return None
    state = wanted.gpus.simulate_state
    command = gpu_events.listener_command(
        library_path=wanted.gpus.library_path,
        driver_roots=() if state else wanted.driver_roots,
        simulate_state=str(state) if state else None,
    )
    return gpu_events.GpuEvents(command=command, on_change=box.put_gpu_change)


def _listener(
    wanted: settings.AgentSettings, watch: nodewatch.NodeWatch, pulse: health.Pulse
) -> tuple[ports.Telemetry, Callable[[], bytes]]:
    """Return who hears what happens, and what it has to tell; nobody where nobody asks."""
    if not wanted.health_port:
        return ports.Telemetry(), bytes
    from mig_manager import metrics  # noqa: PLC0415 - its library costs memory on every node

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
    wanted: settings.AgentSettings, kube: api.KubeApi, telemetry: ports.Telemetry, boot_id: str
) -> reconcile.World:
    """Return what the pipeline reaches: this node's cluster, kubelet, GPUs and files."""
    system = clock.SystemClock()
    workers = gpu_workers(wanted, telemetry)
    kubelet = podresources_child.ChildPodResources(str(wanted.pod_resources_socket))
    reached = reconcile.World(
        gpus=gpus(wanted, kube, workers),
        standby=ports.Standbys(workers, kubelet),
        node=node.KubeNode(kube, name=wanted.node_name, clock=system),
        workloads=pods.KubeWorkloads(kube, node_name=wanted.node_name),
        allocations=kubelet,
        configs=files.ConfigFile(wanted.config_file),
        extra_clients=files.ConfigFile(wanted.extra_clients_file)
        if wanted.extra_clients_file
        else None,
        clock=system,
        telemetry=telemetry,
        exclusion=lockfile.LockFile(
            wanted.lock_file,
            program=f"mig-manager's agent on node {wanted.node_name}",
            clock=system,
            # A pod may lack the mount, and one manager alone needs no lock.
            is_required=False,
        ),
        boot_id=boot_id,
        hooks=_hooks(wanted),
        own_pod_uid=identity.own_pod_uid(wanted.own_pod_uid, _MOUNTS),
        proven=journalfile.ProvenFile(wanted.proven_file),
        slots=_slots(wanted, kube, system),
    )
    # Simulated GPUs are no reason to do anything to the real machine.
    return reached if wanted.gpus.is_simulated else _with_machine(reached, wanted.host)


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
    wanted: settings.AgentSettings, kube: api.KubeApi, system: clocks.Clock
) -> ports.Slots | None:
    if not wanted.max_concurrent_nodes:
        return None
    from mig_manager.adapters.kube import slots  # noqa: PLC0415 - only where there is a budget

    return slots.LeaseSlots(
        kube,
        namespace=wanted.slots_namespace,
        node_name=wanted.node_name,
        limit=wanted.max_concurrent_nodes,
        clock=system,
    )


def _with_machine(reached: reconcile.World, host: hostsettings.HostSettings) -> reconcile.World:
    """Return the same with what the owner allows of the machine underneath."""
    reached = dataclasses.replace(
        reached,
        device_files=devicefiles.DeviceFiles(host.roots, is_cdi_enabled=host.cdi_enabled),
    )
    if host.gpu_reset:
        from mig_manager.adapters import gpureset  # noqa: PLC0415 - reads XML

        found = tools.Tools(gpureset.roots(host.roots))
        reached = dataclasses.replace(reached, reset=gpureset.SmiReset(found))
    if not (host.with_reboot or host.shuts_host_clients):
        return reached
    from mig_manager.adapters import systemd  # noqa: PLC0415 - its library is not for everybody

    if host.shuts_host_clients and host.gpu_clients_file:
        listed = files.ConfigFile(host.gpu_clients_file)
        reached = dataclasses.replace(
            reached,
            services=systemd.Systemd(
                host.dbus_address,
                stop_timeout_s=host.service_stop_timeout_s,
                start_timeout_s=host.service_start_timeout_s,
            ),
            service_names=lambda: hostclients.parse(listed.read(), source=listed.name),
        )
    if host.with_reboot:
        reached = dataclasses.replace(reached, reboot=systemd.Reboot(host.dbus_address))
    return reached


def gpu_workers(wanted: settings.AgentSettings, telemetry: ports.Telemetry) -> gpu_child.ChildGpus:
    """Return the GPUs, each operation in a process of its own."""
    state = wanted.gpus.simulate_state
    command = gpu_child.worker_command(
        library_path=wanted.gpus.library_path,
        driver_roots=() if state else wanted.driver_roots,
        simulate_state=str(state) if state else None,
        in_use_timeout_s=wanted.in_use_timeout_s,
    )
    return gpu_child.ChildGpus(
        command=command, timeout_s=wanted.gpu_timeout_s, telemetry=telemetry
    )


def gpus(
    wanted: settings.AgentSettings, kube: api.KubeApi, workers: gpu_child.ChildGpus
) -> ports.Gpus:
    """Return the GPUs; simulated ones that no plugin offers are advertised as well."""
    if not wanted.advertises_simulated:
        return workers
    offer = advertise.NodeResources(kube, name=wanted.node_name)
    advertising = advertise.AdvertisingGpus(workers, offer)
    advertising.start()
    return advertising


def limits(wanted: settings.AgentSettings) -> reconcile.Limits:
    """Return what the node's owner allows."""
    return reconcile.Limits(
        drain_timeout_s=wanted.drain_timeout_s,
        plugin_timeout_s=wanted.plugin_timeout_s,
        monitor_timeout_s=wanted.monitor_timeout_s,
        lock_timeout_s=wanted.lock_timeout_s,
        allows_foreign_managers=wanted.allows_foreign_managers,
        is_lenient=wanted.is_lenient,
        heals_drift=wanted.heals_drift,
        reboot_timeout_s=wanted.host.reboot_timeout_s,
        policy=wanted.policy,
        pace=pacing.Pace(max_s=wanted.poll_interval_s),
    )


def end_on_signals(box: mailbox.Mailbox, stop: threading.Event) -> None:
    """Have SIGTERM and SIGINT end the loop, in good order."""

    def end(_number: int, _frame: FrameType | None) -> None:
        # A handler runs between two bytecodes of the main thread, which may hold the mailbox's
        # lock; another thread can wait for it.
        threading.Thread(target=box.stop, name="stop").start()
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
