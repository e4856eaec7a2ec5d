"""``validate``: check layout files against the grammar, GPU products and this machine's GPUs."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from mig_manager import errors
from mig_manager.change import validate as fits
from mig_manager.cli import command_settings, console, gpu_access, gpu_report
from mig_manager.core import bar, model, yaml_tree
from mig_manager.core.layout import config, layouts

ReadFile = Callable[[str | None], config.Document]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
    """The verdicts on one layout file."""

    document: config.Document
    fits: fits.Validated | None
    """None: it was not compared with any GPU."""
    checks_portability: bool

    @property
    def is_good(self) -> bool:
        """Whether the file is valid, fits, and is portable if that was checked."""
        is_portable = not (self.checks_portability and self.document.extensions)
        return is_portable and not (self.fits and self.fits.misfits)

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        data = self.fits.to_data() if self.fits else {"source": self.document.source}
        return data | {
            "is_valid": self.is_good,
            "not_portable": [str(diagnostic) for diagnostic in self.document.extensions],
            "warnings": [str(diagnostic) for diagnostic in self.document.warnings],
        }

    def text(self, style: bar.Style) -> str:
        """Return the verdicts for people."""
        parts = [gpu_report.validated(self.fits, style=style)] if self.fits else []
        if self.checks_portability:
            parts.append(gpu_report.portability(self.document))
        return "\n".join(parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The verdicts on all layout files."""

    files: tuple[FileResult, ...]
    is_good: bool
    has_files: bool
    """Whether files were named, instead of layouts of one file."""

    def to_data(self) -> Mapping[str, object]:
        """Return plain data for JSON and YAML."""
        if not self.has_files:
            return self.files[0].to_data()
        return {"is_valid": self.is_good, "files": [each.to_data() for each in self.files]}

    def text(self, style: bar.Style) -> str:
        """Return the verdicts for people."""
        if not self.has_files:
            return self.files[0].text(style)
        return "\n\n".join(f"{each.document.source}\n{each.text(style)}" for each in self.files)


def validate(
    chosen: command_settings.CommandSettings,
    terminal: console.Console,
    access: gpu_access.GpuAccess,
    read: ReadFile,
) -> Result:
    """Validate layout files, which ``read`` parses; for None it parses the default one.

    Raises:
        ConfigError: The file is invalid.
        HardwareError: The GPUs of this machine cannot be observed.
        UsageError: No file is named, or a product is unknown.
    """
    compare = _comparison(chosen, access)

    def check(document: config.Document, names: Sequence[str]) -> FileResult:
        for diagnostic in (*document.warnings, *unknown_names(document)):
            terminal.note(f"warning: {diagnostic}")
        return FileResult(
            document=document,
            fits=compare(document, names),
            checks_portability=chosen.is_portable,
        )

    if not chosen.has_files:
        result = check(read(chosen.config_file), chosen.layouts)
        return Result(files=(result,), is_good=result.is_good, has_files=False)
    if not chosen.layouts:
        raise errors.UsageError("--files: name the layout files to check")
    results = []
    for file in chosen.layouts:
        try:
            results.append(check(read(file), ()))
        except errors.ConfigError as error:
            terminal.note(error.message)
    is_good = len(results) == len(chosen.layouts) and all(each.is_good for each in results)
    return Result(files=tuple(results), is_good=is_good, has_files=True)


def _comparison(
    chosen: command_settings.CommandSettings, access: gpu_access.GpuAccess
) -> Callable[[config.Document, Sequence[str]], fits.Validated | None]:
    """Return a function that compares layouts of a file with GPUs; it observes them once."""
    observe = functools.cache(lambda: access.gpus().observe())
    templates = functools.cache(access.templates)

    def compare(document: config.Document, names: Sequence[str]) -> fits.Validated | None:
        selected = [document.layout(name) for name in names or tuple(document.layouts)]
        others = None if names or chosen.must_fit else _known_gpus
        source = document.source
        if chosen.products:
            return fits.against_products(
                selected, source=source, templates=templates(), others=others
            )
        if chosen.is_portable:
            return None
        return fits.against_node(selected, source=source, gpus=observe(), others=others)

    return compare


def _known_gpus() -> Sequence[model.Gpu]:
    from mig_manager.catalogue import products  # noqa: PLC0415 - only for products

    return products.known()


def unknown_names(source: config.Document) -> Sequence[yaml_tree.Diagnostic]:
    """Return diagnostics on filters by a name that no known product has."""
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
    return f"no known product is called '{name}'{hint}"
