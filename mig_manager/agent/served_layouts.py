"""Find a requested layout, and publish the layouts available on the node."""

import dataclasses
import functools
from collections.abc import Callable

import structlog

from mig_manager import errors
from mig_manager.agent import agent_settings
from mig_manager.core import messages, model, ports
from mig_manager.core.files import yaml_tree
from mig_manager.core.layout import config, layouts, served
from mig_manager.core.node import well_known
from mig_manager.core.records import gpu_codec

_log = structlog.get_logger()

_parsed = functools.lru_cache(maxsize=1)(config.parse)
"""Cache: the file rarely changes, and parsing would take half of the time until ``pending``."""


def find(
    name: str,
    source: ports.ConfigSource,
    sources: agent_settings.LayoutSources,
    observe: Callable[[], model.ObservedGpus],
) -> tuple[layouts.Layout, tuple[yaml_tree.Diagnostic, ...]]:
    """Return a layout and the warnings about the file; an owner's layout needs no observation.

    Raises:
        ConfigError: The file cannot be read or is invalid.
        HardwareError: ``observe`` raised it.
        LayoutError: The layout does not exist, may belong to an unreachable GPU
            (GPU_UNREACHABLE), or would be in the node's annotation (CUSTOM_LAYOUTS_OFF).
    """
    try:
        return _find_in_file_or_generate(name, source, sources, observe)
    except errors.LayoutError as error:
        if name != well_known.CUSTOM_LAYOUT:
            raise
        raise errors.LayoutError(
            f"{error.message}; this agent takes none from the annotation "
            f"{well_known.LAYOUT_ANNOTATION}, because custom layouts are switched off",
            reason=errors.Reason.CUSTOM_LAYOUTS_OFF,
        ) from error


def _find_in_file_or_generate(
    name: str,
    source: ports.ConfigSource,
    sources: agent_settings.LayoutSources,
    observe: Callable[[], model.ObservedGpus],
) -> tuple[layouts.Layout, tuple[yaml_tree.Diagnostic, ...]]:
    has_generated = sources.generated_layouts is not agent_settings.GeneratedLayouts.OFF
    if not (has_generated and sources.has_default_layouts):
        file = _read(source, sources)
        if name in file.layouts or not has_generated:
            return file.layout(name), file.warnings
    gpus = observe()
    document = _merge(source, sources, gpus)
    try:
        return document.layout(name, (gpus,)), document.warnings
    except errors.LayoutError as error:
        lost = "; ".join(gpu.sentence for gpu in served.gpus_without_layouts(gpus))
        if not lost:
            raise
        raise errors.LayoutError(
            f"{messages.with_full_stop(error.message)} "
            f"It may be one of an unreachable GPU: {lost}",
            reason=errors.Reason.GPU_UNREACHABLE,
        ) from error


def _merge(
    source: ports.ConfigSource, sources: agent_settings.LayoutSources, gpus: model.ObservedGpus
) -> layouts.Document:
    """Return every layout of the file and of the GPUs."""
    has_generated = sources.generated_layouts is not agent_settings.GeneratedLayouts.OFF
    made = served.generate(gpus) if has_generated else {}
    try:
        file = _read(source, sources)
    except errors.ConfigError as error:
        if not (made and sources.has_default_layouts):
            raise
        _log.warning("default_layouts_not_read", error=error.message)
        file = layouts.Document(source=source.name, layouts={})
    if made and sources.generated_layouts is agent_settings.GeneratedLayouts.ONLY:
        file = dataclasses.replace(file, layouts={})
    document = served.merge(file, made, is_default=sources.has_default_layouts)
    if not sources.has_custom_layouts:
        return document
    # A layout of this name in the file is unavailable: the name means the node's annotation.
    others = {k: v for k, v in document.layouts.items() if k != well_known.CUSTOM_LAYOUT}
    return dataclasses.replace(document, layouts=others)


@functools.lru_cache(maxsize=4)
def _fitting_names(
    candidates: tuple[tuple[layouts.Layout, bool], ...], idle: tuple[model.Gpu, ...]
) -> frozenset[str]:
    """Return the names of the layouts that these idle GPUs can have.

    Cached: every run asks this, layouts and GPUs rarely change, and planning all layouts would
    take half of a run's time. Equal layouts can differ in ``is_lenient``, so each comes with it.
    """
    fits = served.fitting((layout for layout, _ in candidates), idle)
    return frozenset(fit.layout.name for fit in fits)


def _read(source: ports.ConfigSource, sources: agent_settings.LayoutSources) -> layouts.Document:
    return _parsed(source.read(), source=source.name, is_lenient=sources.is_lenient)


class LayoutList:
    """The list of the layouts that fit the node's GPUs, for people and for other programs."""

    def __init__(self, deps: ports.Dependencies, sources: agent_settings.LayoutSources) -> None:
        self._deps = deps
        self._sources = sources
        self._written: tuple[layouts.Layout, ...] | None = None
        """The layouts in the published document; None: not written yet."""

    def fitting(self, gpus: model.ObservedGpus) -> tuple[layouts.Layout, ...] | None:
        """Return the layouts available on the node; None if unknown."""
        if not gpus:
            return None
        try:
            document = _merge(self._deps.configs, self._sources, gpus)
        except errors.ConfigError as error:
            _log.info("layouts_not_listed", error=error.message)
            return None
        listed = document.layouts.values()
        idle = tuple(map(gpu_codec.idle, gpus))
        names = _fitting_names(tuple((each, each.is_lenient) for each in listed), idle)
        return tuple(each for each in listed if each.name in names)

    def annotations(self, fitting: tuple[layouts.Layout, ...] | None) -> dict[str, str | None]:
        """Return the annotation to write; empty if the layouts are unknown."""
        if fitting is None:
            return {}
        entries = map(served.ServedLayout.of, fitting)
        text = served.to_json(entries, takes_custom=self._sources.has_custom_layouts)
        return {well_known.LAYOUTS_ANNOTATION: text}

    def write(self, fitting: tuple[layouts.Layout, ...] | None) -> None:
        """Write a new list's document, for other programs."""
        if self._deps.write_layouts is None or fitting in (None, self._written):
            return
        if self._deps.write_layouts(yaml_tree.dump(layouts.render(fitting or ()))):
            self._written = fitting
