"""What a config document says once it is read: layouts of rules, canonical and comparable."""

import dataclasses
import fnmatch
import hashlib
import json
import re
from collections.abc import Iterable, Mapping

from mig_manager import errors
from mig_manager.core import fields, model, yaml_tree

FILTER_HELP = (
    'a device-filter is a PCI id such as "0x20B010DE" (device, then vendor), optionally with '
    '":0xSSSSVVVV" for the subsystem, or a product name or glob such as "*A100*"'
)

_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_ADDRESS = re.compile(
    r"(?:(?P<domain>[0-9a-f]{4}|[0-9a-f]{8}):)?(?P<rest>[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFilter:
    """A GPU model by PCI id, device and vendor packed as NVML does: ``0x20B010DE``."""

    device_id: int
    subsystem_id: int | None = None
    """None: any; 0: a GPU that reports none."""

    def matches(self, gpu: model.Gpu) -> bool:
        """Return whether the GPU is of this model."""
        return gpu.pci_device_id == self.device_id and self.subsystem_id in (
            None,
            gpu.pci_subsystem_id,
        )

    def __str__(self) -> str:
        subsystem = "" if self.subsystem_id is None else f":0x{self.subsystem_id:08X}"
        return f"0x{self.device_id:08X}{subsystem}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NameFilter:
    """GPU models by the name that NVML reports, or a glob of it, in any case."""

    pattern: str
    """Canonical: ``a100-sxm4-*gb``."""

    def matches(self, gpu: model.Gpu) -> bool:
        """Return whether the GPU is of such a model."""
        return self.matches_name(gpu.name)

    def matches_name(self, name: str) -> bool:
        """Return whether a product of that name is such a model."""
        known = canonical_name(name)
        return any(fnmatch.fnmatchcase(each, self.pattern) for each in (known, f"nvidia-{known}"))

    def __str__(self) -> str:
        return self.pattern


Filter = DeviceFilter | NameFilter

NOTHING = DeviceFilter(device_id=0)
"""What mig-parted makes of a filter that it cannot read: a PCI id that no GPU has."""


def parse_filter(text: str) -> Filter:
    """Read a ``device-filter``: ``0xDDDDVVVV``, ``0xDDDDVVVV:0xSSSSVVVV``, or a name.

    Raises:
        ValueError: The text is neither; the message is a sentence for a person.
    """
    device, colon, subsystem = text.partition(":")
    try:
        return DeviceFilter(
            device_id=_uint32(device), subsystem_id=_uint32(subsystem) if colon else None
        )
    except ValueError:
        pattern = canonical_name(text)
        if text == text.strip() and _is_name(pattern):
            return NameFilter(pattern=pattern)
    raise ValueError(f"{text[:60]!r} is no PCI id{_meant(text)}; {FILTER_HELP}")


def canonical_name(name: str) -> str:
    """Return a product's name as names are compared: ``a100-sxm4-40gb``."""
    return re.sub(r"^(nvidia-)+", "", re.sub(r"[\s_]+", "-", name.strip().casefold()))


def parse_identity(text: str) -> str | None:
    """Return a GPU's UUID or PCI address as ``model.Gpu`` has it; None if it is neither."""
    if _UUID.fullmatch(text):
        return "GPU-" + text[4:].lower()
    address = _ADDRESS.fullmatch(text)
    if address:
        return f"{(address['domain'] or '').rjust(8, '0')}:{address['rest']}".lower()
    return None


def is_uuid(identity: str) -> bool:
    """Return whether it is a UUID and not a PCI address."""
    return identity.startswith("GPU-")


def _is_name(pattern: str) -> bool:
    """Return whether a pattern can be a product name: it has letters and is no mistyped number."""
    is_number = re.match(r"0x|[0-9a-f]{8}(?![0-9a-z])", pattern)
    # The names that NVML has are such; no colon, quote or comma is in any.
    is_plain = re.fullmatch(r"[a-z0-9*?\[][a-z0-9./()*?\[\]!-]*", pattern)
    return bool(is_plain and not is_number and re.search(r"[a-z*?]", pattern))


def _meant(text: str) -> str:
    if re.fullmatch(r"[0-9A-Fa-f]{8}(:[0-9A-Fa-f]{8})?", text):
        return f"; did you mean '{':'.join('0x' + part for part in text.split(':'))}'?"
    stripped = text.strip()
    if stripped != text and stripped:
        return "; there is a space too many"
    return ""


def _uint32(text: str) -> int:
    # Go's ParseUint with base 0: like Python's int, but without signs and spaces, and with the
    # old octal 017.
    if not re.fullmatch(r"[0-9A-Za-z_]+", text):
        raise ValueError(text)
    value = int(text, 8 if re.match(r"0[0-9_]", text) else 0)
    if value >= 2**32:
        raise ValueError(text)
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One element of a layout: which GPUs, and what they shall have."""

    filters: tuple[Filter, ...]
    """Any of them; empty: every model. Sorted, unique."""
    indices: tuple[int, ...] | None
    """Indices among all GPUs of the node, not among those filtered. None: all. Sorted, unique."""
    identities: tuple[str, ...] = ()
    """Further GPUs by UUID or PCI address, as ``model.Gpu`` has them. Sorted, unique."""
    wanted: model.DesiredGpu
    location: errors.Location = dataclasses.field(compare=False)
    profile_locations: Mapping[model.Profile, errors.Location] = dataclasses.field(compare=False)
    """Where each profile is asked for."""
    filter_locations: Mapping[Filter, errors.Location] = dataclasses.field(
        compare=False, default_factory=dict
    )
    """Where each filter is written."""

    def matches(self, gpu: model.Gpu) -> bool:
        """Return whether the rule is about this GPU."""
        return self.filters_match(gpu) and (
            self.indices is None or gpu.index in self.indices or self.names(gpu)
        )

    def names(self, gpu: model.Gpu) -> bool:
        """Return whether the rule names this very GPU by UUID or PCI address."""
        return gpu.uuid in self.identities or gpu.pci_address in self.identities

    def filters_match(self, gpu: model.Gpu) -> bool:
        """Return whether the rule is about GPUs of this model."""
        return not self.filters or any(each.matches(gpu) for each in self.filters)


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """All layouts of a config file, in its order."""

    source: str
    layouts: Mapping[str, Layout]
    warnings: tuple[yaml_tree.Diagnostic, ...] = dataclasses.field(default=(), compare=False)
    """What a lenient reader let pass, in the order of the file."""
    extensions: tuple[yaml_tree.Diagnostic, ...] = dataclasses.field(default=(), compare=False)
    """What mig-parted would not understand, in the order of the file."""

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


def content_hash(rules: Iterable[Rule]) -> str:
    """Return a hash of what the rules mean; what is not used does not enter it.

    Nodes carry it in their status: it must stay the same from release to release.
    """
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
