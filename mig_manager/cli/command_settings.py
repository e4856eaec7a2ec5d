"""Settings of a command at a shell; names and variables of ``nvidia-mig-parted`` are honoured."""

import dataclasses
import enum
import pathlib
from collections.abc import Mapping

from mig_manager import errors
from mig_manager.agent import settings
from mig_manager.core.host import host_settings
from mig_manager.core.options import source

_JOURNAL_FILE = pathlib.Path("/var/lib/mig-manager/journal.json")
"""On a disk: a journal is for the loss of power, too."""


_DOCUMENT_WRITERS = frozenset({"export", "generate-config"})
_STANDARD_OUTPUT = pathlib.Path("-")


class OutputFormat(enum.Enum):
    """How a command answers."""

    TEXT = "text"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommandSettings:
    """Settings of one command at a shell; each command reads what concerns it."""

    gpus: settings.GpuAccess
    is_debug: bool
    """Whether to log everything and to show tracebacks of bugs."""
    colour: settings.Colour
    output_format: OutputFormat
    config_file: str | None
    """Config document; ``-`` is standard input, None the one that comes with the program."""
    layouts: tuple[str, ...]
    """Names of layouts, as positional arguments or by ``-c``; none: the document's only one."""
    is_lenient: bool
    """Whether what the peer passes over in silence passes, with a warning."""
    config_label: str
    """Name that ``export`` gives to the layout it writes."""
    products: tuple[str, ...]
    """Products that ``validate`` and ``generate-config`` are about, as globs; none: the GPUs of
    this machine."""
    has_all_maximal: bool
    """Whether ``generate-config`` writes all mixed layouts, too."""
    output_file: pathlib.Path | None
    """Where ``generate-config`` writes; None: standard output."""
    has_placements: bool
    """Whether ``export`` writes where instances lie."""
    has_files: bool
    """Whether the arguments of ``validate`` are documents rather than layouts."""
    is_portable: bool
    """Whether ``validate`` tells what the peer would not understand."""
    must_fit: bool
    """Whether ``validate`` fails for a layout that fits only GPUs it was not asked about."""
    hooks_file: str | None
    """The owner's programs around a change; None: no hooks."""
    hook_timeout_s: float
    """How long a hook may take that does not say so itself; seconds."""
    search_path: str
    """Where a hook's program is looked for, as in ``PATH``."""
    checkpoint_file: str | None
    """What ``checkpoint`` writes and ``restore`` reads."""
    is_mode_only: bool
    """Whether only MIG mode counts."""
    is_reset_skipped: bool
    """Whether a change that resets a GPU is refused."""
    is_valid_config_only: bool
    """Whether ``assert`` only checks that the document is good and has the layout."""
    in_use_timeout_s: float
    """How long a GPU or instance that is in use is tried again; seconds."""
    idle_timeout_s: float
    """How long to wait, before anything is destroyed, for processes that use it; seconds."""
    gpu_timeout_s: float
    """How long one operation on the GPUs may take before it is given up; seconds."""
    lock_file: pathlib.Path
    """Keeps every other manager of this node off while a command changes the GPUs."""
    lock_timeout_s: float
    """How long to wait while another manager is at work; seconds."""
    journal_file: pathlib.Path
    """Where what the GPUs had is written down before they are changed."""
    proven_file: pathlib.Path
    """Where a layout is kept for the next boot once it is proven in force."""
    roots: host_settings.HostRoots
    """Where driver, devices and the host's tools are."""
    driver_timeout_s: float
    """How long ``boot`` waits for the driver to be loaded; seconds."""
    pod_resources_socket: pathlib.Path | None
    """Kubelet that ``plan`` asks for the holders of devices; None: nobody is asked."""


