"""The plugin's commands on a cluster."""

import datetime as dt
from collections.abc import Callable, Mapping

from mig_manager import errors
from mig_manager.adapters import cluster_reader, kubectl
from mig_manager.cli.commands.settings import OutputFormat
from mig_manager.cli.toolkit import console, validation
from mig_manager.core.fleet import listed_layouts, node_reports
from mig_manager.core.layout.layouts import Document
from mig_manager.core.node.device_classes import DeviceClass
from mig_manager.kubectl import (
    apply,
    autoscaler,
    capacity,
    device_classes,
    node_layouts,
    plan,
    settings,
)
from mig_manager.kubectl import status as node_status


class ClusterCommands:
    """The commands on one command line's settings; they return False for a problem."""

    def __init__(self, chosen: settings.PluginSettings, terminal: console.Console) -> None:
        self._chosen = chosen
        self._terminal = terminal
        self._format = chosen.output_format
        self._style = terminal.style(chosen.colour)
        self._now = dt.datetime.now(tz=dt.UTC)
        self._kubectl = kubectl.Kubectl(chosen.kubectl, note=terminal.note)
        self._reader = cluster_reader.ClusterReader(self._kubectl)

    def status(self) -> bool:
        if self._chosen.is_watched:
            return self._watch()
        search = self._nodes()
        result = self._status_of(search)
        draw = node_status.pictures if self._is_drawn(search) else node_status.table
        self._answer(result.to_data, lambda: draw(result, style=self._style))
        return result.is_good and not search.missing

    def _status_of(self, search: cluster_reader.Search) -> node_status.Status:
        pods = cluster_reader.Pods(by_node=None)
        # A table has no room for the pods of many nodes, and listing them is slow.
        if self._is_drawn(search) or self._format is not OutputFormat.TEXT:
            pods = self._reader.pods(search.names)
        return node_status.Status(reports=search.reports, pods=pods, now=self._now)

    def _watch(self) -> bool:
        from mig_manager.cli.toolkit import live  # noqa: PLC0415 - rarely used

        live.require_text(self._format.value)

        def refresh() -> live.View:
            self._now = dt.datetime.now(tz=dt.UTC)
            self._style = self._terminal.style(self._chosen.colour)
            search = self._find()
            result = self._status_of(search)
            draw = node_status.pictures if self._is_drawn(search) else node_status.table
            blocks = [draw(result, style=self._style)]
            # Events cost a request per node, and their table does not name it.
            if len(search.reports) == 1:
                past = node_status.history(self._reader, search.reports[0], now=self._now)
                blocks += node_status.last_run(past, style=self._style)
            blocks += [self._style.wrapped(message) for message in search.missing]
            lines = {report.node.name: node_status.line(report) for report in search.reports}
            # One constant name: a node that reappears must not be reported as gone.
            lines["not found"] = "; ".join(search.missing)
            return live.View("\n\n".join(blocks), lines)

        return live.run(self._terminal, refresh) == console.DONE

    def top(self) -> bool:
        from mig_manager.cli.toolkit import live  # noqa: PLC0415 - rarely used
        from mig_manager.kubectl import top  # noqa: PLC0415 - rarely used

        def find() -> cluster_reader.Search:
            self._now = dt.datetime.now(tz=dt.UTC)
            return self._find()

        view = top.Top(
            self._kubectl,
            self._reader,
            find,
            self._document,
            lambda: self._terminal.style(self._chosen.colour),
        )
        return live.run(self._terminal, view.refresh, view.press) == console.DONE

    def plan(self) -> bool:
        name, search = str(self._chosen.layout), self._nodes()
        is_listed = listed_layouts.is_listed((each.node for each in search.reports), name)
        document = self._document(listed_layouts.NO_FILE if is_listed else None)
        pods = self._reader.pods(search.names)
        result = plan.plan(name, search.reports, document=document, pods=pods)
        draw = plan.pictures if self._is_drawn(search) else plan.table
        self._answer(result.to_data, lambda: draw(result, style=self._style))
        return result.is_good and not search.missing

    def apply(self) -> bool:
        if self._chosen.filename is None:
            raise errors.UsageError("name the file with the layout: -f FILE")
        layout = apply.chosen(self._document(), self._chosen.layout)
        result = apply.apply(
            self._kubectl,
            self._node(),
            layout,
            is_dry_run=self._chosen.is_dry_run,
            now=self._now,
        )
        self._answer(result.to_data, lambda: apply.text(result, style=self._style))
        return result.is_good

    def capacity(self) -> bool:
        search = self._nodes()
        result = capacity.capacity(search.reports, now=self._now)
        self._answer(result.to_data, lambda: capacity.table(result, style=self._style))
        return result.is_good and not search.missing

    def validate(self) -> bool:
        document, names = self._document(), self._chosen.layouts
        result = plan.validated(document, names, self._nodes().reports, note=self._terminal.note)
        self._answer(result.to_data, lambda: validation.table(result, style=self._style))
        return not result.misfits

    def layouts(self) -> bool:
        report = self._node()
        own = cluster_reader.OPERATOR_NAMESPACE, f"{report.node.name}-mig-config"
        if self._chosen.filename or self._chosen.config_map:
            document = self._document()
            result = node_layouts.list_layouts(report, [lambda: document])
        else:
            usual = [self._document, lambda: self._reader.document(own)]
            result = node_layouts.list_layouts(report, usual)
        self._answer(result.to_data, lambda: node_layouts.pictures(result, style=self._style))
        return bool(result.layouts)

    def history(self) -> bool:
        report = self._node()
        result = node_status.history(self._reader, report, now=self._now)
        self._answer(result.to_data, lambda: node_status.page(result, style=self._style))
        return True

    def autoscaler_tags(self) -> bool:
        layout = self._document().layout(str(self._chosen.layout))
        result = autoscaler.tags(plan.printable(layout), self._chosen.gpu, self._chosen.strategy)
        self._answer(result.to_data, lambda: autoscaler.text(result))
        return True

    def device_classes(self) -> bool:
        search = self._nodes()
        unknown = [each.node.name for each in search.reports if each.gpus is None]
        for name in unknown:
            self._terminal.note(f"{name}: its agent has not published its GPUs")
        present: tuple[DeviceClass, ...] = ()
        try:
            present = self._reader.device_classes()
        except errors.ClusterError as error:
            self._terminal.note(f"the DeviceClasses of the cluster are unknown: {error.message}")
        result = device_classes.for_nodes(search.reports, present)
        if self._format in (OutputFormat.JSON, OutputFormat.YAML):
            # A Kubernetes object, not an answer of ours.
            self._terminal.say(console.rendered(result.to_data(), self._format.value))
        else:
            text = device_classes.table(result, style=self._style)
            self._terminal.say(text + "\n")
        return not (search.missing or unknown)

    def _answer(self, data: Callable[[], Mapping[str, object]], text: Callable[[], str]) -> None:
        self._terminal.answer(self._format.value, data, text)

    def _nodes(self) -> cluster_reader.Search:
        search = self._find()
        for message in search.missing:
            self._terminal.note(message)
        return search

    def _find(self) -> cluster_reader.Search:
        return self._reader.find(self._chosen.nodes, self._chosen.selector, now=self._now)

    def _node(self) -> node_reports.Report:
        (report,) = self._reader.find([self._chosen.node], None, now=self._now).reports
        return report

    def _is_drawn(self, search: cluster_reader.Search) -> bool:
        return len(search.reports) == 1 or self._format is OutputFormat.WIDE

    def _document(self, default: Document | None = None) -> Document:
        file, config_map = self._chosen.filename, self._chosen.config_map
        if file is not None and config_map is not None:
            raise errors.UsageError("name a file or a ConfigMap with layouts, not both")
        if file is not None:
            document = self._terminal.layout_file(file)
        elif config_map is None:
            document = self._reader.document(None, default)
        else:
            namespace, slash, name = config_map.partition("/")
            if not (namespace and slash and name):
                raise errors.UsageError(f"--config-map {config_map}: write NAMESPACE/NAME")
            document = self._reader.document((namespace, name))
        for remark in document.warnings:
            self._terminal.note(f"warning: {remark}")
        return document
