"""The layouts available on a node: from a config file, and generated.

Of equal names, an owner's file precedes generated layouts. The default file of this program or of
NVIDIA's operator follows them: it was written without knowledge of the node.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mig_manager import errors
from mig_manager.core import messages, model
from mig_manager.core.files import json_text
from mig_manager.core.layout import generator, layouts
from mig_manager.core.planner import planner
from mig_manager.core.records import gpu_codec

_VERSION = 1
_MAX_BYTES = 64 << 10  # limit of the annotation
_MAX_LAYOUTS = 1000  # layouts in it
_MAX_LETTERS = 200  # limit of a name or an origin


def generate(gpus: Iterable[model.Gpu]) -> dict[str, layouts.Layout]:
    """Return the standard layouts of a node's GPUs; none if the driver lists no profiles."""
    try:
        return generator.layouts_of(generator.kinds_of(gpus))
    except errors.LayoutError:
        return {}


def desired_gpus(
    name: str, document: layouts.Document | None, gpus: Iterable[model.Gpu]
) -> dict[str, model.DesiredGpu]:
    """Return a layout of a document, or else a generated one, on these GPUs; empty if unknown.

    Raises:
        LayoutError: It does not fit.
    """
    gpus = tuple(gpus)
    available = document.layouts if document else generate(gpus)
    return layouts.select(available[name], gpus) if name in available else {}


def gpus_without_layouts(gpus: model.ObservedGpus) -> tuple[model.UnreachableGpu, ...]:
    """Return the unreachable GPUs with unknown layouts: no reachable GPU is of their model."""
    models = {gpu.pci_device_id for gpu in gpus}
    return tuple(gpu for gpu in gpus.unreachable if gpu.pci_device_id not in models)


def merge(
    file: layouts.Document, generated: Mapping[str, layouts.Layout], *, is_default: bool
) -> layouts.Document:
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
    idle = [gpu_codec.idle(gpu) for gpu in gpus]
    for layout in candidates:
        try:
            desired = layouts.select(layout, idle)
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedLayout:
    """One layout in a node's list."""

    name: str
    content_hash: str
    origin: str

    @staticmethod
    def of(layout: layouts.Layout) -> "ServedLayout":
        """Return the entry of a layout."""
        return ServedLayout(
            name=layout.name, content_hash=layout.content_hash, origin=layout.origin
        )


def to_json(entries: Iterable[ServedLayout], *, takes_custom: bool = False) -> str:
    """Return the annotation that lists a node's layouts, up to its maximum size.

    ``takes_custom``: whether the node also takes a layout from its annotation.

    The API server refuses a node with more than 256 KiB of annotations
    (``TotalAnnotationSizeLimitB`` of ``k8s.io/apimachinery``), also when a run ends.
    """
    rows: dict[str, dict[str, str]] = {}
    members = {"custom": True} if takes_custom else {}
    size = 0
    for each in entries:
        row = {"hash": each.content_hash, "origin": each.origin}
        size += len(json.dumps({each.name: row}))
        if size > _MAX_BYTES or len(rows) == _MAX_LAYOUTS:
            members["truncated"] = True
            break
        rows[each.name] = row
    return json.dumps({"version": _VERSION, **members, "layouts": rows})


def from_json(text: str) -> tuple[ServedLayout, ...]:
    """Parse that annotation, with printable texts; ValueError if it is malformed."""
    with json_text.decoding("a list of layouts"):
        rows = list(_parse(text)["layouts"].items())[:_MAX_LAYOUTS]
        return tuple(
            ServedLayout(
                name=messages.word(name, _MAX_LETTERS),
                content_hash=messages.word(row["hash"], _MAX_LETTERS),
                origin=messages.word(row["origin"], _MAX_LETTERS),
            )
            for name, row in rows
        )


def is_complete(text: str) -> bool:
    """Return whether the list has every layout; False if it is malformed."""
    try:
        return not _parse(text).get("truncated")
    except ValueError:
        return False


def lists_custom(text: str) -> bool | None:
    """Return whether the node takes custom layouts; None if the list is malformed."""
    try:
        return _parse(text).get("custom") is True
    except ValueError:
        return None


def _parse(text: str) -> dict[str, Any]:
    """Parse the list's JSON; ValueError if it is malformed, or of another version."""
    data = json_text.parse_object(text)
    if data.get("version") != _VERSION:
        raise ValueError("from a version this program does not know")
    return data
