"""Check which layouts fit which GPUs, without touching any.

A rule with a ``device-filter``, or with the UUID or PCI address of a GPU, must fit that GPU. Any
other rule is meant for every GPU that supports it: a layout for A100s is valid although an A30 has
no ``1g.5gb``. So a rule that does not fit is excused if it fits another known GPU. It is not if
the user named the layout, which is then meant for these GPUs.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mig_manager import errors, reasons
from mig_manager.core import model, steps
from mig_manager.core.layout import layouts, selection
from mig_manager.core.node.devices import strategies
from mig_manager.core.planner import planner

if TYPE_CHECKING:
    from mig_manager.core.answers import check_answers


_NO_MIG = "no MIG"


class Fit(enum.Enum):
    """Whether a layout fits a product."""

    FITS = "fits"
    DOES_NOT_FIT = "does-not-fit"
    ELSEWHERE = "elsewhere"  # it does not fit, but fits other products, and does not name this one
    NOT_FOR_IT = "not-for-it"  # the layout is for other GPUs
    UNKNOWN = "unknown"  # the driver reports the GPU's profiles only with MIG on


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProductFit:
    """Whether one layout fits one product, and why not."""

    layout: str
    product: str
    fit: Fit
    why: str  # empty when it fits
    brief: str = ""  # the cause in a few words; empty when it fits, or selects other GPUs
    location: errors.Location | None = None  # where the rule is that does not fit
    origin: str = ""  # origin of the layout
    unserved: Mapping[strategies.Strategy, str] = dataclasses.field(default_factory=dict)
    """MIG strategies with which the device plugin would exit although it fits, and why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """How layouts fit products, in the order of layouts, then of products."""

    source: str
    layouts: tuple[str, ...]
    products: tuple[str, ...]
    product_fits: Mapping[tuple[str, str], ProductFit]  # by layout and product
    has_unchecked_indices: bool = False
    """Whether a layout selects GPUs by index, and was compared with products."""

    @property
    def misfits(self) -> tuple[ProductFit, ...]:
        """Those that need action."""
        return tuple(v for v in self.product_fits.values() if v.fit is Fit.DOES_NOT_FIT)

    @property
    def without_mig(self) -> Sequence[str]:
        """The products that have no MIG, as far as a layout would enable it."""
        names = [v.product for v in self.product_fits.values() if v.brief == _NO_MIG]
        return list(dict.fromkeys(names))

    @property
    def unserved(self) -> Mapping[strategies.Strategy, Sequence[str]]:
        """The layouts that fit but make the device plugin exit, by MIG strategy."""
        fits = self.product_fits.values()
        return {
            strategy: list(dict.fromkeys(v.layout for v in fits if strategy in v.unserved))
            for strategy in strategies.Strategy
            if any(strategy in v.unserved for v in fits)
        }

    def to_data(self) -> "check_answers.Validation":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "Validation",
            "source": self.source,
            "is_valid": not self.misfits,
            "verdicts": [
                {
                    "layout": v.layout,
                    "origin": v.origin,
                    "product": v.product,
                    "fit": v.fit.value,
                    "why": v.why,
                    "place": str(v.location) if v.location else None,
                    "unserved_mig_strategies": {
                        strategy.value: why for strategy, why in v.unserved.items()
                    },
                }
                for v in self.product_fits.values()
            ],
        }


OtherProducts = Callable[[], Sequence[model.Gpu]]
"""Returns one idle GPU of every other known product; called only if a rule does not fit."""


def against_products(
    checked: Sequence[layouts.Layout],
    *,
    source: str,
    templates: Sequence[model.Gpu],
    others: OtherProducts | None = None,
) -> Validation:
    """Check every layout against products.

    A rule counts if its filter matches the product, whatever GPU indices it names. It does not
    count if a later rule for all GPUs replaces it.
    """
    names = [template.name for template in templates]
    labelled = {}
    for template in templates:
        # The PCI id distinguishes products that share a name.
        is_shared = names.count(template.name) > 1
        suffix = f" (0x{template.pci_device_id:08X})" if is_shared else ""
        labelled[template.name + suffix] = template
    cases = [
        _Case(
            layout=layout,
            product=label,
            variants=_layouts_for_product(layout, template),
            members=(template,),
        )
        for layout in checked
        for label, template in labelled.items()
    ]
    has_indices = any(
        rule.indices and any(map(rule.filters_match, templates))
        for layout in checked
        for rule in layout.rules
    )
    result = _check(checked, source, tuple(labelled), others, cases)
    return dataclasses.replace(result, has_unchecked_indices=has_indices)


def against_node(
    checked: Sequence[layouts.Layout],
    *,
    source: str,
    gpus: Sequence[model.Gpu],
    others: OtherProducts | None = None,
) -> Validation:
    """Check every layout against the GPUs of one node, regardless of their instances."""
    products = tuple(dict.fromkeys(gpu.name for gpu in gpus))
    cases = [
        _Case(
            layout=layout,
            product=product,
            variants=(layout,),
            members=[gpu for gpu in gpus if gpu.name == product],
            node=gpus,
        )
        for layout in checked
        for product in products
    ]
    return _check(checked, source, products, others, cases)


def _check(
    checked: Sequence[layouts.Layout],
    source: str,
    products: tuple[str, ...],
    others: OtherProducts | None,
    cases: Sequence["_Case"],
) -> Validation:
    check = _LayoutCheck(others)
    return Validation(
        source=source,
        layouts=tuple(layout.name for layout in checked),
        products=products,
        product_fits={(case.layout.name, case.product): check.check(case) for case in cases},
    )


