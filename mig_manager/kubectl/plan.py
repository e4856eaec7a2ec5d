"""``kubectl mig plan``: what a layout would change on nodes.

The planner is the one that the agents ask. What it cannot know here is which devices are held: an
agent spares those, and so may choose other instances of the same kind to end.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence

from mig_manager import errors
from mig_manager.change import plans
from mig_manager.cli.render import gpu_report
from mig_manager.core import bar, messages, model
from mig_manager.core.fleet import node_report
from mig_manager.core.layout import config
from mig_manager.core.node import resources
from mig_manager.core.records import gpu_codec
from mig_manager.kubectl import layout as layouts
from mig_manager.kubectl import selection

_PRODUCT_LABEL = "nvidia.com/gpu.product"
_COUNT_LABEL = "nvidia.com/gpu.count"
_SUFFIX = re.compile(r"-(MIG|SHARED)\b.*")
"""What GPU feature discovery appends for GPUs that are divided or shared."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The products of a cluster's GPUs."""

    templates: tuple[model.Gpu, ...]
    """One GPU of each product, as if nobody had partitioned it."""
    notes: tuple[str, ...]
    """What is guessed, and of which nodes nothing is known."""


def of_nodes(reports: Sequence[node_report.Report]) -> Products:
    """Return the products of nodes, each once."""
    found: dict[tuple[str, int, int], model.Gpu] = {}
    notes: list[str] = []
    guessed: dict[str, model.Gpu] = {}
    for node in reports:
        gpus = node.gpus
        if gpus is None:
            gpus, note = presumed(node)
            notes.append(f"{node.node.view.name}: {note}")
            guessed.update((gpu.name, gpu) for gpu in gpus)
            continue
        for gpu in gpus:
            key = gpu.name, gpu.pci_device_id, gpu.pci_subsystem_id
            found.setdefault(key, gpu_codec.idle(gpu))
    told = {gpu.name for gpu in found.values()}
    others = [gpu for name, gpu in guessed.items() if name not in told]
    # By their names and places in the table: the order of nodes means nothing.
    templates = sorted([*found.values(), *others], key=lambda gpu: (gpu.name, gpu.pci_device_id))
    return Products(templates=tuple(templates), notes=tuple(notes))


def presumed(report: node_report.Report) -> tuple[model.ObservedGpus, str]:
    """Return the GPUs that a node has by its labels, not partitioned, and a note that says so."""
    from mig_manager.catalogue import hardware  # noqa: PLC0415 - where nothing is published

    labels = report.node.view.labels
    product = _SUFFIX.sub("", labels.get(_PRODUCT_LABEL, ""))
    count = labels.get(_COUNT_LABEL, "1")
    if not product:
        return model.NO_GPUS, "neither its agent nor its labels tell which GPUs it has"
    is_count = count.isascii() and count.isdecimal() and len(count) <= len(str(hardware.MAX_GPUS))
    number = int(count) if is_count else 1
    try:
        found = hardware.find(product)
        gpus = model.ObservedGpus(
            hardware.template(found, index) for index in range(min(number, hardware.MAX_GPUS))
        )
    except errors.UsageError as error:
        return model.NO_GPUS, f"its agent has published nothing, and by its label: {error.message}"
    return gpus, (
        f"its agent has published nothing; by its labels it has {len(gpus)}x {found.name}, "
        "taken as not partitioned"
    )


def known() -> Sequence[model.Gpu]:
    """Return an idle GPU of every product that a layout may be for."""
    from mig_manager.catalogue import products  # noqa: PLC0415 - reads the table of them

    return products.known()


def harmless(layout: config.Layout) -> config.Layout:
    """Return a layout whose name can be shown."""
    return dataclasses.replace(layout, name=messages.printable(layout.name))


