"""How the rules of a layout name GPUs: models by filters, one GPU by UUID or PCI address."""

import dataclasses
import fnmatch
import re

from mig_manager.core import model

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
class PciIdFilter:
    """A GPU model by PCI id: device and vendor packed as NVML does, ``0x20B010DE``."""

    device_id: int
    subsystem_id: int | None = None  # None: any; 0: a GPU that reports none

    def matches(self, gpu: model.Gpu) -> bool:
        """Return whether the GPU is of this model."""
        return gpu.pci_device_id == self.device_id and self.subsystem_id in (
            None,
            gpu.pci_subsystem_id,
        )

    def may_match(self, gpu: model.UnreachableGpu) -> bool:
        """Return whether an unreachable GPU can be of this model."""
        return gpu.pci_device_id in (None, self.device_id)

    def __str__(self) -> str:
        subsystem = "" if self.subsystem_id is None else f":0x{self.subsystem_id:08X}"
        return f"0x{self.device_id:08X}{subsystem}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """GPUs that no layout distinguishes."""

    device_ids: tuple[int, ...]
    """PCI ids, device and vendor packed as NVML does; one product can have several."""
    subsystem_id: int | None = None  # where GPUs of one PCI id offer different profiles; None: any
    name: str = ""  # name of the product
    profiles: tuple[model.GpuInstanceProfile, ...]

    @property
    def filters(self) -> tuple[PciIdFilter, ...]:
        """The filters that select these GPUs."""
        return tuple(
            PciIdFilter(device_id=each, subsystem_id=self.subsystem_id) for each in self.device_ids
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NameFilter:
    """GPU models by NVML's name or a glob of it, case-insensitive."""

    pattern: str  # canonical: ``a100-sxm4-*gb``

    def matches(self, gpu: model.Gpu) -> bool:
        """Return whether the GPU is of a matching model."""
        return self.matches_name(gpu.name)

    def matches_name(self, name: str) -> bool:
        """Return whether a product name matches."""
        canonical = canonical_name(name)
        return any(
            fnmatch.fnmatchcase(each, self.pattern) for each in (canonical, f"nvidia-{canonical}")
        )

    def may_match(self, gpu: model.UnreachableGpu) -> bool:
        """Return whether an unreachable GPU can be of a matching model."""
        return not gpu.name or self.matches_name(gpu.name)

    def __str__(self) -> str:
        return self.pattern


Filter = PciIdFilter | NameFilter

MATCHES_NOTHING = PciIdFilter(device_id=0)
"""mig-parted's value for an invalid filter: a PCI id that no GPU has."""


def parse_filter(text: str) -> Filter:
    """Parse a ``device-filter``: ``0xDDDDVVVV[:0xSSSSVVVV]`` or a name; ValueError if neither."""
    device, colon, subsystem = text.partition(":")
    try:
        return PciIdFilter(
            device_id=_uint32(device), subsystem_id=_uint32(subsystem) if colon else None
        )
    except ValueError:
        pattern = canonical_name(text)
        # A mistyped PCI id is not a name.
        is_number = re.match(r"0x|[0-9a-f]{8}(?![0-9a-z])", pattern)
        # No name in NVML has a colon, quote or comma.
        is_plain = re.fullmatch(r"[a-z0-9*?\[][a-z0-9./()*?\[\]!-]*", pattern)
        if text == text.strip() and is_plain and not is_number and re.search("[a-z*?]", pattern):
            return NameFilter(pattern=pattern)
    hint = ""
    if re.fullmatch(r"[0-9A-Fa-f]{8}(:[0-9A-Fa-f]{8})?", text):
        hint = f"; did you mean '{':'.join('0x' + part for part in text.split(':'))}'?"
    elif text.strip() not in ("", text):
        hint = "; unexpected space"
    raise ValueError(f"{text[:60]!r} is not a PCI id{hint}; {FILTER_HELP}")


def canonical_name(name: str) -> str:
    """Return a product's name in the form for comparison: ``a100-sxm4-40gb``."""
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
    # Go's ParseUint with base 0: like Python's int, without signs and spaces, with the octal 017.
    if not re.fullmatch(r"[0-9A-Za-z_]+", text):
        raise ValueError(text)
    value = int(text, 8 if re.match(r"0[0-9_]", text) else 0)
    if value >= 2**32:
        raise ValueError(text)
    return value
