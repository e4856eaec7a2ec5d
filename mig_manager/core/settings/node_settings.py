"""Settings that the agent and the commands on a node share: the GPUs, files, and logs."""

import dataclasses
import enum
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from mig_manager import errors
from mig_manager.core.settings import host_settings, options

_LOCK_FILE = pathlib.Path("/run/mig-manager/lock")
"""On a file system that a reboot empties: no lock survives a reboot."""
# On a disk: they are read after a reboot or a loss of power.
_LAYOUT_FILE = pathlib.Path("/var/lib/mig-manager/verified-layout.json")
_JOURNAL_FILE = pathlib.Path("/var/lib/mig-manager/journal.json")
JOURNAL_SUFFIX = _JOURNAL_FILE.stem
LAYOUT_SUFFIX = _LAYOUT_FILE.stem
"""Suffixes of the files that a simulated node has beside its state."""
_SIMULATE_VARIABLES = "MIG_MANAGER_SIMULATE", "MIG_MANAGER_SIMULATE_STATE"
_LOADER_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD")  # variables of ld.so(8)
_FILES = "files"
DEBUG = options.Option(
    name="debug",
    short="d",
    help="log at debug level, such as each step of a change",
    variable="MIG_PARTED_DEBUG",
    parse=options.parse_switch,
    default=False,
)


class Colour(enum.Enum):
    """When to use ANSI colours."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class OutputFormat(enum.Enum):
    """How a command answers."""

    TEXT = "text"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_data(self) -> bool:
        """Whether the answer is for programs."""
        return self in (OutputFormat.JSON, OutputFormat.YAML)


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


COLOUR = options.choosing(
    "auto, always or never; auto is never where NO_COLOR is set",
    name="color",
    metavar="WHEN",
    default=Colour.AUTO,
)
HEALTH_ADDRESS = options.Option(
    help="address to serve them on",
    metavar="ADDRESS",
    default="",
    default_text="all addresses",
    group=options.METRICS,
)
LOG_LEVEL = options.choosing(
    "debug, info, warning or error", metavar="LEVEL", default=LogLevel.INFO, group=options.METRICS
)
LOG_FORMAT = options.choosing(
    "json or console", metavar="FORMAT", default=LogFormat.JSON, group=options.METRICS
)
"""Options that the services and the commands that start them share."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuAccess:
    """How to reach the GPUs, real or simulated."""

    simulate_spec: str | None = options.text(
        "simulate GPUs, such as 8xA100-SXM4-40GB, 4xA100-SXM4-80GB+2xA30, or those of a FILE.json "
        "that 'acceptance' wrote",
        name="simulate",
        metavar=options.SPEC,
        group=options.GPUS,
    )
    """None with a state file: the GPUs of that file."""
    simulate_state: pathlib.Path | None = options.path(
        "file that keeps the simulated GPUs between commands",
        default_text="one for each SPEC in the user's state directory",
        group=options.GPUS,
    )
    """None: the GPUs are real."""
    is_fresh: bool = options.switch(
        "reset the simulated GPUs to MIG off", name="fresh", group=options.GPUS
    )
    library_path: str | None = options.text(
        "NVML's library",
        metavar=options.FILE,
        default_text="libnvidia-ml.so.1",
        group=options.GPUS,
    )
    driver_roots: tuple[str, ...] = ()
    """Where to look for the library when the loader does not find the right one."""
    loader_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables of ``ld.so(8)``, which child processes and the driver's programs also need."""

    is_from_variable: bool = False
    """Whether a variable, which is easily forgotten, names simulated GPUs."""

    @property
    def is_simulated(self) -> bool:
        """Whether no hardware is touched."""
        return self.simulate_state is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentSettings:
    """How to read a layout file."""

    is_lenient: bool = options.switch(
        "warn instead of failing where nvidia-mig-parted says nothing: duplicate keys, filters "
        "and indices that match nothing",
        name="lenient",
    )


class GeneratedLayouts(enum.Enum):
    """How layouts generated from the GPUs combine with a layout file."""

    MERGE = "merge"  # add to an owner's layout file; override the default file
    ONLY = "only"
    """Replace the layout file; serve the default file if the driver lists no profiles."""
    OFF = "off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutSources(DocumentSettings):
    """Where the layouts of a node come from, besides the layout file, and how that is parsed.

    A command can have its own ``is_lenient`` beside the agent's.
    """

    generated_layouts: GeneratedLayouts = options.choice(
        "layouts generated from the GPUs: merge adds to the layout file, only replaces it, off",
        metavar="HOW",
        default=GeneratedLayouts.MERGE,
        group=options.LAYOUTS,
    )
    has_custom_layouts: bool = options.switch(
        "take layout 'custom' from the node's annotation mig-manager.io/layout",
        name="custom-layouts",
        group=options.LAYOUTS,
    )
    has_default_layouts: bool = False
    """Whether the layout file is the default file, which generated layouts override."""


