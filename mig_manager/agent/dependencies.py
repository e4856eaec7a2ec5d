"""Compose the ports of the agent's pipeline: API server, kubelet, GPUs, files and host."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator

from mig_manager import gpu_ports
from mig_manager.adapters import host, pod_resources
from mig_manager.adapters.host import (
    device_nodes,
    files,
    hooks,
    lock_file,
    procfs,
)
from mig_manager.adapters.kubernetes import api, kube_node, pod_claims, pods, watch
from mig_manager.adapters.nvml import worker_client
from mig_manager.agent import agent_settings
from mig_manager.core import ports, timing
from mig_manager.core.files import service_files
from mig_manager.core.node.daemons import client_table
from mig_manager.core.settings import host_settings

_MOUNTS = pathlib.Path("/proc/self/mountinfo")


def of_node(
    settings: agent_settings.AgentSettings,
    kube: api.KubeApi,
    *,
    node_watch: watch.NodeWatch,
    pod_watch: pods.PodWatch,
    telemetry: ports.Telemetry,
    boot_id: str,
) -> ports.Dependencies:
    """Return the ports of the pipeline: this node's API server, kubelet, GPUs and files."""
    system = host.SystemClock()
    workers = worker_client.WorkerGpus(
        command=gpu_ports.worker_command(
            settings.gpus, in_use_timeout_s=settings.in_use_timeout_s
        ),
        timeout_s=settings.gpu_timeout_s,
        telemetry=telemetry,
    )
    kubelet = pod_resources.WorkerPodResources(str(settings.pod_resources_socket))
    deps = ports.Dependencies(
        gpus=_advertising_gpus(settings, workers, kube)
        if settings.advertises_simulated
        else workers,
        workers_ready=functools.partial(_workers_ready, workers, kubelet),
        node=kube_node.KubeNode(
            kube,
            name=settings.node_name,
            clock=system,
            watched=lambda: node_watch.latest,
        ),
        workloads=pods.KubeWorkloads(
            kube, node_name=settings.node_name, clock=system, watch=pod_watch
        ),
        pod_watch=pod_watch,
        allocations=kubelet,
        advertises_simulated=settings.advertises_simulated,
        processes=workers.processes,
        slices=pod_claims.KubeSlices(kube, node_name=settings.node_name),
        layout_source=files.SourceFile(settings.config_file),
        extra_clients=functools.partial(_extra_clients, settings),
        clock=system,
        telemetry=telemetry,
        lock=lock_file.LockFile(
            settings.lock_file,
            program=f"mig-manager's agent on node {settings.node_name}",
            clock=system,
            # A pod may lack the mount, and a single manager needs no lock.
            is_required=False,
        ),
        boot_id=boot_id,
        own_pod_uid=procfs.own_pod_uid(settings.own_pod_uid, _MOUNTS),
        verified_layout_file=files.VerifiedLayoutFile(settings.verified_layout_file),
        host_copy_file=files.HostCopyFile(settings.verified_layout_file),
        write_layouts=_layouts_writer(settings, kube, system),
        slots=_slots(settings, kube, system),
        hooks=_hook_programs(settings),
        reset=(
            gpu_ports.reset(settings.gpus, settings.host.roots, settings.search_path)
            if settings.host.gpu_reset
            else None
        ),
    )
    # Simulated GPUs must not change the real machine.
    return deps if settings.gpus.is_simulated else _with_machine(deps, settings.host)


@contextlib.contextmanager
def _workers_ready(
    gpus: worker_client.WorkerGpus, kubelet: pod_resources.WorkerPodResources
) -> Iterator[None]:
    # Kubelet's worker serves all requests, and the first follows the first answer of the GPUs.
    kubelet.start_ahead()
    with gpus.kept_ready():
        yield


def _advertising_gpus(
    settings: agent_settings.AgentSettings, workers: ports.Gpus, kube: api.KubeApi
) -> ports.Gpus:
    """Return simulated GPUs whose devices are advertised on the Node from now on."""
    from mig_manager.sandbox import advertising_gpus  # noqa: PLC0415 - not for real GPUs

    advertised = advertising_gpus.AdvertisingGpus(workers, kube, name=settings.node_name)
    advertised.start()
    return advertised


def _extra_clients(settings: agent_settings.AgentSettings) -> tuple[client_table.ExtraClient, ...]:
    """Read the file of further GPU clients; ConfigError if it is invalid."""
    if not settings.extra_clients_file:
        return ()
    listed = files.SourceFile(settings.extra_clients_file)
    return client_table.parse(listed.read(), source=listed.name)


def _slots(
    settings: agent_settings.AgentSettings, kube: api.KubeApi, clock: timing.Clock
) -> ports.Slots | None:
    """Return the cluster's slots for nodes under change, if their number is limited."""
    if not settings.max_concurrent_nodes:
        return None
    from mig_manager.adapters.kubernetes import lease_slots  # noqa: PLC0415 - only with a limit

    return lease_slots.LeaseSlots(
        kube,
        namespace=settings.slots_namespace,
        node_name=settings.node_name,
        limit=settings.max_concurrent_nodes,
        clock=clock,
    )


def _layouts_writer(
    settings: agent_settings.AgentSettings, kube: api.KubeApi, clock: timing.Clock
) -> Callable[[str], bool] | None:
    """Return what writes the node's layouts to its ConfigMap, if the manifest names the pod.

    NVIDIA's operator does so.
    """
    if not (settings.pod_name and settings.pod_namespace):
        return None
    from mig_manager.adapters.kubernetes import node_layouts  # noqa: PLC0415 - only for the operator

    return node_layouts.KubeNodeLayouts(
        kube,
        clock,
        node_name=settings.node_name,
        namespace=settings.pod_namespace,
        pod_name=settings.pod_name,
        pod_uid=settings.own_pod_uid,
    ).write


def _hook_programs(settings: agent_settings.AgentSettings) -> ports.Hooks | None:
    """Return the owner's hooks, with NVIDIA's variables; None without a file of hooks."""
    if not settings.hooks_file:
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


def _with_machine(
    deps: ports.Dependencies, settings: host_settings.HostSettings
) -> ports.Dependencies:
    """Add the host's ports that the settings allow."""
    deps = dataclasses.replace(
        deps,
        refresh_files=functools.partial(
            device_nodes.refresh_files,
            settings.roots,
            is_cdi_enabled=settings.cdi_enabled,
        ),
    )
    if not (settings.with_reboot or settings.shuts_host_clients):
        return deps
    from mig_manager.adapters.host import systemd  # noqa: PLC0415 - few nodes need its library

    if settings.shuts_host_clients and settings.gpu_clients_file:
        listed = files.SourceFile(settings.gpu_clients_file)
        deps = dataclasses.replace(
            deps,
            services=systemd.Systemd(
                settings.dbus_address,
                stop_timeout_s=settings.service_stop_timeout_s,
                start_timeout_s=settings.service_start_timeout_s,
            ),
            service_names=lambda: service_files.parse(listed.read(), source=listed.name),
        )
    if settings.with_reboot:
        from mig_manager.adapters.host import logind  # noqa: PLC0415 - as above

        deps = dataclasses.replace(deps, reboot=logind.Reboot(settings.dbus_address))
    return deps
