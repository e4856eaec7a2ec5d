"""The types of the answer of ``kubectl mig capacity``; see ``answers``."""

from typing import Literal, TypedDict


class _Room(TypedDict):
    room: dict[str, int]  # how many more of each profile fit once idle instances are destroyed
    free_slices: int  # memory slices outside the instances in use
    stranded_slices: int  # free ones that no possible instance would cover


class GpuCapacity(_Room):
    """The capacity of one GPU."""

    index: int
    uuid: str
    name: str
    in_use: list[str]  # memory slices of the GPU instances in use, first and number, such as 4:2
    idle: list[str]  # those of the other GPU instances
    fragmentation: float  # share of the free slices outside the largest possible instance, 0 to 1


class TotalCapacity(_Room):
    """The capacity of several GPUs."""

    idle_devices: dict[str, int]  # by profile
    idle_whole_gpus: int  # GPUs without MIG


class NodeCapacity(TotalCapacity):
    """The capacity of one node, as far as it is known."""

    node: str
    observed_at: str | None  # null: not known
    is_on_demand: bool  # whether its agent publishes each change of use
    notes: list[str]
    gpus: list[GpuCapacity]


class ClusterCapacity(TypedDict):
    """Answer of 'kubectl mig capacity'."""

    kind: Literal["ClusterCapacity"]
    is_good: bool  # whether the capacity of every node is known
    total: TotalCapacity
    nodes: list[NodeCapacity]