def _layouts_for_product(
    layout: layouts.Layout, template: model.Gpu
) -> tuple[layouts.Layout, ...]:
    """Return layouts of one rule, for all rules that can apply to such a GPU."""
    deciding: list[layouts.Rule] = []
    for rule in layout.rules:
        if rule.filters_match(template):
            deciding = [*(deciding if rule.indices is not None else []), rule]
    return tuple(_alone(layout, rule) for rule in deciding)


def _alone(layout: layouts.Layout, rule: layouts.Rule) -> layouts.Layout:
    """Return the layout with only one rule, for every GPU that its filters match."""
    everywhere = dataclasses.replace(rule, indices=None, identities=())
    return dataclasses.replace(layout, rules=(everywhere,), is_lenient=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One layout and one product."""

    layout: layouts.Layout
    product: str
    variants: Sequence[layouts.Layout]
    members: Sequence[model.Gpu]
    node: Sequence[model.Gpu] | None = None
    """All GPUs of the members' node; None: the member is a template."""

    @property
    def rules(self) -> Sequence[layouts.Rule]:
        """The rules that can apply to the members."""
        return [rule for variant in self.variants for rule in variant.rules]

    @property
    def results(self) -> Sequence[strategies.GpuLayout]:
        """The layouts of the node's GPUs, or of one template for every rule."""
        if self.node is not None:
            return strategies.gpu_layouts(self.node, selection.select(self.layout, self.node))
        return [strategies.gpu_layout(f"some {self.product}", rule.desired) for rule in self.rules]

    def product_fit(self, fit: Fit, why: str = "") -> ProductFit:
        return ProductFit(
            layout=self.layout.name,
            product=self.product,
            fit=fit,
            why=why,
            origin=self.layout.origin,
        )


class _LayoutCheck:
    """Checks layouts, with a cache of rules that fit other products."""

    def __init__(self, others: OtherProducts | None) -> None:
        self._others = others
        self._fits_by_rule: dict[layouts.Rule, bool] = {}

    def check(self, case: _Case) -> ProductFit:
        """Plan every variant for the members, as parts of their node."""
        is_unknown = False
        for variant in case.variants:
            if not any(rule.filters_match(gpu) for rule in variant.rules for gpu in case.members):
                continue
            try:
                plan = _plan(variant, case.members, case.node or case.members)
            except errors.LayoutError as error:
                return self._misfit(case, error)
            is_unknown |= plan.is_provisional
        if not any(rule.matches(gpu) for rule in case.rules for gpu in case.members):
            return case.product_fit(Fit.NOT_FOR_IT, "it is for other GPUs")
        if is_unknown:
            why = "this driver reports the GPU's profiles only with MIG on"
            return case.product_fit(Fit.UNKNOWN, why)
        unserved = strategies.refusals(case.results)
        return dataclasses.replace(case.product_fit(Fit.FITS), unserved=unserved)

    def _misfit(self, case: _Case, error: errors.LayoutError) -> ProductFit:
        failing = [
            rule
            for rule in case.rules
            if any(
                rule.filters_match(gpu) and not _fits(_alone(case.layout, rule), gpu)
                for gpu in case.members
            )
        ]
        # Rules that fail only together.
        failing = failing or list(case.rules)
        is_short_of_gpus = case.node and selection.missing_gpus(case.layout, case.node)
        # A rule with a filter, or with the name of a GPU, is meant for that GPU. No other GPU
        # model gives a node the GPUs that it lacks.
        is_excused = not (
            any(rule.filters or any(map(rule.names, case.members)) for rule in failing)
            or (error.reason is reasons.Reason.NO_GPU_MATCHES and is_short_of_gpus)
        ) and all(self._fits_elsewhere(case.layout, rule) for rule in failing)
        misfit = case.product_fit(Fit.ELSEWHERE if is_excused else Fit.DOES_NOT_FIT, error.text)
        return dataclasses.replace(
            misfit, brief=_brief(error), location=error.location or failing[0].location
        )

    def _fits_elsewhere(self, layout: layouts.Layout, rule: layouts.Rule) -> bool:
        if self._others is None:
            return False
        variant = _alone(layout, rule)
        key = variant.rules[0]
        if key not in self._fits_by_rule:
            self._fits_by_rule[key] = any(
                gpu.is_mig_capable and rule.filters_match(gpu) and _fits(variant, gpu)
                for gpu in self._others()
            )
        return self._fits_by_rule[key]


def _plan(
    layout: layouts.Layout, members: Sequence[model.Gpu], node: Sequence[model.Gpu]
) -> steps.Plan:
    selected = selection.select(layout, node)
    return planner.plan(
        members, {gpu.uuid: selected[gpu.uuid] for gpu in members if gpu.uuid in selected}
    )


def _brief(error: errors.LayoutError) -> str:
    match error.reason:
        case reasons.Reason.UNKNOWN_PROFILE if error.profile:
            return f"no profile {error.profile}"
        case reasons.Reason.NOT_MIG_CAPABLE:
            return _NO_MIG
        case reasons.Reason.DOES_NOT_FIT:
            return "no room for all its instances"
        case _:
            return error.message


def _fits(layout: layouts.Layout, gpu: model.Gpu) -> bool:
    try:
        _plan(layout, (gpu,), (gpu,))
    except errors.LayoutError:
        return False
    return True
