"""Which GPUs get which part of a layout, and why a layout does not select what it names."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from mig_manager import errors, reasons
from mig_manager.core import model
from mig_manager.core.files import yaml_diagnostics
from mig_manager.core.layout import layouts

_Deciding = dict[str, tuple[model.Gpu, layouts.Rule]]


def select(layout: layouts.Layout, gpus: Sequence[model.Gpu]) -> dict[str, model.DesiredGpu]:
    """Return the desired state of each GPU that the layout selects, by UUID.

    GPUs without MIG are omitted: ``devices: all`` with MIG enabled means all MIG-capable GPUs. So
    are UUIDs of other nodes, and unreachable GPUs that the layout does not name.

    Raises:
        LayoutError: A GPU that the layout names is unreachable (GPU_UNREACHABLE). Unless the
            layout is lenient: no rule selects a GPU, or the node lacks an index or a PCI address
            of a rule (NO_GPU_MATCHES); MIG is to be enabled on a named GPU that has none, or no
            selected GPU has any (NOT_MIG_CAPABLE).
    """
    deciding = _deciding(layout, gpus)
    first = next(_unreachable(layout, gpus), None)
    if first is None and not layout.is_lenient:
        first = next((problem for problem, _ in _problems(layout, gpus, deciding)), None)
    if first is not None:
        raise first
    return {uuid: rule.desired for uuid, (gpu, rule) in deciding.items() if gpu.is_mig_capable}


def desired_hashes(layout: layouts.Layout, gpus: Sequence[model.Gpu]) -> dict[str, str]:
    """Return 12 hexadecimal digits per GPU, equal for layouts with the same state of that GPU.

    Empty for a GPU that the layout does not select.
    """
    hashes = dict.fromkeys((gpu.uuid for gpu in gpus), "")
    for uuid, (gpu, rule) in _deciding(layout, gpus).items():
        hashes[uuid] = layouts.desired_hash(rule.desired) if gpu.is_mig_capable else ""
    return hashes


def unrestored_elsewhere(
    layout: layouts.Layout, gpus: model.ObservedGpus, unrestored: Iterable[model.GpuSnapshot]
) -> tuple[model.GpuSnapshot, ...]:
    """Return the snapshots still to restore after a layout that skips unreachable GPUs."""
    rules = layout.rules
    others = (gpu for gpu in gpus.unreachable if not any(rule.may_match(gpu) for rule in rules))
    return model.ObservedGpus(gpus, others).unreachable_snapshots(unrestored)


@contextlib.contextmanager
def located(layout: layouts.Layout, gpus: Sequence[model.Gpu]) -> Iterator[None]:
    """Add the layout's location to an error of the planner."""
    try:
        yield
    except errors.LayoutError as error:
        deciding = _deciding(layout, gpus)
        if error.location or error.gpu_uuid not in deciding:
            raise
        _, rule = deciding[error.gpu_uuid]
        by_name = {str(name): place for name, place in rule.profile_locations.items()}
        raise errors.LayoutError(
            error.text,
            reason=error.reason,
            location=by_name.get(error.profile, rule.location),
            gpu_uuid=error.gpu_uuid,
            profile=error.profile,
            remedy=error.own_remedy,
        ) from error


def missing_gpus(
    layout: layouts.Layout, gpus: Sequence[model.Gpu]
) -> Sequence[tuple[layouts.Rule, str]]:
    """Return the indices and PCI addresses that the node lacks, as text, with their rules."""
    every: list[model.Gpu | model.UnreachableGpu] = [*gpus, *model.unreachable_of(gpus)]
    has = f"this node has {len(every)}, counted from 0"
    missing: list[tuple[layouts.Rule, str]] = []
    for rule in layout.rules:
        # A rule for another GPU model can have higher indices.
        if rule.indices is None or not any(rule.filters_match(gpu) for gpu in gpus):
            continue
        indices = sorted(set(rule.indices) - {gpu.index for gpu in every})
        others = set(rule.identities) - {gpu.pci_address for gpu in every}
        addresses = sorted(each for each in others if not each.startswith("GPU-"))
        missing += [(rule, f"{each}, and {has}") for each in indices]
        missing += [(rule, f"{each}, and this node has none there") for each in addresses]
    return missing


def absent_uuids(layout: layouts.Layout, gpus: Sequence[model.Gpu]) -> tuple[str, ...]:
    """Return the UUIDs that the layout names and the node lacks, sorted."""
    named = {each for rule in layout.rules for each in rule.identities if each.startswith("GPU-")}
    named -= {gpu.uuid for gpu in gpus} | {gpu.uuid for gpu in model.unreachable_of(gpus)}
    return tuple(sorted(named))


