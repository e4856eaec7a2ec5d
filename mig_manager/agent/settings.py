"""Settings: frozen values made from a command line over environment variables over defaults.

Here those of the agent and what all have in common; those of a command: ``command_settings``,
those for the machine underneath in ``hostsettings``.

The only reader of the environment. Names and variables of NVIDIA's ``nvidia-mig-parted`` and
``nvidia-mig-manager`` are honoured, so that their manifests and scripts keep working; ours are
``MIG_MANAGER_`` and the option's name.
"""

import dataclasses
import enum
import os
import pathlib
import re
from collections.abc import Mapping

from mig_manager import errors
from mig_manager.core.host import host_settings
from mig_manager.core.node import policy as policies
from mig_manager.core.options import peer, source

_PACKAGE = pathlib.Path(__file__).parents[1]
LEAST_PAUSE_S = 0.001
"""A pause of nothing at all would keep a core busy."""
_LOCK_FILE = pathlib.Path("/run/mig-manager/lock")
"""On a file system that a reboot empties, as every lock is gone then."""
_PROVEN_FILE = pathlib.Path("/var/lib/mig-manager/proven.json")
"""On a disk: it is for the time after a reboot."""

JOURNAL_SUFFIX = "journal"
PROVEN_SUFFIX = "proven"
"""Of the files that a simulated node has beside its state."""


_LOADER_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD")
"""Where the loader finds libraries (``ld.so(8)``)."""


class Colour(enum.Enum):
    """When to use ANSI colours."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class LogFormat(enum.Enum):
    """How log lines look."""

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

    library_path: str | None = None
    """NVML's shared library; None: the dynamic loader finds ``libnvidia-ml.so.1``."""
    driver_roots: tuple[str, ...] = ()
    """Where to look for the library when the loader does not find the right one."""
    loader_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Those by which our loader finds libraries; a child or program of the driver needs them."""
    simulate_spec: str | None = None
    """Node to simulate, such as ``8xA100-SXM4-40GB`` or ``4xA100-SXM4-80GB+2xA30``.
    None with a state file: carry on with what that file has."""
    simulate_state: pathlib.Path | None = None
    """File that keeps the simulated GPUs between commands; None: the GPUs are real."""
    is_fresh: bool = False
    """Whether to remove the files of the simulated node and start with MIG off."""

    @property
    def is_simulated(self) -> bool:
        """Whether no hardware is touched."""
        return self.simulate_state is not None

    def beside_state(self, suffix: str) -> pathlib.Path | None:
        """Return a file that belongs to the simulated node; None when the GPUs are real."""
        state = self.simulate_state
        return state.with_name(f"{state.name}.{suffix}") if state else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of the agent; durations in seconds."""

    node_name: str
    """The node that this agent serves."""
    config_file: pathlib.Path
    is_lenient: bool
    """Whether what the peer passes over in silence in that document passes, with a warning."""
    """Config document; by default the one that comes with the program."""
    kubeconfig: pathlib.Path | None
    """None: the credentials of the pod's ServiceAccount."""
    gpus: GpuAccess
    host: host_settings.HostSettings
    """What may be done to the machine, and where its files are."""
    proven_file: pathlib.Path
    """Where the layout last proven in force is kept, for after a reboot."""
    advertises_simulated: bool
    """Whether to tell the scheduler of simulated GPUs, as a device plugin would of real ones."""
    pod_resources_socket: pathlib.Path
    """Kubelet's PodResources socket."""
    max_concurrent_nodes: int
    """How many nodes of the cluster may be under change at once; 0: any number."""
    slots_namespace: str
    """Where the Leases are by which agents keep to that number."""
    policy: policies.Policy
    """Who leaves for a change, and which plugin config goes with which layout."""
    extra_clients_file: pathlib.Path | None
    """The table of the owner's own GPU daemons; None: there are none."""
    hooks_file: pathlib.Path | None
    """The owner's programs around a change; None: there are none."""
    hook_timeout_s: float
    """How long a hook may take that does not say so itself."""
    search_path: str
    """Where a hook's program is looked for, as in ``PATH``."""
    drain_timeout_s: float
    """How long evicted pods may take to leave, and again as long those deleted by force."""
    monitor_timeout_s: float
    """How long each monitor may take to be ready again before the next one is resumed."""
    plugin_timeout_s: float
    """How long the device plugin may take to stop, and to offer the new devices."""
    in_use_timeout_s: float
    """How long a GPU or instance that is in use is tried again."""
    gpu_timeout_s: float
    """How long one operation on the GPUs may take before its process is killed."""
    lock_file: pathlib.Path
    """Keeps every other manager of this node off while one changes the GPUs."""
    lock_timeout_s: float
    """How long to wait while another manager of this node is at work."""
    allows_foreign_managers: bool
    """Whether to go on although another program manages MIG on this node."""
    drift_check_interval_s: float
    """Pause between two looks whether the layout is still in force; 0: nobody looks."""
    heals_drift: bool
    """Whether a layout that somebody else changed is brought back."""
    watches_gpu_events: bool
    """Whether to be told by NVML when the GPUs' MIG configuration changes."""
    own_pod_uid: str | None
    """UID of the pod that this agent runs in; None: in no pod, or it is not told."""
    retry_initial_s: float
    """Pause before the first retry of a failure that can pass."""
    retry_max_s: float
    """Longest pause between retries."""
    poll_interval_s: float
    """Longest pause between two looks while waiting for something."""
    health_address: str
    """Where to serve health and metrics; empty: on all addresses."""
    health_port: int
    """0: they are not served."""
    log_level: LogLevel
    log_format: LogFormat
    not_needed: tuple[str, ...]
    """Options of NVIDIA's agent that were given and that this one does not need."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Settings of the demonstration."""

    spec: str
    """Node to simulate."""
    scenario: str
    """Which story to tell."""
    is_real_time: bool
    """Whether the simulated driver takes as long as a real one."""
    is_kept: bool
    """Whether the node stays up at the end, until SIGINT."""
    colour: Colour
    is_debug: bool


