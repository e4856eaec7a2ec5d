"""Layouts: named lists of rules about GPUs, canonical and comparable."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.core import model
from mig_manager.core.layout import gpu_selectors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One element of a layout: the desired state of some GPUs."""

    filters: tuple[gpu_selectors.Filter, ...]  # any of them, sorted and unique; empty: every model
    indices: tuple[int, ...] | None
    """Indices among all GPUs of the node, filtered or not. None: all. Sorted, unique."""
    identities: tuple[str, ...] = ()
    """Further GPUs by UUID or PCI address, as ``model.Gpu`` has them. Sorted, unique."""
    desired: model.DesiredGpu
    location: errors.Location = dataclasses.field(compare=False)
    profile_locations: Mapping[model.Profile, errors.Location] = dataclasses.field(
        compare=False, default_factory=dict
    )
    filter_locations: Mapping[gpu_selectors.Filter, errors.Location] = dataclasses.field(
        compare=False, default_factory=dict
    )

    def matches(self, gpu: model.Gpu) -> bool:
        """Return whether the rule selects this GPU."""
        return self._chooses(gpu) and self.filters_match(gpu)

    def may_match(self, gpu: model.UnreachableGpu) -> bool:
        """Return whether the rule can select an unreachable GPU."""
        is_possible = not self.filters or any(each.may_match(gpu) for each in self.filters)
        return self._chooses(gpu) and is_possible

    def names(self, gpu: model.Gpu | model.UnreachableGpu) -> bool:
        """Return whether the rule names this GPU by UUID or PCI address."""
        return gpu.uuid in self.identities or gpu.pci_address in self.identities

    def filters_match(self, gpu: model.Gpu) -> bool:
        """Return whether the rule's filters select this GPU's model."""
        return not self.filters or any(each.matches(gpu) for each in self.filters)

    def _chooses(self, gpu: model.Gpu | model.UnreachableGpu) -> bool:
        return self.indices is None or gpu.index in self.indices or self.names(gpu)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A named layout."""

    name: str
    rules: tuple[Rule, ...]  # in the order of the file; the last rule that selects a GPU decides
    is_lenient: bool = dataclasses.field(default=False, compare=False)
    """Whether names that match no GPU are accepted, as mig-parted does."""
    location: errors.Location = dataclasses.field(compare=False)

    @property
    def content_hash(self) -> str:
        """12 hexadecimal digits, equal for equal rules in every release: nodes publish it."""
        meaning = [
            (
                [str(each) for each in rule.filters],
                None if rule.indices is None else [*rule.indices, *rule.identities],
                *_meaning(rule.desired),
            )
            for rule in self.rules
        ]
        return _hash(meaning)

    @property
    def origin(self) -> str:
        """``config.yaml:12``, or ``generated for NVIDIA A30``."""
        place = self.location
        return place.source if self.is_generated else f"{place.source}:{place.line}"

    @property
    def is_generated(self) -> bool:
        """Whether a program made it; the location of a layout from a file has a line."""
        return not self.location.line


def _meaning(desired: model.DesiredGpu) -> tuple[str, list[tuple[str, int]]]:
    devices = [(str(each), count) for each, count in (*desired.devices, *desired.pins)]
    return desired.mode.value, devices


def desired_hash(desired: model.DesiredGpu) -> str:
    """Return 12 hexadecimal digits, equal for equal states."""
    return _hash(_meaning(desired))


def _hash(meaning: object) -> str:
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:12]


def export(
    gpus: Sequence[model.Gpu],
    *,
    name: str,
    has_placements: bool = False,
    is_complete: bool = True,
) -> Layout:
    """Return the current state of the GPUs as a layout; LayoutError (NO_GPU_MATCHES) without GPUs.

    GPUs in the same state share a rule. It has a filter only where models differ. It selects all
    GPUs if it has every GPU of its models and the node has no others (``is_complete``). A GPU
    instance without a compute instance is useless and omitted. mig-parted does not support
    placements.
    """
    if not gpus:
        problem = "this node has no GPU to export"
        raise errors.LayoutError(problem, reason=reasons.Reason.NO_GPU_MATCHES)
    groups: dict[model.DesiredGpu, list[model.Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(current(gpu, has_placements=has_placements), []).append(gpu)
    is_uniform = len(groups) == 1 or len({gpu.pci_device_id for gpu in gpus}) == 1
    location = errors.Location(source="exported", line=0, column=0)
    rules = []
    for desired, members in groups.items():
        ids = sorted({gpu.pci_device_id for gpu in members})
        is_all = is_complete and len(members) == sum(gpu.pci_device_id in ids for gpu in gpus)
        rules.append(
            Rule(
                filters=()
                if is_uniform
                else tuple(gpu_selectors.PciIdFilter(device_id=each) for each in ids),
                indices=None if is_all else tuple(sorted(gpu.index for gpu in members)),
                desired=desired,
                location=location,
            )
        )
    return Layout(name=name, rules=tuple(rules), location=location)


def current(gpu: model.Gpu, *, has_placements: bool = False) -> model.DesiredGpu:
    """Return the desired state that equals a GPU's current state."""
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
