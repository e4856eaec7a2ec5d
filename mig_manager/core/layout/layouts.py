"""What a config document says once it is read: layouts of rules, canonical and comparable."""

import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager import errors
from mig_manager.core import fields, model, yaml_tree

FILTER_HELP = (
    'a device-filter is a PCI id such as "0x20B010DE" (device, then vendor), optionally with '
    '":0xSSSSVVVV" for the subsystem, or a product name or glob such as "*A100*"'
)

UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
ADDRESS = re.compile(
    r"(?:(?P<domain>[0-9a-f]{4}|[0-9a-f]{8}):)?(?P<rest>[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFilter:
    """A GPU model by PCI id, device and vendor packed as NVML does: ``0x20B010DE``."""

    device_id: int
    subsystem_id: int | None = None  # None: any; 0: a GPU that reports none

    def matches(self, gpu: model.Gpu) -> bool:
        """Return whether the GPU is of this model."""
        return gpu.pci_device_id == self.device_id and self.subsystem_id in (
            None,
            gpu.pci_subsystem_id,
        )

    def may_match(self, gpu: model.UnreachableGpu) -> bool:
        """Return whether an unreachable GPU can be of this model, as far as is known of it."""
        return gpu.pci_device_id in (None, self.device_id)

    def __str__(self) -> str:
        subsystem = "" if self.subsystem_id is None else f":0x{self.subsystem_id:08X}"
        return f"0x{self.device_id:08X}{subsystem}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NameFilter:
    """GPU models by the name that NVML reports, or a glob of it, in any case."""

    pattern: str  # canonical: ``a100-sxm4-*gb``

    def matches(self, gpu: model.Gpu) -> bool:
        """Return whether the GPU is of such a model."""
        return self.matches_name(gpu.name)

    def matches_name(self, name: str) -> bool:
        """Return whether a product of that name is such a model."""
        known = canonical_name(name)
        return any(fnmatch.fnmatchcase(each, self.pattern) for each in (known, f"nvidia-{known}"))

    def may_match(self, gpu: model.UnreachableGpu) -> bool:
        """Return whether an unreachable GPU can be of such a model."""
        return not gpu.name or self.matches_name(gpu.name)

    def __str__(self) -> str:
        return self.pattern


Filter = DeviceFilter | NameFilter

NOTHING = DeviceFilter(device_id=0)
"""What mig-parted makes of a filter that it cannot read: a PCI id that no GPU has."""


def parse_filter(text: str) -> Filter:
    """Read a ``device-filter``: ``0xDDDDVVVV[:0xSSSSVVVV]`` or a name; ValueError if neither."""
    device, colon, subsystem = text.partition(":")
    try:
        return DeviceFilter(
            device_id=_uint32(device), subsystem_id=_uint32(subsystem) if colon else None
        )
    except ValueError:
        pattern = canonical_name(text)
        # It has letters, and is no mistyped number.
        is_number = re.match(r"0x|[0-9a-f]{8}(?![0-9a-z])", pattern)
        # The names that NVML has are such; no colon, quote or comma is in any.
        is_plain = re.fullmatch(r"[a-z0-9*?\[][a-z0-9./()*?\[\]!-]*", pattern)
        if text == text.strip() and is_plain and not is_number and re.search("[a-z*?]", pattern):
            return NameFilter(pattern=pattern)
    hint = ""
    if re.fullmatch(r"[0-9A-Fa-f]{8}(:[0-9A-Fa-f]{8})?", text):
        hint = f"; did you mean '{':'.join('0x' + part for part in text.split(':'))}'?"
    elif text.strip() not in ("", text):
        hint = "; there is a space too many"
    raise ValueError(f"{text[:60]!r} is no PCI id{hint}; {FILTER_HELP}")


def canonical_name(name: str) -> str:
    """Return a product's name as names are compared: ``a100-sxm4-40gb``."""
    return re.sub(r"^(nvidia-)+", "", re.sub(r"[\s_]+", "-", name.strip().casefold()))


def parse_identity(text: str) -> str | None:
    """Return a GPU's UUID or PCI address as ``model.Gpu`` has it; None if it is neither."""
    if UUID.fullmatch(text):
        return "GPU-" + text[4:].lower()
    address = ADDRESS.fullmatch(text)
    if address:
        return f"{(address['domain'] or '').rjust(8, '0')}:{address['rest']}".lower()
    return None


def _uint32(text: str) -> int:
    # Go's ParseUint with base 0: as Python's int, without signs and spaces, with the octal 017.
    if not re.fullmatch(r"[0-9A-Za-z_]+", text):
        raise ValueError(text)
    value = int(text, 8 if re.match(r"0[0-9_]", text) else 0)
    if value >= 2**32:
        raise ValueError(text)
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One element of a layout: which GPUs, and what they shall have."""

    filters: tuple[Filter, ...]  # any of them; empty: every model. Sorted, unique.
    indices: tuple[int, ...] | None
    """Indices among all GPUs of the node, not among those filtered. None: all. Sorted, unique."""
    identities: tuple[str, ...] = ()
    """Further GPUs by UUID or PCI address, as ``model.Gpu`` has them. Sorted, unique."""
    wanted: model.DesiredGpu
    location: errors.Location = dataclasses.field(compare=False)
    profile_locations: Mapping[model.Profile, errors.Location] = dataclasses.field(compare=False)
    filter_locations: Mapping[Filter, errors.Location] = dataclasses.field(
        compare=False, default_factory=dict
    )

    def matches(self, gpu: model.Gpu) -> bool:
        """Return whether the rule is about this GPU."""
        return self._chooses(gpu) and self.filters_match(gpu)

    def may_match(self, gpu: model.UnreachableGpu) -> bool:
        """Return whether the rule is about an unreachable GPU, as far as is known of it."""
        is_possible = not self.filters or any(each.may_match(gpu) for each in self.filters)
        return self._chooses(gpu) and is_possible

    def names(self, gpu: model.Gpu | model.UnreachableGpu) -> bool:
        """Return whether the rule names this very GPU by UUID or PCI address."""
        return gpu.uuid in self.identities or gpu.pci_address in self.identities

    def filters_match(self, gpu: model.Gpu) -> bool:
        """Return whether the rule is about GPUs of this model."""
        return not self.filters or any(each.matches(gpu) for each in self.filters)

    def _chooses(self, gpu: model.Gpu | model.UnreachableGpu) -> bool:
        return self.indices is None or gpu.index in self.indices or self.names(gpu)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A named layout."""

    name: str
    rules: tuple[Rule, ...]
    """In the order of the file: of rules about the same GPU, the last decides."""
    content_hash: str
    """12 hexadecimal digits that change exactly when the meaning of the rules does."""
    is_lenient: bool = dataclasses.field(default=False, compare=False)
    """Whether what matches no GPU passes, as mig-parted lets it."""
    location: errors.Location = dataclasses.field(compare=False)

    @property
    def origin(self) -> str:
        """``config.yaml:12``, or ``generated for NVIDIA A30``."""
        place = self.location
        return place.source if self.is_generated else f"{place.source}:{place.line}"

    @property
    def is_generated(self) -> bool:
        """Whether it is from no file."""
        return not self.location.line


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """All layouts of a config file, in its order."""

    source: str
    layouts: Mapping[str, Layout]
    warnings: tuple[yaml_tree.Diagnostic, ...] = dataclasses.field(default=(), compare=False)
    extensions: tuple[yaml_tree.Diagnostic, ...] = dataclasses.field(default=(), compare=False)
    """What mig-parted would not understand, in the order of the file."""

    def layout(self, name: str, nodes: Sequence[Sequence[model.Gpu]] = ()) -> Layout:
        """Return the layout of that name; LayoutError (UNKNOWN_CONFIG) names close matches.

        With the GPUs of ``nodes`` only such as one of these nodes has the profiles for.
        """
        if name in self.layouts:
            return self.layouts[name]
        possible = [
            each.name
            for each in self.layouts.values()
            if not nodes or any(_has_profiles(gpus, each) for gpus in nodes)
        ]
        raise errors.LayoutError(
            f"{self.source} has no layout '{name}' among its {len(self.layouts)}"
            f"{fields.did_you_mean(name, possible)}",
            reason=errors.Reason.UNKNOWN_CONFIG,
        )


def content_hash(rules: Iterable[Rule]) -> str:
    """Return a hash of what the rules mean, the same in every release: nodes publish it."""
    meaning = [
        (
            [str(each) for each in rule.filters],
            None if rule.indices is None else [*rule.indices, *rule.identities],
            rule.wanted.mode.value,
            [(str(each), count) for each, count in (*rule.wanted.devices, *rule.wanted.pins)],
        )
        for rule in rules
    ]
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:12]


