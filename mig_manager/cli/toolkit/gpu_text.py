"""Answers about GPUs, for people: pictures, tables and a summary."""

import collections
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core import gpu_processes, messages, model, profile_name, steps
from mig_manager.core.display import picture, styles, tables
from mig_manager.core.layout import plans
from mig_manager.core.node.devices import strategies
from mig_manager.core.records import gpu_recovery

_MAX_UUIDS = 2  # that a picture shows, each of 40 characters
NO_GPU = "This node has no NVIDIA GPU."


def status(
    gpus: model.ObservedGpus,
    processes: gpu_processes.Processes | None,
    *,
    is_wide: bool,
    style: styles.Style,
) -> str:
    """Draw every GPU; wide: also its instances with ids and UUIDs, and the processes using it."""
    if not gpus:
        return NO_GPU
    missing = _problems(gpu_recovery.sentences(gpus), style)
    if not is_wide:
        return "\n\n".join([picture.draw_gpus(gpus, style=style), *missing])
    blocks = []
    for gpu in gpus:
        lines = [picture.draw_gpus([gpu], style=style), *_instances(gpu, style)]
        lines += [
            style.fit(f"    in use by {process}", further="      ")
            for process in (processes or {}).get(gpu.uuid, ())
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, *missing])


def _problems(sentences: Iterable[str], style: styles.Style) -> list[str]:
    return [style.paint(style.wrap(sentence), styles.Tone.BAD) for sentence in sentences]


def slices(gpus: Iterable[model.Gpu]) -> str:
    """Return the profiles of all GPUs together, with counts."""
    counts: collections.Counter[model.Profile] = collections.Counter()
    whole = empty = 0
    for gpu in gpus:
        counts.update(device.profile for device in gpu.devices)
        if gpu.current_mode is not model.MigMode.ENABLED:
            whole += 1
        elif not gpu.devices:
            empty += 1
    parts = [profile_name.with_counts(counts)] if counts else []
    parts += [f"{whole}x whole GPU"] if whole else []
    parts += [f"{empty}x empty GPU"] if empty else []
    return ", ".join(parts) or "none"


def live_status(
    gpus: model.ObservedGpus,
    processes: gpu_processes.Processes | None,
    *,
    pods: Mapping[str, Sequence[str]],
    changed_by: str,
    is_wide: bool,
    style: styles.Style,
) -> tuple[str, Mapping[str, str]]:
    """Draw every GPU with its users and the process that is changing it.

    Args:
        gpus: The GPUs.
        processes: Their processes; None: unknown.
        pods: The pods that kubelet knows, by the UUID of their device.
        changed_by: The process that is changing the GPUs; empty without one.
        is_wide: Whether to draw ids, UUIDs and every process.
        style: Of the terminal.

    Returns:
        The picture, and a line for every GPU and for the change.
    """
    change = f"{changed_by} is changing the GPUs" if changed_by else "no change is under way"
    lines = {"change": change}
    blocks = [style.fit(f"{change[0].upper()}{change[1:]}."), ""]
    blocks += [status(gpus, processes, is_wide=is_wide, style=style), ""]
    for gpu in gpus:
        devices = (gpu.uuid, *gpu.mig_uuids)
        names = [pod for device in devices for pod in pods.get(device, ())]
        names += [str(each) for each in (processes or {}).get(gpu.uuid, ())]
        users = messages.list_names(list(dict.fromkeys(names)), limit=messages.MAX_AT_A_TERMINAL)
        name = f"GPU {gpu.index}"
        lines[name] = f"{name}: {slices([gpu])}, " + (f"in use by {users}" if users else "idle")
        if users:
            blocks.append(style.fit(f"{name} in use by {users}"))
    return "\n".join(blocks).rstrip(), lines


def plan(
    result: plans.Planned,
    *,
    is_wide: bool,
    style: styles.Style,
    agent_evicts: bool | None = None,
    strategy: strategies.Strategy | None = None,
) -> str:
    """Draw a change, its counts and the affected pods.

    ``agent_evicts`` is whether an agent can evict pods for it; None without an agent.
    ``strategy`` is the MIG strategy of the node's device plugin; None if it is unknown.
    """
    blocks = [
        picture.draw_change(result.gpus, result.plan, selected=result.desired.keys(), style=style)
    ]
    blocks += _problems(gpu_recovery.sentences(result.gpus), style)
    if is_wide and not result.plan.is_empty:
        rows = [
            style.fit(f"GPU {gpu_plan.gpu_index}  {steps.describe(step)}")
            for gpu_plan in result.plan.gpus
            for step in gpu_plan.steps
        ]
        blocks.append("\n".join(rows))
    lines = [_disruption(result, style, agent_evicts=agent_evicts)]
    if result.origin:
        lines.append(style.paint(style.wrap(f"Origin: {result.origin}"), styles.Tone.FAINT))
    if result.plan.is_empty:
        # An agent still has its request to answer.
        rest = "nothing to do" if agent_evicts is None else "no GPU changes"
        verdict = f"Layout {result.layout} is already active: {rest}."
        lines.append(style.paint(style.fit(verdict), styles.Tone.GOOD))
    else:
        lines += [
            style.wrap(f"Not for a device plugin with MIG strategy {each.value}: {why}")
            for each, why in result.unserved.items()
            if strategy in (None, each)
        ]
        is_first_part = result.plan.is_provisional
        later = " so far; the instances are planned once MIG is enabled" if is_first_part else ""
        verdict = f"Layout {result.layout}: {summary(result)}{later}."
        lines.append(style.paint(style.fit(verdict, further="  "), styles.Tone.STRONG))
    blocks.append("\n".join(filter(None, lines)))
    return "\n\n".join(blocks)


