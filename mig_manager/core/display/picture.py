"""Draw the slices of GPUs as text: a node now, and after a plan.

Equal GPUs are drawn once. Colour only repeats the characters' meaning.
"""

import collections
import dataclasses
import enum
import itertools
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence

from mig_manager.core import messages, model, profile_name, steps
from mig_manager.core.display import bar, styles

WHOLE = "the whole GPU, not partitioned"  # how a GPU with MIG off is called
_PLACED_LATER = "placements are decided once MIG is on"

_FREE_ROOM, _NO_FIT, _NO_FIT_SHORT = "free", "no fit", "none"
"""Room that some profile can still take, and room between instances that none can."""
FREE, _UNUSABLE = "·", " "
_UNKNOWN_SLICES = 8  # drawn of a GPU whose driver lists no profiles yet


class _Effect(enum.Enum):
    """The effect of a plan on a GPU instance; the value is the mark beside it."""

    DESTROY = "destroy"
    CREATE = "create"
    CHANGE = "change"
    NONE = ""


_TONE_OF_EFFECT = {
    _Effect.DESTROY: styles.Tone.BAD,
    _Effect.CREATE: styles.Tone.GOOD,
    _Effect.CHANGE: styles.Tone.WARN,
    _Effect.NONE: styles.Tone.PLAIN,
}
_TONE_OF_SIZE = {
    1: styles.Tone.CYAN,
    2: styles.Tone.LIGHT_BLUE,
    3: styles.Tone.MAGENTA,
    4: styles.Tone.LIGHT_MAGENTA,
}
"""Tones of GPU instances, by their compute slices."""


def draw_gpus(gpus: Sequence[model.Gpu], *, style: styles.Style, has_offer: bool = True) -> str:
    """Draw every GPU with its instances in lines that fit the style's width.

    Equal GPUs, which are ascending by index, are drawn once. ``has_offer`` adds the names that a
    layout for them may have: PCI id and profiles.
    """
    blocks: list[str] = []
    for alike in _fold(gpus, _appearance):
        gpu = alike[0]
        lines = [_header(alike, _mode_text(gpu), style)]
        if slices := _slices(gpu):
            row = bar.Row(cells=_cells_now(gpu, slices, effects={}))
            lines += bar.draw([row], slices=slices, style=style)
        blocks.append("\n".join([*lines, *(_offer(gpu, style) if has_offer else ())]))
    if any(not gi.compute_instances for gpu in gpus for gi in gpu.gpu_instances):
        legend = (
            "! GPU instance without a compute instance: it only blocks memory slices; "
            "'apply' removes it."
        )
        blocks.append(style.paint(style.wrap(legend), styles.Tone.BAD))
    return "\n\n".join(blocks)


def draw_change(
    gpus: Sequence[model.Gpu],
    plan: steps.Plan,
    *,
    selected: Container[str],
    style: styles.Style,
) -> str:
    """Draw each GPU before and after a plan, the current state above the planned one.

    ``gpus`` are ascending by index, ``selected`` are the UUIDs of the layout's GPUs. Lines fit
    the style's width.
    """
    plans = {gpu_plan.gpu_uuid: gpu_plan for gpu_plan in plan.gpus if gpu_plan.steps}

    def appearance(gpu: model.Gpu) -> Hashable:
        plan = plans.get(gpu.uuid)
        if plan is None:
            return _appearance(gpu), gpu.uuid in selected
        return (
            _appearance(gpu),
            frozenset(step.placement for step in plan.of(steps.DestroyGpuInstance)),
            dataclasses.replace(plan, gpu_uuid="", gpu_index=0, steps=()),
            plan.takes_whole_gpu,
        )

    blocks: list[str] = []
    for alike in _fold(gpus, appearance):
        gpu = alike[0]
        gpu_plan = plans.get(gpu.uuid)
        if gpu_plan is None:
            note = "unchanged" if gpu.uuid in selected else "not in this layout"
            header = _header(alike, f"{_mode_text(gpu)} · {note}", style)
            summary = style.fit(f"    {summarise(gpu)}", further="      ")
            blocks.append(f"{header}\n{style.plain(summary)}")
            continue
        mode = _mode_text(gpu)
        if gpu_plan.takes_whole_gpu:
            how = ", resets the GPU" if gpu_plan.resets_gpu else ""
            after = _on_off(_mode_after(gpu, gpu_plan))
            mode = f"MIG {_on_off(gpu.current_mode)} → {after}{how}"
        lines = _bar_change(gpu, gpu_plan, style)
        blocks.append("\n".join([_header(alike, mode, style), *lines]))
    return "\n\n".join(blocks)


