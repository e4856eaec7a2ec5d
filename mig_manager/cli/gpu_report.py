"""Answers about GPUs, for people: pictures, tables, and a sentence that sums up."""

import collections
import itertools
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core import bar, messages, model, picture, steps
from mig_manager.core.layout import config, plans, validate

_MOST_NAMED = 8  # devices or pods that a sentence names before it counts the rest
_MOST_EXPLAINED = 12
_MOST_COLUMNS = 16
_GLYPH_COUNT = 6  # characters of a glyph and a count, with the gap before it
_PRODUCT_COLUMN = 4  # characters, with the gap before it
_GAP, _NARROW_GAP = "   ", "  "
_FIRST_HALF, _JOINT = re.compile(r"\b([0-9]+x|[0-9-]{10}) "), "\N{NO-BREAK SPACE}"
"""The count of a profile, as in ``16x 3g.20gb``, or a date, and what keeps both in one line."""
NO_GPU = "This node has no NVIDIA GPU."


def columns(
    head: Sequence[str], rows: Iterable[Sequence[str | tuple[str, bar.Tone]]], *, style: bar.Style
) -> list[str]:
    """Return the lines of a table; a cell is a text, or a text and its tone.

    Where the table is wider than the terminal, its widest columns are wrapped.
    """
    table = [
        [(_FIRST_HALF.sub(rf"\1{_JOINT}", text), tone) for text, tone in cells]
        for cells in (
            [(cell, bar.Tone.PLAIN) if isinstance(cell, str) else cell for cell in row]
            for row in (head, *rows)
        )
    ]
    widths = [max(len(text) for text, _ in column) for column in zip(*table, strict=True)]
    gap, room = _GAP, style.table_width
    if room is not None and sum(widths) + len(gap) * (len(widths) - 1) > room:
        gap = _NARROW_GAP
        widths = _narrowed(table, room - len(gap) * (len(widths) - 1))
    padded = [*widths[:-1], 0]  # lines end with their text
    lines = []
    for row in table:
        cells = [_cell_lines(text, width) for (text, _), width in zip(row, widths, strict=True)]
        for texts in itertools.zip_longest(*cells, fillvalue=""):
            painted = [
                style.paint(style.plain(text.ljust(width)), tone)
                for text, width, (_, tone) in zip(texts, padded, row, strict=True)
            ]
            lines.append(gap.join(painted).rstrip().replace(_JOINT, " "))
    return lines


def _narrowed(table: Sequence[Sequence[tuple[str, bar.Tone]]], room: int) -> list[int]:
    """Return widths of columns that fit the room; words are broken only if nothing else helps."""
    texts = [[text for text, _ in column] for column in zip(*table, strict=True)]
    widths = [max(map(len, column)) for column in texts]
    words = [
        max(len(word) for text in column for word in _cell_lines(text, 1, breaks_words=False))
        for column in texts
    ]
    while sum(widths) > room:
        spare = [width if width > word else 0 for width, word in zip(widths, words, strict=True)]
        best = spare if any(spare) else widths
        widths[best.index(max(best))] -= 1
    return widths


def _cell_lines(text: str, width: int, *, breaks_words: bool = True) -> list[str]:
    if len(text) <= width:
        return [text]
    whole = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
    if breaks_words and max(map(len, whole), default=0) <= width:
        return whole
    return textwrap.wrap(text, width, break_long_words=breaks_words)


def status(result: plans.Status, *, is_wide: bool, style: bar.Style) -> str:
    """Draw every GPU; wide: also its instances with ids and UUIDs, and the processes using it."""
    if not result.gpus:
        return NO_GPU
    missing = _unreachable(result.gpus, style)
    if not is_wide:
        return "\n\n".join([picture.draw_gpus(result.gpus, style=style), *missing])
    blocks = []
    for gpu in result.gpus:
        lines = [picture.draw_gpus([gpu], style=style), *_instances(gpu, style)]
        processes = (result.processes or {}).get(gpu.uuid, ())
        blocks.append(
            "\n".join(
                [
                    *lines,
                    *(
                        style.fitted(f"    in use by {each}", further="      ")
                        for each in processes
                    ),
                ]
            )
        )
    return "\n\n".join([*blocks, *missing])


def slices(gpus: Iterable[model.Gpu]) -> str:
    """Return what GPUs are divided into, all together."""
    counts: collections.Counter[model.Profile] = collections.Counter()
    whole = empty = 0
    for gpu in gpus:
        found = [ci.profile for gi in gpu.gpu_instances for ci in gi.compute_instances]
        counts.update(found)
        if gpu.current_mode is not model.MigMode.ENABLED:
            whole += 1
        elif not found:
            empty += 1
    parts = [picture.counted(counts)] if counts else []
    parts += [f"{whole}x whole GPU"] if whole else []
    parts += [f"{empty}x empty GPU"] if empty else []
    return ", ".join(parts) or "none"


