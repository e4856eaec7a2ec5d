"""The changes of a layout on the nodes of a cluster, as a preview shows them."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from mig_manager import reasons
from mig_manager.core.answers import gpu_answers
from mig_manager.core.layout import plans
from mig_manager.core.node.devices import resources, strategies

if TYPE_CHECKING:
    from mig_manager.core.answers import fleet_answers, plan_answers

_OMITTED_KEYS = ("kind", "destroyed_uuids", "affected_pods")
"""Keys of a plan to leave out: UUIDs are not published, and ``NodePlan`` has the evicted pods."""


class NodeFit(enum.Enum):
    """Whether a node can have a layout; the values are a public contract."""

    UNCHANGED = "unchanged"
    FITS = "fits"
    DOES_NOT_FIT = "does-not-fit"
    UNKNOWN = "unknown"  # its GPUs, their profiles, its strategy, or the layout's content

    @property
    def words(self) -> str:
        """The value for a sentence."""
        return self.value.replace("-", " ")

    @property
    def fits(self) -> bool | None:
        """Whether the node can have the layout; None: unknown."""
        if self is NodeFit.UNKNOWN:
            return None
        return self is not NodeFit.DOES_NOT_FIT


class PreviewReason(enum.Enum):
    """Why a preview has no plan, or why it is unknown whether a plan fits; a public contract.

    Why a layout does not fit is a ``reasons.Reason``, as of a run that fails.
    """

    NOT_PUBLISHED = "NotPublished"  # no agent shows the node's GPUs
    CONTENT_UNKNOWN = "ContentUnknown"  # only the agent has the content of the layout
    MIG_DISABLED = "MigDisabled"  # the profiles are unknown until MIG is enabled
    SUPERSEDED = "Superseded"  # another layout was requested since the rollout
    LABEL_REMOVED = "LabelRemoved"  # an undo only removes the label


Reason = PreviewReason | reasons.Reason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The changes of a layout on one node."""

    name: str
    layout: str
    fit: NodeFit
    reason: Reason | None = None  # why it does not fit, or is unknown
    message: str = ""
    content_hash: str = ""  # hash of the layout; empty if unknown
    planned: plans.Planned | None = None  # None: it does not fit, or the GPUs are unknown
    losses: tuple[resources.Loss, ...] | None = None
    """Destroyed devices that pods request; None: no plan, or unknown pods."""
    claiming: tuple[str, ...] = ()  # pods with ResourceClaims, perhaps for destroyed devices
    notes: tuple[str, ...] = ()
    may_evict: bool = True  # whether the agent would evict pods for it
    strategy: strategies.Strategy | None = None  # of the node's device plugin; None: unknown

    @property
    def reason_text(self) -> str:
        """The published word for the reason; empty without one."""
        return self.reason.value if self.reason else ""

    @property
    def evicted(self) -> tuple[str, ...]:
        """Pods that are certainly evicted: all devices of one of their resources are destroyed."""
        total = [loss for loss in self.losses or () if loss.is_total and self.may_evict]
        return tuple(sorted({pod for loss in total for pod in loss.kind.pods}))

    @property
    def maybe_evicted(self) -> tuple[str, ...]:
        """Pods that may be evicted: the agent avoids devices in use where possible."""
        every = {pod for loss in self.losses or () for pod in loss.kind.pods} | {*self.claiming}
        return tuple(sorted(every - {*self.evicted})) if self.may_evict else ()

    @property
    def is_changed(self) -> bool:
        """Whether the plan has steps."""
        return self.planned is not None and not self.planned.is_applied

    def to_data(self) -> "fleet_answers.NodePlan":
        """Return plain data for JSON and YAML."""
        data: Mapping[str, object] = self.planned.to_data() if self.planned else {}
        published = {key: value for key, value in data.items() if key not in _OMITTED_KEYS}
        return {
            "node": self.name,
            "layout": self.layout or None,
            "fit": self.fit.value,
            "reason": self.reason_text or None,
            "message": self.message or None,
            "notes": list(self.notes),
            "evicted_pods": list(self.evicted),
            "maybe_evicted_pods": list(self.maybe_evicted),
            "losses": None
            if self.losses is None
            else [
                {
                    "resource": loss.kind.resource,
                    "devices": loss.kind.count,
                    "destroyed": loss.destroyed,
                    "in_use_destroyed_at_least": loss.least,
                    "pods": dict(loss.kind.pods),
                }
                for loss in self.losses
            ],
            "plan": cast("plan_answers.PublishedPlan", gpu_answers.without_ids(published)) or None,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The changes of a layout, or of a rollout's undo, on nodes."""

    layout: str | None  # None: an undo
    source: str
    nodes: tuple[NodePlan, ...]
    pods_not_known: str

    @property
    def is_good(self) -> bool:
        """Whether every node can have the layout."""
        return all(node.fit.fits for node in self.nodes)

    @property
    def title(self) -> str:
        """The layout or undo that is previewed, as the subject of a sentence."""
        return f"Layout {self.layout} of {self.source}" if self.layout else "Undo of the rollout"

    def to_data(self) -> "fleet_answers.ClusterPlan":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "ClusterPlan",
            "layout": self.layout,
            "is_good": self.is_good,
            "pods_not_known": self.pods_not_known or None,
            "nodes": [node.to_data() for node in self.nodes],
        }