def draw_outcome(
    before: Sequence[model.Gpu], after: Sequence[model.Gpu], *, style: styles.Style
) -> str:
    """Draw each GPU before and after a change, the previous state above the current one.

    Both have the same GPUs, ascending by index. Lines have at most ``WIDTH`` columns.
    """
    now_by_uuid = {gpu.uuid: gpu for gpu in after}
    blocks: list[str] = []
    for alike in _fold(before, lambda gpu: (_appearance(gpu), _appearance(now_by_uuid[gpu.uuid]))):
        was, now = alike[0], now_by_uuid[alike[0].uuid]
        slices = max(_slices(was), _slices(now))
        mode = " → ".join(dict.fromkeys((_mode_text(was), _mode_text(now))))
        if is_same := _appearance(was) == _appearance(now):
            mode += " · unchanged"
        if is_same or not slices:
            header = _header(alike, mode, style)
            blocks.append(f"{header}\n    {style.plain(summarise(now))}")
            continue
        rows = [
            bar.Row(label=label, cells=_cells_now(gpu, slices, effects={}))
            for label, gpu in (("before", was), ("after", now))
        ]
        lines = bar.draw(rows, slices=slices, style=style)
        blocks.append("\n".join([_header(alike, mode, style), *lines]))
    return "\n\n".join(blocks)


def gpu_cells(gpu: model.Gpu) -> tuple[bar.Cell, ...]:
    """Return the instances of a GPU and the room between them, from slice 0 on."""
    return _cells_now(gpu, _slices(gpu) or _UNKNOWN_SLICES, effects={})


def summarise(gpu: model.Gpu) -> str:
    """Return the instances of a GPU in a few words, such as ``1x 3g.20gb, 2x 1g.5gb``."""
    if gpu.current_mode is not model.MigMode.ENABLED:
        return WHOLE
    return profile_name.with_counts(
        collections.Counter(
            each.profile for gi in gpu.gpu_instances for each in gi.compute_instances or (gi,)
        )
    )


def indices(gpus: Iterable[model.Gpu]) -> str:
    """Return the indices of GPUs as people write them: ``0-3,6``."""
    return ",".join(messages.ranges(gpu.index for gpu in gpus))


