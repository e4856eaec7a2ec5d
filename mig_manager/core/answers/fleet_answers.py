"""The answers of commands that change or preview many nodes: ``rollout``, ``kubectl mig plan``."""

from typing import Annotated, Literal, NotRequired, TypedDict

from mig_manager.core.answers.plan_answers import PublishedPlan


class _Failure(TypedDict):
    name: str
    reason: str
    message: str


class _RolloutNode(TypedDict):
    name: str
    state: Annotated[str, "core.fleet.node_progress.NodeProgressState"]
    phase: str
    reason: str
    message: str
    is_retried: bool
    is_unavailable: bool
    before: str | None  # the former layout, which 'undo' requests
    unreachable_gpus: list[str]


class Rollout(TypedDict):
    """Answer of 'mig-manager rollout'."""

    kind: Literal["Rollout"]
    layout: str | None  # null: undo
    undo: bool
    state: Annotated[str, "core.fleet.rollout.RolloutPhase", "interrupted"]
    max_unavailable: int
    unavailable: list[str]
    counts: dict[str, int]  # nodes by state
    failures: list[_Failure]
    nodes: list[_RolloutNode]


class _Loss(TypedDict):
    resource: str
    devices: int
    destroyed: int
    in_use_destroyed_at_least: int
    pods: dict[str, int]


class NodePlan(TypedDict):
    """What a layout would change on one node."""

    node: str
    layout: str | None  # null: an undo removes the label
    fit: Annotated[str, "core.fleet.cluster_plan.NodeFit"]
    reason: str | None
    message: str | None  # why, unless it simply fits
    notes: list[str]
    evicted_pods: list[str]
    maybe_evicted_pods: list[str]  # any of them may be evicted, or none
    losses: list[_Loss] | None  # null: no plan, or the pods are unknown
    plan: PublishedPlan | None


class ClusterPlan(TypedDict):
    """Answer of 'kubectl mig plan', 'kubectl mig apply' and 'mig-manager rollout --dry-run'."""

    kind: Literal["ClusterPlan"]
    is_requested: NotRequired[bool]  # only in an answer of 'apply'
    layout: str | None  # null: an undo
    is_good: bool
    pods_not_known: str | None  # why
    nodes: list[NodePlan]
