"""Publish the layouts available on the node, for people and for other programs."""

import functools

import structlog

from mig_manager import errors
from mig_manager.agent import node_context
from mig_manager.core import model
from mig_manager.core.files import yaml_text
from mig_manager.core.layout import available_layouts, layout_documents, layout_list, layouts
from mig_manager.core.objects import well_known

_log = structlog.get_logger()


class LayoutReport:
    """The layouts that fit the node's GPUs, as published."""

    def __init__(self, context: node_context.NodeContext) -> None:
        self._context = context
        self._written: tuple[layouts.Layout, ...] | None = None
        """The layouts in the published document; None: not written yet."""

    def forget_node(self) -> None:
        """Write the document again: the Node was deleted and registered again."""
        self._written = None

    def fitting(self, gpus: model.ObservedGpus) -> tuple[layouts.Layout, ...] | None:
        """Return the layouts available on the node; None if unknown."""
        if not gpus:
            return None
        try:
            document = available_layouts.list_all(
                self._context.layout_file, self._context.settings, gpus
            )
        except errors.ConfigError as error:
            _log.info("layouts_not_listed", error=error.message)
            return None
        listed = document.layouts.values()
        idle = tuple(gpu.unpartitioned for gpu in gpus)
        names = _fitting_names(tuple((each, each.is_lenient) for each in listed), idle)
        return tuple(each for each in listed if each.name in names)

    def annotations(self, fitting: tuple[layouts.Layout, ...] | None) -> dict[str, str | None]:
        """Return the annotation to write; empty if the layouts are unknown."""
        if fitting is None:
            return {}
        entries = map(layout_list.Entry.of, fitting)
        takes_custom = self._context.settings.has_custom_layouts
        text = layout_list.to_json(entries, takes_custom=takes_custom)
        return {well_known.LAYOUTS_ANNOTATION: text}

    def write(self, fitting: tuple[layouts.Layout, ...] | None) -> None:
        """Write a new list's document, for other programs."""
        write = self._context.deps.write_layouts
        if write is None or fitting in (None, self._written):
            return
        if write(yaml_text.dump(layout_documents.render(fitting or ()))):
            self._written = fitting


@functools.lru_cache(maxsize=4)
def _fitting_names(
    candidates: tuple[tuple[layouts.Layout, bool], ...], idle: tuple[model.Gpu, ...]
) -> frozenset[str]:
    """Return the names of the layouts that these idle GPUs can have.

    Cached: every run asks this, layouts and GPUs rarely change, and planning all layouts would
    take half of a run's time. Equal layouts can differ in ``is_lenient``, so each comes with it.
    """
    fits = available_layouts.fitting((layout for layout, _ in candidates), idle)
    return frozenset(fit.layout.name for fit in fits)
