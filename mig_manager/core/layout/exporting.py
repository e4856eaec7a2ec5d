"""Documents as plain data: any that was read, and one of what GPUs have now."""

from collections.abc import Mapping, Sequence

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.layout import layouts

_VERSION = "v1"


def render(document: layouts.Document) -> dict[str, object]:
    """Return plain data which, written as YAML or JSON, reads as an equal document."""
    rendered = {
        layout.name: [
            rule(
                filters=[str(each) for each in each_rule.filters],
                gpus=None
                if each_rule.indices is None
                else [*each_rule.indices, *each_rule.identities],
                wanted=each_rule.wanted,
            )
            for each_rule in layout.rules
        ]
        for layout in document.layouts.values()
    }
    return {"version": _VERSION} | ({"mig-configs": rendered} if rendered else {})


def rule(
    *, filters: Sequence[str], gpus: Sequence[int | str] | None, wanted: model.DesiredGpu
) -> dict[str, object]:
    """Return one rule, in the order and the shape in which mig-parted writes them.

    No filters: every model; ``gpus`` None: all.
    """
    head: dict[str, object] = {}
    if filters:
        head["device-filter"] = filters[0] if len(filters) == 1 else list(filters)
    return head | {
        "devices": "all" if gpus is None else list(gpus),
        "mig-enabled": wanted.mode is model.MigMode.ENABLED,
        "mig-devices": {str(each): count for each, count in (*wanted.devices, *wanted.pins)},
    }


def export(
    gpus: Sequence[model.Gpu], *, label: str, has_placements: bool = False
) -> dict[str, object]:
    """Return a document, as plain data, whose one layout is what the GPUs have now.

    GPUs in the same state share a rule; a filter appears only where models differ,
    and ``devices`` is ``all`` where a rule has every GPU of its models. A GPU instance without a
    compute instance is useless and omitted. mig-parted cannot read placements.

    Raises:
        LayoutError: There is no GPU, and a layout without rules is no layout (NO_GPU_MATCHES).
    """
    if not gpus:
        raise errors.LayoutError(
            "this node has no GPU to export", reason=errors.Reason.NO_GPU_MATCHES
        )
    groups: dict[model.DesiredGpu, list[model.Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(current(gpu, has_placements=has_placements), []).append(gpu)
    return {"version": _VERSION, "mig-configs": {label: _rules(groups, gpus)}}


def current(gpu: model.Gpu, *, has_placements: bool = False) -> model.DesiredGpu:
    """Return the desired state that equals the current state of a GPU."""
    counts: dict[model.Profile, int] = {}
    pins: dict[model.Pin, int] = {}
    if gpu.current_mode is not model.MigMode.ENABLED:
        return model.DesiredGpu.of(model.MigMode.DISABLED, counts)
    for instance in gpu.gpu_instances:
        for compute in instance.compute_instances:
            pin = model.Pin(profile=compute.profile, start=instance.placement.start)
            counts[compute.profile] = counts.get(compute.profile, 0) + 1
            pins[pin] = pins.get(pin, 0) + 1
    if has_placements:
        return model.DesiredGpu.of(model.MigMode.ENABLED, {}, pins)
    return model.DesiredGpu.of(model.MigMode.ENABLED, counts)


def _rules(
    groups: Mapping[model.DesiredGpu, Sequence[model.Gpu]], gpus: Sequence[model.Gpu]
) -> list[dict[str, object]]:
    is_uniform = len(groups) == 1 or len({gpu.pci_device_id for gpu in gpus}) == 1
    rules = []
    for wanted, members in groups.items():
        ids = {gpu.pci_device_id for gpu in members}
        names = sorted(str(layouts.DeviceFilter(device_id=each)) for each in ids)
        same_model = [gpu for gpu in gpus if gpu.pci_device_id in ids]
        is_all = len(members) == len(same_model)
        rules.append(
            rule(
                filters=[] if is_uniform else names,
                gpus=None if is_all else sorted(gpu.index for gpu in members),
                wanted=wanted,
            )
        )
    return rules
