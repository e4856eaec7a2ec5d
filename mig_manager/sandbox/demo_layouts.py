"""The layouts of the demo, made for the GPUs that it simulates."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from mig_manager.core import model
from mig_manager.core.files import yaml_text
from mig_manager.core.layout import layout_documents, selection

ONE_SLICE = "demo-one-slice-changed"
TOO_MUCH = "demo-too-much"
BALANCED = "all-balanced"


def render(
    gpus: Sequence[model.Gpu],
    packaged: layout_documents.Document,
    *,
    names: Collection[str] = (ONE_SLICE, TOO_MUCH),
) -> str:
    """Return layouts for these GPUs as text that continues the packaged document.

    ``names`` may include layouts of that document, which are omitted.
    """
    extra: dict[str, object] = {}
    if ONE_SLICE in names:
        balanced = selection.select(packaged.layout(BALANCED), gpus)
        changed = {uuid: dict(layout.devices) for uuid, layout in balanced.items()}
        first = next(gpu for gpu in gpus if gpu.uuid in changed)
        two, one = _smallest(first, 2).profile, _smallest(first, 1).profile
        changed[first.uuid][two] -= 1
        changed[first.uuid][one] = changed[first.uuid].get(one, 0) + 2
        extra[ONE_SLICE] = _rules(gpus, changed)
    if TOO_MUCH in names:
        smallest = {gpu.uuid: _smallest(gpu, 1) for gpu in gpus if gpu.profiles}
        too_much = {uuid: {row.profile: 1 + len(row.placements)} for uuid, row in smallest.items()}
        extra[TOO_MUCH] = _rules(gpus, too_much)
    text = yaml_text.dump(extra) if extra else ""
    return "".join(f"  {line}\n" for line in text.splitlines())


def _rules(
    gpus: Iterable[model.Gpu], desired: Mapping[str, Mapping[model.Profile, int]]
) -> list[object]:
    return [
        {
            "devices": [gpu.index],
            "mig-enabled": True,
            "mig-devices": {str(p): n for p, n in desired[gpu.uuid].items() if n},
        }
        for gpu in gpus
        if gpu.uuid in desired
    ]


def _smallest(gpu: model.Gpu, slices: int) -> model.GpuInstanceProfile:
    """Return the smallest profile without attributes that has this number of compute slices."""
    rows = (
        row
        for row in gpu.profiles or ()
        if row.profile.gpu_slices == slices
        and not (row.profile.attributes or row.profile.negated_attributes)
    )
    return min(rows, key=lambda row: row.memory_mib)


def smallest_everywhere(gpus: Sequence[model.Gpu]) -> str:
    """Return the layout with as many of the smallest instances as fit, if all GPUs share one."""
    names = {str(_smallest(gpu, 1).profile) for gpu in gpus if gpu.profiles}
    return f"all-{names.pop()}" if len(names) == 1 else BALANCED