def lenient_warnings(
    layout: layouts.Layout, gpus: Sequence[model.Gpu]
) -> tuple[yaml_diagnostics.Diagnostic, ...]:
    """Return the problems on these GPUs that ``select`` ignores because the layout is lenient."""
    if not layout.is_lenient:
        return ()
    return tuple(
        yaml_diagnostics.Diagnostic(
            problem.location or layout.location, f"{problem.text} ({effect})"
        )
        for problem, effect in _problems(layout, gpus, _deciding(layout, gpus))
    )


def has_profiles(layout: layouts.Layout, gpus: Sequence[model.Gpu]) -> bool:
    """Return whether a layout selects any of the GPUs, and these have all its profiles."""
    try:
        selected = select(layout, gpus)
    except errors.LayoutError:
        return False
    return bool(selected) and all(
        gpu.profiles is None
        or {spec.profile for spec in gpu.profiles}.issuperset(
            profile.gpu_instance for profile in selected[gpu.uuid].counts
        )
        for gpu in gpus
        if gpu.uuid in selected
    )


def _deciding(layout: layouts.Layout, gpus: Sequence[model.Gpu]) -> _Deciding:
    return {gpu.uuid: (gpu, rule) for rule in layout.rules for gpu in gpus if rule.matches(gpu)}


def _problems(
    layout: layouts.Layout, gpus: Sequence[model.Gpu], deciding: _Deciding
) -> Iterator[tuple[errors.LayoutError, str]]:
    """Yield the problems of a layout on these GPUs, with their effect if ignored."""

    def problem(
        message: str,
        location: errors.Location,
        reason: reasons.Reason = reasons.Reason.NO_GPU_MATCHES,
    ) -> errors.LayoutError:
        text = f"layout '{layout.name}' {message}"
        return errors.LayoutError(text, reason=reason, location=location)

    for rule, what in missing_gpus(layout, gpus):
        yield problem(f"names GPU {what}", rule.location), "it matches no GPU"
    if not deciding:
        models = ", ".join(sorted({_product(gpu) for gpu in gpus}))
        none = f"selects none of this node's GPUs: {models or 'it has none'}"
        yield problem(none, layout.location), "nothing is done"
    is_any_capable = any(gpu.is_mig_capable for gpu, _ in deciding.values())
    for gpu, rule in deciding.values():
        is_impossible = rule.desired.mode is model.MigMode.ENABLED and not gpu.is_mig_capable
        if is_impossible and (rule.indices is not None or not is_any_capable):
            message = f"enables MIG on {gpu}, which has no MIG"
            not_capable = problem(message, rule.location, reasons.Reason.NOT_MIG_CAPABLE)
            yield not_capable, "the GPU stays unchanged"


def _product(gpu: model.Gpu) -> str:
    lacks = "" if gpu.is_mig_capable else ", no MIG"
    return f"{gpu.name} (0x{gpu.pci_device_id:08X}{lacks})"


def _unreachable(
    layout: layouts.Layout, gpus: Sequence[model.Gpu]
) -> Iterator[errors.LayoutError]:
    """Yield an error for every unreachable GPU that is named or alone can match a rule."""
    for gpu in model.unreachable_of(gpus):
        rule = next((each for each in reversed(layout.rules) if each.may_match(gpu)), None)
        verb = _verb_for_unreachable(layout, rule, gpu, gpus) if rule else ""
        if rule and verb:
            yield errors.LayoutError(
                f"layout '{layout.name}' {verb} {gpu}, which is unreachable: {gpu.message}",
                reason=reasons.Reason.GPU_UNREACHABLE,
                location=rule.location,
            )


def _verb_for_unreachable(
    layout: layouts.Layout,
    rule: layouts.Rule,
    gpu: model.UnreachableGpu,
    gpus: Sequence[model.Gpu],
) -> str:
    """Return how a rule needs an unreachable GPU; empty if it can do without."""
    if rule.indices is not None:
        return "names"
    if not any(each.matches(other) for each in layout.rules for other in gpus):
        return "can only select"
    is_for_others = rule.filters and not any(rule.filters_match(other) for other in gpus)
    # If the model is unknown, the rule may be for another node's GPUs.
    if is_for_others and gpu.pci_device_id is not None:
        return "has a device-filter that can only mean"
    return ""
