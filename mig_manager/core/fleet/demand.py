"""What pods ask for, what they take, and which nodes they can run on, from the API's Pod objects.

It computes what the scheduler computes about one pod and one node, so that "only MIG devices are
missing" is known and not guessed: node name, selector and required affinity, taints, cordon, and
all resources. What depends on other pods or on storage is left to the scheduler: pod affinity,
topology spread, host ports, volumes, ResourceClaims. A pod that only they keep off a node may be
given room there in vain, once (``partitioning.History``).
"""

import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import Any

from mig_manager.core import model

Amounts = tuple[tuple[str, int], ...]
"""Resources by name, sorted, none of them zero: ``cpu`` in thousandths, the others in units."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One line of a node affinity: a label (or ``metadata.name``), an operator, its values."""

    key: str
    operator: str  # In, NotIn, Exists, DoesNotExist, Gt, Lt
    values: tuple[str, ...] = ()
    is_field: bool = False  # whether the key is a field of the node, which is its name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str
    effect: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """A toleration of a pod; empty key: of every taint, empty effect: of every effect."""

    key: str
    operator: str  # Equal, Exists
    value: str
    effect: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """All that decides where a pod can run: pods with equal needs are alike to the decision."""

    amounts: Amounts  # at its hungriest moment, overhead included
    selector: tuple[tuple[str, str], ...] = ()  # nodeSelector, sorted
    affinity: tuple[tuple[Requirement, ...], ...] | None = None
    """Terms of which one must hold, each with all its requirements; None: no required affinity."""
    tolerations: tuple[Toleration, ...] = ()

    @property
    def profiles(self) -> dict[model.Profile, int]:
        """The MIG devices it asks for, by profile; names that are no profile's are left out."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A pod that the scheduler found no node for, and that asks for MIG devices."""

    namespace: str
    name: str
    uid: str
    needs: Needs
    priority: int = 0
    created_at: dt.datetime | None = None

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A pod that has a node and has not ended: what it takes there."""

    namespace: str
    name: str
    uid: str
    node_name: str
    amounts: Amounts


def parse(item: Mapping[str, Any]) -> Pending | Bound | None:
    """Parse a Pod object of the API; None for one that neither waits for MIG devices nor runs.

    A pending pod counts if it is not bound, deleted or gated, the scheduler reported it
    unschedulable, it asks for ``nvidia.com/mig-*``, and neither a label nor an annotation
    ``mig-manager.io/partitioning: off`` excludes it. Raises ClusterError: It is malformed.
    """
    raise NotImplementedError
