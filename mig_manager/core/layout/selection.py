"""Which GPUs of a node a layout is about, and what each of them shall have."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from mig_manager import errors
from mig_manager.core import model, yaml_tree
from mig_manager.core.layout import layouts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """What keeps a layout from meaning what it says on these GPUs."""

    message: str
    reason: errors.Reason
    location: errors.Location
    passes: str
    """What becomes of it where it is let pass."""


def select(layout: layouts.Layout, gpus: Sequence[model.Gpu]) -> dict[str, model.DesiredGpu]:
    """Return the desired state of each GPU that the layout selects, by UUID.

    The last rule that selects a GPU decides. GPUs without MIG are omitted: ``devices: all`` with
    MIG enabled means all that have it. So are UUIDs of other nodes, and unreachable GPUs that the
    layout does not name. A layout that was parsed leniently raises nothing, as with mig-parted.

    Raises:
        LayoutError: No rule selects a GPU here, or a rule names an index or a PCI address that
            the node lacks (NO_GPU_MATCHES). A GPU named by itself has no MIG to enable, or
            none has (NOT_MIG_CAPABLE), or it cannot be observed (GPU_UNREACHABLE).
    """
    deciding = _deciding(layout, gpus)
    for problem in _unreachable(layout, gpus):
        raise errors.LayoutError(problem.message, reason=problem.reason, location=problem.location)
    if not layout.is_lenient:
        for problem in _problems(layout, gpus, deciding):
            raise errors.LayoutError(
                problem.message, reason=problem.reason, location=problem.location
            )
    return {uuid: rule.wanted for uuid, (gpu, rule) in deciding.items() if gpu.is_mig_capable}


def unrestored_elsewhere(
    layout: layouts.Layout, gpus: model.ObservedGpus, unrestored: Iterable[model.GpuSnapshot]
) -> tuple[model.GpuSnapshot, ...]:
    """Return the snapshots still to restore after a layout that skips unreachable GPUs."""
    others = (
        gpu for gpu in gpus.unreachable if not any(_may_match(rule, gpu) for rule in layout.rules)
    )
    return model.ObservedGpus(gpus, others).missing(unrestored)


@contextlib.contextmanager
def located(layout: layouts.Layout, gpus: Sequence[model.Gpu]) -> Iterator[None]:
    """Add the layout's location to an error of the planner."""
    try:
        yield
    except errors.LayoutError as error:
        found = _deciding(layout, gpus).get(error.gpu_uuid)
        if found:
            _, rule = found
            locations = {
                str(profile): location for profile, location in rule.profile_locations.items()
            }
            error.locate(locations.get(error.profile, rule.location))
        raise


def lenient_warnings(
    layout: layouts.Layout, gpus: Sequence[model.Gpu]
) -> tuple[yaml_tree.Diagnostic, ...]:
    """Return what ``select`` passes on these GPUs because the layout is lenient."""
    if not layout.is_lenient:
        return ()
    found = _problems(layout, gpus, _deciding(layout, gpus))
    return tuple(
        yaml_tree.Diagnostic(each.location, f"{each.message} ({each.passes})") for each in found
    )


_Deciding = dict[str, tuple[model.Gpu, layouts.Rule]]


def _deciding(layout: layouts.Layout, gpus: Sequence[model.Gpu]) -> _Deciding:
    found: _Deciding = {}
    for rule in layout.rules:
        found.update((gpu.uuid, (gpu, rule)) for gpu in gpus if rule.matches(gpu))
    return found


def _problems(
    layout: layouts.Layout, gpus: Sequence[model.Gpu], deciding: _Deciding
) -> Iterator[_Problem]:
    for rule in layout.rules:
        yield from _missing(layout, rule, gpus)
    if not deciding:
        models = ", ".join(sorted({f"{gpu.name} (0x{gpu.pci_device_id:08X})" for gpu in gpus}))
        yield _Problem(
            message=f"layout '{layout.name}' is about none of this node's GPUs: "
            f"{models or 'it has none'}",
            reason=errors.Reason.NO_GPU_MATCHES,
            location=layout.location,
            passes="nothing is done",
        )
    yield from _hopeless(layout, list(deciding.values()))


def _unreachable(layout: layouts.Layout, gpus: Sequence[model.Gpu]) -> Iterator[_Problem]:
    """Yield the unreachable GPUs that the layout is about by name, or by nothing else."""
    for gpu in model.unreachable(gpus):
        rule = next((each for each in reversed(layout.rules) if _may_match(each, gpu)), None)
        if rule is None:
            continue
        if rule.indices is not None:
            how = "names"
        elif not any(each.matches(seen) for each in layout.rules for seen in gpus):
            how = "can only be about"
        elif rule.filters and not any(rule.filters_match(seen) for seen in gpus):
            how = "has a device-filter that can only mean"
            if gpu.pci_device_id is None:
                # Its model is not known: the rule may be about another node's GPUs.
                continue
        else:
            continue
        yield _Problem(
            message=f"layout '{layout.name}' {how} {gpu}, which is unreachable: {gpu.message}",
            reason=errors.Reason.GPU_UNREACHABLE,
            location=rule.location,
            passes="it is left as it is",
        )


def _may_match(rule: layouts.Rule, gpu: model.UnreachableGpu) -> bool:
    """Return whether a rule is about an unreachable GPU, as far as is known of it."""
    is_chosen = (
        rule.indices is None
        or gpu.index in rule.indices
        or bool({gpu.uuid, gpu.pci_address} & set(rule.identities))
    )
    return is_chosen and (
        not rule.filters or any(_filter_may_match(each, gpu) for each in rule.filters)
    )


def _filter_may_match(each: layouts.Filter, gpu: model.UnreachableGpu) -> bool:
    match each:
        case layouts.DeviceFilter():
            return gpu.pci_device_id in (None, each.device_id)
        case layouts.NameFilter():
            return not gpu.name or each.matches_name(gpu.name)


def _missing(
    layout: layouts.Layout, rule: layouts.Rule, gpus: Sequence[model.Gpu]
) -> Iterator[_Problem]:
    # A rule for another model of GPU may well count further than this node does.
    if rule.indices is None or not any(rule.filters_match(gpu) for gpu in gpus):
        return
    every: list[model.Gpu | model.UnreachableGpu] = [*gpus, *model.unreachable(gpus)]
    indices = sorted(set(rule.indices) - {gpu.index for gpu in every})
    here = {gpu.pci_address for gpu in every}
    addresses = [
        each for each in rule.identities if not layouts.is_uuid(each) and each not in here
    ]
    has = f"this node has {len(every)}, counted from 0"
    for what in [f"{each}, and {has}" for each in indices] + [
        f"{each}, and this node has none there" for each in addresses
    ]:
        yield _Problem(
            message=f"layout '{layout.name}' names GPU {what}",
            reason=errors.Reason.NO_GPU_MATCHES,
            location=rule.location,
            passes="it matches no GPU",
        )


def _hopeless(
    layout: layouts.Layout, decided: Sequence[tuple[model.Gpu, layouts.Rule]]
) -> Iterator[_Problem]:
    is_any_capable = any(gpu.is_mig_capable for gpu, _ in decided)
    for gpu, rule in decided:
        is_wanted = rule.wanted.mode is model.MigMode.ENABLED
        is_meant = rule.indices is not None or not is_any_capable
        if is_wanted and is_meant and not gpu.is_mig_capable:
            yield _Problem(
                message=f"layout '{layout.name}' enables MIG on {gpu}, which has no MIG",
                reason=errors.Reason.NOT_MIG_CAPABLE,
                location=rule.location,
                passes="it is left as it is",
            )
