"""Draw the nodes of a cluster on one screen: their GPUs to scale, with use and changes.

Equal GPUs of a node are drawn once. The API shows how many devices of a kind pods have, but not
which. Some agents publish which instances are in use; elsewhere the first ones count.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from mig_manager.core import messages, model
from mig_manager.core.display import bar, picture, styles
from mig_manager.core.fleet import fleet_nodes, node_reports
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import pod_object, well_known

_PITCH = 4  # columns of a memory slice
_IN_USE, _IDLE = "█", "░"
LEGEND = f"{_IN_USE} in use  {_IDLE} idle  {picture.FREE} free"
_TONES: Mapping[node_reports.NodeState, styles.Tone] = {
    node_reports.NodeState.SUCCESS: styles.Tone.GOOD,
    node_reports.NodeState.PENDING: styles.Tone.WARN,
    node_reports.NodeState.REBOOTING: styles.Tone.WARN,
    node_reports.NodeState.WAITING: styles.Tone.WARN,
    node_reports.NodeState.NO_REQUEST: styles.Tone.FAINT,
}
"""Tones by the state of a node; the other states are bad."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The nodes of a cluster with GPUs, and the pods."""

    reports: Sequence[node_reports.NodeReport]
    pods: Sequence[pod_object.Pod]

    @property
    def pending(self) -> pod_object.Pods:
        """The pods that request MIG devices and have no node yet."""
        return tuple(
            pod
            for pod in self.pods
            if not (pod.node_name or pod.is_finished) and _mig_requests(pod)
        )


def draw(overview: Overview, *, style: styles.Style, selected: str = "") -> list[str]:
    """Return the lines of the overview, with a mark before the ``selected`` node."""
    width = max((len(report.node.name) for report in overview.reports), default=0)
    by_node: dict[str, list[pod_object.Pod]] = collections.defaultdict(list)
    for pod in overview.pods:
        by_node[pod.node_name].append(pod)
    lines: list[str] = []
    for report in overview.reports:
        mark = ">" if report.node.name == selected else " "
        lines.append(f"{mark} {_headline(report, width, style)}")
        lines += [f"    {line}" for line in _strips(report, by_node[report.node.name], style)]
    return [*lines, "", *_footer(overview, style)]


def tone_of(state: node_reports.NodeState) -> styles.Tone:
    """Return the tone of a node's state."""
    return _TONES.get(state, styles.Tone.BAD)


def _mig_requests(pod: pod_object.Pod) -> Mapping[str, int]:
    return {
        name.removeprefix(well_known.RESOURCE_PREFIX): count
        for name, count in pod.gpu_resources.items()
        if resources.is_mig(name)
    }


def _headline(report: node_reports.NodeReport, width: int, style: styles.Style) -> str:
    """Return a node's name, state, layout and current activity in one line."""
    node = report.node
    state = report.state
    last_run = report.last_run
    layout = node.applied or node.applied_before or "-"
    if node.requested and node.requested != node.applied:
        layout += f" → {node.requested}"
    words = [layout]
    if not node.is_ready:
        words.append("not ready")
    if last_run and not state.is_good:
        words.append(
            ": ".join(filter(None, (last_run.reason or last_run.phase, last_run.message)))
        )
    rest = messages.printable("  ".join(words), " ")
    room = style.width - 2 - width - 2 - _STATE_WIDTH - 2
    rest = styles.shorten(rest, room)
    name = style.paint(node.name.ljust(width), styles.Tone.STRONG)
    shown = style.paint(state.value.ljust(_STATE_WIDTH), tone_of(state))
    return f"{name}  {shown}  {style.plain(rest)}".rstrip()


_STATE_WIDTH = max(len(state.value) for state in node_reports.NodeState)


