"""What commands answer to people: pictures, tables and one sentence that sums up."""

import textwrap
from collections.abc import Iterable, Sequence

from mig_manager import commands, validation
from mig_manager.core import bar, model, picture, steps
from mig_manager.core import holders as holding

_MOST_NAMED = 8
"""Devices or pods that a sentence names before it counts the rest."""
_MOST_EXPLAINED = 12
_NOT_FOR_IT = validation.Fit.NOT_FOR_IT


def status(result: commands.Status, *, is_wide: bool, style: bar.Style) -> str:
    """Draw every GPU; wide: also instances with ids and UUIDs, and holders."""
    if not result.gpus:
        return "This node has no NVIDIA GPU."
    if not is_wide:
        return picture.draw_gpus(result.gpus, style=style)
    blocks = [
        "\n".join(
            [
                f"{picture.draw_gpus([gpu], style=style)}\n{_instances(gpu)}".rstrip(),
                *_held((result.held or {}).get(gpu.uuid, ())),
            ]
        )
        for gpu in result.gpus
    ]
    return "\n\n".join(blocks)


def plan(result: commands.Planned, *, is_wide: bool, style: bar.Style) -> str:
    """Draw the change and say what goes, what comes and whom it hurts."""
    blocks = [
        picture.draw_change(result.gpus, result.plan, selected=result.wanted.keys(), style=style)
    ]
    if is_wide and not result.plan.is_empty:
        blocks.append("\n".join(_steps(result)))
    blocks.append("\n".join(filter(None, [_victims(result), _verdict(result, style)])))
    return "\n\n".join(blocks)


def summary(result: commands.Planned) -> str:
    """Return what a change amounts to, such as ``2 instances destroyed, 1 created, 5 stay``."""
    counts = [
        f"{_count(len(result.destroyed), 'instance')} destroyed",
        f"{len(result.created)} created",
        f"{result.staying} {'stays' if result.staying == 1 else 'stay'}",
    ]
    sentence = ", ".join(counts)
    inside = _changed_inside(result)
    if inside:
        sentence += f"; {_count(inside, 'instance')} divided anew"
    if result.mode_changes:
        sentence += f"; MIG mode of {_count(len(result.mode_changes), 'GPU')} switched"
    resets = sum(gpu_plan.needs_reset for gpu_plan in result.plan.gpus)
    return f"{sentence}; " + (f"{_count(resets, 'GPU')} reset" if resets else "no reset")


def difference(result: commands.Planned) -> str:
    """Return in one sentence how a GPU is not as the layout wants it, and how many more are."""
    by_uuid = {gpu.uuid: gpu for gpu in result.gpus}
    wrong = [by_uuid[gpu_plan.gpu_uuid] for gpu_plan in result.plan.gpus if gpu_plan.steps]
    first = wrong[0]
    has, wants = picture.summarise(first), _wish(result.wanted[first.uuid])
    sentence = f"GPU {first.index} has {has} instead of {wants}"
    if has == wants:
        sentence = (
            f"GPU {first.index} has {has} as wanted, but leftovers or a pending MIG mode too"
        )
    if len(wrong) > 1:
        sentence += f"; {_count(len(wrong) - 1, 'more GPU')} {_differs(len(wrong) - 1)}"
    return sentence


def validated(result: validation.Validated, *, style: bar.Style) -> str:
    """Return a table of layouts and products, and why what does not fit does not."""
    columns = [str(number + 1) for number in range(len(result.products))]
    width = max((len(name) for name in result.layouts), default=0)
    lines = [f"  {number}  {name}" for number, name in zip(columns, result.products, strict=True)]
    lines += ["", " ".join([" " * width, *(f"{column:>3}" for column in columns)])]
    for layout in result.layouts:
        fits = [result.verdicts[layout, product].fit for product in result.products]
        lines.append(" ".join([layout.ljust(width), *(_glyph(fit, style) for fit in fits)]))
    lines += [
        "",
        style.plain("✓ fits   ✗ does not fit   · is about other GPUs   ? cannot be told"),
    ]
    told = [v for v in result.verdicts.values() if v.why and v.fit is not _NOT_FOR_IT]
    lines += [_wrapped(f"{v.layout}: {v.why}") for v in told[:_MOST_EXPLAINED]]
    if len(told) > _MOST_EXPLAINED:
        lines.append(f"{len(told) - _MOST_EXPLAINED} more; -o json explains them all")
    return "\n".join(lines)


