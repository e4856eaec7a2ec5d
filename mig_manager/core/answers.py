"""The contract for programs: the types of every ``-o json`` answer.

``docs/generator/schemas.py`` derives the JSON Schemas of ``mig-manager schema`` from these types,
and mypy compares them with the code that writes the answers. Within an ``apiVersion`` keys are
only added, as ``NotRequired``: an older program with the same ``apiVersion`` does not write them.
They are written in camel case, as Kubernetes has them (``json_text.in_camel_case``).
A comment behind a key becomes its description. A quoted name in ``Annotated`` names the enum or
constant with the possible values, which this module does not import.
"""

import enum
from typing import Annotated, Literal, NotRequired, TypedDict

Fit = Annotated[str, "core.layout.validate.Fit"]
MigMode = Annotated[str, "core.model.MigMode"]
NodeState = Annotated[str, "core.fleet.node_reports.NodeState"]
Phase = Annotated[str, "core.model.Phase"]
Reason = Annotated[str, "reasons.Reason"]
State = Annotated[str, "core.model.State"]
Strategy = Annotated[str, "core.node.strategies.Strategy"]
Step = Annotated[dict[str, object], "core.gpu_answers.ACTIONS"]
PublishedStep = Annotated[
    dict[str, object], "core.gpu_answers.ACTIONS", "core.gpu_answers.LOCAL_IDS"
]
Moment = Annotated[dict[str, object], "core.fleet.node_moments.Moment"]


# -- GPUs ----------------------------------------------------------------------------------------


class Process(TypedDict):
    """A process that uses a GPU."""

    pid: int
    name: str  # its command line, as far as known
    gpu_instances: list[int]  # ids of the GPU instances that it uses; empty: the GPU itself
    pod_uid: str | None
    unit: str | None  # systemd unit


class UnreachableGpu(TypedDict):
    """A GPU that could not be observed; unknown facts are null."""

    index: int
    uuid: str | None
    pci_address: str | None
    reason: Reason
    code: int | None  # NVML code
    message: str


class _PublishedComputeInstance(TypedDict):
    profile: str
    placement: str | None  # compute slices, such as 0-1; null: the driver does not report it


class _ComputeInstance(_PublishedComputeInstance):
    id: int
    uuid: str | None  # UUID of the MIG device


class _InstanceFacts(TypedDict):
    profile: str
    profile_id: int
    placement: str  # memory slices, such as 4-7


class _PublishedGpuInstance(_InstanceFacts):
    compute_instances: list[_PublishedComputeInstance]


class _GpuInstance(_InstanceFacts):
    id: int
    compute_instances: list[_ComputeInstance]


_RecoveryAction = Annotated[str, "core.model.RecoveryAction"]


class _GpuFacts(TypedDict):
    index: int
    uuid: str
    name: str
    architecture: Annotated[str, "core.model.Architecture"]
    pci_address: str
    pci_device_id: str  # device, then vendor, as a device-filter has it
    pci_subsystem_id: str
    memory_mib: int
    mig_mode: MigMode | None  # null: the GPU has no MIG
    pending_mig_mode: MigMode | None  # the mode after the next reset
    mode_change_needs_reset: bool
    virtualization: Annotated[str, "core.model.Virtualization"]
    recovery_action: NotRequired[_RecoveryAction | None]  # null: not reported
    profiles: dict[str, list[str]] | None  # placements by profile; null: the driver lists none


class PublishedGpu(_GpuFacts):
    """A GPU as its agent publishes it."""

    gpu_instances: list[_PublishedGpuInstance]


class Gpu(_GpuFacts):
    """A GPU as the driver reports it."""

    gpu_instances: list[_GpuInstance]


class _StatusGpu(Gpu):
    processes: list[Process] | None  # processes that use it; null: unknown


class Status(TypedDict):
    """Answer of 'mig-manager status'."""

    kind: Literal["Status"]
    gpus: list[_StatusGpu]
    unreachable_gpus: list[UnreachableGpu]


# -- changes -------------------------------------------------------------------------------------


