"""``validate`` at a shell: documents, layouts and GPUs in, verdicts out."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from mig_manager import errors
from mig_manager.change import validate
from mig_manager.cli import command_settings, console, gpu_access
from mig_manager.cli.render import gpu_report
from mig_manager.core import bar, model, yaml_tree
from mig_manager.core.layout import config, layouts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What there is to say about one document."""

    document: config.Document
    fits: validate.Validated | None
    """None: it was not compared with any GPU."""
    is_portable_wanted: bool

    @property
    def is_good(self) -> bool:
        """Whether nobody must act."""
        is_portable = not (self.is_portable_wanted and self.document.extensions)
        return is_portable and not (self.fits and self.fits.misfits)

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        fits = self.fits.to_data() if self.fits else {"source": self.document.source}
        return fits | {
            "is_valid": self.is_good,
            "not_portable": [str(remark) for remark in self.document.extensions],
            "warnings": [str(remark) for remark in self.document.warnings],
        }

    def text(self, style: bar.Style) -> str:
        """Return the verdicts for people."""
        parts = [gpu_report.validated(self.fits, style=style)] if self.fits else []
        if self.is_portable_wanted:
            parts.append(gpu_report.portability(self.document))
        return "\n".join(parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the command says."""

    checked: tuple[Checked, ...]
    is_good: bool
    has_files: bool
    style: bar.Style

    def to_data(self) -> Mapping[str, object]:
        """Return plain data for JSON and YAML."""
        if not self.has_files:
            return self.checked[0].to_data()
        return {"is_valid": self.is_good, "files": [each.to_data() for each in self.checked]}

    @property
    def text(self) -> str:
        """All of it for people."""
        if not self.has_files:
            return self.checked[0].text(self.style)
        return "\n\n".join(
            f"{each.document.source}\n{each.text(self.style)}" for each in self.checked
        )


class Validate:
    """One run of the command."""

    def __init__(
        self,
        given: command_settings.CommandSettings,
        terminal: console.Console,
        reach: gpu_access.Reach,
        read: Callable[[str | None], config.Document],
        style: bar.Style,
    ) -> None:
        """Take what to check and what to check it against.

        Args:
            given: The settings.
            terminal: Where remarks go.
            reach: The GPUs.
            read: Reads one document; None: the one of the settings.
            style: What the terminal can show.
        """
        self._given = given
        self._terminal = terminal
        self._reach = reach
        self._read = read
        self._style = style

    def run(self) -> Answer:
        """Check it all.

        Raises:
            ConfigError: A document breaks the format; with several, once all were looked at.
            HardwareError: The GPUs of this machine cannot be seen.
            UsageError: There is no document, or no such product.
        """
        if not self._given.has_files:
            checked = [self._check(self._read(self._given.config_file), self._given.layouts)]
            return self._answer(checked, is_good=checked[0].is_good)
        if not self._given.layouts:
            raise errors.UsageError("--files: name the documents to check")
        checked = []
        broken = 0
        for file in self._given.layouts:
            try:
                checked.append(self._check(self._read(file), ()))
            except errors.ConfigError as error:
                broken += 1
                self._terminal.note(error.message)
        is_good = not broken and all(each.is_good for each in checked)
        return self._answer(checked, is_good=is_good)

    def _answer(self, checked: Sequence[Checked], *, is_good: bool) -> Answer:
        return Answer(
            checked=tuple(checked),
            is_good=is_good,
            has_files=self._given.has_files,
            style=self._style,
        )

    def _check(self, source: config.Document, names: Sequence[str]) -> Checked:
        for remark in (*source.warnings, *unknown_names(source)):
            self._terminal.note(f"warning: {remark}")
        layouts = [source.layout(name) for name in names or tuple(source.layouts)]
        is_offline = self._given.is_portable and not self._given.products
        return Checked(
            document=source,
            fits=None if is_offline else self._fits(source, layouts, is_named=bool(names)),
            is_portable_wanted=self._given.is_portable,
        )

    def _fits(
        self, source: config.Document, layouts: Sequence[config.Layout], *, is_named: bool
    ) -> validate.Validated:
        others = None if is_named or self._given.must_fit else known_gpus
        if self._given.products:
            return validate.against_products(
                layouts, source=source.source, templates=self._templates, others=others
            )
        return validate.against_node(layouts, source=source.source, gpus=self._here, others=others)

    @functools.cached_property
    def _templates(self) -> Sequence[model.Gpu]:
        return self._reach.templates()

    @functools.cached_property
    def _here(self) -> Sequence[model.Gpu]:
        return self._reach.gpus().observe()


def known_gpus() -> Sequence[model.Gpu]:
    """Return an idle GPU of every product whose profiles are known."""
    from mig_manager.catalogue import products  # noqa: PLC0415 - only for products

    return products.known()


def unknown_names(source: config.Document) -> Sequence[yaml_tree.Diagnostic]:
    """Return remarks on filters by a name that no known product has."""
    named = {
        each: rule.filter_locations[each]
        for layout in source.layouts.values()
        for rule in layout.rules
        for each in rule.filters
        if isinstance(each, layouts.NameFilter)
    }
    if not named:
        return ()
    from mig_manager.catalogue import hardware  # noqa: PLC0415 - only for products

    products = hardware.products().values()
    names = {name for product in products for name in (product.key, *product.names)}
    return [
        yaml_tree.Diagnostic(place, _unknown(each, names))
        for each, place in named.items()
        if not any(each.matches_name(name) for product in products for name in product.names)
    ]


def _unknown(name: layouts.NameFilter, known: set[str]) -> str:
    wider = layouts.NameFilter(pattern=f"*{name.pattern}*")
    hint = f"; did you mean '{wider}'?" if any(wider.matches_name(each) for each in known) else ""
    return f"no product known here is called '{name}'{hint}"
