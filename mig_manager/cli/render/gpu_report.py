"""What commands answer to people: pictures, tables and one sentence that sums up."""

import textwrap
from collections.abc import Iterable, Sequence

from mig_manager.change import plans, validate
from mig_manager.core import bar, messages, model, picture, steps
from mig_manager.core.host import gpu_processes
from mig_manager.core.layout import config

_MOST_NAMED = 8
"""Devices or pods that a sentence names before it counts the rest."""
_MOST_EXPLAINED = 12


def status(result: plans.Status, *, is_wide: bool, style: bar.Style) -> str:
    """Draw every GPU; wide: also instances with ids and UUIDs, and holders."""
    if not result.gpus:
        return "This node has no NVIDIA GPU."
    missing = _unreachable(result.gpus, style)
    if not is_wide:
        return "\n\n".join([picture.draw_gpus(result.gpus, style=style), *missing])
    blocks = [
        "\n".join(
            [
                f"{picture.draw_gpus([gpu], style=style)}\n{_instances(gpu)}".rstrip(),
                *_held((result.held or {}).get(gpu.uuid, ())),
            ]
        )
        for gpu in result.gpus
    ]
    return "\n\n".join([*blocks, *missing])


def _unreachable(gpus: model.ObservedGpus, style: bar.Style) -> list[str]:
    """Return a block about the GPUs that could not be observed; none where all could."""
    lines = [
        style.paint(_wrapped(messages.printable(gpu.sentence, " ")), bar.Tone.BAD)
        for gpu in gpus.unreachable
    ]
    return ["\n".join(lines)] if lines else []


def plan(result: plans.Planned, *, is_wide: bool, style: bar.Style) -> str:
    """Draw the change and say what goes, what comes and whom it hurts."""
    blocks = [
        picture.draw_change(result.gpus, result.plan, selected=result.wanted.keys(), style=style)
    ]
    blocks += _unreachable(result.gpus, style)
    if is_wide and not result.plan.is_empty:
        blocks.append("\n".join(_steps(result)))
    told = [_victims(result), *_unserved(result), _verdict(result, style)]
    blocks.append("\n".join(filter(None, told)))
    return "\n\n".join(blocks)


def summary(result: plans.Planned) -> str:
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


def difference(result: plans.Planned) -> str:
    """Return in one sentence how a GPU is not as the layout wants it, and how many more are."""
    by_uuid = {gpu.uuid: gpu for gpu in result.gpus}
    wrong = [by_uuid[gpu_plan.gpu_uuid] for gpu_plan in result.plan.gpus if gpu_plan.steps]
    first = wrong[0]
    has, wants = picture.summarise(first), _wish(result.wanted[first.uuid])
    sentence = f"GPU {first.index} has {has} instead of {wants}"
    if has == wants:
        is_placed = bool(result.wanted[first.uuid].pins)
        but = "in other places, with leftovers or" if is_placed else "leftovers or"
        sentence = f"GPU {first.index} has {has} as wanted, but {but} a pending MIG mode too"
    if len(wrong) > 1:
        sentence += f"; {_count(len(wrong) - 1, 'more GPU')} {_differs(len(wrong) - 1)}"
    return sentence


def validated(result: validate.Validated, *, style: bar.Style) -> str:
    """Return a table of layouts and products, and why what does not fit does not."""
    width = max((len(name) for name in result.layouts), default=0)
    table = _by_layout if len(result.products) > _MOST_COLUMNS else _by_product
    lines = [*table(result, width, style), ""]
    fits = {verdict.fit for verdict in result.verdicts.values()}
    legend = [text for fit, text in _LEGEND if fit in fits]
    lines += [style.plain("   ".join(legend))] if legend else []
    lines += _explained(result)
    lines += [
        _listing(f"Not for MIG strategy {strategy.value}", names)
        for strategy, names in result.unserved.items()
    ]
    lines.append(_summed_up(result, style))
    return "\n".join(lines)


def portability(document: config.Document) -> str:
    """Return whether the peer understands a document, or every place where it does not."""
    if not document.extensions:
        return f"{document.source}: nvidia-mig-parted understands all of it."
    return "\n".join(
        [
            f"{document.source}: nvidia-mig-parted does not understand all of it.",
            *(_wrapped(str(remark)) for remark in document.extensions),
        ]
    )


_MOST_COLUMNS = 16
_GLYPHS = {
    validate.Fit.FITS: ("✓", bar.Tone.GOOD),
    validate.Fit.DOES_NOT_FIT: ("✗", bar.Tone.BAD),
    validate.Fit.ELSEWHERE: ("-", bar.Tone.FAINT),
    validate.Fit.NOT_FOR_IT: ("·", bar.Tone.FAINT),
    validate.Fit.UNKNOWN: ("?", bar.Tone.WARN),
}
_LEGEND = (
    (validate.Fit.FITS, "✓ fits"),
    (validate.Fit.DOES_NOT_FIT, "✗ does not fit"),
    (validate.Fit.ELSEWHERE, "- fits other GPUs only"),
    (validate.Fit.NOT_FOR_IT, "· is about other GPUs"),
    (validate.Fit.UNKNOWN, "? cannot be told"),
)


def _by_product(result: validate.Validated, width: int, style: bar.Style) -> Iterable[str]:
    columns = [str(number + 1) for number in range(len(result.products))]
    for number, name in zip(columns, result.products, strict=True):
        yield f"  {number:>2}  {name}"
    yield ""
    yield " ".join([" " * width, *(f"{column:>3}" for column in columns)])
    for layout in result.layouts:
        fits = [result.verdicts[layout, product].fit for product in result.products]
        yield " ".join([layout.ljust(width), *(_glyph(fit, style) for fit in fits)])