class _Target(TypedDict):
    profile: str
    placement: str
    compute_instances: list[str]  # their profiles
    kept: bool  # whether it exists already


class _GpuPlanFacts(TypedDict):
    index: int
    uuid: str
    changes_mode: bool
    needs_reset: bool
    is_provisional: bool  # whether the instances are unknown until MIG is enabled
    target: list[_Target]  # empty while is_provisional


class GpuPlan(_GpuPlanFacts):
    """The change of one GPU."""

    steps: list[Step]  # in the order in which they run


class _PublishedGpuPlan(_GpuPlanFacts):
    steps: list[PublishedStep]  # in the order in which they run


class _Counts(TypedDict):
    destroyed: int
    created: int
    kept: int


class _PlanFacts(TypedDict):
    layout: str
    origin: str | None  # where the layout comes from, such as config.yaml:12
    is_applied: bool  # whether there is nothing to do
    is_provisional: bool
    instances: _Counts
    unserved_mig_strategies: dict[Strategy, str]  # why the device plugin would exit
    warnings: list[str]
    unreachable_gpus: list[UnreachableGpu]


class PublishedPlan(_PlanFacts):
    """What a layout changes on a node, as far as its annotations show."""

    gpus: list[_PublishedGpuPlan]  # GPUs that change


class Plan(_PlanFacts):
    """Answer of 'mig-manager plan', 'apply --dry-run' and 'assert'."""

    kind: Literal["Plan"]
    destroyed_uuids: list[str]  # MIG devices that are destroyed, GPUs whose mode changes
    evicted_pods: list[str]  # pods that use them, as far as known
    gpus: list[GpuPlan]  # GPUs that change


class Change(TypedDict):
    """Answer of 'mig-manager apply' and 'restore'."""

    kind: Literal["Change"]
    layout: str
    is_changed: bool
    warnings: list[str]
    plans: list[Plan]  # executed plans
    unreachable_gpus: list[UnreachableGpu]


class Boot(TypedDict):
    """Answer of 'mig-manager boot'."""

    kind: Literal["Boot"]
    layout: str  # empty: no layout to restore
    is_changed: bool
    plans: list[Plan]  # executed plans
    problems: list[str]
    faults: NotRequired[list[str]]  # GPUs that need recovery, with what to do


# -- validate, doctor ----------------------------------------------------------------------------


class _LayoutVerdict(TypedDict):
    layout: str
    origin: str
    product: str
    fit: Fit
    why: str
    place: str | None  # place of the rule that does not fit
    unserved_mig_strategies: dict[Strategy, str]  # why the device plugin would exit


class Validation(TypedDict):
    """Answer of 'mig-manager validate' and 'kubectl mig validate'."""

    kind: Literal["Validation"]
    source: str
    is_valid: bool
    verdicts: list[_LayoutVerdict]  # empty with '--portable', which compares no GPUs
    not_portable: NotRequired[
        list[str]
    ]  # what nvidia-mig-parted cannot read; not in kubectl mig's answer
    warnings: NotRequired[list[str]]  # not in kubectl mig's answer
    error: NotRequired[str]  # why a file of '--files' is invalid; it then has no verdicts


class Validations(TypedDict):
    """Answer of 'mig-manager validate --files'."""

    kind: Literal["Validations"]
    is_valid: bool
    files: list[Validation]


class CheckResult(enum.Enum):
    """The result of a check of a node."""

    OK = "ok"
    WARN = "warn"  # works now, but may fail later
    FAIL = "fail"
    SKIPPED = "skipped"  # not checked; the finding says why


_CheckResult = Annotated[str, "core.answers.CheckResult"]


class _Finding(TypedDict):
    check: str
    verdict: _CheckResult
    found: str
    remedy: str


class Doctor(TypedDict):
    """Answer of 'mig-manager doctor'."""

    kind: Literal["Doctor"]
    is_good: bool
    counts: dict[_CheckResult, int]
    findings: list[_Finding]


# -- acceptance ----------------------------------------------------------------------------------


