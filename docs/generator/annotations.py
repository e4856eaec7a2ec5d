"""The types of an agent's annotations on its Node; ``schemas`` makes their JSON Schemas of these.

The product writes these texts row by row, so that they are short. Tests compare what it writes.
"""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from mig_manager.core.answers.values import MigMode, Phase, Reason, State

Span = Annotated[list[int], tuple[int, int]]  # start and size, in memory slices
_ComputeRow = Annotated[list[Any], tuple[str], tuple[str, int, int]]
_InstanceRow = Annotated[list[Any], tuple[str, int, int, int, list[_ComputeRow]]]
"""Profile, its id, start, size, and of each compute instance: profile, start, size."""
_CreationRow = Annotated[list[Any], tuple[str, int, int], tuple[str, int, int, int, int]]
_ProfileRow = Annotated[
    list[Any], tuple[str, int, int, int, int, int, tuple[int, int, int, int], list[Span]]
]
"""Profile, number and id, MiB, multiprocessors, maximum number, media engines, placements."""


class _Snapshot(TypedDict):
    uuid: str
    mode: MigMode | None
    pending: MigMode | None
    instances: list[_InstanceRow]
    created: NotRequired[list[_CreationRow]]


class GpuModel(TypedDict):
    """What GPUs of one model have in common."""

    name: str
    architecture: Annotated[str, "core.model.Architecture"]
    device: int
    subsystem: int
    memory: int  # MiB
    reset: bool  # whether a change of MIG mode needs a reset
    virtualization: Annotated[str, "core.model.Virtualization"]
    profiles: list[_ProfileRow] | None


class InventoryGpu(_Snapshot):
    """One GPU."""

    index: int
    pci: str
    model: int  # index in 'models'
    recovery: NotRequired[Annotated[str, "core.model.RecoveryAction"]]  # unless none is needed


class UnreachableInventoryGpu(TypedDict):
    """A GPU that could not be observed."""

    index: int
    uuid: str
    pci: str
    device: int | None
    name: str
    reason: Reason
    code: int | None
    message: str


class GpusAnnotation(TypedDict):
    """Value of the annotation 'mig-manager.io/gpus': a node's GPUs."""

    version: Literal[1]
    models: list[GpuModel]
    gpus: list[InventoryGpu]
    unreachable: NotRequired[list[UnreachableInventoryGpu]]


class GpuSummary(TypedDict):
    """What one GPU is divided into."""

    index: int
    uuid: str
    mig: MigMode | Literal["unsupported"]
    devices: dict[str, int]  # by profile


class UnreachableSummary(TypedDict):
    """A GPU that could not be observed."""

    index: int
    uuid: str
    pci: str
    reason: Reason
    message: str


class StatusAnnotation(TypedDict):
    """Value of the annotation 'mig-manager.io/status': the last run; empty members are absent."""

    version: Literal[1]
    config: NotRequired[str]
    configHash: NotRequired[str]
    annotationHash: NotRequired[str]  # of the annotation that a custom layout is from
    origin: NotRequired[str]
    state: State
    phase: Phase
    reason: NotRequired[Reason]
    message: NotRequired[str]
    attempt: int
    startedAt: NotRequired[str]
    finishedAt: NotRequired[str]
    retryAt: NotRequired[str]
    rebooted: NotRequired[bool]
    configProblem: NotRequired[str]  # why the file cannot be used
    gpus: NotRequired[list[GpuSummary]]
    unreachableGpus: NotRequired[list[UnreachableSummary]]


class PublishedLayout(TypedDict):
    """One layout that can be requested."""

    hash: str
    origin: str


class LayoutsAnnotation(TypedDict):
    """Value of the annotation 'mig-manager.io/layouts': what can be requested of a node."""

    version: Literal[1]
    layouts: dict[str, PublishedLayout]  # by name
    custom: NotRequired[bool]  # whether the agent takes a layout from an annotation, too
    truncated: NotRequired[bool]  # whether the agent has layouts that the list has no room for


class GpuCapacity(TypedDict):
    """What is in use on one GPU, and what could still be created on it."""

    uuid: str
    inUse: list[Span]  # GPU instances that a pod or a process uses
    free: int  # memory slices outside the instances in use
    room: dict[str, int]  # how many more of each profile, were idle instances destroyed
    stranded: int  # free memory slices that no profile can use
    fragmentation: float  # 0 to 1


class CapacityAnnotation(TypedDict):
    """Value of the annotation 'mig-manager.io/capacity': what is in use on a node."""

    version: Literal[1]
    at: str
    gpus: list[GpuCapacity]


class VerifiedRequest(TypedDict):
    """What was verified for a request."""

    configHash: str
    owners: bool  # whether the owner wrote the layout
    asApplied: NotRequired[bool]  # whether GPUs as in 'applied' have it


class Repair(TypedDict):
    """The attempts to repair a GPU by a reset."""

    gpu: str  # its UUID
    attempts: int
    next: int  # Unix time before which no other attempt begins
    open: bool  # whether an attempt is under way
    problem: str  # why the last one failed; empty: it did not


class FailedChanges(TypedDict):
    """The changes to a layout that failed after they had evicted pods."""

    configHash: str
    bootId: str
    reason: Annotated[str, "reasons.Reason"]  # of the last failure
    problem: str  # the last failure
    count: int


class AppliedLayout(TypedDict):
    """The GPUs as they had the applied layout."""

    bootId: str
    gpus: dict[str, str]  # UUID -> fingerprint, empty for a GPU outside the layout
    names: NotRequired[dict[str, str]]  # UUID -> name


class RequestAnnotation(TypedDict):
    """Value of the annotation 'mig-manager.io/request': what decides whether a run may evict."""

    version: Literal[1]
    config: str
    annotationHash: NotRequired[str]  # of the annotation that a custom layout is from
    origin: Annotated[str, "core.records.requests.Origin"]
    mayEvict: bool
    verified: NotRequired[VerifiedRequest]
    desiredHashes: NotRequired[dict[str, str]]  # UUID -> hash of what the layout makes of the GPU
    rebootedHash: NotRequired[str]  # of the layout that the machine was rebooted for
    rebootedFrom: NotRequired[str]  # the boot in which it was asked to
    awaited: NotRequired[list[str]]  # deploy labels of deleted device plugins and DRA drivers
    applied: NotRequired[AppliedLayout]  # what the label mig-manager.io/applied is about
    failedChanges: NotRequired[FailedChanges]  # after three the request evicts no more pods
    repairs: NotRequired[list[Repair]]  # the agent's own requests to reset GPUs


class PluginConfigChange(TypedDict):
    """A change of the label that names the device plugin's config."""

    before: str | None
    now: str


class JournalAnnotation(TypedDict):
    """Value of the annotation 'mig-manager.io/journal': a change under way; for agents alone."""

    version: Literal[1]
    config: str
    annotationHash: str
    holdTaint: bool
    pausedLabels: dict[str, str]
    hostServices: list[str]
    exitHook: bool
    rebootedFrom: str
    draining: bool
    hasEvicted: bool
    advertisers: list[str]
    applied: str
    bootId: str
    snapshot: NotRequired[list[_Snapshot]]
    verified: NotRequired[bool]
    staleFiles: NotRequired[bool]
    persistentGpus: NotRequired[list[str]]
    pluginConfig: NotRequired[PluginConfigChange]


Annotation = (
    CapacityAnnotation
    | GpusAnnotation
    | JournalAnnotation
    | LayoutsAnnotation
    | RequestAnnotation
    | StatusAnnotation
)
