"""``kubectl mig layouts``: draw the layouts available on a node.

A node publishes names, origins and hashes. Generated layouts are computed from the published GPUs,
others are read from a layout file; the hash shows whether the content is the same.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mig_manager import errors
from mig_manager.adapters import cluster_reader
from mig_manager.cli.toolkit import console
from mig_manager.core import messages, model
from mig_manager.core.display import picture, styles
from mig_manager.core.fleet import fleet_nodes, node_reports
from mig_manager.core.layout import (
    available_layouts,
    custom_layouts,
    layout_documents,
    layout_list,
    layouts,
)
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.kubectl import cluster_command, plugin_settings, presumed_gpus

if TYPE_CHECKING:
    from mig_manager.core.answers import node_answers

Document = Callable[[], layout_documents.Document]


class Settings(
    plugin_settings.NodeCommandSettings,
    takes=("node", "filename", "config-map", "output", *plugin_settings.COMMON),
):
    """Settings of ``layouts``."""


def run(settings: Settings, terminal: console.Console) -> int:
    """Show the layouts available on a node; 1 if there is none."""
    command = cluster_command.ClusterCommand(settings, terminal)
    report = command.node(settings.node)
    config_map = cluster_reader.OPERATOR_NAMESPACE, f"{report.node.name}-mig-config"
    documents: list[Document] = [command.document, lambda: command.reader.document(config_map)]
    if settings.filename or settings.config_map:
        document = command.document()
        documents = [lambda: document]
    result = list_layouts(report, documents)
    return command.answer(
        result.to_data,
        lambda: pictures(result, style=command.style),
        is_good=bool(result.layouts),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One layout of a node."""

    entry: layout_list.Entry
    gpus: tuple[model.Gpu, ...] | None
    """The selected GPUs with the layout's instances; None: the content is unknown."""
    is_requested: bool
    is_applied: bool

    def to_data(self) -> "node_answers.ListedLayout":
        """Return plain data for JSON and YAML."""
        return {
            "layout": self.entry.name,
            "origin": self.entry.origin,
            "hash": self.entry.content_hash,
            "is_requested": self.is_requested,
            "is_applied": self.is_applied,
            "gpus": None
            if self.gpus is None
            else [
                {
                    "index": gpu.index,
                    "name": gpu.name,
                    "is_mig_enabled": gpu.current_mode is model.MigMode.ENABLED,
                    "devices": run_status.device_counts(gpu),
                }
                for gpu in self.gpus
            ],
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """The layouts available on a node."""

    node: str
    layouts: tuple[Listed, ...]
    notes: tuple[str, ...]

    def to_data(self) -> "node_answers.NodeLayouts":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "NodeLayouts",
            "node": self.node,
            "notes": list(self.notes),
            "layouts": [each.to_data() for each in self.layouts],
        }


def list_layouts(report: node_reports.NodeReport, documents: Iterable[Document]) -> Layouts:
    """Return the layouts of a node; read documents only until all contents are known."""
    node, notes = report.node, list(report.notes)
    gpus = report.gpus
    if gpus is None:
        gpus, note = presumed_gpus.of(report)
        notes.append(note)
    contents_by_key = _by_key(available_layouts.generate(gpus).values())
    entries, note = _entries(node, contents_by_key)
    if node.listed.takes_custom:
        # An invalid annotation has no layout to list.
        with contextlib.suppress(errors.MigManagerError):
            custom, _ = custom_layouts.CustomRequest.of(node.view).layout()
            entries = [*entries, layout_list.Entry.of(custom)]
            contents_by_key |= _by_key([custom])
    notes += [note] if note else []
    for document in documents:
        if all(_key(entry) in contents_by_key for entry in entries):
            break
        # Without a document, only pictures are missing.
        with contextlib.suppress(errors.MigManagerError):
            contents_by_key |= _by_key(document().layouts.values())
    contents = filter(None, (contents_by_key.get(_key(entry)) for entry in entries))
    fitted = {fit.layout.name: fit.gpus for fit in available_layouts.fitting(contents, gpus)}
    return Layouts(
        node=node.name,
        layouts=tuple(
            Listed(
                entry=entry,
                gpus=fitted.get(entry.name),
                is_requested=entry.name == node.requested,
                is_applied=_is_applied(entry, node),
            )
            for entry in entries
        ),
        notes=tuple(notes),
    )


def _is_applied(entry: layout_list.Entry, node: fleet_nodes.FleetNode) -> bool:
    is_named, last_run = entry.name == node.applied, node.status
    if not is_named or last_run is None or last_run.layout != entry.name:
        return is_named
    # The label has no hash of the content, which may have changed since.
    return run_status.was_active(last_run) and last_run.content_hash in ("", entry.content_hash)


_Key = tuple[str, str]  # name and content hash


def _key(entry: layout_list.Entry) -> _Key:
    return entry.name, entry.content_hash


def _by_key(candidates: Iterable[layouts.Layout]) -> dict[_Key, layouts.Layout]:
    return {(layout.name, layout.content_hash): layout for layout in candidates}


def _entries(
    node: fleet_nodes.FleetNode, generated: Mapping[_Key, layouts.Layout]
) -> tuple[Sequence[layout_list.Entry], str]:
    """Return the published layouts, or else the layouts that can be generated, and a note."""
    text = node.view.annotations.get(well_known.LAYOUTS_ANNOTATION)
    if text is not None:
        try:
            return layout_list.from_json(text).layouts, ""
        except ValueError as error:
            why = f"its agent's list of layouts cannot be read ({error})"
    else:
        why = "its agent has published no layouts"
    what = ": these layouts can be generated for its GPUs" if generated else ""
    return [layout_list.Entry.of(layout) for layout in generated.values()], why + what


def pictures(result: Layouts, *, style: styles.Style) -> str:
    """Draw every layout on the node's GPUs."""
    count = messages.count(len(result.layouts), "layout")
    title = style.fit(f"{result.node}: {count} can be requested")
    lines = [style.paint(title, styles.Tone.STRONG)]
    lines += style.notes(result.notes)
    return "\n\n".join(["\n".join(lines), *(_picture(each, style) for each in result.layouts)])


def _picture(listed: Listed, style: styles.Style) -> str:
    words = [listed.entry.origin]
    if listed.is_applied:
        words.append("active")
    elif listed.is_requested:
        words.append("requested")
    lines = [style.title([(listed.entry.name, styles.Tone.STRONG)], words)]
    if listed.gpus is None:
        why = "    its content is in no known layout file; name one with -f"
        lines.append(style.fit(why))
    else:
        lines.append(picture.draw_gpus(listed.gpus, style=style, has_offer=False))
    return "\n".join(lines)
