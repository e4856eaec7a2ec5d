"""``kubectl mig capacity``: show idle devices, and devices that could be created instead.

It measures as agents do (``planner.free_capacity``), from their published GPUs and use. An agent
publishes the use at the end of a run. With on-demand partitioning it also publishes every change.
"""

import collections
import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mig_manager.cli.toolkit import console
from mig_manager.core import messages, model, profile_name, timestamps
from mig_manager.core.display import picture, styles, tables
from mig_manager.core.fleet import fleet_nodes, node_reports
from mig_manager.core.objects import well_known
from mig_manager.core.planner import free_capacity
from mig_manager.kubectl import cluster_command, plugin_settings

if TYPE_CHECKING:
    from mig_manager.core.answers import node_answers

_HEAD = ("NODE", "OBSERVED", "FREE", "STRANDED", "IDLE NOW", "ROOM")
_LEGEND = (
    "IDLE NOW: devices that a pod can get at once. ROOM: what fits once idle instances are "
    "destroyed, for one profile at a time. FREE: memory slices outside the instances in use. "
    "STRANDED: free slices that no instance could use."
)
_OLD = (
    f"Nodes without the label {well_known.PARTITIONING_LABEL}={well_known.ON_DEMAND} publish the "
    "use only at the end of a run: pods may have come and gone since."
)


class Settings(
    plugin_settings.NodesSettings, takes=("node", "selector", "output", *plugin_settings.COMMON)
):
    """Settings of ``capacity``."""


