"""The verdicts on layout files: whether layouts fit GPUs, and mig-parted accepts the file."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mig_manager import errors
from mig_manager.core import messages
from mig_manager.core.display import styles, tables
from mig_manager.core.files import yaml_diagnostics
from mig_manager.core.layout import gpu_selectors, layout_documents, layout_fit

if TYPE_CHECKING:
    from mig_manager.core.answers import check_answers

_MAX_EXPLAINED = 12
_MAX_COLUMNS = 16
_MAX_ROWS = 24  # a longer table has no layouts for other GPUs
_UNCHECKED_INDICES = (
    "Device indices were not checked: layouts are compared with products, not with a node."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedFile:
    """The verdicts on one layout file."""

    document: layout_documents.Document
    fits: layout_fit.Validation | None  # None: not compared with any GPU
    checks_portability: bool

    @property
    def is_good(self) -> bool:
        """Whether the file is valid, fits, and is portable if portability was checked."""
        is_portable = not (self.checks_portability and self.document.extensions)
        return is_portable and not (self.fits and self.fits.misfits)

    def to_data(self) -> "check_answers.Validation":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "Validation",
            "source": self.document.source,
            "verdicts": self.fits.to_data()["verdicts"] if self.fits else [],
            "is_valid": self.is_good,
            "not_portable": [str(diagnostic) for diagnostic in self.document.extensions],
            "warnings": [str(diagnostic) for diagnostic in self.document.warnings],
        }

    def text(self, style: styles.Style) -> str:
        """Return the verdicts for people."""
        parts = [table(self.fits, style=style)] if self.fits else []
        if self.checks_portability:
            parts.append(_portability(self.document, style=style))
        return "\n".join(parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InvalidFile:
    """A file that cannot be read or parsed."""

    source: str
    error: errors.ConfigError
    is_good: bool = dataclasses.field(default=False, init=False)

    def to_data(self) -> "check_answers.Validation":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "Validation",
            "source": self.source,
            "verdicts": [],
            "is_valid": False,
            "error": "; ".join((self.error.message, *self.error.others)),
        }


def files_text(results: Sequence[ValidatedFile | InvalidFile], style: styles.Style) -> str:
    """Return the verdicts on several files for people, and the number of invalid files."""
    valid = [each for each in results if isinstance(each, ValidatedFile)]
    blocks = [f"{style.fit(each.document.source)}\n{each.text(style)}" for each in valid]
    if number := len(results) - len(valid):
        verb = "is" if number == 1 else "are"
        total = f"{number} of {messages.count(len(results), 'file')} {verb} invalid."
        blocks.append(style.paint(total, styles.Tone.BAD))
    return "\n\n".join(blocks)


def unknown_names(source: layout_documents.Document) -> Sequence[yaml_diagnostics.Diagnostic]:
    """Return diagnostics for device filters whose name matches no known product."""
    named = {
        each: rule.filter_locations[each]
        for layout in source.layouts.values()
        for rule in layout.rules
        for each in rule.filters
        if isinstance(each, gpu_selectors.NameFilter)
    }
    if not named:
        return ()
    from mig_manager.catalogue import hardware  # noqa: PLC0415 - only for products

    products = hardware.products().values()
    names = {name for product in products for name in (product.key, *product.names)}
    diagnostics = []
    for each, place in named.items():
        if any(each.matches_name(name) for product in products for name in product.names):
            continue
        wider = gpu_selectors.NameFilter(pattern=f"*{each.pattern}*")
        hint = f"; did you mean '{wider}'?" if any(map(wider.matches_name, names)) else ""
        diagnostics.append(yaml_diagnostics.Diagnostic(place, f"unknown product '{each}'{hint}"))
    return diagnostics


def table(result: layout_fit.Validation, *, style: styles.Style) -> str:
    """Return a table of layouts and products, and why layouts do not fit."""
    drawn = result
    if len(result.layouts) > _MAX_ROWS:
        shown = tuple(name for name in result.layouts if not _is_for_others(result, name))
        drawn = dataclasses.replace(result, layouts=shown)
    draw = _by_layout if len(result.products) > _MAX_COLUMNS else _by_product
    lines = [*draw(drawn, style), ""]
    fits = {
        result.product_fits[name, product].fit
        for name in drawn.layouts
        for product in result.products
    }
    # A no-break space keeps a glyph beside its meaning.
    legend = [
        f"{glyph} {text}".replace(" ", "\xa0")
        for fit, (glyph, _, text) in _FITS.items()
        if fit in fits
    ]
    if legend:
        text = style.fit("   ".join(legend), further="")
        lines.append(style.plain(text.replace("\xa0", " ")))
    unknown = [v for v in result.product_fits.values() if v.fit is layout_fit.Fit.UNKNOWN]
    explained = result.misfits or unknown
    if hidden := len(result.layouts) - len(drawn.layouts):
        more = messages.count(hidden, "more layout")
        lines.append(style.fit(f"{more} for other GPUs; -o json has the reasons"))
        if result.without_mig:
            lines.append(style.fit(f"Without MIG: {messages.list_names(result.without_mig)}"))
    else:
        lines += _elsewhere(result, style)
    for misfit in explained[:_MAX_EXPLAINED]:
        place = f" [{misfit.location}]" if misfit.location else ""
        lines.append(style.wrap(f"{misfit.layout}: {misfit.why}{place}"))
    if len(explained) > _MAX_EXPLAINED:
        lines.append(f"{len(explained) - _MAX_EXPLAINED} more; -o json explains them all")
    lines += [
        tables.listing(f"Not for MIG strategy {strategy.value}", names, style)
        for strategy, names in result.unserved.items()
    ]
    if result.has_unchecked_indices:
        lines.append(style.wrap(_UNCHECKED_INDICES))
    lines.append(_summed_up(result, drawn, style))
    return "\n".join(lines)


def _is_for_others(result: layout_fit.Validation, layout: str) -> bool:
    others = {layout_fit.Fit.ELSEWHERE, layout_fit.Fit.NOT_FOR_IT}
    return {result.product_fits[layout, product].fit for product in result.products} <= others


def _portability(document: layout_documents.Document, *, style: styles.Style) -> str:
    """Name the lines of a layout file that nvidia-mig-parted does not understand."""
    if not document.extensions:
        return style.fit(f"{document.source}: nvidia-mig-parted understands all of it.")
    lines = [style.fit(f"{document.source}: nvidia-mig-parted does not understand all of it.")]
    return "\n".join([*lines, *(style.wrap(str(remark)) for remark in document.extensions)])


_FITS = {
    layout_fit.Fit.FITS: ("✓", styles.Tone.GOOD, "fits"),
    layout_fit.Fit.DOES_NOT_FIT: ("✗", styles.Tone.BAD, "does not fit"),
    layout_fit.Fit.ELSEWHERE: ("-", styles.Tone.FAINT, "fits other GPUs only"),
    layout_fit.Fit.NOT_FOR_IT: ("·", styles.Tone.FAINT, "selects other GPUs"),
    layout_fit.Fit.UNKNOWN: ("?", styles.Tone.WARN, "unknown"),
}


def _elsewhere(result: layout_fit.Validation, style: styles.Style) -> Iterable[str]:
    """Yield why layouts fit only other GPUs: one line for all products with the same causes."""
    products: dict[str, list[str]] = {}
    for product in result.products:
        fits = [result.product_fits[layout, product] for layout in result.layouts]
        causes = [(v.layout, v.brief) for v in fits if v.fit is layout_fit.Fit.ELSEWHERE]
        if causes:
            products.setdefault(messages.by_cause(causes), []).append(product)
    for text, names in list(products.items())[:_MAX_EXPLAINED]:
        yield style.wrap(f"- {messages.list_names(names)}: {text}")
    if products:
        yield "-o json explains them all"


def _by_product(result: layout_fit.Validation, style: styles.Style) -> Iterable[str]:
    for number, name in enumerate(result.products, start=1):
        yield style.fit(f"  {number:>2}  {name}")
    yield ""
    rows: list[tables.Row] = [
        (layout, *(_FITS[result.product_fits[layout, each].fit][:2] for each in result.products))
        for layout in result.layouts
    ]
    yield from tables.columns(("", *map(str, range(1, number + 1))), rows, style=style)


def _by_layout(result: layout_fit.Validation, style: styles.Style) -> Iterable[str]:
    """Yield how many products every layout fits, if they are too many for columns."""
    rows: list[tables.Row] = []
    for layout in result.layouts:
        fits = [result.product_fits[layout, product].fit for product in result.products]
        counts = [(fits.count(fit), glyph, tone) for fit, (glyph, tone, _) in _FITS.items()]
        rows.append((layout, *((f"{glyph} {n}" if n else "", tone) for n, glyph, tone in counts)))
    return tables.columns([""] * (1 + len(_FITS)), rows, style=style)


def _summed_up(
    result: layout_fit.Validation, drawn: layout_fit.Validation, style: styles.Style
) -> str:
    if result.misfits:
        number = len({misfit.layout for misfit in result.misfits})
        of_all = f"of {messages.count(len(result.layouts), 'layout')}"
        verb = "does" if number == 1 else "do"
        return style.paint(f"{number} {of_all} {verb} not fit.", styles.Tone.BAD)
    elsewhere = {
        name
        for (name, _), each in result.product_fits.items()
        if each.fit is layout_fit.Fit.ELSEWHERE
    }
    if elsewhere:
        if elsewhere & {*drawn.layouts}:
            outcome = "Some layouts do not fit all of these GPUs; use --must-fit to treat this as"
        else:
            outcome = "The layouts shown fit; use --must-fit to treat those for other GPUs as"
        return style.wrap(f"{outcome} an error.")
    if {each.fit for each in result.product_fits.values()} == {layout_fit.Fit.NOT_FOR_IT}:
        return style.paint("No layout selects any of these GPUs.", styles.Tone.WARN)
    return style.paint("Every layout fits the GPUs that it selects.", styles.Tone.GOOD)
