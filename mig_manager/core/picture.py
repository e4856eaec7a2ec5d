"""Draw the slices of GPUs as text: a node now, and after a plan.

Equal GPUs are drawn once. Colour only repeats what the characters show.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence

from mig_manager.core import bar, model, steps

WIDTH = 100  # columns that a picture stays within
WHOLE = "the whole GPU, not partitioned"  # how a GPU with MIG off is called

_FREE_ROOM, _NO_FIT = "free", "no fit"
"""Room that some profile can still take, and room between instances that none can."""
_FREE, _UNUSABLE = "·", " "
_GOES, _NEW, _CHANGES, _STAYS = "goes", "new", "changes", "stays"
_TONE_OF_MARK = {
    _GOES: bar.Tone.BAD,
    _NEW: bar.Tone.GOOD,
    _CHANGES: bar.Tone.WARN,
    _STAYS: bar.Tone.PLAIN,
}
_TONE_OF_SIZE = {
    1: bar.Tone.CYAN,
    2: bar.Tone.LIGHT_GREEN,
    3: bar.Tone.LIGHT_YELLOW,
    4: bar.Tone.MAGENTA,
}


def draw_gpus(gpus: Sequence[model.Gpu], *, style: bar.Style) -> str:
    """Draw every GPU with its instances in lines of at most ``WIDTH`` columns.

    Equal GPUs, which are ascending by index, are drawn once.
    """
    blocks = [
        "\n".join(
            [
                _header(alike, _mode_text(alike[0]), style),
                *_bar_now(alike[0], style),
                *_offer(alike[0], style),
            ]
        )
        for alike in _fold(gpus, _appearance)
    ]
    legend = (
        [_legend_of_garbage(style)]
        if any(not gi.compute_instances for gpu in gpus for gi in gpu.gpu_instances)
        else []
    )
    return "\n\n".join(blocks + legend)


def draw_change(
    gpus: Sequence[model.Gpu],
    plan: steps.Plan,
    *,
    selected: Container[str],
    style: bar.Style,
) -> str:
    """Draw what a plan makes of each GPU, the current state above the planned one.

    ``gpus`` are ascending by index, ``selected`` are the UUIDs of the layout's GPUs. Lines have at
    most ``WIDTH`` columns.
    """
    plans = {gpu_plan.gpu_uuid: gpu_plan for gpu_plan in plan.gpus if gpu_plan.steps}

    def appearance(gpu: model.Gpu) -> Hashable:
        return _appearance(gpu), _appearance_of_plan(plans.get(gpu.uuid)), gpu.uuid in selected

    blocks: list[str] = []
    for alike in _fold(gpus, appearance):
        gpu_plan = plans.get(alike[0].uuid)
        if gpu_plan is None:
            note = "right already" if alike[0].uuid in selected else "not in this layout"
            header = _header(alike, f"{_mode_text(alike[0])} · {note}", style)
            blocks.append(f"{header}\n    {style.plain(summarise(alike[0]))}")
        else:
            header = _header(alike, _mode_change_text(alike[0], gpu_plan), style)
            blocks.append("\n".join([header, *_bar_change(alike[0], gpu_plan, style)]))
    return "\n\n".join(blocks)


def summarise(gpu: model.Gpu) -> str:
    """Return the instances of a GPU in a few words, such as ``1x 3g.20gb, 2x 1g.5gb``."""
    if gpu.current_mode is not model.MigMode.ENABLED:
        return WHOLE
    counts: dict[model.Profile, int] = {}
    for instance in gpu.gpu_instances:
        for profile in [ci.profile for ci in instance.compute_instances] or [instance.profile]:
            counts[profile] = counts.get(profile, 0) + 1
    return counted(counts)


def counted(counts: Mapping[model.Profile, int]) -> str:
    """Return profiles with their counts, biggest first; ``no instances`` for none."""
    ordered = sorted(counts.items(), key=lambda item: item[0].sort_key)
    return ", ".join(f"{count}x {profile}" for profile, count in ordered) or "no instances"


def indices(gpus: Iterable[model.Gpu]) -> str:
    """Return the indices of GPUs as people write them: ``0-3,6``."""
    runs: list[list[int]] = []
    for index in sorted(gpu.index for gpu in gpus):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _fold(
    gpus: Iterable[model.Gpu], appearance: Callable[[model.Gpu], Hashable]
) -> list[list[model.Gpu]]:
    groups: dict[Hashable, list[model.Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(appearance(gpu), []).append(gpu)
    return list(groups.values())


def _appearance(gpu: model.Gpu) -> Hashable:
    """Everything that a picture of this GPU shows, ids and UUIDs left out."""
    instances = tuple(
        (
            gi.profile,
            gi.placement,
            tuple((ci.profile, ci.placement) for ci in gi.compute_instances),
        )
        for gi in gpu.gpu_instances
    )
    return gpu.name, gpu.pci_device_id, gpu.current_mode, gpu.pending_mode, instances


def _appearance_of_plan(gpu_plan: steps.GpuPlan | None) -> Hashable:
    if gpu_plan is None:
        return None
    placements = {
        step.placement for step in gpu_plan.steps if isinstance(step, steps.DestroyGpuInstance)
    }
    return gpu_plan.target, frozenset(placements), gpu_plan.changes_mode, gpu_plan.is_provisional


def _header(alike: Sequence[model.Gpu], note: str, style: bar.Style) -> str:
    first = alike[0]
    who = f"{len(alike)} alike" if len(alike) > 1 else _short(first.uuid)
    title = style.paint(f"GPU {indices(alike)}", bar.Tone.STRONG)
    return title + style.plain(f" · {first.name} · {note} · {who}")


def _short(uuid: str) -> str:
    """Keep what tells GPUs of one node apart: ``GPU-`` and the first group of digits."""
    head, _, rest = uuid.partition("-")
    return f"{head}-{rest.split('-')[0]}"


def _mode_text(gpu: model.Gpu) -> str:
    if gpu.current_mode is None:
        return "has no MIG"
    now = f"MIG {_on_off(gpu.current_mode)}"
    if gpu.pending_mode is None or gpu.pending_mode is gpu.current_mode:
        return now
    return f"{now}, {_on_off(gpu.pending_mode)} after the next reset"


def _mode_change_text(gpu: model.Gpu, gpu_plan: steps.GpuPlan) -> str:
    if not gpu_plan.changes_mode:
        return _mode_text(gpu)
    how = ", resets the GPU" if gpu_plan.needs_reset else ""
    return f"MIG {_on_off(gpu.current_mode)} → {_on_off(_mode_after(gpu, gpu_plan))}{how}"


def _on_off(mode: model.MigMode | None) -> str:
    return "on" if mode is model.MigMode.ENABLED else "off"


def _mode_after(gpu: model.Gpu, gpu_plan: steps.GpuPlan) -> model.MigMode | None:
    modes = [step.mode for step in gpu_plan.steps if isinstance(step, steps.SetMode)]
    return modes[-1] if modes else gpu.current_mode


def _offer(gpu: model.Gpu, style: bar.Style) -> list[str]:
    """Return what a layout for this GPU may name: its PCI id and its profiles."""
    profiles = sorted((info.profile for info in gpu.profiles or ()), key=_small_first)
    names = " ".join(map(str, profiles))
    text = f"PCI 0x{gpu.pci_device_id:08X}"
    if names:
        text += f" · offers {names}"
    elif gpu.is_mig_capable:
        text += " · lists its profiles once MIG is on"
    lines = textwrap.wrap(
        text, WIDTH, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False
    )
    return [style.paint(style.plain(line), bar.Tone.FAINT) for line in lines]


def _small_first(profile: model.Profile) -> tuple[int, int, str]:
    return profile.gpu_slices, profile.memory_gb, str(profile)


def _slices(gpu: model.Gpu) -> int:
    """Return the number of memory slices, or 0 if the driver lists no profiles yet."""
    possible = [place.end for info in gpu.profiles or () for place in info.placements]
    taken = [gi.placement.end for gi in gpu.gpu_instances]
    return max(possible + taken, default=0)


def _bar_now(gpu: model.Gpu, style: bar.Style) -> list[str]:
    slices = _slices(gpu)
    if not slices:
        return []
    row = bar.Row(cells=_cells_now(gpu, slices, marks={}))
    return bar.draw([row], slices=slices, style=style)


def _bar_change(gpu: model.Gpu, gpu_plan: steps.GpuPlan, style: bar.Style) -> list[str]:
    slices = _slices(gpu)
    if not slices:
        return ["    " + _PLACED_LATER]
    marks = _marks(gpu, gpu_plan)
    now = bar.Row(label="now", cells=_cells_now(gpu, slices, marks=marks))
    then = bar.Row(label="then", cells=_cells_then(gpu, gpu_plan, slices, marks=marks))
    return bar.draw([now, then], slices=slices, style=style)


_PLACED_LATER = "placements are decided once MIG is on"


def _marks(gpu: model.Gpu, gpu_plan: steps.GpuPlan) -> dict[model.Placement, str]:
    """Return what the plan does to each live GPU instance, by placement."""
    doomed: set[int] = set()
    touched: set[model.Placement] = set()
    ids = {gi.instance_id: gi.placement for gi in gpu.gpu_instances}
    for step in gpu_plan.steps:
        match step:
            case steps.DestroyGpuInstance():
                doomed.add(step.gpu_instance_id)
            case steps.DestroyComputeInstance() if step.gpu_instance_id in ids:
                touched.add(ids[step.gpu_instance_id])
            case steps.CreateComputeInstance():
                touched.add(step.gpu_instance_placement)
            case _:
                pass
    return {
        gi.placement: _GOES
        if gi.instance_id in doomed
        else (_CHANGES if gi.placement in touched else _STAYS)
        for gi in gpu.gpu_instances
    }


def _cells_now(
    gpu: model.Gpu, slices: int, *, marks: Mapping[model.Placement, str]
) -> tuple[bar.Cell, ...]:
    if gpu.current_mode is not model.MigMode.ENABLED:
        return _whole(slices, WHOLE)
    cells = [_cell_of_live(gi, marks.get(gi.placement, "")) for gi in gpu.gpu_instances]
    return _with_free_room(cells, gpu, slices)


def _cells_then(
    gpu: model.Gpu,
    gpu_plan: steps.GpuPlan,
    slices: int,
    *,
    marks: Mapping[model.Placement, str],
) -> tuple[bar.Cell, ...]:
    if _mode_after(gpu, gpu_plan) is not model.MigMode.ENABLED:
        return _whole(slices, WHOLE)
    if gpu_plan.is_provisional:
        return _whole(slices, _PLACED_LATER)
    cells = [
        _cell_of_target(target, marks.get(target.placement, _STAYS) if target.kept else _NEW)
        for target in gpu_plan.target
    ]
    return _with_free_room(cells, gpu, slices)


def _whole(slices: int, title: str) -> tuple[bar.Cell, ...]:
    return (bar.Cell(start=0, size=slices, title=title, tone=bar.Tone.FAINT),)


def _cell_of_live(gi: model.GpuInstance, mark: str) -> bar.Cell:
    cell = _cell(gi.profile, gi.placement, mark)
    if not gi.compute_instances:
        return dataclasses.replace(
            cell,
            title=f"! {gi.profile}",
            fill="░",
            tone=cell.tone if mark else bar.Tone.BAD,
        )
    instances = [(ci.profile, ci.placement) for ci in gi.compute_instances]
    return dataclasses.replace(cell, parts=_parts(instances, gi.profile, cell.tone))


def _cell_of_target(target: steps.TargetInstance, mark: str) -> bar.Cell:
    cell = _cell(target.profile, target.placement, mark)
    instances = [(ci.profile, ci.placement) for ci in target.compute_instances]
    return dataclasses.replace(cell, parts=_parts(instances, target.profile, cell.tone))


def _cell(profile: model.Profile, placement: model.Placement, mark: str) -> bar.Cell:
    by_size = _TONE_OF_SIZE.get(profile.gpu_slices, bar.Tone.BLUE)
    return bar.Cell(
        start=placement.start,
        size=placement.size,
        title=str(profile),
        tone=_TONE_OF_MARK[mark] if mark else by_size,
        mark="" if mark == _STAYS else mark,
    )


def _parts(
    instances: Sequence[tuple[model.Profile, model.Placement | None]],
    profile: model.Profile,
    tone: bar.Tone,
) -> tuple[bar.Part, ...]:
    """Divide a cell by compute instances; one that spans its GPU instance is no division."""
    if len(instances) == 1 and instances[0][0].spans:
        return ()
    total = profile.gpu_slices
    parts: list[bar.Part] = []
    reached = 0
    for instance, placement in sorted(instances, key=lambda item: item[1] or _NOWHERE):
        start = placement.start if placement else reached
        if start > reached:
            parts.append(_part(reached, start, total, "", bar.Tone.FAINT))
        reached = start + instance.compute_slices
        parts.append(_part(start, reached, total, f"{instance.compute_slices}c", tone))
    if reached < total:
        parts.append(_part(reached, total, total, _FREE, bar.Tone.FAINT))
    return tuple(parts)


_NOWHERE = model.Placement(start=0, size=0)


def _part(start: int, end: int, total: int, title: str, tone: bar.Tone) -> bar.Part:
    return bar.Part(begin=start / total, end=min(end / total, 1.0), title=title, tone=tone)


def _with_free_room(
    cells: Iterable[bar.Cell], gpu: model.Gpu, slices: int
) -> tuple[bar.Cell, ...]:
    """Fill the gaps: room that some profile can still take, and room that none can."""
    drawn = sorted(cells, key=lambda cell: cell.start)
    taken = {slice_ for cell in drawn for slice_ in range(cell.start, cell.end)}
    usable = {
        slice_
        for info in gpu.profiles or ()
        for place in info.placements
        if taken.isdisjoint(range(place.start, place.end))
        for slice_ in range(place.start, place.end)
    }
    for slice_ in range(slices):
        if slice_ in taken:
            continue
        fill = _FREE if slice_ in usable else _UNUSABLE
        last = drawn[-1] if drawn else None
        if (
            last
            and last.end == slice_
            and last.title in (_FREE_ROOM, _NO_FIT)
            and last.fill == fill
        ):
            drawn[-1] = dataclasses.replace(last, size=last.size + 1)
        else:
            title = _FREE_ROOM if slice_ in usable else _NO_FIT
            drawn.append(
                bar.Cell(start=slice_, size=1, title=title, tone=bar.Tone.FAINT, fill=fill)
            )
    return tuple(sorted(drawn, key=lambda cell: cell.start))


def _legend_of_garbage(style: bar.Style) -> str:
    return style.paint(
        "! GPU instance without a compute instance: it only blocks memory slices; "
        "'apply' removes it.",
        bar.Tone.BAD,
    )
