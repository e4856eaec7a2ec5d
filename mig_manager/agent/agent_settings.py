"""Settings of the agent.

Names and variables of NVIDIA's ``nvidia-mig-parted`` and ``nvidia-mig-manager`` are accepted, so
that their manifests and scripts keep working.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Self

from mig_manager import errors
from mig_manager.adapters.host import process
from mig_manager.core import timing
from mig_manager.core.node import policies
from mig_manager.core.settings import host_settings, node_settings, options


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(node_settings.LayoutSources, node_settings.ChangeTimeouts):
    """What pipeline and loop may do, and for how long: a part of the agent's settings."""

    drain_timeout_s: float = options.seconds(
        "how long evicted pods may take to end", default=300.0, group=options.EVICTIONS
    )
    plugin_timeout_s: float = options.seconds(
        "how long the device plugin may take to stop or start", default=300.0, group=options.TIMES
    )
    monitor_timeout_s: float = options.seconds(
        "how long a monitor may take to be ready before the next one starts",
        default=60.0,
        group=options.TIMES,
    )
    allows_foreign_managers: bool = options.switch(
        "continue although another program manages MIG on this node",
        name="allow-foreign-managers",
        group=options.CHANGE,
    )
    heals_drift: bool = options.switch(
        "restore the layout after another program changed it",
        name="heal-drift",
        group=options.DRIFT,
    )
    repair: node_settings.RepairPolicy = options.declare(
        dataclasses.replace(node_settings.REPAIR, group=options.DRIFT)
    )
    drift_check_interval_s: float = options.seconds(
        "pause between drift checks; 0: no checks", default=300.0, group=options.DRIFT
    )
    retry_initial_s: float = options.seconds(
        "pause before the first retry",
        default=5.0,
        minimum=options.MIN_PAUSE_S,
        group=options.TIMES,
    )
    retry_max_s: float = options.seconds(
        "longest pause between retries",
        default=300.0,
        minimum=options.MIN_PAUSE_S,
        group=options.TIMES,
    )
    reboot_timeout_s: float = 600.0
    """How long the node may take to go down after a reboot was requested."""
    policy: policies.Policy = dataclasses.field(default_factory=policies.Policy)
    backoff: timing.Backoff = dataclasses.field(default_factory=timing.Backoff)