def live_status(
    seen: plans.Status,
    *,
    pods: Mapping[str, Sequence[str]],
    changed_by: str,
    is_wide: bool,
    style: bar.Style,
) -> tuple[str, Mapping[str, str]]:
    """Draw every GPU, with who uses it and who changes it now.

    Args:
        seen: The GPUs and their processes.
        pods: The pods that kubelet knows, by the UUID of their device.
        changed_by: Who changes the GPUs; empty: no process does.
        is_wide: Whether to draw ids, UUIDs and each process.
        style: What the terminal can show.

    Returns:
        The picture, and a line for each GPU and for the change.
    """
    doing = f"{changed_by} is changing the GPUs" if changed_by else "no change is under way"
    lines, blocks = {"change": doing}, [style.fitted(f"{doing[0].upper()}{doing[1:]}."), ""]
    blocks += [status(seen, is_wide=is_wide, style=style), ""]
    for gpu in seen.gpus:
        devices = (gpu.uuid, *gpu.mig_uuids)
        found = [pod for device in devices for pod in pods.get(device, ())]
        found += [str(each) for each in (seen.processes or {}).get(gpu.uuid, ())]
        users = messages.listed(list(dict.fromkeys(found)), most=_MOST_NAMED)
        name = f"GPU {gpu.index}"
        lines[name] = f"{name}: {slices([gpu])}, " + (f"in use by {users}" if users else "idle")
        if users:
            blocks.append(style.fitted(f"{name} in use by {users}"))
    return "\n".join(blocks).rstrip(), lines


def _unreachable(gpus: model.ObservedGpus, style: bar.Style) -> list[str]:
    """Return a block about the unreachable GPUs, if there are any."""
    lines = [
        style.paint(style.wrapped(messages.printable(gpu.sentence, " ")), bar.Tone.BAD)
        for gpu in gpus.unreachable
    ]
    return ["\n".join(lines)] if lines else []


def plan(result: plans.Planned, *, is_wide: bool, style: bar.Style) -> str:
    """Draw a change, and say what it destroys and creates and which pods it affects."""
    blocks = [
        picture.draw_change(result.gpus, result.plan, selected=result.wanted.keys(), style=style)
    ]
    blocks += _unreachable(result.gpus, style)
    if is_wide and not result.plan.is_empty:
        rows = [
            style.fitted(f"GPU {gpu_plan.gpu_index}  {steps.describe(step)}")
            for gpu_plan in result.plan.gpus
            for step in gpu_plan.steps
        ]
        blocks.append("\n".join(rows))
    lines = [
        _affected(result, style),
        style.paint(style.wrapped(f"Origin: {result.origin}"), bar.Tone.FAINT)
        if result.origin
        else "",
    ]
    if result.plan.is_empty:
        verdict = f"Layout {result.layout} is already active: nothing to do."
        lines.append(style.paint(style.fitted(verdict), bar.Tone.GOOD))
    else:
        lines += [
            style.wrapped(f"Not for a device plugin with MIG strategy {strategy.value}: {why}")
            for strategy, why in result.unserved.items()
        ]
        is_first_part = result.plan.is_provisional
        later = " so far; the instances are planned once MIG is enabled" if is_first_part else ""
        verdict = f"Layout {result.layout}: {summary(result)}{later}."
        lines.append(style.paint(style.fitted(verdict, further="  "), bar.Tone.STRONG))
    blocks.append("\n".join(filter(None, lines)))
    return "\n\n".join(blocks)


def summary(result: plans.Planned) -> str:
    """Return the counts of a change, such as ``2 instances destroyed, 1 created, 5 stay``."""
    sentence = (
        f"{_count(len(result.destroyed), 'instance')} destroyed, {len(result.created)} created, "
        f"{result.staying} {'stays' if result.staying == 1 else 'stay'}"
    )
    # GPU instances that stay and whose compute instances change.
    created = {(step.gpu_uuid, step.placement) for step in result.created}
    destroyed = {(step.gpu_uuid, step.gpu_instance_id) for step in result.destroyed}
    placements = {
        (gpu.uuid, gi.instance_id): gi.placement for gpu in result.gpus for gi in gpu.gpu_instances
    }
    inside: set[tuple[str, model.Placement]] = set()
    for step in result.plan.steps:
        if isinstance(step, steps.CreateComputeInstance):
            inside.add((step.gpu_uuid, step.gpu_instance_placement))
        elif isinstance(step, steps.DestroyComputeInstance):
            key = step.gpu_uuid, step.gpu_instance_id
            if key not in destroyed and key in placements:
                inside.add((step.gpu_uuid, placements[key]))
    if inside - created:
        sentence += f"; {_count(len(inside - created), 'instance')} divided differently"
    if result.mode_changes:
        sentence += f"; MIG mode of {_count(len(result.mode_changes), 'GPU')} changed"
    resets = sum(gpu_plan.needs_reset for gpu_plan in result.plan.gpus)
    return f"{sentence}; " + (f"{_count(resets, 'GPU')} reset" if resets else "no reset")