class CapturedComputeProfile(TypedDict):
    """A compute-instance profile of a GPU-instance profile."""

    id: int
    slices: int
    multiprocessors: int
    max_instances: int
    placements: list[str] | None  # compute slices, first and number; null: not reported


class CapturedProfile(TypedDict):
    """A GPU-instance profile as the driver reports it."""

    name: str
    enum: int  # NVML_GPU_INSTANCE_PROFILE_*
    id: int
    slices: int
    memory_mib: int
    multiprocessors: int
    max_instances: int
    engines: list[int]  # copy engines, decoders, encoders, JPEG, OFA
    placements: list[str]  # memory slices, first and number, such as 4:2
    compute_profiles: list[CapturedComputeProfile] | None  # null: no such GPU instance existed


class _CapturedComputeInstance(TypedDict):
    profile: str
    id: int


class _CapturedInstance(TypedDict):
    profile: str
    id: int
    placement: str
    compute_instances: list[_CapturedComputeInstance]


class _CapturedAnswer(TypedDict):
    call: str
    answer: str  # SUCCESS, or NVML's error
    is_handled: bool  # whether mig-manager expects this answer


class _CapturedFabric(TypedDict):
    state: Annotated[str, "core.acceptance.surveys.Fabric"]
    consequence: str


class CapturedGpu(TypedDict):
    """A GPU without what identifies it: no UUID, no PCI address, no serial number."""

    name: str
    unreachable: Reason | None
    architecture: Annotated[str, "core.model.Architecture"]
    pci_device_id: str  # device, then vendor, as a device-filter has it
    memory_mib: int
    mig_mode: MigMode | None
    pending_mig_mode: MigMode | None
    mode_change_needs_reset: bool
    virtualization: Annotated[str, "core.model.Virtualization"]
    fabric: _CapturedFabric | None  # null: not behind an NVSwitch, or unknown
    profiles: list[CapturedProfile] | None  # null: the driver lists none
    instances: list[_CapturedInstance]
    rules: dict[str, bool]  # whether the GPU follows each rule
    answers: list[_CapturedAnswer]
    functions: dict[str, list[str]]  # the answers of each NVML function


class Latency(TypedDict):
    """The time of an NVML function."""

    function: str
    calls: int
    median_ms: float
    longest_ms: float


class Difference(TypedDict):
    """A difference between a GPU and its product in the catalogue."""

    gpu: int | None  # its number in 'gpus'; null: not of one GPU
    subject: Annotated[str, "core.acceptance.meanings.Subject"]
    what: str
    expected: str
    actual: str
    effect: Annotated[str, "core.acceptance.meanings.Effect"]
    consequence: str


class CourseStage(TypedDict):
    """A stage of the course on a GPU."""

    name: str
    outcome: Annotated[str, "core.acceptance.stages.StageOutcome"]
    why: str  # empty: done


class Acceptance(TypedDict):
    """Answer of 'mig-manager acceptance'."""

    kind: Literal["Acceptance"]
    version: str  # version of mig-manager
    driver_version: str
    nvml_version: str
    is_simulated: bool
    verdict: Annotated[str, "core.acceptance.differences.Verdict"]
    differences: list[Difference]
    latencies: list[Latency]
    not_called: dict[
        str, str
    ]  # NVML functions that mig-manager uses, and why they were not called
    course: list[CourseStage] | None  # null: without --change-gpu
    library: dict[str, list[str]]  # the answers of functions that concern no GPU
    gpus: list[CapturedGpu]


# -- many nodes ----------------------------------------------------------------------------------


class _Failure(TypedDict):
    name: str
    reason: str
    message: str


class _RolloutNode(TypedDict):
    name: str
    state: Annotated[str, "core.fleet.rollout.NodeProgressState"]
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
    verdict: Annotated[str, "core.fleet.preview.NodeFit"]
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
    reason: Annotated[str, "core.partitioning.waiting.WaitReason"]
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


# -- kubectl mig ---------------------------------------------------------------------------------


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
