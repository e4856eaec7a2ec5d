"""The mig-parted v1 document: named layouts, each a list of rules about GPUs.

    version: v1
    mig-configs:
      <layout>:
      - device-filter: "0x20B010DE"   # optional; one PCI id or a list, 0xDDDDVVVV[:0xSSSSVVVV]
        devices: all                  # or a list of GPU indices
        mig-enabled: true
        mig-devices: {1g.5gb: 7}      # profile to count

What NVIDIA's mig-parted reads is read here with the same meaning, with one exception: what it
reads without a word and then does something else than the author meant is an error. Such are a
key given twice, a ``device-filter`` that is no PCI id and so matches nothing, an index that is
negative or null, and a second YAML document behind the first.

Parsing normalises, so that ``==`` and ``content_hash`` compare what layouts mean, not how they
are spelled.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from mig_manager import errors
from mig_manager.core import document, fields, model, profile

VERSION = "v1"

_DOCUMENT_KEYS = ("version", "mig-configs")
_RULE_KEYS = ("device-filter", "devices", "mig-enabled", "mig-devices")
_FILTER_HELP = (
    'a device-filter is a PCI id such as "0x20B010DE" (device, then vendor), optionally with '
    '":0xSSSSVVVV" for the subsystem'
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFilter:
    """A GPU model by PCI id, device and vendor packed as NVML does: ``0x20B010DE``."""

    device_id: int
    subsystem_id: int | None = None
    """None: any; 0: a GPU that reports none."""

    def matches(self, gpu: model.Gpu) -> bool:
        """Tell whether the GPU is of this model."""
        return gpu.pci_device_id == self.device_id and self.subsystem_id in (
            None,
            gpu.pci_subsystem_id,
        )

    def __str__(self) -> str:
        subsystem = "" if self.subsystem_id is None else f":0x{self.subsystem_id:08X}"
        return f"0x{self.device_id:08X}{subsystem}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One element of a layout: which GPUs, and what they shall have."""

    filters: tuple[DeviceFilter, ...]
    """Any of them; empty: every model. Sorted, unique."""
    indices: tuple[int, ...] | None
    """Indices among all GPUs of the node, not among those filtered. None: all. Sorted, unique."""
    wanted: model.WantedGpu
    location: errors.Location = dataclasses.field(compare=False)
    profile_locations: Mapping[model.Profile, errors.Location] = dataclasses.field(compare=False)
    """Where each profile is asked for."""

    def matches(self, gpu: model.Gpu) -> bool:
        """Tell whether the rule is about this GPU."""
        return self.filters_match(gpu) and (self.indices is None or gpu.index in self.indices)

    def filters_match(self, gpu: model.Gpu) -> bool:
        """Tell whether the rule is about GPUs of this model."""
        return not self.filters or any(each.matches(gpu) for each in self.filters)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A named wish for the GPUs of a node."""

    name: str
    rules: tuple[Rule, ...]
    """In the order of the file: of rules about the same GPU, the last decides."""
    content_hash: str
    """12 hexadecimal digits that change exactly when the meaning of the rules does."""
    location: errors.Location = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """All layouts of a config file, in its order."""

    source: str
    layouts: Mapping[str, Layout]

    def layout(self, name: str) -> Layout:
        """Return the layout of that name.

        Raises:
            LayoutError: There is none (UNKNOWN_CONFIG); the message names close matches.
        """
        if name in self.layouts:
            return self.layouts[name]
        raise errors.LayoutError(
            f"{self.source} has no layout '{name}' among its {len(self.layouts)}"
            f"{fields.did_you_mean(name, self.layouts)}",
            reason=errors.Reason.UNKNOWN_CONFIG,
        )


def parse(text: str, *, source: str) -> Document:
    """Read a config document; an empty one has no layouts.

    Args:
        text: YAML or JSON.
        source: Name of the file for error messages.

    Raises:
        ConfigError: The document breaks the format; the message says where and what is right.
    """
    root = document.parse(text, source=source)
    layouts: dict[str, Layout] = {}
    if root is None or fields.is_null(root):
        return Document(source=source, layouts=layouts)
    if not isinstance(root, document.Mapping):
        fields.fail(root, f"expected a mapping with 'version: {VERSION}' and 'mig-configs'")
    fields.check_keys(root, _DOCUMENT_KEYS)
    version = fields.required(root, "version", example=VERSION)
    if not (isinstance(version, document.Scalar) and version.value == VERSION):
        fields.fail(version, f"version must be the text {VERSION}, not {fields.shown(version)}")
    configs = root.get("mig-configs")
    if configs is not None:
        if not (isinstance(configs, document.Mapping) and configs.entries):
            fields.fail(
                configs, f"mig-configs must map layout names to rules, not {fields.shown(configs)}"
            )
        layouts.update((entry.key, _layout(entry)) for entry in configs.entries)
    return Document(source=source, layouts=layouts)


def parse_filter(text: str) -> DeviceFilter:
    """Read a ``device-filter``: ``0xDDDDVVVV`` or ``0xDDDDVVVV:0xSSSSVVVV``.

    Raises:
        ValueError: The text is no PCI id; the message is a sentence for a person.
    """
    device, colon, subsystem = text.partition(":")
    try:
        return DeviceFilter(
            device_id=_uint32(device), subsystem_id=_uint32(subsystem) if colon else None
        )
    except ValueError:
        raise ValueError(f"{text[:60]!r} is no PCI id; {_FILTER_HELP}") from None


def select(layout: Layout, gpus: Sequence[model.Gpu]) -> dict[str, model.WantedGpu]:
    """Return what the layout wants of each GPU it is about, by UUID; the rest stays as it is.

    The last rule about a GPU decides. GPUs without MIG are left out: they are as disabled as can
    be, and ``devices: all`` with MIG enabled means all that have it.

    Raises:
        LayoutError: No rule is about any GPU here, or a rule names an index that the node lacks
            (NO_GPU_MATCHES). A GPU asked for by its index has no MIG to enable, or none has
            (NOT_MIG_CAPABLE).
    """
    deciding: dict[str, tuple[model.Gpu, Rule]] = {}
    for rule in layout.rules:
        _check_indices(layout, rule, gpus)
        deciding.update((gpu.uuid, (gpu, rule)) for gpu in gpus if rule.matches(gpu))
    if not deciding:
        models = ", ".join(sorted({f"{gpu.name} (0x{gpu.pci_device_id:08X})" for gpu in gpus}))
        raise errors.LayoutError(
            f"layout '{layout.name}' is about none of this node's GPUs: {models or 'it has none'}",
            reason=errors.Reason.NO_GPU_MATCHES,
            location=layout.location,
        )
    _check_capable(layout, list(deciding.values()))
    return {uuid: rule.wanted for uuid, (gpu, rule) in deciding.items() if gpu.is_mig_capable}


def export(gpus: Sequence[model.Gpu], *, label: str) -> dict[str, object]:
    """Return a document, as plain data, whose one layout is what the GPUs have now.

    GPUs in the same state share a rule; a filter appears only where models must be told apart,
    and ``devices`` is ``all`` where a rule has every GPU of its models. A GPU instance without a
    compute instance serves nobody and is left out.

    Raises:
        LayoutError: There is no GPU, and a layout without rules is no layout (NO_GPU_MATCHES).
    """
    if not gpus:
        raise errors.LayoutError(
            "this node has no GPU to export", reason=errors.Reason.NO_GPU_MATCHES
        )
    groups: dict[model.WantedGpu, list[model.Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(_current(gpu), []).append(gpu)
    is_uniform = len(groups) == 1 or len({gpu.pci_device_id for gpu in gpus}) == 1
    rules = []
    for current, members in groups.items():
        ids = {gpu.pci_device_id for gpu in members}
        names = sorted(str(DeviceFilter(device_id=each)) for each in ids)
        same_model = [gpu for gpu in gpus if gpu.pci_device_id in ids]
        is_all = len(members) == len(same_model)
        rules.append(
            ({} if is_uniform else {"device-filter": names[0] if len(names) == 1 else names})
            | {
                "devices": "all" if is_all else sorted(gpu.index for gpu in members),
                "mig-enabled": current.mode is model.MigMode.ENABLED,
                "mig-devices": {str(each): count for each, count in current.devices},
            }
        )
    return {"version": VERSION, "mig-configs": {label: rules}}


def _current(gpu: model.Gpu) -> model.WantedGpu:
    counts: dict[model.Profile, int] = {}
    if gpu.current_mode is not model.MigMode.ENABLED:
        return model.WantedGpu.of(model.MigMode.DISABLED, counts)
    for instance in gpu.gpu_instances:
        for compute in instance.compute_instances:
            counts[compute.profile] = counts.get(compute.profile, 0) + 1
    return model.WantedGpu.of(model.MigMode.ENABLED, counts)


def _check_indices(layout: Layout, rule: Rule, gpus: Sequence[model.Gpu]) -> None:
    # A rule for another model of GPU may well count further than this node does.
    if rule.indices is None or not any(rule.filters_match(gpu) for gpu in gpus):
        return
    missing = sorted(set(rule.indices) - {gpu.index for gpu in gpus})
    if missing:
        raise errors.LayoutError(
            f"layout '{layout.name}' names GPU {missing[0]}, and this node has {len(gpus)}, "
            "counted from 0",
            reason=errors.Reason.NO_GPU_MATCHES,
            location=rule.location,
        )


def _check_capable(layout: Layout, decided: Sequence[tuple[model.Gpu, Rule]]) -> None:
    hopeless = [
        (gpu, rule)
        for gpu, rule in decided
        if rule.wanted.mode is model.MigMode.ENABLED and not gpu.is_mig_capable
    ]
    is_any_capable = any(gpu.is_mig_capable for gpu, _ in decided)
    for gpu, rule in hopeless:
        if rule.indices is not None or not is_any_capable:
            raise errors.LayoutError(
                f"layout '{layout.name}' enables MIG on {gpu}, which has no MIG",
                reason=errors.Reason.NOT_MIG_CAPABLE,
                location=rule.location,
            )


def _layout(entry: document.Entry) -> Layout:
    if not (isinstance(entry.value, document.Sequence) and entry.value.items):
        fields.fail(entry.value, f"layout '{entry.key}' must be a list of rules (- devices: ...)")
    rules = tuple(_rule(item) for item in entry.value.items)
    return Layout(name=entry.key, rules=rules, content_hash=_hash(rules), location=entry.location)


def _hash(rules: Iterable[Rule]) -> str:
    meaning = [
        (
            [str(each) for each in rule.filters],
            rule.indices,
            rule.wanted.mode.value,
            [(str(each), count) for each, count in rule.wanted.devices],
        )
        for rule in rules
    ]
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:12]


def _rule(node: document.Node) -> Rule:
    if not isinstance(node, document.Mapping):
        fields.fail(
            node,
            f"a rule must be a mapping with 'devices' and 'mig-enabled', not {fields.shown(node)}",
        )
    fields.check_keys(node, _RULE_KEYS)
    filters = _filters(node.get("device-filter"))
    indices = _indices(fields.required(node, "devices", example="all"))
    mode = _mode(fields.required(node, "mig-enabled", example="true"))
    counts, locations = _devices(node, mode)
    return Rule(
        filters=filters,
        indices=indices,
        wanted=model.WantedGpu.of(mode, counts),
        location=node.location,
        profile_locations=locations,
    )


def _filters(node: document.Node | None) -> tuple[DeviceFilter, ...]:
    # Nothing, null, "" and [] all mean "every model" to the peer.
    if node is None or (isinstance(node, document.Scalar) and node.value in (None, "")):
        return ()
    items = node.items if isinstance(node, document.Sequence) else (node,)
    # Sorted by what they print: None and a number do not compare.
    return tuple(sorted({_filter(item) for item in items}, key=str))


def _filter(node: document.Node) -> DeviceFilter:
    if not (isinstance(node, document.Scalar) and isinstance(node.value, str)):
        fields.fail(node, f"{fields.shown(node)} must be a text in quotes; {_FILTER_HELP}")
    try:
        return parse_filter(node.value)
    except ValueError as error:
        fields.fail(node, str(error))


def _uint32(text: str) -> int:
    # Go's ParseUint with base 0: like Python's int, but without signs and spaces, and with the
    # old octal 017.
    if not re.fullmatch(r"[0-9A-Za-z_]+", text):
        raise ValueError(text)
    value = int(text, 8 if re.match(r"0[0-9_]", text) else 0)
    if value >= 2**32:
        raise ValueError(text)
    return value


def _indices(node: document.Node) -> tuple[int, ...] | None:
    if isinstance(node, document.Scalar) and node.value == "all":
        return None
    if not isinstance(node, document.Sequence):
        fields.fail(
            node, f"devices must be all, or a list of GPU indices, not {fields.shown(node)}"
        )
    return tuple(sorted({fields.natural(item, "a GPU index") for item in node.items}))


def _mode(node: document.Node) -> model.MigMode:
    value = node.value if isinstance(node, document.Scalar) else node
    if value is True:
        return model.MigMode.ENABLED
    # The peer takes a key without a value for false.
    if not (value is None or value is False):
        fields.fail(
            node, f"mig-enabled must be true or false, without quotes, not {fields.shown(node)}"
        )
    return model.MigMode.DISABLED


def _devices(
    rule: document.Mapping, mode: model.MigMode
) -> tuple[dict[model.Profile, int], dict[model.Profile, errors.Location]]:
    node = rule.get("mig-devices")
    if (node is None or fields.is_null(node)) and mode is model.MigMode.DISABLED:
        return {}, {}
    if not isinstance(node, document.Mapping):
        fields.fail(
            node or rule,
            "mig-devices must map profiles to counts when mig-enabled is true; {} for none",
        )
    counts: dict[model.Profile, int] = {}
    locations: dict[model.Profile, errors.Location] = {}
    for entry in node.entries:
        name = _profile(entry)
        # One profile in two spellings is two wishes for it, as the peer's apply reads it.
        counts[name] = counts.get(name, 0) + _count(entry)
        locations.setdefault(name, entry.location)
    if counts and not any(counts.values()):
        fields.fail(node, "all counts in mig-devices are 0; write {} for no instances")
    if counts and mode is model.MigMode.DISABLED:
        fields.fail(node, "mig-devices must be empty when mig-enabled is false")
    return counts, locations


def _profile(entry: document.Entry) -> model.Profile:
    try:
        return profile.parse(entry.key)
    except ValueError as error:
        raise errors.ConfigError(str(error), location=entry.location) from None


def _count(entry: document.Entry) -> int:
    if fields.is_null(entry.value):
        return 0
    return fields.natural(entry.value, f"the count of {entry.key}")
