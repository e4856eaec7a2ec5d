"""``mig-manager demo``: a reconfiguration on a simulated node."""

import shlex
import shutil
import sysconfig
from collections.abc import Mapping, Sequence

from mig_manager import errors
from mig_manager.adapters.host import process
from mig_manager.cli.commands import settings
from mig_manager.cli.toolkit import console, program
from mig_manager.core import node_settings


def run(parsed: program.Parsed, terminal: console.Console) -> int:
    """Show a scenario; UsageError if it is unknown or the sandbox is not installed."""
    chosen = settings.demo_settings(parsed, terminal.environ)
    try:
        from mig_manager.sandbox import fleet_story, scenarios  # noqa: PLC0415 - may not be installed
    except ModuleNotFoundError as error:
        raise errors.UsageError(
            f"the demo needs {error.name}, which is not installed",
            remedy="Install with the extra 'sandbox', from a checkout: pip install '.[sandbox]', "
            "or uv tool install '.[sandbox]'.",
        ) from error
    if chosen.scenario not in scenarios.STORIES:
        known = ", ".join(scenarios.STORIES)
        raise errors.UsageError(f"unknown scenario {chosen.scenario!r}; choose from {known}")
    terminal.configure_log(node_settings.LogLevel.WARNING, is_debug=chosen.is_debug)
    style = terminal.style(chosen.colour)
    story = scenarios.Options(
        spec=chosen.spec or (fleet_story.SPEC if chosen.nodes else scenarios.SPEC),
        scenario=chosen.scenario,
        packaged=process.packaged_config(),
        is_real_time=chosen.is_real_time,
        is_kept=chosen.is_kept,
        exports=_path_exports(terminal.environ),
    )
    if not chosen.nodes:
        return scenarios.run(story, say=terminal.say, style=style)
    return fleet_story.run(
        story, chosen.nodes, say=terminal.say, style=style, is_live=terminal.can_redraw
    )


def _path_exports(environ: Mapping[str, str]) -> Sequence[str]:
    """Return shell commands that add our programs to the PATH if it lacks them."""
    if shutil.which("mig-manager", path=environ.get("PATH", "")):
        return ()
    return (f'export PATH={shlex.quote(sysconfig.get_path("scripts"))}:"$PATH"',)