def process_environ() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def packaged_config() -> pathlib.Path:
    """Return the config document that comes with the program.

    A wheel carries it inside the package; a source checkout has it beside the package.
    """
    inside = _PACKAGE / "profiles" / "mig-parted.yaml"
    return inside if inside.exists() else _PACKAGE.parent / "profiles" / "mig-parted.yaml"


def gpu_access(options: Mapping[str, object], environ: Mapping[str, str]) -> GpuAccess:
    """Read how to reach the GPUs.

    Raises:
        UsageError: They are real and simulated at once, nothing says where to keep them, or real
            ones are to start afresh.
    """
    given = source.Source(options, environ)
    spec = given.text("simulate") or None
    state = given.path("simulate-state")
    if given.text("library-path") and (spec or state):
        raise errors.UsageError("simulated GPUs need no --library-path; give one or the other")
    if spec and state is None:
        state = _default_state(spec, environ)
    is_fresh = given.switch("fresh")
    if is_fresh and state is None:
        raise errors.UsageError(
            "--fresh starts simulated GPUs afresh; name them with --simulate or --simulate-state"
        )
    return GpuAccess(
        library_path=given.text("library-path") or None,
        driver_roots=() if state else host_settings.library_roots(given),
        loader_variables={name: environ[name] for name in _LOADER_VARIABLES if environ.get(name)},
        simulate_spec=spec,
        simulate_state=state,
        is_fresh=is_fresh,
    )


def gpu_timeouts(given: source.Source) -> tuple[float, float]:
    """Read how long what is in use is tried again, and how long an operation may take, seconds.

    Raises:
        UsageError: They are no durations, or the operation would be killed while it tries again.
    """
    in_use_timeout_s = given.seconds("in-use-timeout-s", default=30.0)
    gpu_timeout_s = given.seconds("gpu-timeout-s", default=120.0)
    if in_use_timeout_s >= gpu_timeout_s:
        raise errors.UsageError(
            f"--in-use-timeout-s {in_use_timeout_s:g} must be less than --gpu-timeout-s "
            f"{gpu_timeout_s:g}, after which the operation is killed"
        )
    return in_use_timeout_s, gpu_timeout_s


def lock_file(given: source.Source, gpus: GpuAccess) -> pathlib.Path:
    """Return the node's lock; each simulated node has one of its own beside its state."""
    return given.path("lock-file") or gpus.beside_state("manager.lock") or _LOCK_FILE


def proven_file(given: source.Source, gpus: GpuAccess) -> pathlib.Path:
    """Return where the last proven layout is kept; that of simulated GPUs beside their state."""
    return given.path("proven-file") or gpus.beside_state(PROVEN_SUFFIX) or _PROVEN_FILE


def colour(given: source.Source, environ: Mapping[str, str]) -> Colour:
    """Read when to use colours; a terminal that cannot show any is believed.

    Raises:
        UsageError: The value is none of them.
    """
    is_unwanted = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
    return given.choice("color", Colour, default=Colour.NEVER if is_unwanted else Colour.AUTO)


