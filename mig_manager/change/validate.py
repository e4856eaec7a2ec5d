"""Which layouts fit which GPUs, without touching any.

A rule with a ``device-filter``, or one that names a GPU by UUID or PCI address, is meant for that
GPU, and must fit it. A rule without any is about whatever GPU it can be had on: that ``1g.5gb``
is not to be had on an A30 is no fault of a layout for A100s. So what does not fit here is excused
if it fits some other GPU that is known, unless the layout was named: then it is meant for here.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

from mig_manager import errors
from mig_manager.core import model, steps
from mig_manager.core.layout import config
from mig_manager.core.node import mig_strategy
from mig_manager.core.planner import planner


class Fit(enum.Enum):
    """How a layout and a product get on."""

    FITS = "fits"
    DOES_NOT_FIT = "does-not-fit"
    ELSEWHERE = "elsewhere"
    """It does not fit, but it does not say that it is meant for this product, and fits others."""
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
    location: errors.Location | None = None
    """Of the rule that does not fit; None when there is none."""
    unserved: Mapping[mig_strategy.Strategy, str] = dataclasses.field(default_factory=dict)
    """MIG strategies with which a device plugin exits over it where it fits, and why."""


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

    @property
    def unserved(self) -> Mapping[mig_strategy.Strategy, Sequence[str]]:
        """The layouts that fit and with which a device plugin exits, by its MIG strategy."""
        found: dict[mig_strategy.Strategy, list[str]] = {}
        for strategy in mig_strategy.Strategy:
            names = [v.layout for v in self.verdicts.values() if strategy in v.unserved]
            if names:
                found[strategy] = list(dict.fromkeys(names))
        return found

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        return {
            "source": self.source,
            "is_valid": not self.misfits,
            "verdicts": [
                {
                    "layout": v.layout,
                    "product": v.product,
                    "fit": v.fit.value,
                    "why": v.why,
                    "place": str(v.location) if v.location else None,
                    "unserved_mig_strategies": {
                        strategy.value: why for strategy, why in v.unserved.items()
                    },
                }
                for v in self.verdicts.values()
            ],
        }


Others = Callable[[], Sequence[model.Gpu]]
"""One idle GPU of each product that a layout may be for; asked only for an excuse."""


def against_products(
    layouts: Sequence[config.Layout],
    *,
    source: str,
    templates: Sequence[model.Gpu],
    others: Others | None = None,
) -> Validated:
    """Check each layout against GPUs that need not be here.

    A rule counts when its filter is about the product, whichever indices it names; a rule that
    a later one about every GPU replaces does not.

    Args:
        layouts: The layouts to check.
        source: Where they come from.
        templates: One idle GPU of each product.
        others: What excuses a rule without filter; None: nothing does.
    """
    labelled = [(_label(template, templates), template) for template in templates]
    judge = _Judge(others)
    verdicts = [
        judge.verdict(
            _Case(
                layout=layout,
                product=label,
                wishes=_wishes_for_product(layout, template),
                members=(template,),
            )
        )
        for layout in layouts
        for label, template in labelled
    ]
    return _validated(layouts, source, tuple(label for label, _ in labelled), verdicts)


def against_node(
    layouts: Sequence[config.Layout],
    *,
    source: str,
    gpus: Sequence[model.Gpu],
    others: Others | None = None,
) -> Validated:
    """Check each layout against the GPUs of one node, whatever they have now.

    Args:
        layouts: The layouts to check.
        source: Where they come from.
        gpus: As observed.
        others: What excuses a rule without filter; None: nothing does.
    """
    products = tuple(dict.fromkeys(gpu.name for gpu in gpus))
    judge = _Judge(others)
    verdicts = [
        judge.verdict(
            _Case(
                layout=layout,
                product=product,
                wishes=(layout,),
                members=[gpu for gpu in gpus if gpu.name == product],
                node=gpus,
            )
        )
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
    return tuple(_alone(layout, rule) for rule in deciding)


def _alone(layout: config.Layout, rule: config.Rule) -> config.Layout:
    """Return the layout with one rule alone, which is about every GPU of its models."""
    everywhere = dataclasses.replace(rule, indices=None, identities=())
    return dataclasses.replace(layout, rules=(everywhere,), is_lenient=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One layout and one product."""

    layout: config.Layout
    product: str
    wishes: Sequence[config.Layout]
    members: Sequence[model.Gpu]
    node: Sequence[model.Gpu] | None = None
    """All GPUs of the members' node; None: the member is a template."""

    @property
    def is_concerned(self) -> bool:
        """Whether the layout is about any member."""
        return any(
            rule.matches(gpu)
            for wish in self.wishes
            for rule in wish.rules
            for gpu in self.members
        )

    @property
    def results(self) -> Sequence[mig_strategy.GpuLayout]:
        """What GPUs have once the layout is applied: the node's, or one template for each rule."""
        if self.node is not None:
            return mig_strategy.of_node(self.node, config.select(self.layout, self.node))
        return [
            mig_strategy.of_wanted(f"some {self.product}", rule.wanted)
            for wish in self.wishes
            for rule in wish.rules
        ]

    def failing(self) -> Sequence[config.Rule]:
        """Return the rules that do not fit; all there are where none can be told from another."""
        rules = [rule for wish in self.wishes for rule in wish.rules]
        found = [
            rule
            for rule in rules
            if any(
                rule.filters_match(gpu) and _refusal(_alone(self.layout, rule), (gpu,))
                for gpu in self.members
            )
        ]
        return found or rules

    def means(self, rule: config.Rule) -> bool:
        """Tell whether a rule says that it is for these GPUs."""
        is_named = any(rule.names(gpu) for gpu in self.members)
        return is_named or bool(rule.filters)


