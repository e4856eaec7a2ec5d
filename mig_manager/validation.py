"""Which layouts fit which GPUs, without touching any."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from mig_manager import errors
from mig_manager.core import config, model, planner


class Fit(enum.Enum):
    """How a layout and a product get on."""

    FITS = "fits"
    DOES_NOT_FIT = "does-not-fit"
    NOT_FOR_IT = "not-for-it"
    """The layout is about other GPUs."""
    UNKNOWN = "unknown"
    """The driver tells the GPU's profiles only once MIG is on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one layout and one product."""

    layout: str
    product: str
    fit: Fit
    why: str
    """Empty when it fits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """All verdicts, by layout in the document's order and product in the given one."""

    source: str
    layouts: tuple[str, ...]
    products: tuple[str, ...]
    verdicts: Mapping[tuple[str, str], Verdict]
    """By layout and product."""

    @property
    def misfits(self) -> tuple[Verdict, ...]:
        """Verdicts that somebody must act on."""
        return tuple(v for v in self.verdicts.values() if v.fit is Fit.DOES_NOT_FIT)

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        return {
            "source": self.source,
            "is_valid": not self.misfits,
            "verdicts": [
                {"layout": v.layout, "product": v.product, "fit": v.fit.value, "why": v.why}
                for v in self.verdicts.values()
            ],
        }


def against_products(
    layouts: Sequence[config.Layout], *, source: str, templates: Sequence[model.Gpu]
) -> Validated:
    """Check each layout against GPUs that need not be here.

    A rule counts when its filter is about the product, whichever indices it names; a rule that
    a later one about every GPU replaces does not.

    Args:
        layouts: The layouts to check.
        source: Where they come from.
        templates: One idle GPU of each product.
    """
    labelled = [(_label(template, templates), template) for template in templates]
    verdicts = [
        _judge(layout, label, _wishes_for_product(layout, template), (template,))
        for layout in layouts
        for label, template in labelled
    ]
    return _validated(layouts, source, tuple(label for label, _ in labelled), verdicts)


def against_node(
    layouts: Sequence[config.Layout], *, source: str, gpus: Sequence[model.Gpu]
) -> Validated:
    """Check each layout against the GPUs of one node, whatever they have now.

    Args:
        layouts: The layouts to check.
        source: Where they come from.
        gpus: As observed.
    """
    products = tuple(dict.fromkeys(gpu.name for gpu in gpus))
    verdicts = [
        _judge(layout, product, (layout,), [gpu for gpu in gpus if gpu.name == product], gpus)
        for layout in layouts
        for product in products
    ]
    return _validated(layouts, source, products, verdicts)


def _validated(
    layouts: Sequence[config.Layout],
    source: str,
    products: tuple[str, ...],
    verdicts: Sequence[Verdict],
) -> Validated:
    return Validated(
        source=source,
        layouts=tuple(layout.name for layout in layouts),
        products=tuple(dict.fromkeys(products)),
        verdicts={(v.layout, v.product): v for v in verdicts},
    )


def _label(template: model.Gpu, templates: Sequence[model.Gpu]) -> str:
    """Return the name, with the PCI id where several products go by it."""
    is_shared = sum(other.name == template.name for other in templates) > 1
    return template.name + (f" (0x{template.pci_device_id:08X})" if is_shared else "")


def _wishes_for_product(layout: config.Layout, template: model.Gpu) -> tuple[config.Layout, ...]:
    """Return a layout of one rule for each rule that can decide about such a GPU."""
    deciding: list[config.Rule] = []
    for rule in layout.rules:
        if rule.filters_match(template):
            deciding = [*(deciding if rule.indices is not None else []), rule]
    return tuple(
        dataclasses.replace(layout, rules=(dataclasses.replace(rule, indices=None),))
        for rule in deciding
    )


def _judge(
    layout: config.Layout,
    product: str,
    wishes: Sequence[config.Layout],
    members: Sequence[model.Gpu],
    node: Sequence[model.Gpu] | None = None,
) -> Verdict:
    """Plan each wish for the members, as parts of their node."""
    uuids = {gpu.uuid for gpu in members}
    is_concerned = is_unknown = False
    for wish in wishes:
        if not any(rule.filters_match(gpu) for rule in wish.rules for gpu in members):
            continue
        try:
            selected = config.select(wish, node or members)
            wanted = {uuid: want for uuid, want in selected.items() if uuid in uuids}
            is_unknown |= planner.plan(members, wanted).is_provisional
        except errors.LayoutError as error:
            # A GPU that need not be here has no index and no UUID to speak of.
            why = error.message if node else error.message.replace(str(members[0]), product)
            return Verdict(layout=layout.name, product=product, fit=Fit.DOES_NOT_FIT, why=why)
        is_concerned |= any(rule.matches(gpu) for rule in wish.rules for gpu in members)
    if not is_concerned:
        fit, why = Fit.NOT_FOR_IT, "it is about other GPUs"
    elif is_unknown:
        fit, why = Fit.UNKNOWN, "this driver tells the GPU's profiles only once MIG is on"
    else:
        fit, why = Fit.FITS, ""
    return Verdict(layout=layout.name, product=product, fit=fit, why=why)
