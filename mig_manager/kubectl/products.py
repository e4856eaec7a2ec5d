"""Which GPUs nodes have: as their agents publish it, or else as their labels let guess."""

import dataclasses
import re
from collections.abc import Sequence

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.fleet import standing
from mig_manager.core.layout import config
from mig_manager.core.records import gpu_records
from mig_manager.core.text import messages

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


def of_nodes(reports: Sequence[standing.Report]) -> Products:
    """Return the products of nodes, each once."""
    found: dict[tuple[str, int, int], model.Gpu] = {}
    notes: list[str] = []
    guessed: dict[str, model.Gpu] = {}
    for report in reports:
        gpus = report.gpus
        if gpus is None:
            gpus, note = presumed(report)
            notes.append(f"{report.node.view.name}: {note}")
            guessed.update((gpu.name, gpu) for gpu in gpus)
            continue
        for gpu in gpus:
            key = gpu.name, gpu.pci_device_id, gpu.pci_subsystem_id
            found.setdefault(key, gpu_records.idle(gpu))
    told = {gpu.name for gpu in found.values()}
    others = [gpu for name, gpu in guessed.items() if name not in told]
    # By their names and places in the table: the order of nodes means nothing.
    templates = sorted([*found.values(), *others], key=lambda gpu: (gpu.name, gpu.pci_device_id))
    return Products(templates=tuple(templates), notes=tuple(notes))


def presumed(report: standing.Report) -> tuple[model.ObservedGpus, str]:
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