_VERSION = "v1"


def render(document: Document) -> dict[str, object]:
    """Return plain data which, written as YAML or JSON, reads as an equal document."""
    rendered = {
        layout.name: [
            _rendered(
                filters=[str(each) for each in rule.filters],
                gpus=None if rule.indices is None else [*rule.indices, *rule.identities],
                wanted=rule.wanted,
            )
            for rule in layout.rules
        ]
        for layout in document.layouts.values()
    }
    return {"version": _VERSION} | ({"mig-configs": rendered} if rendered else {})


def _rendered(
    *, filters: Sequence[str], gpus: Sequence[int | str] | None, wanted: model.DesiredGpu
) -> dict[str, object]:
    """Return one rule, in the order and the shape in which mig-parted writes them."""
    named = {"device-filter": filters[0] if len(filters) == 1 else list(filters)}
    return (named if filters else {}) | {
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
    compute instance is useless and omitted. mig-parted cannot read placements. Without GPUs there
    is no layout: LayoutError (NO_GPU_MATCHES).
    """
    if not gpus:
        problem = "this node has no GPU to export"
        raise errors.LayoutError(problem, reason=errors.Reason.NO_GPU_MATCHES)
    groups: dict[model.DesiredGpu, list[model.Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(current(gpu, has_placements=has_placements), []).append(gpu)
    is_uniform = len(groups) == 1 or len({gpu.pci_device_id for gpu in gpus}) == 1
    rules = []
    for wanted, members in groups.items():
        ids = {gpu.pci_device_id for gpu in members}
        names = sorted(str(DeviceFilter(device_id=each)) for each in ids)
        is_all = len(members) == sum(gpu.pci_device_id in ids for gpu in gpus)
        rules.append(
            _rendered(
                filters=[] if is_uniform else names,
                gpus=None if is_all else sorted(gpu.index for gpu in members),
                wanted=wanted,
            )
        )
    return {"version": _VERSION, "mig-configs": {label: rules}}


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


def select(layout: Layout, gpus: Sequence[model.Gpu]) -> dict[str, model.DesiredGpu]:
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
    for unreachable in _unreachable(layout, gpus):
        raise unreachable
    for problem, location, _ in () if layout.is_lenient else _problems(layout, gpus, deciding):
        problem.locate(location)
        raise problem
    return {uuid: rule.wanted for uuid, (gpu, rule) in deciding.items() if gpu.is_mig_capable}


def unrestored_elsewhere(
    layout: Layout, gpus: model.ObservedGpus, unrestored: Iterable[model.GpuSnapshot]
) -> tuple[model.GpuSnapshot, ...]:
    """Return the snapshots still to restore after a layout that skips unreachable GPUs."""
    lost, rules = gpus.unreachable, layout.rules
    others = (gpu for gpu in lost if not any(rule.may_match(gpu) for rule in rules))
    return model.ObservedGpus(gpus, others).missing(unrestored)


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
        found = _deciding(layout, gpus).get(error.gpu_uuid)
        if found:
            _, rule = found
            by_name = {str(name): place for name, place in rule.profile_locations.items()}
            error.locate(by_name.get(error.profile, rule.location))
        raise


def lenient_warnings(
    layout: Layout, gpus: Sequence[model.Gpu]
) -> tuple[yaml_tree.Diagnostic, ...]:
    """Return what ``select`` passes on these GPUs because the layout is lenient."""
    if not layout.is_lenient:
        return ()
    found = _problems(layout, gpus, _deciding(layout, gpus))
    return tuple(
        yaml_tree.Diagnostic(location, f"{problem} ({passes})")
        for problem, location, passes in found
    )


_Deciding = dict[str, tuple[model.Gpu, Rule]]


def _deciding(layout: Layout, gpus: Sequence[model.Gpu]) -> _Deciding:
    found: _Deciding = {}
    for rule in layout.rules:
        found.update((gpu.uuid, (gpu, rule)) for gpu in gpus if rule.matches(gpu))
    return found


def _problems(
    layout: Layout, gpus: Sequence[model.Gpu], deciding: _Deciding
) -> Iterator[tuple[errors.LayoutError, errors.Location, str]]:
    """Yield what keeps a layout from meaning what it says, where, and what it passes as."""

    def problem(
        message: str, reason: errors.Reason = errors.Reason.NO_GPU_MATCHES
    ) -> errors.LayoutError:
        return errors.LayoutError(f"layout '{layout.name}' {message}", reason=reason)

    every: list[model.Gpu | model.UnreachableGpu] = [*gpus, *model.unreachable(gpus)]
    has = f"this node has {len(every)}, counted from 0"
    for rule in layout.rules:
        # A rule for another model of GPU may well count further than this node does.
        if rule.indices is None or not any(rule.filters_match(gpu) for gpu in gpus):
            continue
        indices = sorted(set(rule.indices) - {gpu.index for gpu in every})
        elsewhere = set(rule.identities) - {gpu.pci_address for gpu in every}
        addresses = sorted(each for each in elsewhere if not each.startswith("GPU-"))
        for what in [f"{each}, and {has}" for each in indices] + [
            f"{each}, and this node has none there" for each in addresses
        ]:
            yield problem(f"names GPU {what}"), rule.location, "it matches no GPU"
    if not deciding:
        models = ", ".join(sorted({f"{gpu.name} (0x{gpu.pci_device_id:08X})" for gpu in gpus}))
        none = problem(f"is about none of this node's GPUs: {models or 'it has none'}")
        yield none, layout.location, "nothing is done"
    is_any_capable = any(gpu.is_mig_capable for gpu, _ in deciding.values())
    for gpu, rule in deciding.values():
        is_wanted = rule.wanted.mode is model.MigMode.ENABLED and not gpu.is_mig_capable
        if is_wanted and (rule.indices is not None or not is_any_capable):
            message = f"enables MIG on {gpu}, which has no MIG"
            not_capable = problem(message, errors.Reason.NOT_MIG_CAPABLE)
            yield not_capable, rule.location, "it is left as it is"


def _unreachable(layout: Layout, gpus: Sequence[model.Gpu]) -> Iterator[errors.LayoutError]:
    """Yield an error for each unreachable GPU that is meant by name, or by nothing else."""
    for gpu in model.unreachable(gpus):
        rule = next((each for each in reversed(layout.rules) if each.may_match(gpu)), None)
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
        yield errors.LayoutError(
            f"layout '{layout.name}' {how} {gpu}, which is unreachable: {gpu.message}",
            reason=errors.Reason.GPU_UNREACHABLE,
            location=rule.location,
        )
