"""``mig-manager demo``: a reconfiguration on a simulated node."""

import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence

from mig_manager import errors
from mig_manager.adapters.host import process
from mig_manager.cli.toolkit import command_settings, console
from mig_manager.core.settings import node_settings, options

ABOUT = """
Runs an embedded Kubernetes API, a node with its daemons, simulated GPUs and the real
agent. Needs neither GPU nor cluster. Ends with the GPUs before and after, and three
commands to try next. A signal or a closed terminal stops all its processes.

$ mig-manager demo
One instance changes on a busy node; the pods on the others keep running.

$ mig-manager demo --scenario budget --keep
A PodDisruptionBudget blocks the drain; the node stays up for kubectl.
"""


class Settings(command_settings.TerminalSettings):
    """Settings of the demonstration."""

    scenario: str | None = options.text(
        "one-slice, first-layout, does-not-fit, budget or gpu-fault",
        words=("one-slice", "first-layout", "does-not-fit", "budget", "gpu-fault"),
        default_text="one-slice",
    )
    spec: str | None = options.text(
        "node to simulate",
        name="simulate",
        metavar=options.SPEC,
        default_text="8xA100-SXM4-40GB, or 2xA100-SXM4-40GB with --nodes",
    )
    nodes: int = options.count(
        "simulate a cluster of this many nodes, 5 to 20: a rollout, its undo, and the partitioner",
        default_text="one node",
        minimum=5,
        maximum=20,
        what="number of nodes",
    )
    is_real_time: bool = options.switch(
        "let the simulated driver take as long as a real one", name="real-time"
    )
    is_kept: bool = options.switch(
        "keep the node up at the end, for kubectl, until Ctrl-C", name="keep"
    )


def run(settings: Settings, terminal: console.Console) -> int:
    """Show a scenario; UsageError if it is unknown or the sandbox is not installed."""
    try:
        from mig_manager.sandbox import demo, fleet_demo, scenarios  # may not be installed
    except ModuleNotFoundError as error:
        raise errors.UsageError(
            f"the demo needs {error.name}, which is not installed",
            remedy="Install with the extra 'sandbox', from a checkout: pip install '.[sandbox]', "
            "or uv tool install '.[sandbox]'.",
        ) from error
    if settings.scenario and settings.nodes:
        raise errors.UsageError("--scenario and --nodes exclude each other")
    scenario = settings.scenario or "one-slice"
    if scenario not in scenarios.BY_NAME:
        names = ", ".join(scenarios.BY_NAME)
        raise errors.UsageError(f"unknown scenario {scenario!r}; choose from {names}")
    terminal.configure_log(node_settings.LogLevel.WARNING, is_debug=settings.is_debug)
    style = terminal.style(settings.colour)
    story = demo.DemoOptions(
        spec=settings.spec or (fleet_demo.SPEC if settings.nodes else demo.SPEC),
        scenario=scenario,
        packaged=process.packaged_config(),
        is_real_time=settings.is_real_time,
        is_kept=settings.is_kept,
        exports=_path_exports(terminal.environ, is_kept=settings.is_kept),
    )
    if not settings.nodes:
        return demo.run(story, say=terminal.say, style=style)
    return fleet_demo.run(
        story, settings.nodes, say=terminal.say, style=style, is_live=terminal.can_redraw
    )


def _path_exports(environ: Mapping[str, str], *, is_kept: bool) -> Sequence[str]:
    """Return shell commands that add our programs to the PATH if the next terminal lacks them."""
    is_in_every_terminal = not is_kept or sys.prefix == sys.base_prefix  # no virtual environment
    if is_in_every_terminal and shutil.which("mig-manager", path=environ.get("PATH", "")):
        return ()
    return (f'export PATH={shlex.quote(sysconfig.get_path("scripts"))}:"$PATH"',)
