"""The layouts available on a node: from a layout file, and generated.

Of equal names, an owner's file precedes generated layouts. The default file of this program or of
NVIDIA's operator follows them: it was written without knowledge of the node.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from mig_manager import errors, reasons
from mig_manager.core import messages, model
from mig_manager.core.files import yaml_diagnostics
from mig_manager.core.layout import generator, layout_documents, layouts, selection
from mig_manager.core.objects import well_known
from mig_manager.core.planner import planner
from mig_manager.core.settings import node_settings

_ReadFile = Callable[[], layout_documents.Document]
"""Reads the layout file; raises ConfigError if it cannot be read or is invalid."""


def find(
    name: str,
    read_file: _ReadFile,
    sources: node_settings.LayoutSources,
    observe: Callable[[], model.ObservedGpus],
) -> tuple[layouts.Layout, tuple[yaml_diagnostics.Diagnostic, ...]]:
    """Return a layout and the warnings about the file; an owner's layout needs no observation.

    Raises:
        ConfigError: The file cannot be read or is invalid.
        HardwareError: ``observe`` raised it.
        LayoutError: The layout does not exist, may belong to an unreachable GPU
            (GPU_UNREACHABLE), or would be in the node's annotation (CUSTOM_LAYOUTS_OFF).
    """
    try:
        return _find_in_file_or_generate(name, read_file, sources, observe)
    except errors.LayoutError as error:
        if name != well_known.CUSTOM_LAYOUT:
            raise
        raise errors.LayoutError(
            f"{error.message}; this agent takes none from the annotation "
            f"{well_known.LAYOUT_ANNOTATION}, because custom layouts are switched off",
            reason=reasons.Reason.CUSTOM_LAYOUTS_OFF,
        ) from error


def _find_in_file_or_generate(
    name: str,
    read_file: _ReadFile,
    sources: node_settings.LayoutSources,
    observe: Callable[[], model.ObservedGpus],
) -> tuple[layouts.Layout, tuple[yaml_diagnostics.Diagnostic, ...]]:
    has_generated = sources.generated_layouts is not node_settings.GeneratedLayouts.OFF
    if not (has_generated and sources.has_default_layouts):
        file = read_file()
        if name in file.layouts or not has_generated:
            return file.layout(name), file.warnings
    gpus = observe()
    every = list_all(read_file, sources, gpus)
    try:
        return every.layout(name, (gpus,)), every.warnings
    except errors.LayoutError as error:
        lost = "; ".join(gpu.sentence for gpu in gpus_without_layouts(gpus))
        if not lost:
            raise
        raise errors.LayoutError(
            f"{messages.with_full_stop(error.message)} "
            f"It may be one of an unreachable GPU: {lost}",
            reason=reasons.Reason.GPU_UNREACHABLE,
        ) from error


def list_all(
    read_file: _ReadFile, sources: node_settings.LayoutSources, gpus: model.ObservedGpus
) -> layout_documents.Document:
    """Return every layout of the file and of the GPUs; a default file may be unusable.

    Raises:
        ConfigError: The file cannot be read or is invalid, and no generated layout replaces it.
    """
    has_generated = sources.generated_layouts is not node_settings.GeneratedLayouts.OFF
    made = generate(gpus) if has_generated else {}
    try:
        file = read_file()
    except errors.ConfigError as error:
        if not (made and sources.has_default_layouts):
            raise
        source = error.location.source if error.location else "the default file"
        file = layout_documents.Document(source=source, layouts={})
    if made and sources.generated_layouts is node_settings.GeneratedLayouts.ONLY:
        file = dataclasses.replace(file, layouts={})
    both = merge(file, made, is_default=sources.has_default_layouts)
    if not sources.has_custom_layouts:
        return both
    # A layout of this name in the file is unavailable: the name means the node's annotation.
    others = {k: v for k, v in both.layouts.items() if k != well_known.CUSTOM_LAYOUT}
    return dataclasses.replace(both, layouts=others)


def generate(gpus: Iterable[model.Gpu]) -> dict[str, layouts.Layout]:
    """Return the standard layouts of a node's GPUs; none if the driver lists no profiles."""
    try:
        return generator.layouts_of(generator.kinds_of(gpus))
    except errors.LayoutError:
        return {}


def desired_gpus(
    name: str, document: layout_documents.Document | None, gpus: Iterable[model.Gpu]
) -> dict[str, model.DesiredGpu]:
    """Return a layout of a document, or else a generated one, on these GPUs; empty if unknown.

    Raises:
        LayoutError: It does not fit.
    """
    gpus = tuple(gpus)
    by_name = document.layouts if document else generate(gpus)
    return selection.select(by_name[name], gpus) if name in by_name else {}


def gpus_without_layouts(gpus: model.ObservedGpus) -> tuple[model.UnreachableGpu, ...]:
    """Return the unreachable GPUs with unknown layouts: no reachable GPU is of their model."""
    models = {gpu.pci_device_id for gpu in gpus}
    return tuple(gpu for gpu in gpus.unreachable if gpu.pci_device_id not in models)


def merge(
    file: layout_documents.Document, generated: Mapping[str, layouts.Layout], *, is_default: bool
) -> layout_documents.Document:
    """Return the layouts of a file and generated ones; these replace a default file's."""
    if not generated:
        return file
    both = {**generated, **file.layouts, **(generated if is_default else {})}
    return dataclasses.replace(
        file, source=f"{file.source} and this node's generated layouts", layouts=both
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittingLayout:
    """A layout that GPUs can have."""

    layout: layouts.Layout
    gpus: tuple[model.Gpu, ...]
    """The GPUs that it selects, with its instances as on an empty GPU; without instances if the
    driver lists the profiles only with MIG on."""


def fitting(
    candidates: Iterable[layouts.Layout], gpus: Iterable[model.Gpu]
) -> Iterator[FittingLayout]:
    """Yield the layouts that these GPUs can have, regardless of their present instances."""
    idle = [gpu.unpartitioned for gpu in gpus]
    for layout in candidates:
        try:
            desired = selection.select(layout, idle)
            plan = planner.plan(idle, desired)
        except errors.LayoutError:
            continue
        instances = {each.gpu_uuid: each.instances for each in plan.gpus}
        yield FittingLayout(
            layout=layout,
            gpus=tuple(
                dataclasses.replace(
                    gpu,
                    current_mode=desired[gpu.uuid].mode,
                    pending_mode=desired[gpu.uuid].mode,
                    gpu_instances=instances.get(gpu.uuid, ()),
                )
                for gpu in idle
                if gpu.uuid in desired
            ),
        )
