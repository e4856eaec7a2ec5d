"""Compose the ports of the agent's pipeline: API server, kubelet, GPUs, files and host."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence

from mig_manager.adapters import host, pod_resources
from mig_manager.adapters.host import (
    device_nodes,
    files,
    hooks,
    lock_file,
    procfs,
    programs,
)
from mig_manager.adapters.kubernetes import api, claims, node, pods, watch
from mig_manager.adapters.nvml import client as nvml_worker
from mig_manager.agent import settings as agent_settings
from mig_manager.core import ports, standbys
from mig_manager.core.files import service_files
from mig_manager.core.node import client_table

_MOUNTS = pathlib.Path("/proc/self/mountinfo")


def of_node(
    settings: agent_settings.AgentSettings,
    kube: api.KubeApi,
    telemetry: ports.Telemetry,
    boot_id: str,
    node_watch: watch.NodeWatch,
    pod_watch: pods.PodWatch,
) -> ports.Dependencies:
    """Return the ports of the pipeline: this node's API server, kubelet, GPUs and files."""
    system = host.SystemClock()
    workers = nvml_worker.WorkerGpus(
        command=worker_command(settings),
        timeout_s=settings.gpu_timeout_s,
        telemetry=telemetry,
    )
    gpus: ports.Gpus = workers
    if settings.advertises_simulated:
        from mig_manager.sandbox import advertising  # noqa: PLC0415 - not for real GPUs

        gpus = advertised = advertising.AdvertisingGpus(workers, kube, name=settings.node_name)
        advertised.start()
    slots: ports.Slots | None = None
    if settings.max_concurrent_nodes:
        # Only with a budget.
        from mig_manager.adapters.kubernetes import lease_slots  # noqa: PLC0415

        slots = lease_slots.LeaseSlots(
            kube,
            namespace=settings.slots_namespace,
            node_name=settings.node_name,
            limit=settings.max_concurrent_nodes,
            clock=system,
        )
    write_layouts: Callable[[str], bool] | None = None
    if settings.pod_name and settings.pod_namespace:
        # Only if the manifest names the pod, as NVIDIA's operator does.
        from mig_manager.adapters.kubernetes import node_layouts  # noqa: PLC0415

        write_layouts = node_layouts.KubeNodeLayouts(
            kube,
            node_name=settings.node_name,
            namespace=settings.pod_namespace,
            pod_name=settings.pod_name,
            pod_uid=settings.own_pod_uid,
        ).write
    kubelet = pod_resources.WorkerPodResources(str(settings.pod_resources_socket))
    listed = files.ConfigFile(settings.extra_clients_file) if settings.extra_clients_file else None
    deps = ports.Dependencies(
        gpus=gpus,
        standby=standbys.Standbys(workers, kubelet),
        node=node.KubeNode(
            kube,
            name=settings.node_name,
            clock=system,
            watched=lambda: node_watch.latest,
        ),
        workloads=pods.KubeWorkloads(kube, node_name=settings.node_name, watch=pod_watch),
        allocations=kubelet,
        is_advertiser=settings.advertises_simulated,
        processes=workers.processes,
        slices=claims.KubeSlices(kube, node_name=settings.node_name),
        configs=files.ConfigFile(settings.config_file),
        extra_clients=lambda: (
            client_table.parse(listed.read(), source=listed.name) if listed else ()
        ),
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
    if settings.gpus.simulate_state is None:
        return _with_machine(deps, settings)
    # Simulated GPUs must not change the real machine.
    if settings.host.gpu_reset:
        # Not for real GPUs.
        from mig_manager.sandbox.driver import resets, state_file  # noqa: PLC0415

        state = state_file.SharedState(settings.gpus.simulate_state)
        deps = dataclasses.replace(deps, reset=resets.SimulatedReset(state))
    return deps


def worker_command(settings: agent_settings.AgentSettings, task: str = "serve") -> Sequence[str]:
    """Return the command of a worker for the node's GPUs, real or simulated."""
    program: Sequence[str] = ()
    if settings.gpus.simulate_state is not None:
        from mig_manager.sandbox.driver import worker  # noqa: PLC0415 - not for real GPUs

        program = worker.program(settings.gpus.simulate_state)
    return nvml_worker.worker_command(
        task,
        library_path=settings.gpus.library_path,
        driver_roots=settings.gpus.driver_roots,
        program=program,
        in_use_timeout_s=settings.in_use_timeout_s,
    )


def _with_machine(
    deps: ports.Dependencies, settings: agent_settings.AgentSettings
) -> ports.Dependencies:
    """Add the host's ports that the settings allow."""
    host_settings = settings.host
    deps = dataclasses.replace(
        deps,
        refresh_files=functools.partial(
            device_nodes.refresh_files,
            host_settings.roots,
            is_cdi_enabled=host_settings.cdi_enabled,
        ),
    )
    if host_settings.gpu_reset:
        from mig_manager.adapters.host import gpu_reset  # noqa: PLC0415 - reads XML

        smi_programs = programs.Programs(
            gpu_reset.roots(host_settings.roots),
            search_path=settings.search_path,
            loader_variables=settings.gpus.loader_variables,
        )
        deps = dataclasses.replace(deps, reset=gpu_reset.SmiReset(smi_programs))
    if not (host_settings.with_reboot or host_settings.shuts_host_clients):
        return deps
    from mig_manager.adapters.host import systemd  # noqa: PLC0415 - few nodes need its library

    if host_settings.shuts_host_clients and host_settings.gpu_clients_file:
        listed = files.ConfigFile(host_settings.gpu_clients_file)
        deps = dataclasses.replace(
            deps,
            services=systemd.Systemd(
                host_settings.dbus_address,
                stop_timeout_s=host_settings.service_stop_timeout_s,
                start_timeout_s=host_settings.service_start_timeout_s,
            ),
            service_names=lambda: service_files.parse(listed.read(), source=listed.name),
        )
    if host_settings.with_reboot:
        deps = dataclasses.replace(deps, reboot=systemd.Reboot(host_settings.dbus_address))
    return deps
