"""The answers of ``partitioner --simulate``."""

from typing import Annotated, Literal, TypedDict

from mig_manager.core.answers.plan_answers import GpuPlan


class SimulatedNode(TypedDict):
    """How the partitioner would change one opted-in node."""

    node: str
    unusable: str | None  # why it cannot be repartitioned now; null: it can
    why: str | None  # null: it stays as it is
    pods: list[str]  # pods that get room
    layout: str | None  # the text of annotation mig-manager.io/layout
    steps: list[GpuPlan]


class _UnmetPod(TypedDict):
    pod: str
    message: str


class _WaitingPod(TypedDict):
    pod: str
    reason: Annotated[str, "core.partitioning.decision.waiting.WaitReason"]
    message: str


class Simulation(TypedDict):
    """Answer of 'mig-manager partitioner --simulate'."""

    kind: Literal["Simulation"]
    nodes: list[SimulatedNode]
    unmet: list[_UnmetPod]  # pods that no node can serve
    waiting: list[_WaitingPod]


class ReplayedWaits(TypedDict):
    """How long pods waited from their creation to their node; without one, until the end."""

    pods: int
    placed: int
    mean_seconds: float
    p95_seconds: float | None  # null: fewer than 95 % are placed


class ReplayRow(TypedDict):
    """One way to serve the pods."""

    name: str  # "partitioner", "present layouts", "as it was", or a generated layout
    waits: ReplayedWaits
    by_profile: dict[str, ReplayedWaits]  # by the devices of a pod, such as "2x 1g.5gb"
    by_namespace: dict[str, ReplayedWaits]
    changes: int  # changes of nodes
    refused: int  # changes that an agent refused, because an instance was in use
    destroyed: int  # idle instances
    tainted_seconds: int  # that nodes were tainted for changes, by all nodes together


class Replay(TypedDict):
    """Answer of 'mig-manager partitioner --simulate --replay'."""

    kind: Literal["Replay"]
    begin: str
    end: str
    is_complete: bool  # false: the time limit ended it early
    nodes: int
    gpus: int
    left_out: int  # nodes without published GPUs
    is_opted_in: bool  # false: no node is opted in, and all are replayed as if they were
    forgotten: int  # pods known from Prometheus alone
    rows: list[ReplayRow]  # the partitioner, the present layouts, as it was, then best first
    unmet: list[_UnmetPod]  # pods that no node can serve