def agent_settings(options: Mapping[str, object], environ: Mapping[str, str]) -> AgentSettings:
    """Read the settings of the agent.

    Raises:
        UsageError: The node's name is missing, or a value cannot be used.
    """
    given = source.Source(options, environ)
    name = given.text("node-name", variable="NODE_NAME")
    if not name:
        raise errors.UsageError("the agent must know its node: give --node-name or set NODE_NAME")
    in_use_timeout_s, gpu_timeout_s = gpu_timeouts(given)
    gpus = gpu_access(options, environ)
    advertises_simulated = given.switch("advertise-simulated")
    if advertises_simulated and not gpus.is_simulated:
        raise errors.UsageError(
            "--advertise-simulated goes with --simulate alone: real GPUs have a device plugin"
        )
    return AgentSettings(
        node_name=name,
        config_file=agent_config_file(given, environ),
        is_lenient=given.switch("lenient"),
        kubeconfig=given.path("kubeconfig", variable="KUBECONFIG"),
        gpus=gpus,
        host=host_settings.host_settings(given),
        proven_file=proven_file(given, gpus),
        advertises_simulated=advertises_simulated,
        pod_resources_socket=given.path("pod-resources-socket")
        or host_settings.pod_resources_socket(given),
        max_concurrent_nodes=given.count("max-concurrent-nodes"),
        slots_namespace=given.text(
            "slots-namespace", variable="POD_NAMESPACE", default="mig-manager"
        ),
        policy=_policy(given),
        extra_clients_file=given.path("extra-clients-file"),
        hooks_file=given.path("hooks-file"),
        hook_timeout_s=given.seconds("hook-timeout-s", default=300.0, least=LEAST_PAUSE_S),
        search_path=environ.get("PATH", ""),
        drain_timeout_s=given.seconds("drain-timeout-s", default=300.0),
        monitor_timeout_s=given.seconds("monitor-timeout-s", default=60.0),
        plugin_timeout_s=given.seconds("plugin-timeout-s", default=300.0),
        in_use_timeout_s=in_use_timeout_s,
        gpu_timeout_s=gpu_timeout_s,
        lock_file=lock_file(given, gpus),
        lock_timeout_s=given.seconds("lock-timeout-s", default=30.0),
        allows_foreign_managers=given.switch("allow-foreign-managers"),
        drift_check_interval_s=given.seconds("drift-check-interval-s", default=300.0),
        heals_drift=given.switch("heal-drift"),
        watches_gpu_events=given.switch("watch-gpu-events"),
        own_pod_uid=given.text("pod-uid", variable="POD_UID") or None,
        retry_initial_s=given.seconds("retry-initial-s", default=5.0, least=LEAST_PAUSE_S),
        retry_max_s=given.seconds("retry-max-s", default=300.0, least=LEAST_PAUSE_S),
        poll_interval_s=given.seconds("poll-interval-s", default=1.0, least=LEAST_PAUSE_S),
        health_address=given.text("health-address"),
        health_port=given.port("health-port"),
        log_level=LogLevel.DEBUG
        if given.switch("debug", variable="MIG_PARTED_DEBUG")
        else given.choice("log-level", LogLevel, default=LogLevel.INFO),
        log_format=given.choice("log-format", LogFormat, default=LogFormat.JSON),
        not_needed=peer.given_options(given),
    )


def agent_config_file(given: source.Source, environ: Mapping[str, str]) -> pathlib.Path:
    """Return the document that the agent serves."""
    named = agent_config_variable(environ)
    return given.path("config-file", variable="CONFIG_FILE") or (
        pathlib.Path(named) if named else packaged_config()
    )


def agent_config_variable(environ: Mapping[str, str]) -> str:
    """Return the document that the manifest names for the agent of this pod, if there is one.

    NVIDIA's operator names a fallback in a variable of its own.
    """
    return environ.get("CONFIG_FILE") or environ.get("DEFAULT_CONFIG_FILE") or ""


def demo_settings(options: Mapping[str, object], environ: Mapping[str, str]) -> DemoSettings:
    """Read the settings of the demonstration."""
    given = source.Source(options, environ)
    return DemoSettings(
        spec=given.text("simulate", default="8xA100-SXM4-40GB"),
        scenario=given.text("scenario", default="first-layout"),
        is_real_time=given.switch("real-time"),
        is_kept=given.switch("keep"),
        colour=colour(given, environ),
        is_debug=given.switch("debug", variable="MIG_PARTED_DEBUG"),
    )


def _policy(given: source.Source) -> policies.Policy:
    drain = given.choice("drain-policy", policies.Drain, default=policies.Drain.AFFECTED)
    is_forced = given.switch("force-drain")
    if is_forced and drain is policies.Drain.NONE:
        raise errors.UsageError(
            "--force-drain contradicts --drain-policy none, which sends nobody away"
        )
    return policies.Policy(
        drain=drain,
        strategy=given.choice(
            "drain-strategy", policies.DrainStrategy, default=policies.DrainStrategy.ROLLING
        ),
        is_forced=is_forced,
        plugin_configs=policies.parse_plugin_configs(
            given.text("plugin-configs"), origin="--plugin-configs"
        ),
    )


def _default_state(spec: str, environ: Mapping[str, str]) -> pathlib.Path:
    """Return a file of the user's own, one for each simulated node."""
    base = environ.get("XDG_STATE_HOME")
    home = environ.get("HOME")
    if base:
        root = pathlib.Path(base)
    elif home:
        root = pathlib.Path(home) / ".local" / "state"
    else:
        raise errors.UsageError(
            "neither XDG_STATE_HOME nor HOME says where to keep simulated GPUs; "
            "give --simulate-state"
        )
    name = re.sub(r"[^A-Za-z0-9.+_-]+", "_", spec)
    return root / "mig-manager" / f"sim-{name}.json"
