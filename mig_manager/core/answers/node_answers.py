"""The answers of ``kubectl mig`` about nodes as they are."""

from typing import Annotated, Literal, NotRequired, TypedDict

from mig_manager.core.answers.gpu_answers import PublishedGpu, UnreachableGpu
from mig_manager.core.answers.values import State, Strategy

NodeState = Annotated[str, "core.fleet.node_reports.NodeState"]
Moment = Annotated[dict[str, object], "core.fleet.node_moments.Moment"]


class _DeviceRequests(TypedDict):
    resource: str
    devices: int
    pods: dict[str, int]


class _LastRun(TypedDict):
    state: State
    phase: str
    reason: str | None
    message: str | None
    attempt: int
    started_at: str | None
    finished_at: str | None
    retry_at: str | None
    origin: str | None  # origin of the layout


class NodeStatus(TypedDict):
    """The state of one node."""

    node: str
    state: NodeState
    is_good: bool
    is_ready: bool
    requested: str | None
    applied: str | None
    applied_before: NotRequired[str | None]  # before the change under way, which removes 'applied'
    last_run: _LastRun | None  # null: no agent has published a status
    notes: list[str]
    gpus: list[PublishedGpu] | None  # null: not published
    unreachable_gpus: list[UnreachableGpu] | None
    device_requests: list[_DeviceRequests] | None  # null: unknown
    pods_with_claims: list[str]


class ClusterStatus(TypedDict):
    """Answer of 'kubectl mig status'."""

    kind: Literal["ClusterStatus"]
    is_good: bool
    pods_not_known: str | None  # why
    nodes: list[NodeStatus]


class _LayoutGpu(TypedDict):
    index: int
    name: str
    is_mig_enabled: bool
    devices: dict[str, int]  # by profile


class ListedLayout(TypedDict):
    """One layout of a node."""

    layout: str
    origin: str
    hash: str
    is_requested: bool
    is_applied: bool
    gpus: list[_LayoutGpu] | None  # null: the layout's content is unknown


class NodeLayouts(TypedDict):
    """Answer of 'kubectl mig layouts'."""

    kind: Literal["NodeLayouts"]
    node: str
    notes: list[str]
    layouts: list[ListedLayout]


class NodeHistory(TypedDict):
    """Answer of 'kubectl mig history'."""

    kind: Literal["NodeHistory"]
    node: str
    state: NodeState
    applied_since: str | None
    events_not_known: str | None  # why
    moments: list[Moment]


class AutoscalerTags(TypedDict):
    """Answer of 'kubectl mig autoscaler-tags'."""

    kind: Literal["AutoscalerTags"]
    layout: str
    gpus: str
    strategy: Strategy
    resources: dict[str, int]
    aws_tags: dict[str, str]
    azure_tags: dict[str, str]
    gce_autoscaler_env_vars: str
    karpenter_capacity: dict[str, str]


class _Room(TypedDict):
    room: dict[str, int]  # how many of each profile fit once idle instances are destroyed
    free_slices: int  # memory slices outside the instances in use
    stranded_slices: int  # free ones that no possible instance would cover


class GpuCapacity(_Room):
    """The capacity of one GPU."""

    index: int
    uuid: str
    name: str
    in_use: list[str]  # memory slices of the GPU instances in use, first and number, such as 4:2
    idle: list[str]  # memory slices of the other GPU instances
    fragmentation: float  # share of the free slices outside the largest possible instance, 0 to 1


class TotalCapacity(_Room):
    """The capacity of several GPUs."""

    idle_devices: dict[str, int]  # by profile
    idle_whole_gpus: int  # GPUs without MIG


class NodeCapacity(TotalCapacity):
    """The capacity of one node, as far as it is known."""

    node: str
    observed_at: str | None  # null: unknown
    is_on_demand: bool  # whether its agent publishes each change of use
    notes: list[str]
    gpus: list[GpuCapacity]


class ClusterCapacity(TypedDict):
    """Answer of 'kubectl mig capacity'."""

    kind: Literal["ClusterCapacity"]
    is_good: bool  # whether the capacity of every node is known
    total: TotalCapacity
    nodes: list[NodeCapacity]