def summary(result: plans.Planned, after: Iterable[model.Gpu] = ()) -> str:
    """Return the counts of a change, such as ``2 instances destroyed, 1 created, 5 kept``.

    ``after`` are the GPUs after the change; a mode that is still pending is neither changed nor
    reset.
    """
    pending = {gpu.uuid for gpu in after if gpu.has_pending_mode}
    created = {(s.gpu_uuid, s.placement) for s in result.plan.of(steps.CreateGpuInstance)}
    destroyed = {(s.gpu_uuid, s.gpu_instance_id) for s in result.plan.of(steps.DestroyGpuInstance)}
    sentence = (
        f"{messages.count(len(destroyed), 'instance')} destroyed, "
        f"{len(created)} created, {result.kept} kept"
    )
    # GPU instances that stay, but change their compute instances.
    placements = {
        (gpu.uuid, gi.instance_id): gi.placement for gpu in result.gpus for gi in gpu.gpu_instances
    }
    inside = {
        (step.gpu_uuid, step.gpu_instance_placement)
        for step in result.plan.of(steps.CreateComputeInstance)
    }
    for step in result.plan.of(steps.DestroyComputeInstance):
        key = step.gpu_uuid, step.gpu_instance_id
        if key not in destroyed and key in placements:
            inside.add((step.gpu_uuid, placements[key]))
    if inside - created:
        sentence += f"; {messages.count(len(inside - created), 'instance')} divided differently"
    modes = {step.gpu_uuid for step in result.plan.of(steps.SetMode)}
    if modes - pending:
        sentence += f"; MIG mode of {messages.count(len(modes - pending), 'GPU')} changed"
    if modes & pending:
        sentence += f"; {messages.count(len(modes & pending), 'MIG mode')} pending"
    resets = sum(each.resets_gpu and each.gpu_uuid not in pending for each in result.plan.gpus)
    return f"{sentence}; " + (f"{messages.count(resets, 'GPU')} reset" if resets else "no reset")


def difference(result: plans.Planned) -> str:
    """Say how the first GPU differs from the layout, and how many others do."""
    by_uuid = {gpu.uuid: gpu for gpu in result.gpus}
    first, *others = [by_uuid[each.gpu_uuid] for each in result.plan.gpus if each.steps]
    layout = result.desired[first.uuid]
    is_enabled = layout.mode is model.MigMode.ENABLED
    present = picture.summarise(first)
    requested = profile_name.with_counts(layout.counts) if is_enabled else picture.WHOLE
    sentence = f"GPU {first.index}: {present}; the layout has {requested}"
    if present == requested:
        but = "at other placements, or with leftovers or" if layout.pins else "leftovers or"
        sentence = (
            f"GPU {first.index} has {present} as requested, but {but} a pending MIG mode too"
        )
    if others:
        differ = "differ" if others[1:] else "differs"
        sentence += f"; {messages.count(len(others), 'more GPU')} {differ}"
    return sentence


def _disruption(result: plans.Planned, style: styles.Style, *, agent_evicts: bool | None) -> str:
    """Say which pods use devices to be destroyed, or else which devices must be idle."""
    if result.affected_pods:
        return tables.listing("Affected pods", result.affected_pods, style)
    changed = {step.gpu_uuid for step in result.plan.of(steps.SetMode)}
    whole = [gpu for gpu in result.gpus if gpu.uuid in changed]
    parts = {uuid for gpu in whole for uuid in gpu.mig_uuids}
    devices = sorted(result.plan.destroyed_uuids - changed - parts)
    if whole and agent_evicts is not None:
        sentence = f"The agent evicts the pods that use GPU {picture.indices(whole)}."
        return style.fit(sentence) if agent_evicts else ""
    lines = [style.fit(f"GPU {picture.indices(whole)} must be idle.")] if whole else []
    if len(devices) > _MAX_UUIDS:
        lines.append(style.fit(f"{len(devices)} MIG devices must be idle; '-o json' lists them."))
    elif devices:
        lines.append(tables.listing("MIG devices that must be idle", devices, style))
    return "\n".join(lines)


def _instances(gpu: model.Gpu, style: styles.Style) -> list[str]:
    """Return the table of instances for ``-o wide``."""
    title = f"    {gpu.uuid} at {gpu.pci_address}, subsystem 0x{gpu.pci_subsystem_id:08X}"
    rows: list[tables.Row] = []
    for gi in gpu.gpu_instances:
        number, place = str(gi.instance_id), str(gi.placement)
        rows += [
            (number, str(ci.instance_id), str(ci.profile), place, ci.uuid or "-")
            for ci in gi.compute_instances
        ] or [(number, "-", str(gi.profile), place, "-")]
    head = ("GI", "CI", "PROFILE", "PLACEMENT", "MIG UUID")
    lines = tables.columns(head, rows, style=style, margin="    ") if rows else []
    return [style.fit(title, further="      "), *lines]
