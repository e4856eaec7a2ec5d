"""Settings of people's commands; options and variables of ``nvidia-mig-parted`` are accepted."""

import dataclasses
import enum
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

from mig_manager import errors
from mig_manager.adapters.host import process
from mig_manager.agent import settings
from mig_manager.core import host_settings, node_settings, options

OUTPUT = "output"  # heading in help
_PROC = pathlib.Path("/proc")
_STANDARD_OUTPUT = pathlib.Path("-")


_Settings = TypeVar("_Settings", bound="CommandSettings")


class OutputFormat(enum.Enum):
    """How a command answers."""

    TEXT = "text"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


def _format(words: str, commands: str = "", **more: Any) -> options.Option:
    default = OutputFormat(words.split(maxsplit=1)[0])
    return options.choosing(
        more.pop("help", words.replace(" ", "|")),
        name="output-format",
        short="o",
        metavar="FORMAT",
        words=words,
        default=default,
        commands=commands,
        group=OUTPUT,
        **more,
    )


_LAYOUT = (
    options.Option(
        name="layout",
        help="name of the layout (default: the only one of the file)",
        metavar=options.LAYOUT,
        commands="plan apply assert",
        is_operand=True,
        has_variable=False,
    ),
    options.Option(
        name="layout",
        help="layouts to check (default: all in the file)",
        metavar=options.LAYOUT,
        commands="validate",
        is_operand=True,
        has_variable=False,
        is_repeatable=True,
    ),
)
WATCH = options.Option(
    name="watch",
    help="refresh until q is pressed; in a pipe, a line for each change",
    short="w",
    parse=options.parse_switch,
    default=False,
    commands="status",
)
_SELECTED_CONFIG = options.Option(
    name="selected-config",
    help="name of the layout; 'boot' uses it only if no layout was applied before",
    short="c",
    metavar=options.LAYOUT,
    variable="MIG_PARTED_SELECTED_CONFIG",
    commands="plan apply assert boot",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TerminalSettings:
    """Settings that every command for people has."""

    colour: node_settings.Colour = options.declared(
        dataclasses.replace(node_settings.COLOUR, group=OUTPUT)
    )
    is_debug: bool = options.declared(dataclasses.replace(node_settings.DEBUG, group=OUTPUT))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings(TerminalSettings):
    """How a command answers."""

    output_format: OutputFormat = options.declared(
        _format("text json yaml", "apply assert boot restore validate doctor rollout"),
        _format(
            "text wide json yaml",
            "status",
            default_text="text; wide adds ids, UUIDs and the pods and processes using the GPUs",
        ),
        _format("text wide json yaml", "plan", default_text="text; wide lists every instance"),
        _format("yaml json", "export generate-config", variable="MIG_PARTED_OUTPUT_FORMAT"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandSettings(AnswerSettings, node_settings.NodeSettings):
    """Settings of a command on this machine's GPUs; every command reads a part of them."""

    layouts: tuple[str, ...] = options.nested((*_LAYOUT, _SELECTED_CONFIG))
    """None: the document's only one."""
    config_file: str | None = options.text(
        "config document, '-' for standard input",
        short="f",
        metavar=options.FILE,
        variable="MIG_PARTED_CONFIG_FILE",
        default_text="CONFIG_FILE except for 'boot', or the built-in one",
        commands="plan apply assert boot validate completion",
    )
    """None: the built-in one."""
    pods_layouts: settings.Limits | None = None
    """How this pod's agent serves its document; None: the document is not the agent's."""
    is_mode_only: bool = options.switch(
        "only MIG mode, no instances",
        name="mode-only",
        short="m",
        variable="MIG_PARTED_MODE_CHANGE_ONLY",
        commands="apply assert restore",
    )
    is_reset_skipped: bool = options.switch(
        "leave a MIG mode change pending if it needs a GPU reset; with --mode-only this is no "
        "failure",
        name="skip-reset",
        short="s",
        variable="MIG_PARTED_SKIP_RESET",
        commands="apply",
    )
    is_dry_run: bool = options.switch(
        "show what would change, like 'plan', and change nothing",
        name="dry-run",
        commands="apply",
    )
    is_watched: bool = options.declared(WATCH)
    is_valid_config_only: bool = options.switch(
        "only check that the file is valid and has the layout",
        name="valid-config",
        short="a",
        variable="MIG_PARTED_VALID_CONFIG",
        commands="assert",
    )
    config_label: str = options.text(
        "name of the exported layout",
        short="l",
        variable="MIG_PARTED_CONFIG_LABEL",
        default="current",
        commands="export",
    )
    has_placements: bool = options.switch(
        "write each instance's placement, as in 1g.5gb@4, which nvidia-mig-parted cannot read",
        name="placements",
        commands="export",
    )
    output_file: pathlib.Path | None = options.path(
        "file to write atomically",
        short="f",
        variable="MIG_PARTED_OUTPUT_FILE",
        default_text="standard output",
        commands="generate-config",
    )
    has_all_maximal: bool = options.switch(
        "add every maximal mixed layout",
        name="all-maximal",
        commands="generate-config",
    )
    checkpoint_file: str | None = options.text(
        "the checkpoint, in nvidia-mig-parted's format (required)",
        short="f",
        metavar=options.FILE,
        variable="MIG_PARTED_CHECKPOINT_FILE",
        commands="checkpoint restore",
    )
    products: tuple[str, ...] = options.declared(
        options.Option(
            name="gpu",
            help="a GPU product, such as 'NVIDIA H100 80GB HBM3' or '*A100*'; repeatable; needs "
            "no GPU",
            default_text="this machine's GPUs",
            metavar=options.PRODUCT,
            default=(),
            commands="validate generate-config",
            is_repeatable=True,
            has_variable=False,
        )
    )
    must_fit: bool = options.switch(
        "also fail for layouts that fit only other GPU models; named layouts must always fit",
        commands="validate",
    )
    is_portable: bool = options.switch(
        "fail if nvidia-mig-parted does not understand the file, and show where; checks only GPUs "
        "named with --gpu",
        name="portable",
        commands="validate",
    )
    has_files: bool = options.switch(
        "the operands are documents, not layouts, as pre-commit passes them",
        name="files",
        commands="validate",
    )
    hooks_file: str | None = options.text(
        "programs to run before, during and after the change; boot runs none",
        short="k",
        metavar=options.FILE,
        variable="MIG_PARTED_HOOKS_FILE",
        commands="apply boot restore",
    )
    driver_timeout_s: float = options.seconds(
        "how long to wait for the driver to be loaded", default=120.0, commands="boot"
    )
    idle_timeout_s: float = options.seconds(
        "how long to wait for processes that use instances to be destroyed, before anything is "
        "destroyed",
        name="wait-for-idle",
        default=0.0,
        group=node_settings.CHANGE,
        commands="apply restore",
    )
    pod_resources_socket: pathlib.Path | None = options.path(
        "ask this kubelet which pods use the devices, such as "
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        default_text="none; 'status --watch' asks kubelet anyway",
        commands="acceptance plan status",
    )
    gpus: node_settings.GpuAccess = options.nested(node_settings.GpuAccess)
    search_path: str  # where to search for a hook's program, as in ``PATH``
    roots: host_settings.HostRoots = options.nested(
        host_settings.RootOptions, "driver-root", group="GPUs"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorSettings(AnswerSettings, node_settings.NodeSettings):
    """Settings of ``doctor``."""

    node_name: str = options.text(
        "this node in the cluster", short="n", variable="NODE_NAME", default=""
    )
    """Empty: the node is not checked."""
    kubeconfig: pathlib.Path | None = options.path(
        "credentials",
        variable="KUBECONFIG",
        default_text="the pod's ServiceAccount; without credentials, the cluster is not checked",
    )
    config_file: pathlib.Path = options.path(
        "config document to check", short="f", variable="CONFIG_FILE"
    )
    pod_resources_socket: pathlib.Path = options.path(
        "kubelet's PodResources socket",
        default_text="/var/lib/kubelet/pod-resources/kubelet.sock",
    )
    timeout_s: float = options.seconds("how long a check may take", default=10.0, least=0.1)
    own_pod_uid: str | None = options.text(
        "UID of this pod", name="pod-uid", variable="POD_UID", has_flag=False
    )
    gpus: node_settings.GpuAccess = options.nested(node_settings.GpuAccess)
    proc: pathlib.Path | None  # None: the kernel knows nothing of simulated GPUs
    dev: pathlib.Path = options.nested(host_settings.RootOptions, "driver-root", group="GPUs")
    has_cluster: bool  # whether a missing cluster is a failure
    has_kubelet: bool  # whether a missing kubelet is a failure


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceSettings(CommandSettings):
    """Settings of ``acceptance``."""

    answer_file: pathlib.Path | None = options.path(
        "file to write, '-' for standard output",
        name="output",
        short="o",
        default_text="mig-manager-acceptance.json in this folder",
        has_variable=False,
    )
    row_source: pathlib.Path | None = options.path(
        "only print the catalogue's rows for the GPUs of such a FILE, for a review",
        name="as-catalogue-row",
        has_variable=False,
    )
    changed_gpu: str | None = options.text(
        "also play a course of changes on this idle GPU, and restore it",
        name="change-gpu",
        metavar="UUID",
        has_variable=False,
        group=node_settings.CHANGE,
    )
    is_confirmed: bool = options.switch(
        "do not ask before the course", name="yes", has_variable=False, group=node_settings.CHANGE
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleSettings(TerminalSettings):
    """Settings of ``support-bundle``."""

    output_file: pathlib.Path | None = options.path(
        "archive to write, '-' for standard output",
        short="o",
        default_text="mig-manager-support-NODE-TIME.tar.gz in this folder",
    )
    doctor: DoctorSettings = options.nested(
        tuple(
            # Drop the list of commands: this command has all the options.
            dataclasses.replace(each, commands="")
            for each in options.of(DoctorSettings, "doctor")
            if each not in options.of(AnswerSettings)
        )
    )
    roots: host_settings.HostRoots  # where the machine's programs are


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoSettings(TerminalSettings):
    """Settings of the demonstration."""

    scenario: str = options.text(
        "first-layout, one-slice, does-not-fit or budget",
        words=("first-layout", "one-slice", "does-not-fit", "budget"),
        default="first-layout",
    )
    spec: str | None = options.text(
        "node to simulate",
        name="simulate",
        metavar=options.SPEC,
        default_text="8xA100-SXM4-40GB, or 2xA100-SXM4-40GB with --nodes",
    )
    nodes: int = options.count(
        "simulate a cluster of this many nodes, at least 5: a rollout, its undo, and the "
        "partitioner; without it one node",
        most=20,
        what="number of nodes",
    )
    is_real_time: bool = options.switch(
        "let the simulated driver take as long as a real one", name="real-time"
    )
    is_kept: bool = options.switch(
        "keep the node up at the end, for kubectl, until Ctrl-C", name="keep"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionSettings:
    """Settings of ``completion``."""

    shell: str | None = options.text(
        "bash, zsh or fish",
        metavar="SHELL",
        words=("bash", "zsh", "fish"),
        has_variable=False,
        is_operand=True,
    )
    lists_layouts: bool = options.switch(
        "list the document's layouts instead, one a line, as the scripts do",
        name="layouts",
        has_variable=False,
    )
    config_file: str | None = options.nested(CommandSettings, "config-file", "lenient")
    is_debug: bool = options.declared(node_settings.DEBUG)


def command_settings(parsed: Mapping[str, object], environ: Mapping[str, str]) -> CommandSettings:
    """Read the settings of a command on this machine's GPUs.

    Raises:
        UsageError: A value cannot be used, or contradicts another.
    """
    return _command_settings(CommandSettings, parsed, environ)


def _command_settings(
    kind: type[_Settings], parsed: Mapping[str, object], environ: Mapping[str, str]
) -> _Settings:
    source = options.Source(parsed, environ)
    values = source.values(kind)
    gpus = node_settings.gpu_access(source)
    values |= node_settings.node_files(source, gpus) | {"colour": colour(source)}
    match source.command:
        case "boot":
            # At boot, no person can run it again.
            values["idle_timeout_s"] = values["in_use_timeout_s"]
        case "acceptance" | "apply" | "restore":
            pass
        case _:
            values["in_use_timeout_s"] = 0.0  # only a change retries
    node_settings.check_gpu_timeouts(values["in_use_timeout_s"], values["gpu_timeout_s"])
    if values["config_file"] is None and source.command not in ("acceptance", "boot"):
        # A boot must not depend on another program's variable.
        of_pod = settings.layouts_of_pod(source, is_lenient=values["is_lenient"])
        if of_pod:
            values["config_file"], values["pods_layouts"] = of_pod
    if values["output_file"] == _STANDARD_OUTPUT:
        values["output_file"] = None
    return kind(
        **values,
        layouts=_layouts(source),
        gpus=gpus,
        search_path=environ.get("PATH", ""),
        roots=host_settings.host_roots(source),
    )


def hook_variables(command: str, chosen: CommandSettings) -> Mapping[str, str]:
    """Return the variables that mig-parted sets for hooks: its options for the command.

    As in mig-parted, a missing option is empty or ``false``.
    """
    variables = {"MIG_PARTED_MODE_CHANGE_ONLY": str(chosen.is_mode_only).lower()}
    if command == "restore":
        return variables | {"MIG_PARTED_CHECKPOINT_FILE": chosen.checkpoint_file or ""}
    return variables | {
        "MIG_PARTED_CONFIG_FILE": chosen.config_file or str(process.packaged_config()),
        "MIG_PARTED_SKIP_RESET": str(chosen.is_reset_skipped).lower(),
    }


def doctor_settings(parsed: Mapping[str, object], environ: Mapping[str, str]) -> DoctorSettings:
    """Read the settings of ``doctor``.

    Raises:
        UsageError: A value cannot be used.
    """
    source = options.Source(parsed, environ, command="doctor")
    values = source.values(DoctorSettings)
    gpus = node_settings.gpu_access(source)
    has_kubelet = values["pod_resources_socket"] is not None
    values |= node_settings.node_files(source, gpus) | {"colour": colour(source)}
    values["config_file"] = settings.agent_config_file(source)
    if not has_kubelet:
        values["pod_resources_socket"] = host_settings.pod_resources_socket(source)
    return DoctorSettings(
        **values,
        gpus=gpus,
        proc=None if gpus.is_simulated else _PROC,
        dev=host_settings.host_roots(source).dev_here / "dev",
        has_cluster=bool(parsed.get("node_name") or parsed.get("kubeconfig")),
        has_kubelet=has_kubelet,
    )


def acceptance_settings(
    parsed: Mapping[str, object], environ: Mapping[str, str]
) -> AcceptanceSettings:
    """Read the settings of ``acceptance``; raises as ``command_settings``."""
    return _command_settings(AcceptanceSettings, parsed, environ)


def bundle_settings(parsed: Mapping[str, object], environ: Mapping[str, str]) -> BundleSettings:
    """Read the settings of ``support-bundle``.

    Raises:
        UsageError: A value cannot be used.
    """
    source = options.Source(parsed, environ, command="support-bundle")
    values = source.values(BundleSettings) | {"colour": colour(source)}
    doctor = doctor_settings(parsed, environ)
    home, is_in_pod = environ.get("HOME"), "KUBERNETES_SERVICE_HOST" in environ
    if doctor.node_name and doctor.kubeconfig is None and home and not is_in_pod:
        usual = pathlib.Path(home) / ".kube" / "config"
        doctor = dataclasses.replace(doctor, kubeconfig=usual)
    return BundleSettings(**values, doctor=doctor, roots=host_settings.host_roots(source))


def demo_settings(parsed: Mapping[str, object], environ: Mapping[str, str]) -> DemoSettings:
    """Read the settings of the demonstration."""
    source = options.Source(parsed, environ, command="demo")
    return DemoSettings(**source.values(DemoSettings) | {"colour": colour(source)})


def colour(source: options.Source) -> node_settings.Colour:
    """Return when to use colours; by default only if the terminal supports them."""
    (option,) = (each for each in options.of(TerminalSettings) if each.name == "color")
    environ = source.environ
    if source.is_set(option) or not (environ.get("NO_COLOR") or environ.get("TERM") == "dumb"):
        colour: node_settings.Colour = source.get(option)
        return colour
    return node_settings.Colour.NEVER


def _layouts(source: options.Source) -> tuple[str, ...]:
    """Return the named layouts; the command line overrides the variable."""
    operand, selected = source.parsed.get("layout"), source.parsed.get("selected_config")
    operands = tuple(operand) if isinstance(operand, list) else (operand,) if operand else ()
    if operands and selected and operands != (selected,):
        raise errors.UsageError(
            f"-c names layout {selected!r} and the command line {operands[0]!r}; name one"
        )
    name = selected if selected is not None else source.get(_SELECTED_CONFIG)
    return operands or ((str(name),) if name else ())
