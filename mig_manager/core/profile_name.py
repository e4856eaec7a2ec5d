"""Profile names: parsed, built from NVML's numbers, and suggested for a mistyped one.

    profile   := [C "c."] G "g." GB "gb" [("+" | "-") attribute ("," attribute)*]
    attribute := letter [letters, digits and dots, not ending in a dot]

``C`` compute slices of a GPU instance with ``G`` slices and ``GB`` gigabytes. The grammar is
mig-parted's, and concerns the form only: ``0g.0gb`` is well formed, and the planner decides
whether a GPU offers a profile.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping

from mig_manager.core import model

GPU_INSTANCE_PROFILES = range(18)
"""The ``NVML_GPU_INSTANCE_PROFILE_*`` numbers that ``from_nvml`` can name (nvml.h, API 13.3)."""

MAX_SUGGESTIONS = 3

# 18 digits always fit the 64 bits that mig-parted reads numbers into.
PROFILE = re.compile(
    r"(?:(?P<compute>[0-9]{1,18})c\.)?(?P<gpu>[0-9]{1,18})g\.(?P<memory>[0-9]{1,18})gb"
    r"(?:(?P<sign>[+-])(?P<attributes>[A-Za-z0-9.,]+))?"
)
ATTRIBUTE = re.compile(r"[A-Za-z](?:[A-Za-z0-9.]*[A-Za-z0-9])?")

_ADDED_BY_ENUM = {
    7: ("me",),  # 1_SLICE_REV1
    8: ("me",),  # 2_SLICE_REV1
    10: ("gfx",),  # 1_SLICE_GFX
    11: ("gfx",),  # 2_SLICE_GFX
    12: ("gfx",),  # 4_SLICE_GFX
    15: ("me.all",),  # 1_SLICE_ALL_ME
    16: ("me.all",),  # 2_SLICE_ALL_ME
    17: ("gfx",),  # 3_SLICE_GFX
}
_REMOVED_BY_ENUM = {13: ("me",), 14: ("me",)}  # 1_SLICE_NO_ME, 2_SLICE_NO_ME


@functools.lru_cache(maxsize=1024)  # pods may name any profile
def parse(text: str) -> model.Profile:
    """Parse a profile name; ValueError with a sentence for a person."""
    match = PROFILE.fullmatch(text)
    if match is None:
        raise ValueError(_explain(text))
    attributes = tuple(sorted((match["attributes"] or "").split(","))) if match["sign"] else ()
    for attribute in attributes:
        if not ATTRIBUTE.fullmatch(attribute):
            raise ValueError(_explain(text))
        if attributes.count(attribute) > 1:
            raise ValueError(f"profile {_shorten(text)} names the attribute '{attribute}' twice")
    return model.Profile(
        compute_slices=int(match["compute"] or match["gpu"]),
        gpu_slices=int(match["gpu"]),
        memory_gb=int(match["memory"]),
        attributes=attributes if match["sign"] == "+" else (),
        negated_attributes=attributes if match["sign"] == "-" else (),
    )


def with_counts(counts: Mapping[model.Profile, int]) -> str:
    """Return profiles with their counts, biggest first; ``no instances`` for none."""
    ordered = sorted(counts.items())
    return ", ".join(f"{count}x {profile}" for profile, count in ordered) or "no instances"


def nominal_gb(*, instance_mib: int, total_bytes: int) -> int:
    """Return the gigabytes in the name of a profile.

    The instance's share of the memory, rounded up to an eighth, times the whole memory in GiB,
    rounded up; a half rounds up. NVIDIA's go-nvlib names profiles so
    (``pkg/nvlib/device/mig_profile.go``), and nvidia-smi agrees. Integers only: on an H200 the
    exact result is 70.5, which ``round`` would round down to a profile that does not exist.

    ``instance_mib`` is ``memorySizeMB`` of the GPU-instance profile, ``total_bytes`` the total of
    ``nvmlDeviceGetMemoryInfo``; ValueError if that is not positive.
    """
    if total_bytes <= 0:
        raise ValueError(f"the memory of a GPU cannot be {total_bytes} bytes")
    eighths = -(-(instance_mib * 2**20 * 8) // total_bytes)
    total_gib = -(-total_bytes // 2**30)
    return (eighths * total_gib + 4) // 8


def from_nvml(*, enum_index: int, slice_count: int, memory_gb: int) -> model.Profile:
    """Name a GPU-instance profile (``NVML_GPU_INSTANCE_PROFILE_*``) as the driver describes it.

    ``1_SLICE_REV2`` (9) is a plain ``1g`` with more memory. ``3_SLICE_GFX`` (17) is ``3g+gfx``;
    mig-parted stops enumerating at it and then knows no profile at all.

    Raises:
        ValueError: The enum is newer than this version: named without its attributes, the profile
            could be mistaken for another.
    """
    if enum_index not in GPU_INSTANCE_PROFILES:
        raise ValueError(f"GPU-instance profile number {enum_index} is unknown to this version")
    return model.Profile(
        compute_slices=slice_count,
        gpu_slices=slice_count,
        memory_gb=memory_gb,
        attributes=_ADDED_BY_ENUM.get(enum_index, ()),
        negated_attributes=_REMOVED_BY_ENUM.get(enum_index, ()),
    )


def suggest(
    requested: model.Profile, available: Iterable[model.Profile]
) -> tuple[model.Profile, ...]:
    """Return up to ``MAX_SUGGESTIONS`` available profiles with the same slices, best first.

    A person who copies a layout for another GPU has the slices right and the memory wrong, so
    profiles with the nearest memory come first. Compute slices are kept: for ``1c.2g.10gb`` the
    answer may be ``1c.2g.20gb``.
    """

    def distance(profile: model.Profile) -> tuple[bool, int, str]:
        attributes = profile.attributes, profile.negated_attributes
        is_other = attributes != (requested.attributes, requested.negated_attributes)
        return is_other, abs(profile.memory_gb - requested.memory_gb), str(profile)

    same_slices = {
        profile
        if requested.spans
        else dataclasses.replace(profile, compute_slices=requested.compute_slices)
        for profile in available
        if profile.gpu_slices == requested.gpu_slices
    }
    return tuple(sorted(same_slices - {requested}, key=distance)[:MAX_SUGGESTIONS])


def _explain(text: str) -> str:
    # The usual slips: capitals, spaces, a prefix, other signs between the parts, and the dot for
    # "+" from layout names, where Kubernetes allows no "+".
    plain = re.sub(r"\s", "", text).lower().replace("_", "-")
    parts = re.fullmatch(r"(?:mig-)?(?:(\d+)c\W?)?(\d+)(?:g\W?|\W)(\d+)(?:gb|bg|g)?(.*)", plain)
    spelled = plain
    if parts:
        compute, slices, memory, rest = parts.groups("")
        spelled = f"{f'{compute}c.' if compute else ''}{slices}g.{memory}gb{rest}"
    spelled = re.sub(r"gb\.(?=[a-z])", "gb+", spelled, count=1)
    advice = (
        f"did you mean '{spelled}'?"
        if PROFILE.fullmatch(spelled)
        else "profiles look like 1g.5gb, 1g.5gb+me or, for a part of an instance, 1c.2g.10gb"
    )
    return f"{_shorten(text)} is not a MIG profile; {advice}"


def _shorten(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
