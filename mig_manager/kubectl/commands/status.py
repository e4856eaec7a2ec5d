"""``kubectl mig status``: the state of nodes."""

from mig_manager.adapters import cluster_reader
from mig_manager.cli.toolkit import command_settings, console, gpu_text
from mig_manager.core import messages, timestamps
from mig_manager.core.display import styles, tables
from mig_manager.core.fleet import overview
from mig_manager.core.settings import node_settings, options
from mig_manager.kubectl import cluster_command, node_history, node_status, plugin_settings

_HEAD = ("NODE", "STATE", "REASON", "AGE", "REQUESTED", "APPLIED", "SLICES")


class Settings(
    plugin_settings.NodesSettings,
    takes=("node", "selector", "watch", "output", *plugin_settings.COMMON),
):
    """Settings of ``status``."""

    is_watched: bool = options.declare(command_settings.WATCH)
    output_format: node_settings.OutputFormat = plugin_settings.drawn_output()


def run(settings: Settings, terminal: console.Console) -> int:
    """Show nodes, once or until q is pressed."""
    command = cluster_command.ClusterCommand(settings, terminal)

    def status_of(search: cluster_reader.NodeSearch) -> tuple[node_status.ClusterStatus, str]:
        pods = cluster_reader.Pods(by_node=None)
        is_drawn = command.is_drawn(search)
        # A table has no room for the pods of many nodes, and listing them is slow.
        if is_drawn or settings.output_format is not node_settings.OutputFormat.TEXT:
            pods = command.reader.pods(search.names)
        result = node_status.ClusterStatus(reports=search.reports, pods=pods, now=command.now)
        draw = node_status.pictures if is_drawn else table
        return result, draw(result, style=command.style)

    if not settings.is_watched:
        search = command.nodes(settings.nodes)
        result, text = status_of(search)
        is_good = result.is_good and not search.missing
        return command.answer(result.to_data, lambda: text, is_good=is_good)
    from mig_manager.cli.toolkit import live  # noqa: PLC0415 - rarely used

    live.require_text(settings.output_format)

    def refresh() -> live.View:
        style, search = command.style, command.find(settings.nodes)
        blocks = [status_of(search)[1]]
        # Events cost a request per node, and their table does not name it.
        if len(search.reports) == 1:
            past = node_history.collect(command.reader, search.reports[0], now=command.now)
            blocks += node_history.last_run(past, style=style)
        blocks += [style.wrap(message) for message in search.missing]
        lines = {report.node.name: node_status.line(report) for report in search.reports}
        # One constant name: a node that reappears must not be reported as gone.
        lines["not found"] = "; ".join(search.missing)
        return live.View("\n\n".join(blocks), lines)

    return live.run(terminal, refresh)


def table(status: node_status.ClusterStatus, *, style: styles.Style) -> str:
    """Return a line for every node, and explanations of problems below."""
    rows, notes = [], []
    for report in status.reports:
        last_run = report.last_run
        state = report.state.value + ("" if report.node.is_ready else ",not-ready")
        rows.append(
            (
                report.node.name,
                (state, overview.tone_of(report.state)),
                (last_run.reason or last_run.phase) if last_run else "-",
                timestamps.age(last_run.at, status.now) if last_run else "-",
                report.node.requested or "-",
                report.node.applied_text or "-",
                "-" if report.gpus is None else gpu_text.slices(report.gpus),
            )
        )
        why = last_run.message if last_run and not report.state.is_good else ""
        if remarks := messages.join(why, *report.notes):
            notes.append(style.wrap(f"{report.node.name}: {remarks}"))
    lines = tables.columns(_HEAD, rows, style=style)
    return "\n".join([*lines, "", *notes] if notes else lines)