_NOT_NEEDED = tuple(
    options.Option(
        name=name,
        short=short,
        help="ignored",
        metavar="X",
        variable=name.upper().replace("-", "_"),
        group=host_settings.NVIDIAS,
    )
    for name, short in {
        "reconfigure-script": "s",
        "host-nvidia-dir": "i",
        "host-mig-manager-state-file": "o",
        "host-kubelet-systemd-service": "k",
        "default-gpu-clients-namespace": "p",
    }.items()
)
"""Options of NVIDIA's agent that are accepted without effect."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentSettings(node_settings.NodeSettings, RunSettings):
    """Settings of the agent; durations in seconds."""

    is_debug: bool = options.declare(
        dataclasses.replace(node_settings.DEBUG, short="", group=options.METRICS)
    )
    node_name: str = options.text(
        "the node to serve (required)", short="n", variable="NODE_NAME", default=""
    )
    config_file: pathlib.Path = options.path(
        "layout file", short="f", variable="CONFIG_FILE", default_text="the built-in one"
    )
    kubeconfig: pathlib.Path | None = options.path(
        "credentials", variable="KUBECONFIG", default_text="the pod's ServiceAccount"
    )
    pod_resources_socket: pathlib.Path = options.path(
        "kubelet's PodResources socket",
        default_text="/var/lib/kubelet/pod-resources/kubelet.sock",
    )
    policy: policies.Policy = options.declare_from(policies.Policy)
    max_concurrent_nodes: int = options.count(
        "how many nodes of the cluster may change their GPUs at once",
        default_text="any number",
        group=options.MANY_NODES,
    )
    slots_namespace: str = options.text(
        "namespace of the Leases that count these nodes",
        variable="POD_NAMESPACE",
        default="mig-manager",
        group=options.MANY_NODES,
    )
    extra_clients_file: pathlib.Path | None = options.path(
        "YAML table of your own GPU daemons to stop during a change", group=options.CHANGE
    )
    hooks_file: pathlib.Path | None = options.path(
        "programs to run around every change, in nvidia-mig-parted's format",
        default_text="none",
        group=options.CHANGE,
    )
    watches_gpu_events: bool = options.switch(
        "let NVML report changes of the MIG configuration at once",
        name="watch-gpu-events",
        group=options.DRIFT,
    )
    poll_interval_s: float = options.seconds(
        "longest pause between checks while waiting",
        default=1.0,
        minimum=options.MIN_PAUSE_S,
        group=options.TIMES,
    )
    health_port: int = options.port(
        "serve /metrics, /healthz and /readyz on this port",
        default_text="disabled",
        group=options.METRICS,
    )
    health_address: str = options.declare(node_settings.HEALTH_ADDRESS)
    log_level: node_settings.LogLevel = options.declare(node_settings.LOG_LEVEL)
    log_format: node_settings.LogFormat = options.declare(node_settings.LOG_FORMAT)
    advertises_simulated: bool = options.switch(
        "with --simulate: advertise the simulated GPUs to the scheduler, as a device plugin does",
        name="advertise-simulated",
    )
    pod_name: str | None = options.text(
        "name of the agent's own pod, which owns the ConfigMap NODE-mig-config; set by NVIDIA's "
        "operator",
        variable="POD_NAME",
        has_flag=False,
    )
    own_pod_uid: str | None = options.text(
        "UID of the agent's own pod, to distinguish it from another manager; set by the manifests",
        name="pod-uid",
        variable="POD_UID",
        has_flag=False,
    )
    gpus: node_settings.GpuAccess = options.declare_from(node_settings.GpuAccess)
    host: host_settings.HostSettings = options.declare_from(host_settings.HostSettings)
    search_path: str  # where to search for a hook's program, as in ``PATH``
    pod_namespace: str  # the namespace of ``pod_name``, from ``POD_NAMESPACE``; empty if unknown
    not_needed: tuple[str, ...] = options.declare_from(_NOT_NEEDED)
    """Options of NVIDIA's agent that were set but have no effect."""

    @classmethod
    def read(cls, parsed: Mapping[str, object], environ: Mapping[str, str]) -> Self:
        """Read the settings of the agent.

        Raises:
            UsageError: The node's name is missing, or a value cannot be used.
        """
        source = options.Source(parsed, environ)
        values = source.values(cls)
        if not values["node_name"]:
            raise errors.UsageError(
                "the agent must know its node: give --node-name or set NODE_NAME"
            )
        gpus = gpu_access(source)
        if values["advertises_simulated"] and not gpus.is_simulated:
            raise errors.UsageError(
                "--advertise-simulated needs --simulate: real GPUs have a device plugin"
            )
        node_settings.check_gpu_timeouts(values["in_use_timeout_s"], values["gpu_timeout_s"])
        values |= node_settings.node_files(values, gpus)
        values["config_file"], values["has_default_layouts"] = _find_config_file(source)
        values["pod_resources_socket"] = values[
            "pod_resources_socket"
        ] or host_settings.pod_resources_socket(source)
        policy = policies.Policy(**source.values(policies.Policy))
        if policy.is_forced and policy.drain is policies.DrainPolicy.NONE:
            raise errors.UsageError(
                "--force-drain contradicts --drain-policy none, which evicts no pod"
            )
        if values["is_debug"]:
            values["log_level"] = node_settings.LogLevel.DEBUG
        host = host_settings.host_settings(source)
        return cls(
            **values,
            gpus=gpus,
            host=host,
            reboot_timeout_s=host.reboot_timeout_s,
            backoff=timing.Backoff(max_s=values["poll_interval_s"]),
            search_path=environ.get("PATH", ""),
            pod_namespace=environ.get("POD_NAMESPACE", "") if values["pod_name"] else "",
            policy=policy,
            not_needed=tuple(each.name for each in _NOT_NEEDED if source.is_set(each)),
        )


def gpu_access(source: options.Source) -> node_settings.GpuAccess:
    """Read how to reach the GPUs, as ``node_settings.gpu_access``."""

    def spell(spec: str) -> str:
        from mig_manager.sandbox import node_spec  # noqa: PLC0415 - not for real GPUs

        return node_spec.spelling(spec)

    return node_settings.gpu_access(source, spell)


def agent_config_file(source: options.Source) -> pathlib.Path:
    """Return the layout file of the agent."""
    return source.field(AgentSettings, "config_file") or _default_config_file(source)


def _default_config_file(source: options.Source) -> pathlib.Path:
    fallback = source.environ.get("DEFAULT_CONFIG_FILE")
    return pathlib.Path(fallback) if fallback else process.packaged_config()


def _find_config_file(source: options.Source) -> tuple[pathlib.Path, bool]:
    """Return the agent's layout file, and whether it is the default file."""
    generated = source.field(node_settings.LayoutSources, "generated_layouts")
    is_only = generated is node_settings.GeneratedLayouts.ONLY
    named = None if is_only else source.field(AgentSettings, "config_file")
    return named or _default_config_file(source), named is None


def layouts_of_pod(
    source: options.Source, *, is_lenient: bool
) -> tuple[str, node_settings.LayoutSources] | None:
    """Return the layout file of the agent with these variables, and how it is served.

    None: neither the manifest nor NVIDIA's operator names a document.
    """
    if not (source.environ.get("CONFIG_FILE") or source.environ.get("DEFAULT_CONFIG_FILE")):
        return None
    path, is_default = _find_config_file(source)
    return str(path), node_settings.LayoutSources(
        generated_layouts=source.field(node_settings.LayoutSources, "generated_layouts"),
        has_default_layouts=is_default,
        is_lenient=is_lenient,
    )