def command_settings(options: Mapping[str, object], environ: Mapping[str, str]) -> CommandSettings:
    """Read the settings of a command at a shell.

    Raises:
        UsageError: A value cannot be used, or contradicts another.
    """
    given = source.Source(options, environ)
    gpus = settings.gpu_access(options, environ)
    in_use_timeout_s, gpu_timeout_s = _timeouts(options, given)
    return CommandSettings(
        gpus=gpus,
        is_debug=given.switch("debug", variable="MIG_PARTED_DEBUG"),
        colour=settings.colour(given, environ),
        output_format=_output_format(options, given),
        config_file=_config_file(options, given, environ),
        layouts=_layouts(options, given),
        config_label=given.text(
            "config-label", variable="MIG_PARTED_CONFIG_LABEL", default="current"
        ),
        is_lenient=given.switch("lenient"),
        products=_texts(options, "gpu"),
        has_all_maximal=given.switch("all-maximal"),
        output_file=_output_file(given),
        has_placements=given.switch("placements"),
        has_files=given.switch("files"),
        is_portable=given.switch("portable"),
        must_fit=given.switch("must-fit"),
        hooks_file=given.text("hooks-file", variable="MIG_PARTED_HOOKS_FILE") or None,
        hook_timeout_s=given.seconds(
            "hook-timeout-s", default=300.0, least=settings.LEAST_PAUSE_S
        ),
        search_path=environ.get("PATH", ""),
        checkpoint_file=given.text("checkpoint-file", variable="MIG_PARTED_CHECKPOINT_FILE")
        or None,
        is_mode_only=given.switch("mode-only", variable="MIG_PARTED_MODE_CHANGE_ONLY"),
        is_reset_skipped=given.switch("skip-reset", variable="MIG_PARTED_SKIP_RESET"),
        is_valid_config_only=given.switch("valid-config", variable="MIG_PARTED_VALID_CONFIG"),
        in_use_timeout_s=in_use_timeout_s,
        # Nobody is there at boot to start it again.
        idle_timeout_s=in_use_timeout_s
        if options.get("command") == "boot"
        else given.seconds("wait-for-idle", default=0.0),
        gpu_timeout_s=gpu_timeout_s,
        lock_file=settings.lock_file(given, gpus),
        lock_timeout_s=given.seconds("lock-timeout-s", default=30.0),
        journal_file=journal_file(given, gpus),
        proven_file=settings.proven_file(given, gpus),
        roots=host_settings.host_roots(given),
        driver_timeout_s=given.seconds("driver-timeout-s", default=120.0),
        pod_resources_socket=given.path("pod-resources-socket"),
    )


def hook_variables(command: str, given: CommandSettings) -> Mapping[str, str]:
    """Return what hooks are told: the peer's options for the command, each by its variable.

    All of them, as there: what was not given is empty or ``false``.
    """
    told = {"MIG_PARTED_MODE_CHANGE_ONLY": str(given.is_mode_only).lower()}
    if command == "restore":
        return told | {"MIG_PARTED_CHECKPOINT_FILE": given.checkpoint_file or ""}
    return told | {
        "MIG_PARTED_CONFIG_FILE": given.config_file or str(settings.packaged_config()),
        "MIG_PARTED_SKIP_RESET": str(given.is_reset_skipped).lower(),
    }


def journal_file(given: source.Source, gpus: settings.GpuAccess) -> pathlib.Path:
    """Return where the journal of a command is; that of simulated GPUs beside their state."""
    return (
        given.path("journal-file") or gpus.beside_state(settings.JOURNAL_SUFFIX) or _JOURNAL_FILE
    )


def _timeouts(options: Mapping[str, object], given: source.Source) -> tuple[float, float]:
    """Return the patience with what is in use, which only changes need, and with NVML."""
    if options.get("command") in {"apply", "boot", "restore"}:
        return settings.gpu_timeouts(given)
    return 0.0, given.seconds("gpu-timeout-s", default=120.0, least=settings.LEAST_PAUSE_S)


def _output_format(options: Mapping[str, object], given: source.Source) -> OutputFormat:
    """Return the format; the peer's variable speaks only of commands that write documents."""
    command = str(options.get("command"))
    is_document = command in _DOCUMENT_WRITERS
    wanted = given.choice(
        "output-format",
        OutputFormat,
        variable="MIG_PARTED_OUTPUT_FORMAT" if is_document else "",
        default=OutputFormat.YAML if is_document else OutputFormat.TEXT,
    )
    if is_document and wanted not in (OutputFormat.JSON, OutputFormat.YAML):
        raise errors.UsageError(f"{command} writes json or yaml, not {wanted.value}")
    return wanted


def _output_file(given: source.Source) -> pathlib.Path | None:
    path = given.path("output-file", variable="MIG_PARTED_OUTPUT_FILE")
    return None if path == _STANDARD_OUTPUT else path


def _config_file(
    options: Mapping[str, object], given: source.Source, environ: Mapping[str, str]
) -> str | None:
    """Return the document named, or in the agent's pod the agent's.

    Not for a boot: what that brings back must not depend on a variable that other programs have.
    """
    named = given.text("config-file", variable="MIG_PARTED_CONFIG_FILE")
    if not named and options.get("command") != "boot":
        named = settings.agent_config_variable(environ)
    return named or None


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
