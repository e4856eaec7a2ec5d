"""Settings of the agent, and those that it shares with people's commands.

The only reader of the environment. Names and variables of NVIDIA's ``nvidia-mig-parted`` and
``nvidia-mig-manager`` are accepted, so that their manifests and scripts keep working.
"""

import dataclasses
import enum
import os
import pathlib
import re
from collections.abc import Mapping

from mig_manager import errors
from mig_manager.core import host_settings, options, timing
from mig_manager.core.node import policy as policies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the pipeline may do and for how long; the agent's settings are such limits."""

    drain_timeout_s: float = options.seconds(
        "how long evicted pods may take to end", default=300.0
    )
    plugin_timeout_s: float = options.seconds(
        "how long the device plugin may take to stop or start", default=300.0
    )
    monitor_timeout_s: float = options.seconds(
        "how long each monitor may take to be ready before the next one starts", default=60.0
    )
    allows_foreign_managers: bool = options.switch(
        "continue although another program manages MIG on this node",
        name="allow-foreign-managers",
    )
    heals_drift: bool = options.switch(
        "restore the layout after another program changed it", name="heal-drift"
    )
    reboot_timeout_s: float = 600.0
    """How long the node may take to go down after a reboot was requested."""
    lock_timeout_s: float = 30.0
    in_use_timeout_s: float = 30.0
    """How long to wait, after the drain, for processes that use what the plan destroys."""
    is_lenient: bool = False
    """Whether to warn instead of failing where mig-parted ignores a problem of the file."""
    policy: policies.Policy = dataclasses.field(default_factory=policies.Policy)
    backoff: timing.Backoff = dataclasses.field(default_factory=timing.Backoff)


_PACKAGE = pathlib.Path(__file__).parents[1]
_LOCK_FILE = pathlib.Path("/run/mig-manager/lock")
"""On a file system that a reboot empties: no lock survives a reboot."""
# On a disk: they are for the time after a reboot or a loss of power.
_LAYOUT_FILE = pathlib.Path("/var/lib/mig-manager/verified-layout.json")
_JOURNAL_FILE = pathlib.Path("/var/lib/mig-manager/journal.json")
JOURNAL_SUFFIX = _JOURNAL_FILE.stem
LAYOUT_SUFFIX = _LAYOUT_FILE.stem
"""Of the files that a simulated node has beside its state."""
_LOADER_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD")  # of ld.so(8)
_GPUS = "GPUs"
DEBUG = options.Option(
    name="debug",
    short="d",
    help="log everything",
    variable="MIG_PARTED_DEBUG",
    parse=options.parse_switch,
    default=False,
)
CHANGE = "the change"
_CHANGES = "apply boot restore"
_WITH_GPUS = f"status plan {_CHANGES} assert export generate-config checkpoint validate"


