"""A Lease (``coordination.k8s.io/v1``) as one program has read it.

Another program may take a Lease that has not changed for its whole duration. Every process
measures this with its own clock, so the clocks of two machines need not agree.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

MAX_DURATION_S = 3600.0
"""Longer durations in a Lease count as this. The API allows 68 years, for which one Lease of
another program could block all programs that wait for it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A Lease; without a version, one that does not exist yet."""

    name: str
    holder: str = ""  # empty: none
    version: str = ""  # ``resourceVersion``
    duration_s: float = 0.0  # how long the holder keeps it without a renewal
    transitions: int = 0  # changes of the holder
    read_s: float = 0.0  # before the request that read or wrote it, by our clock
    since_s: float = 0.0  # since when it has this version, by our clock

    @property
    def is_too_long(self) -> bool:
        """Whether its duration counts as ``MAX_DURATION_S``."""
        return bool(self.holder) and self.duration_s > MAX_DURATION_S

    def is_silent(self, min_duration_s: float = 0.0) -> bool:
        """Return whether the holder has not renewed it for its duration and at least this long."""
        duration_s = max(min_duration_s, min(self.duration_s, MAX_DURATION_S))
        return self.read_s - self.since_s >= duration_s


def parse(item: Mapping[str, Any], *, before: Lease | None, read_s: float, now_s: float) -> Lease:
    """Parse a Lease; ``before`` is the same one as read or written before."""
    metadata, spec = item["metadata"], item.get("spec") or {}
    version = str(metadata["resourceVersion"])
    is_unchanged = before is not None and before.version == version
    return Lease(
        name=str(metadata["name"]),
        holder=str(spec.get("holderIdentity") or ""),
        version=version,
        duration_s=float(spec.get("leaseDurationSeconds") or 0),
        transitions=int(spec.get("leaseTransitions") or 0),
        read_s=read_s,
        since_s=before.since_s if before and is_unchanged else now_s,
    )