def difference(result: plans.Planned) -> str:
    """Say how the first GPU differs from the layout, and how many others do."""
    by_uuid = {gpu.uuid: gpu for gpu in result.gpus}
    wrong = [by_uuid[gpu_plan.gpu_uuid] for gpu_plan in result.plan.gpus if gpu_plan.steps]
    first = wrong[0]
    wanted = result.wanted[first.uuid]
    is_enabled = wanted.mode is model.MigMode.ENABLED
    has = picture.summarise(first)
    wants = picture.counted(wanted.counts) if is_enabled else picture.WHOLE
    sentence = f"GPU {first.index} has {has} instead of {wants}"
    if has == wants:
        but = "at other placements, or with leftovers or" if wanted.pins else "leftovers or"
        sentence = f"GPU {first.index} has {has} as requested, but {but} a pending MIG mode too"
    if len(wrong) > 1:
        differ = "differ" if wrong[2:] else "differs"
        sentence += f"; {_count(len(wrong) - 1, 'more GPU')} {differ}"
    return sentence


def validated(result: validate.Validated, *, style: bar.Style) -> str:
    """Return a table of layouts and products, and why layouts do not fit."""
    width = max((len(name) for name in result.layouts), default=0)
    most = _MOST_COLUMNS
    if style.table_width is not None:
        most = min(most, (style.table_width - width) // _PRODUCT_COLUMN)
    table = _by_layout if len(result.products) > most else _by_product
    lines = [*table(result, width, style), ""]
    fits = {verdict.fit for verdict in result.verdicts.values()}
    # A no-break space keeps a glyph beside its meaning.
    legend = [
        f"{glyph} {text}".replace(" ", "\xa0")
        for fit, (glyph, _, text) in _FITS.items()
        if fit in fits
    ]
    lines += (
        [style.plain(style.fitted("   ".join(legend), further="").replace("\xa0", " "))]
        if legend
        else []
    )
    unknown = [v for v in result.verdicts.values() if v.fit is validate.Fit.UNKNOWN]
    explained = result.misfits or unknown
    lines += _elsewhere(result, style)
    for verdict in explained[:_MOST_EXPLAINED]:
        place = f" [{verdict.location}]" if verdict.location else ""
        lines.append(style.wrapped(f"{verdict.layout}: {verdict.why}{place}"))
    if len(explained) > _MOST_EXPLAINED:
        lines.append(f"{len(explained) - _MOST_EXPLAINED} more; -o json explains them all")
    lines += [
        _listing(f"Not for MIG strategy {strategy.value}", names, style)
        for strategy, names in result.unserved.items()
    ]
    lines.append(_summed_up(result, style))
    return "\n".join(lines)


def portability(document: config.Document, *, style: bar.Style) -> str:
    """Say where nvidia-mig-parted does not understand a layout file."""
    if not document.extensions:
        return style.fitted(f"{document.source}: nvidia-mig-parted understands all of it.")
    lines = [style.fitted(f"{document.source}: nvidia-mig-parted does not understand all of it.")]
    return "\n".join([*lines, *(style.wrapped(str(remark)) for remark in document.extensions)])


_FITS = {
    validate.Fit.FITS: ("✓", bar.Tone.GOOD, "fits"),
    validate.Fit.DOES_NOT_FIT: ("✗", bar.Tone.BAD, "does not fit"),
    validate.Fit.ELSEWHERE: ("-", bar.Tone.FAINT, "fits other GPUs only"),
    validate.Fit.NOT_FOR_IT: ("·", bar.Tone.FAINT, "selects other GPUs"),
    validate.Fit.UNKNOWN: ("?", bar.Tone.WARN, "not known"),
}


def _elsewhere(result: validate.Validated, style: bar.Style) -> Iterable[str]:
    """Yield why layouts fit other GPUs only: a line for all products with the same causes."""
    products: dict[str, list[str]] = {}
    for product in result.products:
        verdicts = [result.verdicts[layout, product] for layout in result.layouts]
        causes = [(v.layout, v.brief) for v in verdicts if v.fit is validate.Fit.ELSEWHERE]
        if causes:
            products.setdefault(messages.by_cause(causes), []).append(product)
    for text, names in list(products.items())[:_MOST_EXPLAINED]:
        yield style.wrapped(f"- {messages.listed(names)}: {text}")
    if products:
        yield "-o json explains them all"


def _by_product(result: validate.Validated, width: int, style: bar.Style) -> Iterable[str]:
    numbers = range(1, len(result.products) + 1)
    for number, name in zip(numbers, result.products, strict=True):
        yield style.fitted(f"  {number:>2}  {name}")
    yield ""
    yield " ".join([" " * width, *(f"{number:>3}" for number in numbers)])
    for layout in result.layouts:
        fits = [result.verdicts[layout, product].fit for product in result.products]
        yield " ".join([layout.ljust(width), *(f"  {_glyph(fit, style)}" for fit in fits)])


def _by_layout(result: validate.Validated, width: int, style: bar.Style) -> Iterable[str]:
    """Yield how many products each layout fits, where one line has no room for all."""
    for layout in result.layouts:
        fits = [result.verdicts[layout, product].fit for product in result.products]
        counts = [f"{_glyph(fit, style)} {fits.count(fit)}" for fit in _FITS if fit in fits]
        name = layout.ljust(width)
        room = _GLYPH_COUNT * len(counts)
        if style.table_width is not None and width + room > style.table_width:
            # Painted text cannot be wrapped: the counts get a line of their own.
            name = f"{style.fitted(layout)}\n "
        yield f"{name}  {'  '.join(counts)}"


def _summed_up(result: validate.Validated, style: bar.Style) -> str:
    if result.misfits:
        number = len({verdict.layout for verdict in result.misfits})
        of_all = f"of {_count(len(result.layouts), 'layout')}"
        verb = "does" if number == 1 else "do"
        return style.paint(f"{number} {of_all} {verb} not fit.", bar.Tone.BAD)
    layouts = {
        fit: {v.layout for v in result.verdicts.values() if v.fit is fit} for fit in validate.Fit
    }
    elsewhere = layouts[validate.Fit.ELSEWHERE] - layouts[validate.Fit.FITS]
    if elsewhere:
        verb = "fits" if len(elsewhere) == 1 else "fit"
        return style.fitted(
            f"{_count(len(elsewhere), 'layout')} {verb} none of these GPUs, but others; name them "
            "or give --must-fit to insist.",
            further="  ",
        )
    return style.paint("Every layout fits the GPUs that it selects.", bar.Tone.GOOD)


def _glyph(fit: validate.Fit, style: bar.Style) -> str:
    glyph, tone, _ = _FITS[fit]
    return style.paint(style.plain(glyph), tone)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _affected(result: plans.Planned, style: bar.Style) -> str:
    """Say which pods would be evicted, or else which devices must be idle."""
    if result.evicted:
        return _listing("Pods that would be evicted", result.evicted, style)
    changed = {step.gpu_uuid for step in result.mode_changes}
    whole = [gpu for gpu in result.gpus if gpu.uuid in changed]
    parts = {uuid for gpu in whole for uuid in gpu.mig_uuids}
    devices = sorted(result.plan.destroyed_uuids - changed - parts)
    lines = [style.fitted(f"GPU {picture.indices(whole)} must be idle.")] if whole else []
    lines += [_listing("MIG devices that must be idle", devices, style)] if devices else []
    return "\n".join(lines)


def _listing(title: str, names: Sequence[str], style: bar.Style) -> str:
    return style.wrapped(f"{title}: {messages.listed(names, most=_MOST_NAMED)}")


def _instances(gpu: model.Gpu, style: bar.Style) -> list[str]:
    """Return a table of instances: what ``-o wide`` adds to the picture."""
    head = f"    {gpu.uuid} at {gpu.pci_address}, subsystem 0x{gpu.pci_subsystem_id:08X}"
    lines = [style.fitted(head, further="      ")]
    # A terminal of 80 columns has room for a UUID if the profiles are short.
    wide = 16 if style.columns is None else 12
    row = f"    {{:>3}} {{:>3}}  {{:<{wide}}} {{:<9}}  {{}}"
    if gpu.gpu_instances:
        lines.append(row.format("GI", "CI", "profile", "placement", "MIG UUID"))
    for gi in gpu.gpu_instances:
        place = str(gi.placement)
        if not gi.compute_instances:
            lines.append(row.format(gi.instance_id, "-", str(gi.profile), place, "-"))
        lines += [
            row.format(gi.instance_id, ci.instance_id, str(ci.profile), place, ci.uuid or "-")
            for ci in gi.compute_instances
        ]
    return [style.fitted(line, further="              ") for line in lines]