class Colour(enum.Enum):
    """When to use ANSI colours."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class LogFormat(enum.Enum):
    """The format of log lines."""

    JSON = "json"
    CONSOLE = "console"


class LogLevel(enum.Enum):
    """The least severe lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuAccess:
    """How to reach the GPUs, real or simulated."""

    simulate_spec: str | None = options.text(
        "simulate GPUs, such as 8xA100-SXM4-40GB or 4xA100-SXM4-80GB+2xA30",
        name="simulate",
        metavar=options.SPEC,
        group=_GPUS,
    )
    """None with a state file: the GPUs of that file."""
    simulate_state: pathlib.Path | None = options.path(
        "file that keeps the simulated GPUs between commands",
        default_text="one for each SPEC in the user's state directory",
        group=_GPUS,
    )
    """None: the GPUs are real."""
    is_fresh: bool = options.switch(
        "reset the simulated GPUs to MIG off", name="fresh", group=_GPUS
    )
    library_path: str | None = options.text(
        "NVML's library", metavar=options.FILE, default_text="libnvidia-ml.so.1", group=_GPUS
    )
    driver_roots: tuple[str, ...] = ()
    """Where to look for the library when the loader does not find the right one."""
    loader_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables of ``ld.so(8)``, which child processes and the driver's programs need, too."""

    @property
    def is_simulated(self) -> bool:
        """Whether no hardware is touched."""
        return self.simulate_state is not None

    def beside_state(self, suffix: str) -> pathlib.Path | None:
        """Return a file that belongs to the simulated node; None when the GPUs are real."""
        state = self.simulate_state
        return state.with_name(f"{state.name}.{suffix}") if state else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentSettings:
    """How to read a config document."""

    is_lenient: bool = options.switch(
        "warn instead of failing where nvidia-mig-parted says nothing: duplicate keys, filters "
        "and indices that match nothing",
        name="lenient",
        commands="agent doctor rollout plan apply assert boot validate completion",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeSettings(DocumentSettings):
    """Settings that the agent and commands on a node share; durations in seconds."""

    hook_timeout_s: float = options.seconds(
        "how long a hook may take that has no time-out of its own",
        default=300.0,
        least=options.LEAST_PAUSE_S,
        commands="agent apply restore",
    )
    in_use_timeout_s: float = options.seconds(
        "how long to retry GPUs and instances that are in use",
        default=30.0,
        group=CHANGE,
        commands=f"agent {_CHANGES}",
    )
    lock_timeout_s: float = options.seconds(
        "how long to wait while another manager changes the GPUs; 0: not at all",
        default=30.0,
        group=CHANGE,
        commands=f"agent {_CHANGES}",
    )
    lock_file: pathlib.Path = options.path(
        "lock that keeps two managers from changing one node's GPUs",
        default_text=str(_LOCK_FILE),
        group=CHANGE,
        commands=f"agent doctor {_CHANGES}",
    )
    journal_file: pathlib.Path = options.path(
        "journal of a change, for the next command if this one is killed",
        default_text=str(_JOURNAL_FILE),
        group=CHANGE,
        commands=f"doctor {_CHANGES}",
    )
    verified_layout_file: pathlib.Path = options.path(
        "keeps the last verified layout for the next boot",
        default_text=str(_LAYOUT_FILE),
        group=CHANGE,
        commands=f"agent doctor {_CHANGES}",
    )
    gpu_timeout_s: float = options.seconds(
        "how long one operation on the GPUs may take",
        default=120.0,
        least=options.LEAST_PAUSE_S,
        group=_GPUS,
        commands=f"agent {_WITH_GPUS}",
    )


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
"""Options of NVIDIA's agent that are accepted and change nothing here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentSettings(NodeSettings, Limits):
    """Settings of the agent; durations in seconds."""

    is_debug: bool = options.declared(dataclasses.replace(DEBUG, short=""))
    node_name: str = options.text(
        "the node to serve (required)", short="n", variable="NODE_NAME", default=""
    )
    config_file: pathlib.Path = options.path(
        "config document", short="f", variable="CONFIG_FILE", default_text="the built-in one"
    )
    kubeconfig: pathlib.Path | None = options.path(
        "credentials", variable="KUBECONFIG", default_text="the pod's ServiceAccount"
    )
    pod_resources_socket: pathlib.Path = options.path(
        "kubelet's PodResources socket",
        default_text="/var/lib/kubelet/pod-resources/kubelet.sock",
    )
    drain_policy: policies.Drain = options.choice(
        "evict the affected pods, all GPU pods of the node, or none",
        metavar="WHO",
        default=policies.Drain.AFFECTED,
    )
    drain_strategy: policies.DrainStrategy = options.choice(
        "if budgets allow only some evictions: rolling starts with those, whole waits for all",
        metavar="HOW",
        default=policies.DrainStrategy.ROLLING,
    )
    is_drain_forced: bool = options.switch(
        "delete pods that remain at the drain's deadline, whatever their PodDisruptionBudgets say",
        name="force-drain",
    )
    max_concurrent_nodes: int = options.count(
        "how many nodes of the cluster may change their GPUs at once", default_text="any number"
    )
    slots_namespace: str = options.text(
        "namespace of the Leases that count these nodes",
        variable="POD_NAMESPACE",
        default="mig-manager",
    )
    extra_clients_file: pathlib.Path | None = options.path(
        "YAML table of your own GPU daemons to stop during a change"
    )
    plugin_configs: str = options.text(
        "device-plugin config by layout, such as all-1g.5gb=sliced,*=whole",
        metavar="MAP",
        default="",
        default_text="unchanged",
    )
    hooks_file: pathlib.Path | None = options.path(
        "programs to run around each change, in nvidia-mig-parted's format", default_text="none"
    )
    drift_check_interval_s: float = options.seconds(
        "pause between two checks that the layout is still applied; 0: never", default=300.0
    )
    watches_gpu_events: bool = options.switch(
        "let NVML report changes of the MIG configuration at once", name="watch-gpu-events"
    )
    retry_initial_s: float = options.seconds(
        "pause before the first retry", default=5.0, least=options.LEAST_PAUSE_S
    )
    retry_max_s: float = options.seconds(
        "longest pause between retries", default=300.0, least=options.LEAST_PAUSE_S
    )
    poll_interval_s: float = options.seconds(
        "longest pause between two checks while waiting",
        default=1.0,
        least=options.LEAST_PAUSE_S,
    )
    health_port: int = options.port(
        "serve /metrics, /healthz and /readyz on this port", default_text="nowhere"
    )
    health_address: str = options.text(
        "address to serve them on", metavar="ADDRESS", default="", default_text="all addresses"
    )
    log_level: LogLevel = options.choice(
        "debug, info, warning or error", metavar="LEVEL", default=LogLevel.INFO
    )
    log_format: LogFormat = options.choice(
        "json or console", metavar="FORMAT", default=LogFormat.JSON
    )
    advertises_simulated: bool = options.switch(
        "with --simulate: advertise the simulated GPUs to the scheduler, as a device plugin does",
        name="advertise-simulated",
    )
    own_pod_uid: str | None = options.text(
        "UID of the agent's own pod, to distinguish it from another manager; set by the manifests",
        name="pod-uid",
        variable="POD_UID",
        has_flag=False,
    )
    gpus: GpuAccess = options.nested(GpuAccess)
    host: host_settings.HostSettings = options.nested(host_settings.HostSettings)
    search_path: str
    """Where a hook's program is looked for, as in ``PATH``."""
    not_needed: tuple[str, ...] = options.nested(_NOT_NEEDED)
    """Options of NVIDIA's agent that were set and change nothing."""


def process_environ() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def packaged_config() -> pathlib.Path:
    """Return the config document that comes with the program.

    A wheel carries it inside the package; a source checkout has it beside the package.
    """
    inside = _PACKAGE / "profiles" / "mig-parted.yaml"
    return inside if inside.exists() else _PACKAGE.parent / "profiles" / "mig-parted.yaml"


def agent_settings(parsed: Mapping[str, object], environ: Mapping[str, str]) -> AgentSettings:
    """Read the settings of the agent.

    Raises:
        UsageError: The node's name is missing, or a value cannot be used.
    """
    source = options.Source(parsed, environ, command="agent")
    values = source.values(AgentSettings)
    if not values["node_name"]:
        raise errors.UsageError("the agent must know its node: give --node-name or set NODE_NAME")
    gpus = gpu_access(source)
    if values["advertises_simulated"] and not gpus.is_simulated:
        raise errors.UsageError(
            "--advertise-simulated goes with --simulate alone: real GPUs have a device plugin"
        )
    check_gpu_timeouts(values["in_use_timeout_s"], values["gpu_timeout_s"])
    values |= node_files(source, gpus)
    values["config_file"] = agent_config_file(source)
    values["pod_resources_socket"] = values[
        "pod_resources_socket"
    ] or host_settings.pod_resources_socket(source)
    if values["is_drain_forced"] and values["drain_policy"] is policies.Drain.NONE:
        raise errors.UsageError(
            "--force-drain contradicts --drain-policy none, which evicts no pod"
        )
    if values["is_debug"]:
        values["log_level"] = LogLevel.DEBUG
    host = host_settings.host_settings(source)
    return AgentSettings(
        **values,
        gpus=gpus,
        host=host,
        reboot_timeout_s=host.reboot_timeout_s,
        backoff=timing.Backoff(max_s=values["poll_interval_s"]),
        search_path=environ.get("PATH", ""),
        policy=policies.Policy(
            drain=values["drain_policy"],
            strategy=values["drain_strategy"],
            is_forced=values["is_drain_forced"],
            plugin_configs=policies.parse_plugin_configs(
                values["plugin_configs"], origin="--plugin-configs"
            ),
        ),
        not_needed=tuple(each.name for each in _NOT_NEEDED if source.is_set(each)),
    )


def gpu_access(source: options.Source) -> GpuAccess:
    """Read how to reach the GPUs.

    Raises:
        UsageError: They are real and simulated at once, no file can keep the simulated ones, or
            real ones are to be reset.
    """
    values, environ = source.values(GpuAccess), source.environ
    spec, state = values["simulate_spec"], values["simulate_state"]
    if values["library_path"] and (spec or state):
        raise errors.UsageError("simulated GPUs need no --library-path; give one or the other")
    if spec and state is None:
        state = values["simulate_state"] = _default_state(spec, environ)
    if values["is_fresh"] and state is None:
        raise errors.UsageError(
            "--fresh resets simulated GPUs; name them with --simulate or --simulate-state"
        )
    return GpuAccess(
        **values,
        driver_roots=() if state else host_settings.library_roots(source),
        loader_variables={name: environ[name] for name in _LOADER_VARIABLES if environ.get(name)},
    )


def check_gpu_timeouts(in_use_timeout_s: float, gpu_timeout_s: float) -> None:
    """Raise ``UsageError`` if an operation would be killed while it retries."""
    if in_use_timeout_s >= gpu_timeout_s:
        raise errors.UsageError(
            f"--in-use-timeout-s {in_use_timeout_s:g} must be less than --gpu-timeout-s "
            f"{gpu_timeout_s:g}, after which the operation is killed"
        )


def node_files(source: options.Source, gpus: GpuAccess) -> dict[str, pathlib.Path]:
    """Return lock, journal and last verified layout; simulated GPUs have theirs beside them."""
    usual = {
        "lock_file": ("manager.lock", _LOCK_FILE),
        "journal_file": (JOURNAL_SUFFIX, _JOURNAL_FILE),
        "verified_layout_file": (LAYOUT_SUFFIX, _LAYOUT_FILE),
    }
    return {
        name: source.field(NodeSettings, name) or gpus.beside_state(suffix) or default
        for name, (suffix, default) in usual.items()
    }


def agent_config_file(source: options.Source) -> pathlib.Path:
    """Return the config document of the agent."""
    named: pathlib.Path | None = source.field(AgentSettings, "config_file")
    fallback = agent_config_variable(source.environ)
    return named or (pathlib.Path(fallback) if fallback else packaged_config())


def agent_config_variable(environ: Mapping[str, str]) -> str:
    """Return the config document that the manifest or NVIDIA's operator names, if any."""
    return environ.get("CONFIG_FILE") or environ.get("DEFAULT_CONFIG_FILE") or ""


def _default_state(spec: str, environ: Mapping[str, str]) -> pathlib.Path:
    """Return a file of the user's own, one for each simulated node."""
    base, home = environ.get("XDG_STATE_HOME"), environ.get("HOME")
    if not base and not home:
        raise errors.UsageError(
            "neither XDG_STATE_HOME nor HOME says where to keep simulated GPUs; "
            "give --simulate-state"
        )
    root = pathlib.Path(base) if base else pathlib.Path(str(home)) / ".local" / "state"
    name = re.sub(r"[^A-Za-z0-9.+_-]+", "_", spec)
    return root / "mig-manager" / f"sim-{name}.json"
