"""The answer of ``acceptance``: captured GPUs, and how they differ from their product."""

from typing import Annotated, Literal, TypedDict

from mig_manager.core.answers.values import MigMode, Reason


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