_GLYPHS = {
    validation.Fit.FITS: ("✓", bar.Tone.GOOD),
    validation.Fit.DOES_NOT_FIT: ("✗", bar.Tone.BAD),
    validation.Fit.NOT_FOR_IT: ("·", bar.Tone.FAINT),
    validation.Fit.UNKNOWN: ("?", bar.Tone.WARN),
}


def _glyph(fit: validation.Fit, style: bar.Style) -> str:
    glyph, tone = _GLYPHS[fit]
    return "  " + style.paint(style.plain(glyph), tone)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _differs(number: int) -> str:
    return "differs" if number == 1 else "differ"


def _wish(wanted: model.WantedGpu) -> str:
    match wanted.mode:
        case model.MigMode.DISABLED:
            return picture.WHOLE
        case model.MigMode.ENABLED:
            return picture.counted(dict(wanted.devices))


def _changed_inside(result: commands.Planned) -> int:
    """Count GPU instances that stay and whose compute instances change."""
    created = {(step.gpu_uuid, step.placement) for step in result.created}
    destroyed = {(step.gpu_uuid, step.gpu_instance_id) for step in result.destroyed}
    ids = {
        (gpu.uuid, gi.instance_id): gi.placement for gpu in result.gpus for gi in gpu.gpu_instances
    }
    inside: set[tuple[str, model.Placement]] = set()
    for step in result.plan.steps:
        if isinstance(step, model.CreateComputeInstance):
            inside.add((step.gpu_uuid, step.gpu_instance_placement))
        elif isinstance(step, model.DestroyComputeInstance):
            key = step.gpu_uuid, step.gpu_instance_id
            if key not in destroyed and key in ids:
                inside.add((step.gpu_uuid, ids[key]))
    return len(inside - created)


def _victims(result: commands.Planned) -> str:
    """Say which pods would be evicted, or else what their users must let go of."""
    if result.evicted:
        return _listing("Pods that would be evicted", result.evicted)
    switched = {step.gpu_uuid for step in result.mode_changes}
    whole = [gpu for gpu in result.gpus if gpu.uuid in switched]
    parts = {uuid for gpu in whole for uuid in gpu.mig_uuids}
    devices = sorted(result.plan.doomed_uuids - switched - parts)
    lines = [f"GPU {picture.indices(whole)} must have no user at all."] if whole else []
    lines += [_listing("MIG devices that must have no user", devices)] if devices else []
    return "\n".join(lines)


def _listing(title: str, names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMED
    text = ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
    return _wrapped(f"{title}: {text}")


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text,
        picture.WIDTH,
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _verdict(result: commands.Planned, style: bar.Style) -> str:
    if result.plan.is_empty:
        return style.paint(f"Layout {result.layout} is in force: nothing to do.", bar.Tone.GOOD)
    later = (
        " so far; the instances are planned once MIG is on" if result.plan.is_provisional else ""
    )
    return style.paint(f"Layout {result.layout}: {summary(result)}{later}.", bar.Tone.STRONG)


def _steps(result: commands.Planned) -> Iterable[str]:
    for gpu_plan in result.plan.gpus:
        for step in gpu_plan.steps:
            yield f"GPU {gpu_plan.gpu_index}  {steps.described(step)}"


def _held(holders: Iterable[holding.Holder]) -> Iterable[str]:
    for holder in holders:
        yield f"    held by {holder}"


def _instances(gpu: model.Gpu) -> str:
    """Return a table of instances: what ``-o wide`` adds to the picture."""
    rows = [("GI", "CI", "profile", "placement", "MIG UUID")] if gpu.gpu_instances else []
    for gi in gpu.gpu_instances:
        if not gi.compute_instances:
            rows.append((str(gi.instance_id), "-", str(gi.profile), str(gi.placement), "-"))
        rows += [
            (
                str(gi.instance_id),
                str(ci.instance_id),
                str(ci.profile),
                str(gi.placement),
                ci.uuid or "-",
            )
            for ci in gi.compute_instances
        ]
    identity = f"    {gpu.uuid} at {gpu.pci_address}, subsystem 0x{gpu.pci_subsystem_id:08X}"
    table = [
        f"    {gi:>3} {ci:>3}  {profile:<16} {placement:<9}  {uuid}"
        for gi, ci, profile, placement, uuid in rows
    ]
    return "\n".join([identity, *table])
