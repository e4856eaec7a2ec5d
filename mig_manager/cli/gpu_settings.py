"""What the settings of commands on this machine's GPUs share.

Options and variables of ``nvidia-mig-parted`` are accepted.
"""

import pathlib
from typing import Any

from mig_manager import errors
from mig_manager.agent import agent_settings
from mig_manager.cli.toolkit import command_settings
from mig_manager.core.settings import host_settings, node_settings, options

# Names for ``takes``.
LAYOUT = ("layout", "selected-config", "config-file")  # of a command for one layout
PODS = ("pod-resources-socket", "ignore-pods")  # of a command that may change GPUs of pods
CHANGE = (  # of one that changes GPUs
    "in-use-timeout-s",
    "lock-timeout-s",
    "lock-file",
    "journal-file",
    "verified-layout-file",
)
GPUS = ("simulate", "simulate-state", "fresh", "library-path", "driver-root")  # that finds GPUs
ON_GPUS = (*GPUS, "gpu-timeout-s", "color", "debug")  # of every command on GPUs
_SELECTED_CONFIG = options.Option(
    name="selected-config",
    help="name of the layout",
    short="c",
    metavar=options.LAYOUT,
    variable="MIG_PARTED_SELECTED_CONFIG",
)


class GpuSettings(command_settings.AnswerSettings, node_settings.LocalSettings):
    """Settings of a command on this machine's GPUs, which takes a part of the options."""

    command: str
    layouts: tuple[str, ...] = options.declare_from(
        (
            options.Option(
                name="layout",
                help="name of the layout (default: the only one of the file)",
                metavar=options.LAYOUT,
                is_operand=True,
                has_variable=False,
            ),
            _SELECTED_CONFIG,
        )
    )
    """Empty: the document's only one."""
    config_file: str | None = options.text(
        "layout file, '-' for standard input",
        short="f",
        metavar=options.FILE,
        variable="MIG_PARTED_CONFIG_FILE",
        default_text="CONFIG_FILE, or the built-in one",
    )
    """None: the built-in one."""
    pods_layouts: node_settings.LayoutSources | None = None
    """How this pod's agent serves its document; None: the document is not the agent's."""
    is_mode_only: bool = options.switch(
        "only MIG mode, no instances",
        name="mode-only",
        short="m",
        variable="MIG_PARTED_MODE_CHANGE_ONLY",
    )
    checkpoint_file: str | None = options.text(
        "the checkpoint, in nvidia-mig-parted's format (required)",
        short="f",
        metavar=options.FILE,
        variable="MIG_PARTED_CHECKPOINT_FILE",
    )
    products: tuple[str, ...] = options.declare(
        options.Option(
            name="gpu",
            help="a GPU product, such as 'NVIDIA H100 80GB HBM3' or '*A100*'; repeatable; needs "
            "no GPU",
            default_text="this machine's GPUs",
            metavar=options.PRODUCT,
            default=(),
            is_repeatable=True,
            has_variable=False,
        )
    )
    hooks_file: str | None = options.text(
        "programs to run before, during and after the change",
        short="k",
        metavar=options.FILE,
        variable="MIG_PARTED_HOOKS_FILE",
    )
    idle_timeout_s: float = options.seconds(
        "how long to wait for processes and pods that use instances to be destroyed, before "
        "anything is destroyed",
        name="wait-for-idle",
        default=0.0,
        group=options.CHANGE,
    )
    pod_resources_socket: pathlib.Path | None = options.path(
        "ask this kubelet which pods use the devices, such as "
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        default_text="the usual one, if kubelet has started",
    )
    ignores_pods: bool = options.switch(
        "also destroy or reset devices that kubelet lists for pods",
        name="ignore-pods",
        group=options.CHANGE,
    )
    usual_socket: pathlib.Path  # kubelet's, where no other is named
    gpus: node_settings.GpuAccess = options.declare_from(node_settings.GpuAccess)
    search_path: str  # where to search for a hook's program, as in ``PATH``
    roots: host_settings.HostRoots = options.declare_from(
        host_settings.RootOptions, "driver-root", group=options.GPUS
    )

    @classmethod
    def values(cls, source: options.Source) -> dict[str, Any]:
        """Return the values of all fields."""
        values = super().values(source)
        gpus = agent_settings.gpu_access(source)
        values |= node_settings.node_files(values, gpus)
        if "in-use-timeout-s" not in cls.takes:
            values["in_use_timeout_s"] = 0.0  # only a change retries
        node_settings.check_gpu_timeouts(values["in_use_timeout_s"], values["gpu_timeout_s"])
        if values["config_file"] is None:
            of_pod = agent_settings.layouts_of_pod(source, is_lenient=values["is_lenient"])
            if of_pod:
                values["config_file"], values["pods_layouts"] = of_pod
        return values | {
            "command": str(source.parsed["command"]),
            "layouts": _layouts(source),
            "gpus": gpus,
            "search_path": source.environ.get("PATH", ""),
            "roots": host_settings.host_roots(source),
            "usual_socket": host_settings.pod_resources_socket(source),
        }


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
