"""Answers about GPUs, for people: pictures, tables and a summary."""

import collections
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.cli.toolkit import tables
from mig_manager.core import bar, messages, model, picture, steps
from mig_manager.core.layout import plans

_MOST_UUIDS = 2  # that a picture shows, each of 40 characters
_MOST_NAMED = 8  # devices or pods that a sentence names before it counts the rest
NO_GPU = "This node has no NVIDIA GPU."


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
    """Return the profiles of all GPUs together, with counts."""
    counts: collections.Counter[model.Profile] = collections.Counter()
    whole = empty = 0
    for gpu in gpus:
        found = [device.profile for device in gpu.devices]
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
    """Draw every GPU with its users and the process that is changing it.

    Args:
        seen: The GPUs and their processes.
        pods: The pods that kubelet knows, by the UUID of their device.
        changed_by: The process that is changing the GPUs; empty if there is none.
        is_wide: Whether to draw ids, UUIDs and each process.
        style: What the terminal can show.

    Returns:
        The picture, and a line for every GPU and for the change.
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
        f"{tables.count(len(result.destroyed), 'instance')} destroyed, "
        f"{len(result.created)} created, "
        f"{result.staying} {'stays' if result.staying == 1 else 'stay'}"
    )
    # GPU instances that stay, but change their compute instances.
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
        sentence += f"; {tables.count(len(inside - created), 'instance')} divided differently"
    if result.mode_changes:
        sentence += f"; MIG mode of {tables.count(len(result.mode_changes), 'GPU')} changed"
    resets = sum(gpu_plan.needs_reset for gpu_plan in result.plan.gpus)
    return f"{sentence}; " + (f"{tables.count(resets, 'GPU')} reset" if resets else "no reset")


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
        sentence += f"; {tables.count(len(wrong) - 1, 'more GPU')} {differ}"
    return sentence


def _affected(result: plans.Planned, style: bar.Style) -> str:
    """Say which pods would be evicted, or else which devices must be idle."""
    if result.evicted:
        return tables.listing("Pods that would be evicted", result.evicted, style)
    changed = {step.gpu_uuid for step in result.mode_changes}
    whole = [gpu for gpu in result.gpus if gpu.uuid in changed]
    parts = {uuid for gpu in whole for uuid in gpu.mig_uuids}
    devices = sorted(result.plan.destroyed_uuids - changed - parts)
    lines = [style.fitted(f"GPU {picture.indices(whole)} must be idle.")] if whole else []
    if len(devices) > _MOST_UUIDS:
        lines.append(
            style.fitted(f"{len(devices)} MIG devices must be idle; '-o json' lists them.")
        )
    elif devices:
        lines.append(tables.listing("MIG devices that must be idle", devices, style))
    return "\n".join(lines)


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