_HEAD = ("NODE", "FITS", "CHANGE", "PODS")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What a layout would change on one node."""

    name: str
    planned: plans.Planned | None
    """None: it cannot be had, or cannot be told."""
    why_not: str
    """Why there is no plan; empty when there is one."""
    fits: bool | None
    """Whether the node can have the layout; None: cannot be told."""
    losses: tuple[resources.Loss, ...] | None
    """Devices that end and that pods ask for; None: pods are not known."""
    notes: tuple[str, ...]

    @property
    def is_changed(self) -> bool:
        """Whether anything would be done."""
        return self.planned is not None and not self.planned.plan.is_empty

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        data = {
            "node": self.name,
            "fits": self.fits,
            "why_not": self.why_not or None,
            "notes": list(self.notes),
            "losses": None
            if self.losses is None
            else [
                {
                    "resource": lost.kind.resource,
                    "devices": lost.kind.count,
                    "ending": lost.ending,
                    "held_ending_at_least": lost.least,
                    "pods": dict(lost.kind.pods),
                }
                for lost in self.losses
            ],
        }
        planned = self.planned.to_data() if self.planned else {}
        # Which pods leave is told as far as it is known, and UUIDs are not.
        known = {k: v for k, v in planned.items() if k not in ("destroyed_uuids", "evicted_pods")}
        return {**data, "plan": layouts.without_ids(known) or None}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """What a layout would change on nodes."""

    layout: str
    source: str
    nodes: tuple[NodePlan, ...]
    pods_not_known: str

    @property
    def is_good(self) -> bool:
        """Whether every node can have the layout."""
        return all(node.fits for node in self.nodes)

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        return {
            "layout": self.layout,
            "is_good": self.is_good,
            "pods_not_known": self.pods_not_known or None,
            "nodes": [node.to_data() for node in self.nodes],
        }


def plan(
    layout: config.Layout,
    reports: Sequence[node_report.Report],
    *,
    source: str,
    pods: selection.Pods,
) -> Plans:
    """Work out what a layout would change on nodes.

    Args:
        layout: The wish.
        reports: How the nodes stand.
        source: Where the layout is from.
        pods: Their pods, as far as known.
    """
    return Plans(
        layout=layout.name,
        source=source,
        nodes=tuple(_of_node(layout, each, pods) for each in reports),
        pods_not_known=pods.why_not,
    )


def _of_node(layout: config.Layout, told: node_report.Report, pods: selection.Pods) -> NodePlan:
    name, notes = told.node.view.name, list(_notes(layout, told))
    gpus = told.gpus
    if gpus is None:
        gpus, note = presumed(told)
        notes.append(note)
    if not gpus:
        return NodePlan(
            name=name,
            planned=None,
            why_not=notes.pop() if told.gpus is None else "it has no GPU",
            fits=None if told.gpus is None else False,
            losses=None,
            notes=tuple(notes),
        )
    planned, why_not = None, ""
    try:
        planned = plans.planned(gpus, layout, scope=plans.Scope.ALL, holders={})
    except errors.LayoutError as error:
        why_not = messages.printable(error.message, " ")
    if planned is not None:
        notes += [messages.printable(str(remark), " ") for remark in planned.overlooked]
    return NodePlan(
        name=name,
        planned=planned,
        why_not=why_not,
        fits=_fits(planned),
        losses=_losses(planned, told, pods),
        notes=tuple(notes),
    )


def _fits(planned: plans.Planned | None) -> bool | None:
    if planned is None:
        return False
    return None if planned.plan.is_provisional else True


def _losses(
    planned: plans.Planned | None, told: node_report.Report, pods: selection.Pods
) -> tuple[resources.Loss, ...] | None:
    found = pods.of(told.node.view.name)
    if found is None or planned is None:
        return None
    return resources.losses(planned.plan, planned.gpus, found, strategy=told.node.strategy)


def _notes(layout: config.Layout, told: node_report.Report) -> Iterable[str]:
    yield from (note for note in told.notes if told.gpus is not None)
    if told.standing is node_report.Standing.CHANGING:
        yield "the node is changing right now: ask again when it is done"
    is_same = told.told is not None and told.told.config == layout.name
    if is_same and told.told and told.told.config_hash not in ("", layout.content_hash):
        yield f"its agent last knew a layout {layout.name} of other content"


def pictures(plans: Plans, *, style: bar.Style) -> str:
    """Draw the change of every node."""
    return "\n\n".join(_picture(plans, node, style) for node in plans.nodes)


def _picture(plans: Plans, node: NodePlan, style: bar.Style) -> str:
    lines = [style.paint(f"{node.name}: {plans.layout} of {plans.source}", bar.Tone.STRONG)]
    lines += [layouts.wrapped(note, indent="  ! ") for note in node.notes]
    if node.planned is None:
        verdict = "cannot be told" if node.fits is None else "cannot have it"
        lines.append(layouts.wrapped(f"{verdict}: {node.why_not}", indent="  "))
        return "\n".join(lines)
    lines += ["", gpu_report.plan(node.planned, is_wide=False, style=style)]
    if node.losses is None:
        lines.append(layouts.wrapped(f"Who would be hurt is not known: {plans.pods_not_known}"))
    else:
        lines += [layouts.wrapped(layouts.loss(lost)) for lost in node.losses]
    return "\n".join(lines)


def table(plans: Plans, *, style: bar.Style) -> str:
    """Return a line for each node, what there is to say of some, and a sum."""
    rows = [_row(node) for node in plans.nodes]
    tones = {(number, 1): _TONES[node.fits] for number, node in enumerate(plans.nodes)}
    lines = layouts.columns(_HEAD, rows, tones=tones, style=style)
    said = [
        layouts.wrapped(f"{node.name}: {'; '.join(filter(None, [node.why_not, *node.notes]))}")
        for node in plans.nodes
        if node.why_not or node.notes
    ]
    if plans.pods_not_known:
        said.append(layouts.wrapped(f"Who would be hurt is not known: {plans.pods_not_known}"))
    changed = sum(node.is_changed for node in plans.nodes)
    without = sum(not node.fits for node in plans.nodes)
    right = len(plans.nodes) - changed - without
    total = (
        f"Layout {plans.layout} of {plans.source}: {changed} of {len(plans.nodes)} nodes change, "
        f"{right} have it already, {without} cannot have it or do not tell."
    )
    return "\n".join([*lines, "", *said, layouts.wrapped(total)])


_TONES = {True: bar.Tone.GOOD, False: bar.Tone.BAD, None: bar.Tone.WARN}


def _row(node: NodePlan) -> Sequence[str]:
    fits = {True: "yes", False: "no", None: "?"}[node.fits]
    if node.planned is None:
        return node.name, fits, "-", "-"
    change = gpu_report.summary(node.planned) if node.is_changed else "nothing"
    return node.name, fits, change, _hurt(node.losses)


def _hurt(losses: Sequence[resources.Loss] | None) -> str:
    if losses is None:
        return "?"
    sure = {pod for lost in losses if lost.is_total for pod in lost.kind.pods}
    maybe = {pod for lost in losses if not lost.is_total for pod in lost.kind.pods} - sure
    if not (sure or maybe):
        return "none"
    parts = [f"{len(sure)} must leave"] if sure else []
    parts += [f"up to {len(maybe)} may have to"] if maybe else []
    return ", ".join(parts)
