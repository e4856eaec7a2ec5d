"""Layouts and the devices of GPUs with them: one table for all tests that strike a change.

Neither the parser nor the planner is asked, because they are what is tried.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core import model

Gpus = tuple[str, ...]
"""Of each GPU its devices with the memory slices at which they begin, or ``off`` without MIG."""

_BALANCED = "2g.10gb@0 1g.5gb@2 1g.5gb@3 3g.20gb@4"
_SLICE = "1g.5gb@0 1g.5gb@1 1g.5gb@2 1g.5gb@3 3g.20gb@4"
_TWO = "1g.5gb@0 3g.20gb@4"

LAYOUTS: Mapping[str, str | Gpus] = {
    "all-disabled": "off",
    "all-1g.5gb": "1g.5gb@0 1g.5gb@1 1g.5gb@2 1g.5gb@3 1g.5gb@4 1g.5gb@5 1g.5gb@6",
    "all-balanced": _BALANCED,
    "one-slice": _SLICE,
    "one-slice-changed": (_SLICE, _BALANCED),
    "all-disabled-first": ("off", _BALANCED),
    "fewer": "1g.5gb@2 1g.5gb@3 3g.20gb@4",
    "two-sizes": _TWO,
    "two-sizes-h100": "1g.10gb@0 3g.40gb@4",
    "first-off": ("off", _TWO),
    "uneven": (_BALANCED, "3g.20gb@4"),
    "uneven-changed": (_SLICE, "2g.10gb@0 3g.20gb@4"),
    "halves": "3g.20gb@0 3g.20gb@4",
    "inside": "3g.20gb@0 1c.3g.20gb@4 1c.3g.20gb@4 1c.3g.20gb@4",
    "ones": "1g.6gb@0 1g.6gb@1 1g.6gb@2 1g.6gb@3",
    "twos": "2g.12gb@0 2g.12gb@2",
    "ampere": "2g.12gb@0 1g.6gb@2 1g.6gb@3",
    "hopper": "1g.10gb@0 1g.10gb@1 3g.40gb@4",
}
"""What each GPU has with a layout, or all GPUs have.

Where there is a choice the placements are those after the change that is played here.
"""


def gpus_with(layout: str, count: int = 2) -> Gpus:
    """Return what each of some GPUs has with a layout."""
    devices = LAYOUTS[layout]
    return (devices,) * count if isinstance(devices, str) else devices


def counts(gpu: str) -> Mapping[str, int] | None:
    """Return how many devices of each profile a GPU has; None without MIG."""
    if gpu == "off":
        return None
    return collections.Counter(device.partition("@")[0] for device in sorted(gpu.split()))


def counts_of(layout: str) -> Mapping[str, int]:
    """Return how many devices of each profile each GPU has with a layout that has MIG on."""
    (gpu,) = gpus_with(layout, 1)
    listed = counts(gpu)
    assert listed is not None, layout
    return listed


def document(layouts: Iterable[str]) -> str:
    """Return the file with layouts of the table."""
    return render({layout: rule_lines(LAYOUTS[layout]) for layout in layouts})


def rule_lines(devices: str | Gpus) -> list[str]:
    """Return the lines of a layout: the same devices for all GPUs, or those of each."""
    if isinstance(devices, str):
        return [rule_line("all", counts(devices))]
    return [rule_line(f"[{at}]", counts(each)) for at, each in enumerate(devices)]


def render(layouts: Mapping[str, Iterable[str]]) -> str:
    """Return the file with layouts, from the lines of each."""
    lines = (line for name, rules in layouts.items() for line in (f"  {name}:", *rules))
    return "\n".join(["version: v1", "mig-configs:", *lines, ""])


def rule_line(devices: str, desired: Mapping[str, int] | None) -> str:
    """Return one line of a layout: what some GPUs shall have, None for no MIG."""
    if desired is None:
        return f"  - {{devices: {devices}, mig-enabled: false}}"
    each = ", ".join(f"{name}: {count}" for name, count in desired.items())
    return f"  - {{devices: {devices}, mig-enabled: true, mig-devices: {{{each}}}}}"


def devices_by_gpu(gpus: Gpus) -> set[str]:
    """Return every device with its GPU."""
    return {f"{index}: {name}" for index, gpu in enumerate(gpus) for name in gpu.split()}


def device_names(gpus: Sequence[model.Gpu]) -> dict[str, str]:
    """Return GPU, profile and place of each device, by UUID."""
    off = model.MigMode.DISABLED
    return {gpu.uuid: f"{gpu.index}: off" for gpu in gpus if gpu.current_mode is off} | {
        ci.uuid or "": f"{gpu.index}: {ci.profile}@{gi.placement.start}"
        for gpu in gpus
        for gi in gpu.gpu_instances
        for ci in gi.compute_instances
    }


def devices_in_words(gpus: Sequence[model.Gpu]) -> Gpus:
    """Return what observed GPUs have, in the words of the table."""
    return tuple(map(gpu_in_words, gpus))


def have(gpus: Sequence[model.Gpu], listed: Gpus) -> bool:
    """Return whether observed GPUs have exactly the listed devices, at whatever place."""
    return [*map(counts, devices_in_words(gpus))] == [*map(counts, listed)]


def gpu_in_words(gpu: model.Gpu) -> str:
    """Return what an observed GPU has; a GPU instance in parentheses has no compute instance."""
    if gpu.current_mode is not gpu.pending_mode:
        return "between two modes"
    if gpu.current_mode is model.MigMode.DISABLED:
        return "off"
    return " ".join(
        f"{name}@{gi.placement.start}"
        for gi in gpu.gpu_instances
        for name in ([str(ci.profile) for ci in gi.compute_instances] or [f"({gi.profile})"])
    )
