"""``kubectl mig device-classes``: DeviceClasses for the profiles of nodes with the DRA driver.

Every profile of a node's GPUs gets one, so that the classes hold for all layouts of the node. With
``-o yaml`` and ``-o json`` the answer is a Kubernetes List for ``kubectl apply -f -``.
"""

import collections
import dataclasses
from collections.abc import Iterable

from mig_manager import errors
from mig_manager.cli.toolkit import console
from mig_manager.core import model
from mig_manager.core.display import styles, tables
from mig_manager.core.fleet import node_reports
from mig_manager.core.node.devices import device_classes
from mig_manager.kubectl import cluster_command, plugin_settings

_HEAD = ("DEVICECLASS", "RESOURCE", "IN THE CLUSTER", "NODES")


ABOUT = """
With '-o yaml' it prints them for 'kubectl apply -f -'.
"""


class Settings(
    plugin_settings.NodesSettings, takes=("node", "selector", "output", *plugin_settings.COMMON)
):
    """Settings of ``device-classes``."""


def run(settings: Settings, terminal: console.Console) -> int:
    """Show the classes, or print them; 1 if the GPUs of a node are unknown."""
    command = cluster_command.ClusterCommand(settings, terminal)
    search = command.nodes(settings.nodes)
    unknown = [each.node.name for each in search.reports if each.gpus is None]
    for name in unknown:
        terminal.note(f"{name}: its agent has not published its GPUs")
    present: tuple[device_classes.DeviceClass, ...] = ()
    try:
        present = command.reader.device_classes()
    except errors.ClusterError as error:
        terminal.note(f"the DeviceClasses of the cluster are unknown: {error.message}")
    result = for_nodes(search.reports, present)
    if settings.output_format.is_data:
        # A Kubernetes object, not an answer of ours.
        terminal.say(console.render(result.to_data(), settings.output_format))
    else:
        terminal.say(table(result, style=command.style))
    return console.FAILED if search.missing or unknown else console.DONE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassRow:
    """The class of a profile."""

    profile: model.Profile
    desired: device_classes.DeviceClass
    present: str  # name of a class of the cluster that serves the resource; empty for none
    nodes: int  # how many nodes have such GPUs

    @property
    def is_foreign(self) -> bool:
        """Whether a class with another name serves the resource."""
        return self.present not in ("", self.desired.name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClasses:
    """The classes for the GPUs of nodes, largest profile first."""

    rows: tuple[ClassRow, ...]

    def to_data(self) -> dict[str, object]:
        """Return a Kubernetes List, without resources that another class serves.

        Of several classes with one resource the scheduler uses one.
        """
        items = [
            device_classes.manifest(row.profile, row.desired)
            for row in self.rows
            if not row.is_foreign
        ]
        return {"apiVersion": "v1", "kind": "List", "items": items}


def for_nodes(
    reports: Iterable[node_reports.NodeReport],
    present: Iterable[device_classes.DeviceClass],
) -> DeviceClasses:
    """Return the classes for the nodes' GPUs; ``present`` are the classes of the cluster."""
    serving = {each.resource: each.name for each in present}
    counts: collections.Counter[model.Profile] = collections.Counter()
    for report in reports:
        rows = (row for gpu in report.gpus or () for row in gpu.profiles or ())
        counts.update({row.profile for row in rows})
    return DeviceClasses(
        rows=tuple(
            ClassRow(
                profile=profile,
                desired=desired,
                present=serving.get(desired.resource, ""),
                nodes=counts[profile],
            )
            for profile in sorted(counts)
            if (desired := device_classes.of_profile(profile))
        )
    )


def table(result: DeviceClasses, *, style: styles.Style) -> str:
    """Return a line for each class."""
    rows = [
        (row.desired.name, row.desired.resource, _presence(row), str(row.nodes))
        for row in result.rows
    ]
    lines = tables.columns(_HEAD, rows, style=style) if rows else ["No GPU has MIG profiles."]
    if any(not row.present for row in result.rows):
        lines += [
            "",
            "Only nodes with the DRA driver use them.",
            "Add '-o yaml | kubectl apply -f -' to this command to create them.",
        ]
    return "\n".join(lines)


def _presence(row: ClassRow) -> str | tuple[str, styles.Tone]:
    """Return whether the class exists, or which other one serves its resource."""
    if row.is_foreign:
        return row.present, styles.Tone.BAD
    return "yes" if row.present else ("no", styles.Tone.WARN)
