"""The table of GPU products: names, slices, profiles and placements.

The file ``hardware.json`` beside this one is read on first use. Every number in it has a public
source, or is listed as inferred.
"""

import dataclasses
import enum
import functools
import json
import pkgutil
from collections.abc import Mapping
from typing import Any

from mig_manager.core import model, profile_name


class Grid(enum.Enum):
    """The numbering of memory slices, which also determines the ids of GPU instances."""

    SEVEN_SLICE = "seven-slice"
    """Data-centre GPUs: eight memory slices, seven of them with compute."""
    FOUR_SLICE = "four-slice"  # A30
    TWELVE_SLICE = "twelve-slice"  # RTX PRO 6000: four quarters of three memory slices


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputeProfile(model.ComputeInstanceProfile):
    """One compute-instance profile of a GPU-instance profile.

    Its id equals ``NVML_COMPUTE_INSTANCE_PROFILE_*`` on every captured GPU.
    """

    placements: tuple[model.Placement, ...]
    """In compute slices of its GPU instance; never captured on hardware."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile(model.GpuInstanceProfile):
    """One GPU-instance profile of a product, with facts for the simulated driver."""

    name: str
    copy_engines: int
    compute: tuple[ComputeProfile, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One GPU product."""

    key: str  # short name in lower case, such as ``a100-sxm4-40gb``
    names: tuple[str, ...]
    """As NVML reports them, the usual name first. Not unique: two H100 share a name."""
    pci_device_ids: tuple[int, ...]  # device and vendor packed as NVML does
    generation: str  # ``turing``, ``ampere``, ``ada``, ``hopper`` or ``blackwell``
    memory_mib: int  # zero: the memory of the host, or unknown
    is_mig_capable: bool
    max_instances: int  # zero without MIG
    grid: Grid | None  # None: no MIG, or unknown slices
    mode_needs_reset: bool
    mode_persists: bool  # whether MIG mode survives a reboot
    profiles: tuple[GpuProfile, ...]
    """Empty without MIG, and for products that cannot be simulated."""
    not_simulatable: str  # why this product cannot be simulated; empty when it can

    @property
    def name(self) -> str:
        """The name that NVML reports."""
        return self.names[0]

    @property
    def architecture(self) -> model.Architecture:
        """The generation, if MIG behaves differently on it."""
        try:
            return model.Architecture(self.generation)
        except ValueError:
            return model.Architecture.OTHER

    @property
    def memory_slices(self) -> int:
        """Memory slices of the whole GPU; zero if it cannot be partitioned."""
        return max((place.end for row in self.profiles for place in row.placements), default=0)


@functools.cache
def rows() -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of the table by the key of their product."""
    # importlib.resources takes as long to import as all other modules.
    text = pkgutil.get_data(__package__, "hardware.json")
    assert text is not None  # noqa: S101 - part of the package
    return {raw["key"]: raw for raw in json.loads(text)["products"]}


def of_row(raw: Mapping[str, Any]) -> Product:
    """Return the product of a row in the form of ``hardware.json``.

    Raises:
        ValueError: A profile has no name.
    """
    mode = raw.get("mode", {"needs_reset": False, "persists": False})
    reason = raw.get("not_simulatable", "")
    return Product(
        key=raw["key"],
        names=tuple(raw["names"]),
        pci_device_ids=tuple(int(text, 16) for text in raw["pci"]),
        generation=raw["architecture"],
        memory_mib=raw["memory_total_mib"] or 0,
        is_mig_capable=raw["mig_capable"],
        max_instances=raw.get("max_instances", 0),
        grid=Grid(raw["grid"]) if raw.get("grid") else None,
        mode_needs_reset=mode["needs_reset"],
        mode_persists=mode["persists"],
        profiles=()
        if reason
        else tuple(_row(each, raw["memory_total_mib"]) for each in raw["profiles"]),
        not_simulatable=reason,
    )


def _row(raw: Mapping[str, Any], gpu_mib: int) -> GpuProfile:
    copy_engines, decoders, encoders, jpegs, ofas = raw["engines"]
    return GpuProfile(
        name=raw["name"],
        profile=_profile(raw["enum"], raw["slices"], raw["memory_mib"], gpu_mib),
        enum_index=raw["enum"],
        profile_id=raw["id"],
        max_instances=raw["max"],
        multiprocessors=raw["sms"],
        copy_engines=copy_engines,
        engines=model.Engines(decoders=decoders, encoders=encoders, jpegs=jpegs, ofas=ofas),
        memory_mib=raw["memory_mib"],
        placements=placements(raw["placements"]),
        compute=tuple(
            ComputeProfile(
                profile_id=profile_id,
                slices=slices,
                max_instances=maximum,
                multiprocessors=processors,
                placements=tuple(model.Placement(int(at), slices) for at in starts.split()),
            )
            for profile_id, slices, maximum, processors, starts in raw["compute"]
        ),
    )


def placements(text: str) -> tuple[model.Placement, ...]:
    """Return the placements in a text such as ``0:4 4:4``."""
    return tuple(model.Placement(*map(int, each.split(":"))) for each in text.split())


def _profile(enum_index: int, slices: int, instance_mib: int, gpu_mib: int) -> model.Profile:
    """Name a profile by the driver's numbers, with the same rule as for a real GPU."""
    memory_gb = profile_name.nominal_gb(instance_mib=instance_mib, total_bytes=gpu_mib * 2**20)
    return profile_name.from_nvml(enum_index=enum_index, slice_count=slices, memory_gb=memory_gb)