def _fold(
    gpus: Iterable[model.Gpu], appearance: Callable[[model.Gpu], Hashable]
) -> list[list[model.Gpu]]:
    groups: dict[Hashable, list[model.Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(appearance(gpu), []).append(gpu)
    return list(groups.values())


def _appearance(gpu: model.Gpu) -> Hashable:
    """Return everything that a picture of this GPU shows: no ids and no UUIDs."""
    instances = tuple(
        (
            gi.profile,
            gi.placement,
            tuple((ci.profile, ci.placement) for ci in gi.compute_instances),
        )
        for gi in gpu.gpu_instances
    )
    return gpu.name, gpu.pci_device_id, gpu.current_mode, gpu.pending_mode, instances


def _header(alike: Sequence[model.Gpu], note: str, style: styles.Style) -> str:
    first = alike[0]
    # ``GPU-`` and the first group of digits distinguish the GPUs of one node.
    short = "-".join(first.uuid.split("-")[:2])
    who = f"{len(alike)} alike" if len(alike) > 1 else short
    title = f"GPU {indices(alike)}", styles.Tone.STRONG
    return style.title([title], [first.name, note, who])


def _mode_text(gpu: model.Gpu) -> str:
    if gpu.current_mode is None:
        return "has no MIG"
    now = f"MIG {_on_off(gpu.current_mode)}"
    if not gpu.has_pending_mode:
        return now
    return f"{now}, {_on_off(gpu.pending_mode)} after the next reset"


def _on_off(mode: model.MigMode | None) -> str:
    return "on" if mode is model.MigMode.ENABLED else "off"


def _mode_after(gpu: model.Gpu, gpu_plan: steps.GpuPlan) -> model.MigMode | None:
    changes = gpu_plan.of(steps.SetMode)
    return changes[-1].mode if changes else gpu.current_mode


def _offer(gpu: model.Gpu, style: styles.Style) -> list[str]:
    """Return the names that a layout for this GPU may have: PCI id and profiles."""
    profiles = [info.profile for info in gpu.profiles or ()]
    profiles.sort(key=lambda each: (each.gpu_slices, each.memory_gb, str(each)))
    names = " ".join(map(str, profiles))
    text = f"PCI 0x{gpu.pci_device_id:08X}"
    if names:
        text += f" · offers {names}"
    elif gpu.is_mig_capable:
        text += " · lists its profiles once MIG is on"
    lines = style.wrap(text, indent="    ").split("\n")
    return [style.paint(style.plain(line), styles.Tone.FAINT) for line in lines]


def _slices(gpu: model.Gpu) -> int:
    """Return the number of memory slices, or 0 if the driver lists no profiles yet."""
    possible = [place.end for info in gpu.profiles or () for place in info.placements]
    occupied = [gi.placement.end for gi in gpu.gpu_instances]
    return max(possible + occupied, default=0)


def _bar_change(gpu: model.Gpu, gpu_plan: steps.GpuPlan, style: styles.Style) -> list[str]:
    slices = _slices(gpu)
    if not slices:
        return ["    " + _PLACED_LATER]
    effects = _effects(gpu, gpu_plan)
    if _mode_after(gpu, gpu_plan) is not model.MigMode.ENABLED:
        after = _whole(slices, WHOLE)
    elif gpu_plan.is_provisional:
        after = _whole(slices, _PLACED_LATER)
    else:
        cells: list[bar.Cell] = []
        for target in gpu_plan.target:
            before = effects.get(target.placement, _Effect.NONE)
            cells.append(_cell(target, before if target.is_kept else _Effect.CREATE))
        after = _with_free_room(cells, gpu, slices)
    now = bar.Row(label="now", cells=_cells_now(gpu, slices, effects=effects))
    return bar.draw([now, bar.Row(label="then", cells=after)], slices=slices, style=style)


def _effects(gpu: model.Gpu, gpu_plan: steps.GpuPlan) -> dict[model.Placement, _Effect]:
    """Return the plan's effect on each live GPU instance, by placement."""
    ids = {gi.instance_id: gi.placement for gi in gpu.gpu_instances}
    effects = dict.fromkeys(ids.values(), _Effect.NONE)
    for step in gpu_plan.steps:
        match step:
            case steps.DestroyComputeInstance() if step.gpu_instance_id in ids:
                effects[ids[step.gpu_instance_id]] = _Effect.CHANGE
            case steps.CreateComputeInstance() if (
                effects.get(step.gpu_instance_placement) is _Effect.NONE
            ):
                effects[step.gpu_instance_placement] = _Effect.CHANGE
            case steps.DestroyGpuInstance() if step.gpu_instance_id in ids:
                effects[ids[step.gpu_instance_id]] = _Effect.DESTROY
            case _:
                pass
    return effects


def _cells_now(
    gpu: model.Gpu, slices: int, *, effects: Mapping[model.Placement, _Effect]
) -> tuple[bar.Cell, ...]:
    if gpu.current_mode is not model.MigMode.ENABLED:
        return _whole(slices, WHOLE)
    cells: list[bar.Cell] = []
    for gi in gpu.gpu_instances:
        effect = effects.get(gi.placement)
        cell = _cell(gi, effect)
        if not gi.compute_instances:
            cell = dataclasses.replace(
                cell,
                title=f"! {gi.profile}",
                short=f"! {cell.short}",
                fill="░",
                tone=cell.tone if effect else styles.Tone.BAD,
                parts=(),
            )
        cells.append(cell)
    return _with_free_room(cells, gpu, slices)


def _whole(slices: int, title: str) -> tuple[bar.Cell, ...]:
    return (bar.Cell(start=0, size=slices, title=title, tone=styles.Tone.FAINT),)


def _cell(instance: model.GpuInstance | steps.TargetInstance, effect: _Effect | None) -> bar.Cell:
    """Return an instance, in the tone of its effect; None: no plan is drawn."""
    tone = _TONE_OF_SIZE.get(instance.profile.gpu_slices, styles.Tone.BLUE)
    tone = _TONE_OF_EFFECT[effect] if effect else tone
    return bar.Cell(
        start=instance.placement.start,
        size=instance.placement.size,
        title=str(instance.profile),
        short=str(instance.profile).replace(f".{instance.profile.memory_gb}gb", ""),
        tone=tone,
        mark=effect.value if effect else "",
        parts=_parts(instance.compute_instances, instance.profile, tone),
    )


def _parts(
    inside: Sequence[model.ComputeInstance | steps.TargetComputeInstance],
    profile: model.Profile,
    tone: styles.Tone,
) -> tuple[bar.Part, ...]:
    """Divide a cell by compute instances, unless one spans the whole GPU instance."""
    if len(inside) == 1 and inside[0].profile.spans:
        return ()
    total = profile.gpu_slices
    parts: list[bar.Part] = []

    def add(start: int, end: int, title: str, tone: styles.Tone) -> None:
        share = min(end / total, 1.0)
        parts.append(bar.Part(begin=start / total, end=share, title=title, tone=tone))

    reached = 0
    nowhere = model.Placement(start=0, size=0)
    for ci in sorted(inside, key=lambda ci: ci.placement or nowhere):
        start = ci.placement.start if ci.placement else reached
        if start > reached:
            add(reached, start, "", styles.Tone.FAINT)
        reached = start + ci.profile.compute_slices
        add(start, reached, f"{ci.profile.compute_slices}c", tone)
    if reached < total:
        add(reached, total, FREE, styles.Tone.FAINT)
    return tuple(parts)


def _with_free_room(
    cells: Iterable[bar.Cell], gpu: model.Gpu, slices: int
) -> tuple[bar.Cell, ...]:
    """Fill the gaps: room that some profile can still take, and room that none can."""
    drawn = [*cells]
    occupied = {slice_ for cell in drawn for slice_ in range(cell.start, cell.end)}
    usable = {
        slice_
        for info in gpu.profiles or ()
        for place in info.placements
        if occupied.isdisjoint(range(place.start, place.end))
        for slice_ in range(place.start, place.end)
    }
    for (is_taken, is_usable), run in itertools.groupby(
        range(slices), key=lambda slice_: (slice_ in occupied, slice_ in usable)
    ):
        if not is_taken:
            start, *more = run
            drawn.append(
                bar.Cell(
                    start=start,
                    size=1 + len(more),
                    title=_FREE_ROOM if is_usable else _NO_FIT,
                    short="" if is_usable else _NO_FIT_SHORT,
                    tone=styles.Tone.FAINT,
                    fill=FREE if is_usable else _UNUSABLE,
                )
            )
    return tuple(sorted(drawn, key=lambda cell: cell.start))
