"""``mig-manager status``."""

import pathlib

from mig_manager.cli import gpu_settings
from mig_manager.cli.toolkit import command_settings, console
from mig_manager.core.settings import node_settings, options

ABOUT = """
Identical GPUs are drawn once. It changes nothing and needs only access to the driver.

$ mig-manager status
A picture of every GPU's slices.

$ mig-manager status -o wide
Also instance ids, UUIDs, PCI ids and the processes using the GPUs.

$ mig-manager status -o json | jq '.gpus[].profiles | keys'
The profiles of every GPU.

$ mig-manager status --simulate 2xA100-SXM4-40GB --simulate-event 0=gpu-reset
A simulated GPU with a fault. Other events: 0=lost, reboot, 0=none.
"""


class Settings(
    gpu_settings.GpuSettings,
    takes=(
        "watch",
        "pod-resources-socket",
        *gpu_settings.ON_GPUS,
        "simulate-event",
        "output-format",
    ),
):
    """Settings of ``status``."""

    is_watched: bool = options.declare(command_settings.WATCH)
    pod_resources_socket: pathlib.Path | None = options.path(
        "with --watch: ask this kubelet which pods use the devices", default_text="none"
    )
    simulated_event: str | None = options.text(
        "first let this happen to the simulated GPUs: reboot, INDEX=lost, or INDEX=ACTION for a "
        "fault that needs this recovery action, such as 0=gpu-reset; INDEX=none ends it",
        name="simulate-event",
        metavar="EVENT",
        group=options.GPUS,
        has_variable=False,
    )
    output_format: node_settings.OutputFormat = command_settings.output_format(
        "text",
        "wide",
        "json",
        "yaml",
        default_text="text; wide adds ids, UUIDs and the pods and processes using the GPUs",
    )


def run(settings: Settings, terminal: console.Console) -> int:
    """Show the GPUs, once or until q is pressed."""
    from mig_manager.cli import gpu_command
    from mig_manager.cli.toolkit import gpu_text
    from mig_manager.core.answers import gpu_answers

    command = gpu_command.GpuCommand(settings, terminal)
    if settings.simulated_event:
        from mig_manager.sandbox.driver import simulated_events

        simulated_events.simulate(settings.simulated_event, settings.gpus.simulate_state)
    if not settings.is_watched:
        gpus = command.observe()
        is_text = settings.output_format is node_settings.OutputFormat.TEXT
        processes = None if is_text else command.processes()
        return command.answer(
            lambda: gpu_answers.status(gpus, processes),
            lambda: gpu_text.status(gpus, processes, is_wide=command.is_wide, style=command.style),
        )
    from mig_manager.cli.toolkit import live
    from mig_manager.core.objects import pod_object

    live.require_text(settings.output_format)
    kubelet = command.kubelet() if settings.pod_resources_socket else None

    def refresh() -> live.View:
        text, lines = gpu_text.live_status(
            command.observe(),
            command.processes(),
            pods=pod_object.by_device(kubelet.assigned_devices() if kubelet else ()),
            changed_by=command.changed_by(),
            is_wide=command.is_wide,
            style=terminal.style(settings.colour),
        )
        return live.View(text, lines)

    return live.run(terminal, refresh)