def _strips(
    report: node_reports.NodeReport, pods: Sequence[pod_object.Pod], style: styles.Style
) -> list[str]:
    """Return the GPUs of a node, as many in a line as fit."""
    if not report.gpus:
        return []
    in_use = _in_use(report.node, report.gpus, pods)
    indices_of: dict[tuple[bar.Cell, ...], list[int]] = collections.defaultdict(list)
    for gpu in report.gpus:
        indices_of[_cells(gpu, in_use)].append(gpu.index)
    drawn = [
        (",".join(messages.ranges(indices)), cells, sum(cell.size for cell in cells) * _PITCH + 1)
        for cells, indices in indices_of.items()
    ]
    lines: list[str] = []
    room = 0
    for title, cells, columns in drawn:
        text = f"{style.paint(title, styles.Tone.FAINT)} {_strip(cells, style)}"
        needed = len(title) + 1 + columns + 2
        if lines and needed <= room:
            lines[-1] += f"  {text}"
        else:
            lines.append(text)
            room = style.width - 4 + 2
        room -= needed
    return lines


_Span = tuple[str, model.Placement | None]
"""UUID of a GPU, and a GPU instance on it; None: the whole GPU."""


def _in_use(
    node: fleet_nodes.FleetNode, gpus: Collection[model.Gpu], pods: Iterable[pod_object.Pod]
) -> frozenset[_Span]:
    """Return as many instances and whole GPUs of each kind as pods on the node request.

    Of devices that pods can share, those that are published, but at least as many as needed.
    """
    use, _ = fleet_nodes.published_use(node, gpus)
    placements = use.in_use if use else {}
    published = {
        (gpu.uuid, placement if gpu.current_mode is model.MigMode.ENABLED else None)
        for gpu in gpus
        for placement in placements.get(gpu.uuid, ())
    }
    known_first = published | {(uuid, None) for uuid, _ in published}
    requested: collections.Counter[str] = collections.Counter()
    has_claims = False
    for pod in pods:
        if not pod.is_finished:
            has_claims |= pod.has_claims
            for name, count in pod.gpu_resources.items():
                requested[resources.base(name)] += count
    spans = [
        (name, (gpu.uuid, placement))
        for gpu in gpus
        for _, name, placement in resources.devices(gpu, node.strategy)
    ]
    spans.sort(key=lambda each: each[1] not in known_first)
    counts = collections.Counter(name for name, _ in spans)
    needed = {
        name: math.ceil(requested[name] / resources.replicas(node.view.capacity, name, n))
        for name, n in counts.items()
    }
    in_use: set[_Span] = {*published} if has_claims else set()
    for name, span in spans:
        if needed[name] > 0 or (span in known_first and requested[name] > 0):
            needed[name] -= 1
            requested[name] -= 1
            in_use.add(span)
    return frozenset(in_use)


def _cells(gpu: model.Gpu, in_use: frozenset[_Span]) -> tuple[bar.Cell, ...]:
    """Return the instances of a GPU and the free slices between them, from slice 0."""
    placements = {gi.placement for gi in gpu.gpu_instances}
    is_on = gpu.current_mode is model.MigMode.ENABLED
    cells: list[bar.Cell] = []
    for cell in picture.gpu_cells(gpu):
        placement = model.Placement(cell.start, cell.size) if is_on else None
        title, fill = ("", cell.fill) if is_on else ("MIG off", _IDLE)
        if placement in placements:
            title, fill = cell.short, _IDLE
        if in_use & {(gpu.uuid, placement), (gpu.uuid, None)}:
            fill = _IN_USE
        cells.append(dataclasses.replace(cell, title=title, short="", fill=fill, parts=()))
    return tuple(cells)


def _strip(cells: Iterable[bar.Cell], style: styles.Style) -> str:
    border = style.paint(style.plain("│"), styles.Tone.FAINT)
    texts = (
        style.paint(style.plain(cell.title.ljust(cell.size * _PITCH - 1, cell.fill)), cell.tone)
        for cell in cells
    )
    return border + border.join(texts) + border


def _footer(overview: Overview, style: styles.Style) -> list[str]:
    """Return the legend, and the MIG devices for which pending pods wait."""
    lines = [style.paint(style.plain(LEGEND), styles.Tone.FAINT)]
    requests: collections.Counter[str] = collections.Counter()
    pending = overview.pending
    for pod in pending:
        requests.update(_mig_requests(pod))
    if requests:
        count = len(pending)
        devices = ", ".join(f"{number}x {name}" for name, number in sorted(requests.items()))
        pods = "1 pod waits" if count == 1 else f"{count} pods wait"
        lines.append(style.wrap(f"{pods} for MIG devices: {devices}"))
    return lines