class _Judge:
    """Comes to verdicts; remembers what fits elsewhere."""

    def __init__(self, others: Others | None) -> None:
        self._others = others
        self._known: dict[config.Rule, bool] = {}

    def verdict(self, case: _Case) -> Verdict:
        """Plan each wish for the members, as parts of their node."""
        fit, why, location = self._find(case)
        return Verdict(
            layout=case.layout.name,
            product=case.product,
            fit=fit,
            why=why,
            location=location,
            unserved=mig_strategy.refusals(case.results) if fit is Fit.FITS else {},
        )

    def _find(self, case: _Case) -> tuple[Fit, str, errors.Location | None]:
        is_unknown = False
        for wish in case.wishes:
            if not any(rule.filters_match(gpu) for rule in wish.rules for gpu in case.members):
                continue
            try:
                is_unknown |= _plan(wish, case.members, case.node).is_provisional
            except errors.LayoutError as error:
                return self._misfit(case, error)
        if not case.is_concerned:
            return Fit.NOT_FOR_IT, "it is about other GPUs", None
        if is_unknown:
            return Fit.UNKNOWN, "this driver tells the GPU's profiles only once MIG is on", None
        return Fit.FITS, "", None

    def _misfit(
        self, case: _Case, error: errors.LayoutError
    ) -> tuple[Fit, str, errors.Location | None]:
        failing = case.failing()
        # A GPU that need not be here has no index and no UUID to speak of.
        why = (
            error.message
            if case.node
            else error.message.replace(str(case.members[0]), case.product)
        )
        is_excused = not any(case.means(rule) for rule in failing) and all(
            self._fits_elsewhere(case.layout, rule) for rule in failing
        )
        place = error.location or failing[0].location
        return (Fit.ELSEWHERE if is_excused else Fit.DOES_NOT_FIT), why, place

    def _fits_elsewhere(self, layout: config.Layout, rule: config.Rule) -> bool:
        if self._others is None:
            return False
        wish = _alone(layout, rule)
        key = wish.rules[0]
        if key not in self._known:
            self._known[key] = any(
                gpu.is_mig_capable and rule.filters_match(gpu) and not _refusal(wish, (gpu,))
                for gpu in self._others()
            )
        return self._known[key]


def _plan(
    wish: config.Layout, members: Sequence[model.Gpu], node: Sequence[model.Gpu] | None
) -> steps.Plan:
    uuids = {gpu.uuid for gpu in members}
    selected = config.select(wish, node or members)
    return planner.plan(members, {uuid: want for uuid, want in selected.items() if uuid in uuids})


def _refusal(wish: config.Layout, members: Sequence[model.Gpu]) -> errors.LayoutError | None:
    try:
        _plan(wish, members, None)
    except errors.LayoutError as error:
        return error
    return None