def _by_layout(result: validate.Validated, width: int, style: bar.Style) -> Iterable[str]:
    """Yield how many products each layout fits: of that many no line could tell all."""
    for layout in result.layouts:
        fits = [result.verdicts[layout, product].fit for product in result.products]
        told = [
            f"{_glyph(fit, style).strip()} {fits.count(fit)}" for fit, _ in _LEGEND if fit in fits
        ]
        yield f"{layout.ljust(width)}  {'  '.join(told)}"


def _explained(result: validate.Validated) -> Iterable[str]:
    told = result.misfits or tuple(
        v for v in result.verdicts.values() if v.fit is validate.Fit.UNKNOWN
    )
    for verdict in told[:_MOST_EXPLAINED]:
        place = f" [{verdict.location}]" if verdict.location else ""
        yield _wrapped(f"{verdict.layout}: {verdict.why}{place}")
    if len(told) > _MOST_EXPLAINED:
        yield f"{len(told) - _MOST_EXPLAINED} more; -o json explains them all"


def _summed_up(result: validate.Validated, style: bar.Style) -> str:
    if result.misfits:
        names = {verdict.layout for verdict in result.misfits}
        of_all = f"of {_count(len(result.layouts), 'layout')}"
        return style.paint(
            f"{len(names)} {of_all} {'does' if len(names) == 1 else 'do'} not fit.", bar.Tone.BAD
        )
    elsewhere = {v.layout for v in result.verdicts.values() if v.fit is validate.Fit.ELSEWHERE} - {
        v.layout for v in result.verdicts.values() if v.fit is validate.Fit.FITS
    }
    if elsewhere:
        verb = "fits" if len(elsewhere) == 1 else "fit"
        return (
            f"{_count(len(elsewhere), 'layout')} {verb} none of these GPUs, but others; name them "
            "or give --must-fit to insist."
        )
    return style.paint("Every layout fits the GPUs that it is for.", bar.Tone.GOOD)


def _glyph(fit: validate.Fit, style: bar.Style) -> str:
    glyph, tone = _GLYPHS[fit]
    return "  " + style.paint(style.plain(glyph), tone)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _differs(number: int) -> str:
    return "differs" if number == 1 else "differ"


def _wish(wanted: model.DesiredGpu) -> str:
    match wanted.mode:
        case model.MigMode.DISABLED:
            return picture.WHOLE
        case model.MigMode.ENABLED:
            return picture.counted(wanted.counts)


def _changed_inside(result: plans.Planned) -> int:
    """Count GPU instances that stay and whose compute instances change."""
    created = {(step.gpu_uuid, step.placement) for step in result.created}
    destroyed = {(step.gpu_uuid, step.gpu_instance_id) for step in result.destroyed}
    ids = {
        (gpu.uuid, gi.instance_id): gi.placement for gpu in result.gpus for gi in gpu.gpu_instances
    }
    inside: set[tuple[str, model.Placement]] = set()
    for step in result.plan.steps:
        if isinstance(step, steps.CreateComputeInstance):
            inside.add((step.gpu_uuid, step.gpu_instance_placement))
        elif isinstance(step, steps.DestroyComputeInstance):
            key = step.gpu_uuid, step.gpu_instance_id
            if key not in destroyed and key in ids:
                inside.add((step.gpu_uuid, ids[key]))
    return len(inside - created)


def _victims(result: plans.Planned) -> str:
    """Say which pods would be evicted, or else what their users must let go of."""
    if result.evicted:
        return _listing("Pods that would be evicted", result.evicted)
    switched = {step.gpu_uuid for step in result.mode_changes}
    whole = [gpu for gpu in result.gpus if gpu.uuid in switched]
    parts = {uuid for gpu in whole for uuid in gpu.mig_uuids}
    devices = sorted(result.plan.destroyed_uuids - switched - parts)
    lines = [f"GPU {picture.indices(whole)} must have no user at all."] if whole else []
    lines += [_listing("MIG devices that must have no user", devices)] if devices else []
    return "\n".join(lines)


def _listing(title: str, names: Sequence[str]) -> str:
    return _wrapped(f"{title}: {messages.listed(names, most=_MOST_NAMED)}")


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text,
        picture.WIDTH,
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _unserved(result: plans.Planned) -> Iterable[str]:
    for strategy, why in () if result.plan.is_empty else result.unserved.items():
        yield _wrapped(f"Not for a device plugin with MIG strategy {strategy.value}: {why}")


def _verdict(result: plans.Planned, style: bar.Style) -> str:
    if result.plan.is_empty:
        return style.paint(f"Layout {result.layout} is in force: nothing to do.", bar.Tone.GOOD)
    later = (
        " so far; the instances are planned once MIG is on" if result.plan.is_provisional else ""
    )
    return style.paint(f"Layout {result.layout}: {summary(result)}{later}.", bar.Tone.STRONG)


def _steps(result: plans.Planned) -> Iterable[str]:
    for gpu_plan in result.plan.gpus:
        for step in gpu_plan.steps:
            yield f"GPU {gpu_plan.gpu_index}  {steps.described(step)}"


def _held(holders: Iterable[gpu_processes.GpuProcess]) -> Iterable[str]:
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