def run(settings: Settings, terminal: console.Console) -> int:
    """Show the capacity of nodes; 1 if a node's capacity is unknown."""
    command = cluster_command.ClusterCommand(settings, terminal)
    search = command.nodes(settings.nodes)
    result = capacity(search.reports, now=command.now)
    return command.answer(
        result.to_data,
        lambda: table(result, style=command.style),
        is_good=result.is_good and not search.missing,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuCapacity:
    """The capacity of one GPU with known use."""

    gpu: model.Gpu
    in_use: frozenset[model.Placement]
    free: free_capacity.FreeCapacity

    @property
    def is_whole(self) -> bool:
        """Whether pods get the whole GPU, because MIG is unsupported or disabled."""
        return self.gpu.current_mode is not model.MigMode.ENABLED

    @property
    def idle(self) -> Sequence[model.GpuInstance]:
        """The GPU instances that are not in use."""
        return [gi for gi in self.gpu.gpu_instances if gi.placement not in self.in_use]

    def to_data(self) -> "node_answers.GpuCapacity":
        """Return plain data for JSON and YAML."""
        return {
            "index": self.gpu.index,
            "uuid": self.gpu.uuid,
            "name": self.gpu.name,
            "in_use": [str(place) for place in sorted(self.in_use)],
            "idle": [str(gi.placement) for gi in self.idle],
            "room": _counts_by_name(self.free.room),
            "free_slices": self.free.free_slices,
            "stranded_slices": self.free.stranded_slices,
            "fragmentation": round(self.free.fragmentation, 2),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """The capacity of one or more nodes."""

    name: str
    at: dt.datetime | None  # when it was observed; None: unknown
    gpus: tuple[GpuCapacity, ...]
    is_on_demand: bool = False
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> collections.Counter[model.Profile]:
        """The devices in instances that are not in use, by profile."""
        return collections.Counter(
            ci.profile for each in self.gpus for gi in each.idle for ci in gi.compute_instances
        )

    @property
    def whole_gpus(self) -> int:
        """The number of idle GPUs without MIG."""
        return sum(each.is_whole and not each.in_use for each in self.gpus)

    @property
    def room(self) -> collections.Counter[model.Profile]:
        """The number of further instances on all GPUs, for one profile at a time."""
        total = collections.Counter[model.Profile]()
        for each in self.gpus:
            total.update({profile: n for profile, n in each.free.room.items() if n})
        return total

    @property
    def free_slices(self) -> int:
        """Memory slices outside the instances in use."""
        return sum(each.free.free_slices for each in self.gpus)

    @property
    def stranded_slices(self) -> int:
        """Free memory slices that no instance could use."""
        return sum(each.free.stranded_slices for each in self.gpus)

    def to_data(self) -> "node_answers.NodeCapacity":
        """Return plain data for JSON and YAML."""
        return {
            "node": self.name,
            "observed_at": timestamps.iso(self.at),
            "is_on_demand": self.is_on_demand,
            "notes": list(self.notes),
            **_totals(self),
            "gpus": [each.to_data() for each in self.gpus],
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCapacity:
    """The capacity of nodes."""

    nodes: tuple[NodeCapacity, ...]
    now: dt.datetime

    @property
    def is_good(self) -> bool:
        """Whether the capacity of every node is known."""
        return all(node.at for node in self.nodes)

    @property
    def total(self) -> NodeCapacity:
        """All nodes together."""
        gpus = tuple(gpu for node in self.nodes for gpu in node.gpus)
        return NodeCapacity(name="all", at=None, gpus=gpus)

    def to_data(self) -> "node_answers.ClusterCapacity":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "ClusterCapacity",
            "is_good": self.is_good,
            "total": _totals(self.total),
            "nodes": [node.to_data() for node in self.nodes],
        }


def _totals(node: NodeCapacity) -> "node_answers.TotalCapacity":
    return {
        "idle_devices": _counts_by_name(node.devices),
        "idle_whole_gpus": node.whole_gpus,
        "room": _counts_by_name(node.room),
        "free_slices": node.free_slices,
        "stranded_slices": node.stranded_slices,
    }


def _counts_by_name(counts: Mapping[model.Profile, int]) -> dict[str, int]:
    ordered = sorted(counts.items())
    return {str(profile): count for profile, count in ordered if count}


def capacity(reports: Iterable[node_reports.NodeReport], *, now: dt.datetime) -> ClusterCapacity:
    """Measure the capacity of nodes from their published status."""
    return ClusterCapacity(nodes=tuple(map(_of_node, reports)), now=now)


def _of_node(report: node_reports.NodeReport) -> NodeCapacity:
    node, notes = report.node, list(report.notes)
    if node.is_ready and node.is_unavailable:
        notes.append("no new pods are scheduled to it: it is cordoned or changing")
    is_on_demand = node.view.labels.get(well_known.PARTITIONING_LABEL) == well_known.ON_DEMAND
    use, why = fleet_nodes.published_use(node, report.gpus or ())
    notes += [why] if why else []
    measured, unknown = [], []
    in_use = use.in_use if use else {}
    for gpu in (report.gpus or ()) if use else ():
        if gpu.uuid in in_use and (capacity_of_gpu := _of_gpu(gpu, in_use[gpu.uuid])):
            measured.append(capacity_of_gpu)
        else:
            unknown.append(gpu)
    if unknown:
        notes.append(f"the use of GPU {picture.indices(unknown)} is unknown or outdated")
    return NodeCapacity(
        name=node.name,
        at=use.at if use and report.gpus is not None else None,
        gpus=tuple(measured),
        is_on_demand=is_on_demand,
        notes=tuple(notes),
    )


def _of_gpu(gpu: model.Gpu, in_use: frozenset[model.Placement]) -> GpuCapacity | None:
    # A GPU without MIG has no instances: it is in use as a whole.
    is_whole = gpu.current_mode is not model.MigMode.ENABLED
    measured = free_capacity.NONE if is_whole else free_capacity.measure(gpu, in_use)
    return None if measured is None else GpuCapacity(gpu=gpu, in_use=in_use, free=measured)


def table(result: ClusterCapacity, *, style: styles.Style) -> str:
    """Return a line for every node, a total, and the meaning of the columns."""
    rows = [_row(node, timestamps.age(node.at, result.now)) for node in result.nodes]
    if len(rows) > 1:
        rows.append(_row(result.total, ""))
    lines = tables.columns(_HEAD, rows, style=style)
    remarks = [
        style.wrap(f"{node.name}: {messages.join(*node.notes)}")
        for node in result.nodes
        if node.notes
    ]
    remarks.append(style.wrap(_LEGEND))
    if any(node.at and not node.is_on_demand for node in result.nodes):
        remarks.append(style.wrap(_OLD))
    return "\n".join([*lines, "", *remarks])


def _row(node: NodeCapacity, age: str) -> tables.Row:
    if not node.gpus:
        return node.name, age, "-", "-", "-", "-"
    parts = [profile_name.with_counts(node.devices)] if node.devices else []
    parts += [f"{node.whole_gpus}x whole GPU"] if node.whole_gpus else []
    # Variants with other media engines need the same slices; only JSON lists them.
    plain = {p: n for p, n in node.room.items() if not (p.attributes or p.negated_attributes)}
    fits = profile_name.with_counts(plain) if plain else "none"
    return (
        node.name,
        age,
        str(node.free_slices),
        str(node.stranded_slices),
        ", ".join(parts) or "none",
        fits,
    )
