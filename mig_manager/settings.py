"""Settings: frozen values made from a command line over environment variables over defaults.

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

from mig_manager import errors, peer, source
from mig_manager.core import policy as policies

_PACKAGE = pathlib.Path(__file__).parent
_LEAST_PAUSE_S = 0.001
"""A pause of nothing at all would keep a core busy."""


class OutputFormat(enum.Enum):
    """How a command answers."""

    TEXT = "text"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


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
    simulate_spec: str | None = None
    """Node to simulate, such as ``8xA100-SXM4-40GB`` or ``4xA100-SXM4-80GB+2xA30``.
    None with a state file: carry on with what that file has."""
    simulate_state: pathlib.Path | None = None
    """File that keeps the simulated GPUs between commands; None: the GPUs are real."""
    is_fresh: bool = False
    """Whether to forget the state file and start with MIG off."""

    @property
    def is_simulated(self) -> bool:
        """Whether no hardware is touched."""
        return self.simulate_state is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommandSettings:
    """Settings of one command at a shell; each command reads what concerns it."""

    gpus: GpuAccess
    is_debug: bool
    """Whether to log everything and to show tracebacks of bugs."""
    colour: Colour
    output_format: OutputFormat
    config_file: str | None
    """Config document; ``-`` is standard input, None the one that comes with the program."""
    layouts: tuple[str, ...]
    """Names of layouts, as positional arguments or by ``-c``; none: the document's only one."""
    config_label: str
    """Name that ``export`` gives to the layout it writes."""
    products: tuple[str, ...]
    """Products that ``validate`` checks against, as globs; none: the GPUs of this machine."""
    hooks_file: str | None
    """The peer's hooks; None or empty: no hooks."""
    is_mode_only: bool
    """Whether only MIG mode counts."""
    is_reset_skipped: bool
    """Whether a change that resets a GPU is refused."""
    is_valid_config_only: bool
    """Whether ``assert`` only checks that the document is good and has the layout."""
    in_use_timeout_s: float
    """How long a GPU or instance that is in use is tried again; seconds."""
    pod_resources_socket: pathlib.Path | None
    """Kubelet that ``plan`` asks for the holders of devices; None: nobody is asked."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of the agent; durations in seconds."""

    node_name: str
    """The node that this agent serves."""
    config_file: pathlib.Path
    """Config document; by default the one that comes with the program."""
    kubeconfig: pathlib.Path | None
    """None: the credentials of the pod's ServiceAccount."""
    gpus: GpuAccess
    driver_roots: tuple[str, ...]
    """File systems with a driver, to look for NVML's library where the loader finds none."""
    advertises_simulated: bool
    """Whether to tell the scheduler of simulated GPUs, as a device plugin would of real ones."""
    pod_resources_socket: pathlib.Path
    """Kubelet's PodResources socket."""
    policy: policies.Policy
    """Who leaves for a change, and which plugin config goes with which layout."""
    extra_clients_file: pathlib.Path | None
    """The table of the owner's own GPU daemons; None: there are none."""
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
    not_supported: tuple[str, ...]
    """Options of NVIDIA's agent that were given and ask for what this one does not do."""


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
        UsageError: They are real and simulated at once, or nothing says where to keep them.
    """
    given = source.Source(options, environ)
    spec = given.text("simulate") or None
    state = given.path("simulate-state")
    if given.text("library-path") and (spec or state):
        raise errors.UsageError("simulated GPUs need no --library-path; give one or the other")
    if spec and state is None:
        state = _default_state(spec, environ)
    return GpuAccess(
        library_path=given.text("library-path") or None,
        simulate_spec=spec,
        simulate_state=state,
        is_fresh=given.switch("fresh"),
    )


def command_settings(options: Mapping[str, object], environ: Mapping[str, str]) -> CommandSettings:
    """Read the settings of a command at a shell.

    Raises:
        UsageError: A value cannot be used, or contradicts another.
    """
    given = source.Source(options, environ)
    return CommandSettings(
        gpus=gpu_access(options, environ),
        is_debug=given.switch("debug", variable="MIG_PARTED_DEBUG"),
        colour=_colour(given, environ),
        output_format=_output_format(options, given),
        config_file=_config_file(options, given),
        layouts=_layouts(options, given),
        config_label=given.text(
            "config-label", variable="MIG_PARTED_CONFIG_LABEL", default="current"
        ),
        products=_texts(options, "gpu"),
        hooks_file=given.text("hooks-file", variable="MIG_PARTED_HOOKS_FILE") or None,
        is_mode_only=given.switch("mode-only", variable="MIG_PARTED_MODE_CHANGE_ONLY"),
        is_reset_skipped=given.switch("skip-reset", variable="MIG_PARTED_SKIP_RESET"),
        is_valid_config_only=given.switch("valid-config", variable="MIG_PARTED_VALID_CONFIG"),
        in_use_timeout_s=given.seconds("in-use-timeout-s", default=30.0),
        pod_resources_socket=given.path("pod-resources-socket"),
    )


def agent_settings(options: Mapping[str, object], environ: Mapping[str, str]) -> AgentSettings:
    """Read the settings of the agent.

    Raises:
        UsageError: The node's name is missing, or a value cannot be used.
    """
    given = source.Source(options, environ)
    name = given.text("node-name", variable="NODE_NAME")
    if not name:
        raise errors.UsageError("the agent must know its node: give --node-name or set NODE_NAME")
    in_use_timeout_s = given.seconds("in-use-timeout-s", default=30.0)
    gpu_timeout_s = given.seconds("gpu-timeout-s", default=120.0)
    if in_use_timeout_s >= gpu_timeout_s:
        raise errors.UsageError(
            f"--in-use-timeout-s {in_use_timeout_s:g} must be less than --gpu-timeout-s "
            f"{gpu_timeout_s:g}, after which the operation is killed"
        )
    gpus = gpu_access(options, environ)
    advertises_simulated = given.switch("advertise-simulated")
    if advertises_simulated and not gpus.is_simulated:
        raise errors.UsageError(
            "--advertise-simulated goes with --simulate alone: real GPUs have a device plugin"
        )
    return AgentSettings(
        node_name=name,
        config_file=_agent_config_file(given, environ),
        kubeconfig=given.path("kubeconfig", variable="KUBECONFIG"),
        gpus=gpus,
        driver_roots=_driver_roots(given),
        advertises_simulated=advertises_simulated,
        pod_resources_socket=given.path("pod-resources-socket") or _pod_resources_socket(given),
        policy=_policy(given),
        extra_clients_file=given.path("extra-clients-file"),
        drain_timeout_s=given.seconds("drain-timeout-s", default=300.0),
        monitor_timeout_s=given.seconds("monitor-timeout-s", default=60.0),
        plugin_timeout_s=given.seconds("plugin-timeout-s", default=300.0),
        in_use_timeout_s=in_use_timeout_s,
        gpu_timeout_s=gpu_timeout_s,
        retry_initial_s=given.seconds("retry-initial-s", default=5.0, least=_LEAST_PAUSE_S),
        retry_max_s=given.seconds("retry-max-s", default=300.0, least=_LEAST_PAUSE_S),
        poll_interval_s=given.seconds("poll-interval-s", default=1.0, least=_LEAST_PAUSE_S),
        health_address=given.text("health-address"),
        health_port=given.port("health-port"),
        log_level=LogLevel.DEBUG
        if given.switch("debug", variable="MIG_PARTED_DEBUG")
        else given.choice("log-level", LogLevel, default=LogLevel.INFO),
        log_format=given.choice("log-format", LogFormat, default=LogFormat.JSON),
        not_needed=peer.given_options(given, is_needed=False),
        not_supported=peer.given_options(given, is_needed=True),
    )


def demo_settings(options: Mapping[str, object], environ: Mapping[str, str]) -> DemoSettings:
    """Read the settings of the demonstration."""
    given = source.Source(options, environ)
    return DemoSettings(
        spec=given.text("simulate", default="8xA100-SXM4-40GB"),
        scenario=given.text("scenario", default="first-layout"),
        is_real_time=given.switch("real-time"),
        is_kept=given.switch("keep"),
        colour=_colour(given, environ),
        is_debug=given.switch("debug"),
    )


def _agent_config_file(given: source.Source, environ: Mapping[str, str]) -> pathlib.Path:
    """Return the document to serve; the operator names a fallback in a variable of its own."""
    fallback = environ.get("DEFAULT_CONFIG_FILE")
    return given.path("config-file", variable="CONFIG_FILE") or (
        pathlib.Path(fallback) if fallback else packaged_config()
    )


def _driver_roots(given: source.Source) -> tuple[str, ...]:
    """Return where a driver may be: as seen in a container before as seen on the host."""
    roots = (
        given.text("driver-root-ctr-path", variable="DRIVER_ROOT_CTR_PATH"),
        given.text("nvidia-driver-root", variable="NVIDIA_DRIVER_ROOT"),
    )
    return tuple(dict.fromkeys(root for root in roots if root))


def _pod_resources_socket(given: source.Source) -> pathlib.Path:
    """Return kubelet's socket where it usually is, or below a mount of the host's root.

    The GPU operator mounts the host's root, at NVIDIA's default, and not kubelet's folder. The
    folder decides and not the socket, which is away while kubelet restarts.
    """
    usual = pathlib.Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    host = given.path("host-root-mount", variable="HOST_ROOT_MOUNT") or pathlib.Path("/host")
    below = host / usual.relative_to("/")
    return below if below.parent.is_dir() and not usual.parent.is_dir() else usual


def _policy(given: source.Source) -> policies.Policy:
    drain = given.choice("drain-policy", policies.Drain, default=policies.Drain.AFFECTED)
    is_forced = given.switch("force-drain")
    if is_forced and drain is policies.Drain.NONE:
        raise errors.UsageError(
            "--force-drain contradicts --drain-policy none, which sends nobody away"
        )
    return policies.Policy(
        drain=drain,
        is_forced=is_forced,
        plugin_configs=policies.parse_plugin_configs(
            given.text("plugin-configs"), origin="--plugin-configs"
        ),
    )


def _colour(given: source.Source, environ: Mapping[str, str]) -> Colour:
    is_unwanted = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
    return given.choice("color", Colour, default=Colour.NEVER if is_unwanted else Colour.AUTO)


def _output_format(options: Mapping[str, object], given: source.Source) -> OutputFormat:
    """Return the format; the peer's variable speaks of ``export`` alone, which writes YAML."""
    is_export = options.get("command") == "export"
    wanted = given.choice(
        "output-format",
        OutputFormat,
        variable="MIG_PARTED_OUTPUT_FORMAT" if is_export else "",
        default=OutputFormat.YAML if is_export else OutputFormat.TEXT,
    )
    if is_export and wanted not in (OutputFormat.JSON, OutputFormat.YAML):
        raise errors.UsageError(f"export writes json or yaml, not {wanted.value}")
    return wanted


def _config_file(options: Mapping[str, object], given: source.Source) -> str | None:
    # An unset shell variable must not quietly become the document that comes with the program.
    if options.get("config_file") == "":
        raise errors.UsageError("-f names no file; leave it out for the program's own layouts")
    return given.text("config-file", variable="MIG_PARTED_CONFIG_FILE") or None


def _layouts(options: Mapping[str, object], given: source.Source) -> tuple[str, ...]:
    """Return the layouts named; an explicit one outdoes the variable."""
    positional = _texts(options, "layout")
    selected = options.get("selected_config")
    if positional and selected and positional != (selected,):
        raise errors.UsageError(
            f"-c names layout {selected!r} and the command line {positional[0]!r}; name one"
        )
    if positional:
        return positional
    name = (
        str(selected)
        if selected is not None
        else given.text("selected-config", variable="MIG_PARTED_SELECTED_CONFIG")
    )
    return (name,) if name else ()


def _texts(options: Mapping[str, object], name: str) -> tuple[str, ...]:
    given = options.get(name)
    if given is None:
        return ()
    return tuple(str(item) for item in given) if isinstance(given, list) else (str(given),)


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
