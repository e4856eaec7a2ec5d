"""``kubectl mig history``: the past of a node."""

from mig_manager.cli.toolkit import console
from mig_manager.core import timestamps
from mig_manager.core.display import styles
from mig_manager.kubectl import cluster_command, node_history, node_status, plugin_settings


class Settings(
    plugin_settings.NodeCommandSettings, takes=("node", "output", *plugin_settings.COMMON)
):
    """Settings of ``history``."""


def run(settings: Settings, terminal: console.Console) -> int:
    """Show what happened to a node's layout lately."""
    command = cluster_command.ClusterCommand(settings, terminal)
    result = node_history.collect(command.reader, command.node(settings.node), now=command.now)
    return command.answer(result.to_data, lambda: page(result, style=command.style), is_good=True)


def page(past: node_history.NodeHistory, *, style: styles.Style) -> str:
    """Return a node's past, one line per moment."""
    lines = [node_status.headline(past.report, past.now, style)]
    since = past.applied_since
    if since:
        age = timestamps.age(since, past.now)
        lines.append(f"  applied at least since {timestamps.show(since)}, {age} ago")
    lines += style.notes(past.report.notes)
    if past.moments:
        lines += ["", *node_history.table(past.moments, style=style)]
    if past.why_no_events:
        why = f"Only the last run is shown; Events cannot be read: {past.why_no_events}"
        lines += ["", style.wrap(why)]
    elif not past.moments:
        lines += ["", "No history is known."]
    return "\n".join(lines)