class RepairPolicy(enum.Enum):
    """What the agent and ``boot`` do about GPUs with a fault."""

    OFF = "off"
    REPORT = "report"
    """Publish the condition ``GpuRecoveryNeeded`` and Events; ``boot``: write it to the log."""
    RESET = "reset"
    """Also reset a GPU that needs it, after evicting its pods, and restore its layout."""


REPAIR = options.choosing(
    "GPUs with a fault: report them, also reset them if that helps, or off",
    name="repair",
    metavar="HOW",
    default=RepairPolicy.REPORT,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangeTimeouts:
    """How long a change waits for other users of the GPUs; durations in seconds."""

    in_use_timeout_s: float = options.seconds(
        "how long to retry GPUs and instances that are in use",
        default=30.0,
        group=options.CHANGE,
    )
    lock_timeout_s: float = options.seconds(
        "how long to wait while another manager changes the GPUs; 0: not at all",
        default=30.0,
        group=options.CHANGE,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeSettings(DocumentSettings, ChangeTimeouts):
    """Settings that the agent and commands on a node share; durations in seconds."""

    hook_timeout_s: float = options.seconds(
        "how long a hook may take that has no time-out of its own",
        default=300.0,
        minimum=options.MIN_PAUSE_S,
        group=options.CHANGE,
    )
    lock_file: pathlib.Path = options.path(
        "lock that keeps two managers from changing one node's GPUs",
        default_text=str(_LOCK_FILE),
        group=_FILES,
    )
    verified_layout_file: pathlib.Path = options.path(
        "keeps the last verified layout for the next boot",
        default_text=str(_LAYOUT_FILE),
        group=_FILES,
    )
    gpu_timeout_s: float = options.seconds(
        "how long one operation on the GPUs may take",
        default=120.0,
        minimum=options.MIN_PAUSE_S,
        group=options.GPUS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSettings(NodeSettings):
    """Settings that commands on a node share; the journal of the agent is on the Node."""

    journal_file: pathlib.Path = options.path(
        "journal of a change, for the next command if this one is killed",
        default_text=str(_JOURNAL_FILE),
        group=_FILES,
    )


def gpu_access(source: options.Source, spelling: Callable[[str], str]) -> GpuAccess:
    """Read how to reach the GPUs.

    ``spelling`` returns the one spelling of a SPEC, for the name of its state file.

    Raises:
        UsageError: The options name real and simulated GPUs, no file can keep the simulated GPUs,
            or ``--fresh`` names no simulated GPUs.
    """
    values, environ = source.values(GpuAccess), source.environ
    spec, state = values["simulate_spec"], values["simulate_state"]
    if values["library_path"] and (spec or state):
        raise errors.UsageError("simulated GPUs need no --library-path; give one or the other")
    if spec and state is None:
        state = values["simulate_state"] = _default_state(spelling(spec), environ)
    if values["is_fresh"] and state is None:
        raise errors.UsageError(
            "--fresh resets simulated GPUs; name them with --simulate or --simulate-state"
        )
    return GpuAccess(
        **values,
        driver_roots=() if state else host_settings.library_roots(source),
        loader_variables={name: environ[name] for name in _LOADER_VARIABLES if environ.get(name)},
        is_from_variable=any(map(environ.get, _SIMULATE_VARIABLES)),
    )


def check_gpu_timeouts(in_use_timeout_s: float, gpu_timeout_s: float) -> None:
    """Raise ``UsageError`` if an operation would be killed while it retries."""
    if in_use_timeout_s >= gpu_timeout_s:
        raise errors.UsageError(
            f"--in-use-timeout-s {in_use_timeout_s:g} must be less than --gpu-timeout-s "
            f"{gpu_timeout_s:g}, after which the operation is killed"
        )


def node_files(values: Mapping[str, Any], gpus: GpuAccess) -> dict[str, pathlib.Path]:
    """Return the files of these settings; by default, for simulated GPUs, beside their state."""
    state = gpus.simulate_state
    usual = {
        "lock_file": ("manager.lock", _LOCK_FILE),
        "journal_file": (JOURNAL_SUFFIX, _JOURNAL_FILE),
        "verified_layout_file": (LAYOUT_SUFFIX, _LAYOUT_FILE),
    }
    return {
        name: values[name] or (state.with_name(f"{state.name}.{suffix}") if state else default)
        for name, (suffix, default) in usual.items()
        if name in values
    }


def _default_state(spec: str, environ: Mapping[str, str]) -> pathlib.Path:
    """Return a file of the user, one for each simulated node."""
    base, home = environ.get("XDG_STATE_HOME"), environ.get("HOME")
    if not base and not home:
        raise errors.UsageError(
            "neither XDG_STATE_HOME nor HOME says where to keep simulated GPUs; "
            "give --simulate-state"
        )
    root = pathlib.Path(base) if base else pathlib.Path(str(home)) / ".local" / "state"
    name = re.sub(r"[^A-Za-z0-9.+_-]+", "_", spec)
    return root / "mig-manager" / f"sim-{name}.json"
