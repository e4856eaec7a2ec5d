"""Layouts: named lists of rules about GPUs, canonical and comparable."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.core import messages, model
from mig_manager.core.files import yaml_tree
from mig_manager.core.layout import gpu_selectors

VERSION = "v1"  # version of the document
_NAME_ANOTHER_FILE = "Name another file, or add layouts to it."


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


def _hash(meaning: object) -> str:
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """All layouts of a config file, in its order."""

    source: str
    layouts: Mapping[str, Layout]
    warnings: tuple[yaml_tree.Diagnostic, ...] = dataclasses.field(default=(), compare=False)
    extensions: tuple[yaml_tree.Diagnostic, ...] = dataclasses.field(default=(), compare=False)
    """Uses of features that mig-parted does not support, in the order of the file."""
    is_presumed: bool = dataclasses.field(default=False, compare=False)
    """Whether no person named it: agents may have another file."""

    def layout(
        self, name: str, nodes: Sequence[Sequence[model.Gpu]] = (), *, remedy: str = ""
    ) -> Layout:
        """Return the layout of that name; LayoutError (UNKNOWN_CONFIG) names close matches.

        Of ``nodes``, each a list of GPUs, one must have the profiles of a match.
        """
        if name in self.layouts:
            return self.layouts[name]
        if not self.layouts and not self.is_presumed:
            raise errors.LayoutError(
                f"{self.source} has no layouts",
                reason=reasons.Reason.UNKNOWN_CONFIG,
                remedy=_NAME_ANOTHER_FILE,
            )
        hint = messages.did_you_mean(name, self.possible(nodes))
        raise errors.LayoutError(
            f"unknown layout '{name}' in {self.source}{hint}",
            reason=reasons.Reason.UNKNOWN_CONFIG,
            remedy=remedy,
        )

    def possible(self, nodes: Sequence[Sequence[model.Gpu]]) -> Sequence[str]:
        """Return the layouts with profiles that a node has, each a list of GPUs; or all."""
        return [
            each.name
            for each in self.layouts.values()
            if not nodes or any(_has_profiles(gpus, each) for gpus in nodes)
        ]

    def select(self, names: Sequence[str]) -> Sequence[Layout]:
        """Return the layouts of these names, or all.

        Raises:
            ConfigError: The document has no layouts.
            LayoutError: A name is unknown (UNKNOWN_CONFIG).
        """
        if not self.layouts:
            problem = f"{self.source} has no layouts"
            raise errors.ConfigError(problem, remedy=_NAME_ANOTHER_FILE)
        return [self.layout(name) for name in names or self.layouts]


def render(layouts: Iterable[Layout]) -> dict[str, object]:
    """Return the document with these layouts as plain data, in the form that mig-parted writes."""
    configs: dict[str, list[dict[str, object]]] = {}
    for layout in layouts:
        configs[layout.name] = []
        for rule in layout.rules:
            filters = list(map(str, rule.filters))
            first = {"device-filter": filters[0] if len(filters) == 1 else filters}
            instances = (*rule.desired.devices, *rule.desired.pins)
            configs[layout.name].append(
                (first if filters else {})
                | {
                    "devices": "all"
                    if rule.indices is None
                    else [*rule.indices, *rule.identities],
                    "mig-enabled": rule.desired.mode is model.MigMode.ENABLED,
                    "mig-devices": {str(each): count for each, count in instances},
                }
            )
    return {"version": VERSION} | ({"mig-configs": configs} if configs else {})


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


def select(layout: Layout, gpus: Sequence[model.Gpu]) -> dict[str, model.DesiredGpu]:
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


def goal_hashes(layout: Layout, gpus: Sequence[model.Gpu]) -> dict[str, str]:
    """Return 12 hexadecimal digits per GPU, equal for layouts with the same goal for that GPU.

    Empty for a GPU that the layout does not select.
    """
    goals = dict.fromkeys((gpu.uuid for gpu in gpus), "")
    for uuid, (gpu, rule) in _deciding(layout, gpus).items():
        goals[uuid] = _hash(_meaning(rule.desired)) if gpu.is_mig_capable else ""
    return goals


def unrestored_elsewhere(
    layout: Layout, gpus: model.ObservedGpus, unrestored: Iterable[model.GpuSnapshot]
) -> tuple[model.GpuSnapshot, ...]:
    """Return the snapshots still to restore after a layout that skips unreachable GPUs."""
    rules = layout.rules
    others = (gpu for gpu in gpus.unreachable if not any(rule.may_match(gpu) for rule in rules))
    return model.ObservedGpus(gpus, others).unreachable_snapshots(unrestored)


def _has_profiles(gpus: Sequence[model.Gpu], layout: Layout) -> bool:
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


@contextlib.contextmanager
def located(layout: Layout, gpus: Sequence[model.Gpu]) -> Iterator[None]:
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


def missing_gpus(layout: Layout, gpus: Sequence[model.Gpu]) -> Sequence[tuple[Rule, str]]:
    """Return the indices and PCI addresses that the node lacks, as text, with their rules."""
    every: list[model.Gpu | model.UnreachableGpu] = [*gpus, *model.unreachable_of(gpus)]
    has = f"this node has {len(every)}, counted from 0"
    missing: list[tuple[Rule, str]] = []
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


def lenient_warnings(
    layout: Layout, gpus: Sequence[model.Gpu]
) -> tuple[yaml_tree.Diagnostic, ...]:
    """Return the problems on these GPUs that ``select`` ignores because the layout is lenient."""
    if not layout.is_lenient:
        return ()
    return tuple(
        yaml_tree.Diagnostic(problem.location or layout.location, f"{problem.text} ({effect})")
        for problem, effect in _problems(layout, gpus, _deciding(layout, gpus))
    )


_Deciding = dict[str, tuple[model.Gpu, Rule]]


def _deciding(layout: Layout, gpus: Sequence[model.Gpu]) -> _Deciding:
    return {gpu.uuid: (gpu, rule) for rule in layout.rules for gpu in gpus if rule.matches(gpu)}


def _problems(
    layout: Layout, gpus: Sequence[model.Gpu], deciding: _Deciding
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
        is_wanted = rule.desired.mode is model.MigMode.ENABLED and not gpu.is_mig_capable
        if is_wanted and (rule.indices is not None or not is_any_capable):
            message = f"enables MIG on {gpu}, which has no MIG"
            not_capable = problem(message, rule.location, reasons.Reason.NOT_MIG_CAPABLE)
            yield not_capable, "the GPU stays unchanged"


def _product(gpu: model.Gpu) -> str:
    lacks = "" if gpu.is_mig_capable else ", no MIG"
    return f"{gpu.name} (0x{gpu.pci_device_id:08X}{lacks})"


def _unreachable(layout: Layout, gpus: Sequence[model.Gpu]) -> Iterator[errors.LayoutError]:
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
    layout: Layout, rule: Rule, gpu: model.UnreachableGpu, gpus: Sequence[model.Gpu]
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
