"""GPUs as observed and as desired.

GPUs are keyed by UUID, and GPU instances within a GPU by placement. Index, minor number, instance
id and MIG UUID may all change during a change.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self, TypeVar

from mig_manager import reasons


class MigMode(enum.Enum):
    """MIG mode of a GPU."""

    DISABLED = "disabled"
    ENABLED = "enabled"


class Architecture(enum.Enum):
    """GPU generations whose MIG behaviour differs."""

    AMPERE = "ampere"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"
    OTHER = "other"


class Virtualization(enum.Enum):
    """Whether a GPU is physical, passed through or shared (``nvmlGpuVirtualizationMode_t``)."""

    NONE = "none"  # bare metal, or unknown to the driver
    PASSTHROUGH = "passthrough"
    """A virtual machine with a whole GPU; it cannot reset an Ampere GPU."""
    VGPU = "vgpu"  # a virtual machine with a share of a GPU: only its host changes MIG
    HOST = "host"  # the host of virtual machines that share the GPU


class RecoveryAction(enum.Enum):
    """What a GPU needs to recover from a fault (``nvmlDeviceGpuRecoveryAction_t``)."""

    NONE = "none"
    GPU_RESET = "gpu-reset"
    NODE_REBOOT = "node-reboot"
    DRAIN_P2P = "drain-p2p"
    DRAIN_AND_RESET = "drain-and-reset"
    RECOVER_IMEX_DOMAIN = "recover-imex-domain"
    BUS_RESET = "bus-reset"
    SYSTEM_REBOOT = "system-reboot"
    OTHER = "other"  # a newer driver may have others


class Placement(NamedTuple):
    """A span of slices: memory slices of a GPU instance, compute slices of a compute instance.

    A tuple, because the partitioner hashes and compares all placements of a cluster.
    """

    start: int
    size: int

    @property
    def end(self) -> int:
        """First slice after the span."""
        return self.start + self.size

    def overlaps(self, other: "Placement") -> bool:
        """Return whether both spans share a slice."""
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"{self.start}:{self.size}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A MIG profile by name: ``1c.2g.10gb+me`` in fields.

    A profile with ``compute_slices == gpu_slices`` names a GPU instance with one compute
    instance that spans it. Equality is semantic: ``1c.1g.5gb`` and ``1g.5gb`` are one profile,
    attributes are sorted.
    """

    compute_slices: int
    gpu_slices: int
    memory_gb: int
    attributes: tuple[str, ...] = ()  # after ``+``, sorted: ``me``, ``me.all``, ``gfx``
    negated_attributes: tuple[str, ...] = ()  # after ``-``, sorted: ``me``

    @property
    def spans(self) -> bool:
        """Whether the compute instance takes its whole GPU instance."""
        return self.compute_slices == self.gpu_slices

    @property
    def gpu_instance(self) -> "Profile":
        """The profile of the GPU instance around such a compute instance."""
        return dataclasses.replace(self, compute_slices=self.gpu_slices)

    def __hash__(self) -> int:
        """Hash the slices and the memory, which hardly two profiles share: it is called often."""
        return self.memory_gb << 3 ^ self.compute_slices

    def __lt__(self, other: "Profile") -> bool:
        """Compare in the usual order of layouts: largest first, with attributes before without."""
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, int, int, bool, tuple[str, ...], tuple[str, ...]]:
        has_attributes = bool(self.attributes or self.negated_attributes)
        sizes = -self.gpu_slices, -self.compute_slices, -self.memory_gb
        return *sizes, not has_attributes, self.attributes, self.negated_attributes

    def __str__(self) -> str:
        compute = "" if self.spans else f"{self.compute_slices}c."
        suffix = ""
        if self.attributes:
            suffix = "+" + ",".join(self.attributes)
        elif self.negated_attributes:
            suffix = "-" + ",".join(self.negated_attributes)
        return f"{compute}{self.gpu_slices}g.{self.memory_gb}gb{suffix}"


@dataclasses.dataclass(frozen=True, slots=True)
class Engines:
    """Media engines, which the instances of a GPU share.

    A GPU has the highest count of each engine over all its profiles: every published maximum (one
    ``+me`` a GPU, ``+me.all`` excludes all but ``-me``) follows from that.
    """

    decoders: int = 0
    encoders: int = 0
    jpegs: int = 0
    ofas: int = 0

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The counts in the order of the fields."""
        return self.decoders, self.encoders, self.jpegs, self.ofas

    def within(self, pool: "Engines") -> bool:
        """Return whether ``pool`` has enough of each engine."""
        return all(one <= has for one, has in zip(self.counts, pool.counts, strict=True))

    @staticmethod
    def total(counts: Iterable["Engines"]) -> "Engines":
        """Return the sum of each engine's counts."""
        return Engines(*map(sum, zip(*(each.counts for each in counts), strict=True)))

    @staticmethod
    def pool(counts: Iterable["Engines"]) -> "Engines":
        """Return the highest count of each engine."""
        return Engines(*map(max, *((0,) * 4, (0,) * 4, *(each.counts for each in counts))))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInstanceProfile:
    """One compute-instance profile of a GPU-instance profile."""

    profile_id: int
    slices: int
    multiprocessors: int
    max_instances: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuInstanceProfile:
    """One GPU-instance profile of a GPU (``nvmlGpuInstanceProfileInfo_t``)."""

    profile: Profile
    enum_index: int  # ``NVML_GPU_INSTANCE_PROFILE_*``
    profile_id: int  # the driver's id, for the creation
    memory_mib: int
    multiprocessors: int
    max_instances: int  # as NVML reports it; wrong on A30, so the planner does not use it
    engines: Engines
    placements: tuple[Placement, ...]
    """Possible placements in memory slices, whether free or not; ascending."""
    compute_profiles: tuple[ComputeInstanceProfile, ...] = dataclasses.field(
        default=(), compare=False, repr=False
    )
    """In enum order; empty: unknown, because only an existing instance lists them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInstance:
    """A compute instance, which is a MIG device to pods."""

    instance_id: int
    profile: Profile
    placement: Placement | None
    """Compute slices within its GPU instance; None if the driver does not report them."""
    uuid: str | None  # MIG device UUID; None if the driver lists no MIG device for it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuInstance:
    """A GPU instance; without a compute instance it only blocks memory slices."""

    instance_id: int
    profile: Profile
    profile_id: int
    placement: Placement
    compute_instances: tuple[ComputeInstance, ...]

    def __hash__(self) -> int:
        """Hash what differs between the instances of a GPU: it is called for a whole cluster."""
        return hash((self.profile_id, self.placement))


@dataclasses.dataclass(frozen=True, slots=True)
class Creation:
    """An instance that a change creates, as recorded in the journal."""

    profile: Profile
    gpu_instance: Placement  # placement of the GPU instance, in memory slices
    span: Placement | None = None
    """Span of a compute instance, in compute slices; None: the GPU instance itself. A compute
    instance that spans its GPU instance has span ``0:SLICES``, whatever the driver reports."""

    @staticmethod
    def inside(profile: Profile, gpu_instance: Placement, span: Placement | None) -> "Creation":
        """Build the creation of a compute instance."""
        whole = Placement(0, profile.compute_slices)
        return Creation(profile, gpu_instance, span if span and not profile.spans else whole)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuSnapshot:
    """The mode and instances of a GPU before a change, which a rollback restores."""

    uuid: str
    current_mode: MigMode | None
    pending_mode: MigMode | None
    gpu_instances: tuple[GpuInstance, ...]
    """Ascending by placement; ids and MIG UUIDs cannot be restored."""
    created: tuple[Creation, ...] | None = None
    """Instances that the change creates: a rollback removes only these. None: unrecorded, and a
    rollback removes every instance that the snapshot lacks."""


Snapshots = tuple[GpuSnapshot, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One observed GPU."""

    index: int  # NVML index: valid within one boot, not an identity
    uuid: str
    name: str
    architecture: Architecture
    pci_address: str  # domain:bus:device.function, lower case, such as ``00000000:07:00.0``
    pci_device_id: int  # device and vendor as NVML packs them: ``0x20B010DE``
    pci_subsystem_id: int
    memory_mib: int
    current_mode: MigMode | None  # None: the GPU has no MIG
    pending_mode: MigMode | None  # differs from the current mode until a reset
    mode_change_needs_reset: bool  # True on Ampere, false on Hopper and newer
    profiles: tuple[GpuInstanceProfile, ...] | None
    """None: this driver lists none while MIG is disabled (R535 and older)."""
    gpu_instances: tuple[GpuInstance, ...]
    """Ascending by placement, including GPU instances without a compute instance."""
    virtualization: Virtualization = Virtualization.NONE
    recovery_action: RecoveryAction | None = dataclasses.field(default=None, compare=False)
    """None: this driver does not report it. Not compared, because no plan depends on it."""
    is_remembered: bool = False
    """Whether it is unreachable, and this is how it was when its layout was verified."""
    is_template: bool = dataclasses.field(default=False, compare=False)
    """Whether it stands for any GPU of its product: its index and UUID mean nothing."""

    @property
    def needs_recovery(self) -> bool:
        """Whether the driver requests an action that recovers the GPU from a fault."""
        return self.recovery_action not in (None, RecoveryAction.NONE)

    @property
    def recovers_by_reset(self) -> bool:
        """Whether the driver requests a reset, without which no new work runs on the GPU."""
        return self.recovery_action is RecoveryAction.GPU_RESET

    @property
    def has_pending_mode(self) -> bool:
        """Whether a change of MIG mode is pending."""
        return self.pending_mode is not None and self.pending_mode is not self.current_mode

    @property
    def is_mig_capable(self) -> bool:
        """Whether the GPU has MIG."""
        return self.current_mode is not None

    @property
    def snapshot(self) -> GpuSnapshot:
        """The state that a rollback restores."""
        return GpuSnapshot(
            uuid=self.uuid,
            current_mode=self.current_mode,
            pending_mode=self.pending_mode,
            gpu_instances=self.gpu_instances,
        )

    @property
    def unpartitioned(self) -> "Gpu":
        """The same GPU, not partitioned."""
        mode = None if self.current_mode is None else MigMode.DISABLED
        return dataclasses.replace(self, current_mode=mode, pending_mode=mode, gpu_instances=())

    @property
    def devices(self) -> tuple[ComputeInstance, ...]:
        """Its MIG devices, which are its compute instances, in instance order."""
        return tuple(ci for gi in self.gpu_instances for ci in gi.compute_instances)

    @property
    def mig_uuids(self) -> tuple[str, ...]:
        """UUIDs of its MIG devices, in instance order."""
        return tuple(device.uuid for device in self.devices if device.uuid)

    def __str__(self) -> str:
        return self.name if self.is_template else f"GPU {self.index} ({self.name}, {self.uuid})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnreachableGpu:
    """A GPU that the driver counts but that cannot be observed.

    Its identity is from the driver or the last observation; unknown facts are empty or None.
    """

    index: int
    uuid: str = ""
    pci_address: str = ""
    pci_device_id: int | None = None
    name: str = ""
    reason: reasons.Reason
    code: int | None  # the NVML return value; None: no error, but an invalid answer
    message: str
    recovery_action: RecoveryAction | None = None  # None: not reported

    @property
    def recovers_by_reset(self) -> bool:
        """Whether the driver answers that it requires a reset, and requests nothing else."""
        return self.reason is reasons.Reason.GPU_NEEDS_RESET and self.recovery_action in (
            None,
            RecoveryAction.NONE,
            RecoveryAction.GPU_RESET,
        )

    def with_identity(self, last: Gpu) -> "UnreachableGpu":
        """Return it with the identity from an earlier observation."""
        return dataclasses.replace(
            self,
            uuid=last.uuid,
            pci_address=last.pci_address,
            pci_device_id=last.pci_device_id,
            name=last.name,
        )

    @property
    def sentence(self) -> str:
        """That it is unreachable, and why; without a full stop."""
        return f"{self} is unreachable: {self.message}"

    def __str__(self) -> str:
        ids = ", ".join(filter(None, (self.uuid, self.pci_address)))
        return f"GPU {self.index} ({ids})" if ids else f"GPU {self.index}"


class ObservedGpus(tuple[Gpu, ...]):  # noqa: SLOT001 - a tuple has no room for named slots
    """The reachable GPUs as a tuple, and the unreachable ones; both ascending by index."""

    unreachable: tuple[UnreachableGpu, ...]

    def __new__(cls, gpus: Iterable[Gpu] = (), unreachable: Iterable[UnreachableGpu] = ()) -> Self:
        """Build it from GPUs that are in order."""
        observed = super().__new__(cls, tuple(gpus))
        observed.unreachable = tuple(unreachable)
        return observed

    def __getnewargs__(self) -> tuple[tuple[Gpu, ...], tuple[UnreachableGpu, ...]]:
        """Return the arguments of ``__new__``."""
        return tuple(self), self.unreachable

    def __eq__(self, other: object) -> bool:
        is_equal = super().__eq__(other) is True  # not NotImplemented, which counts as true
        return is_equal and self.unreachable == getattr(other, "unreachable", ())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.unreachable))

    def unreachable_snapshots(self, snapshot: Iterable[GpuSnapshot]) -> tuple[GpuSnapshot, ...]:
        """Return the snapshots of GPUs that are, or may be, unreachable."""
        reachable = {gpu.uuid for gpu in self}
        lost = {gpu.uuid for gpu in self.unreachable}
        return tuple(
            gpu
            for gpu in snapshot
            if gpu.uuid in lost or ("" in lost and gpu.uuid not in reachable)
        )

    def only(self, uuids: Iterable[str]) -> "ObservedGpus":
        """Return the GPUs with these UUIDs."""
        selected = frozenset(uuids)
        lost = (gpu for gpu in self.unreachable if gpu.uuid in selected)
        return ObservedGpus((gpu for gpu in self if gpu.uuid in selected), lost)

    def with_newer(self, newer: "ObservedGpus") -> "ObservedGpus":
        """Return these GPUs, updated with a newer observation of some of them."""
        uuids = {gpu.uuid for gpu in (*newer, *newer.unreachable)}
        indices = {gpu.index for gpu in (*newer, *newer.unreachable)}
        others = (gpu for gpu in self if gpu.uuid not in uuids)
        lost = (gpu for gpu in self.unreachable if gpu.index not in indices)
        return ObservedGpus(
            sorted((*newer, *others), key=lambda gpu: gpu.index),
            sorted((*newer.unreachable, *lost), key=lambda gpu: gpu.index),
        )


NO_GPUS = ObservedGpus()  # where none was observed


def unreachable_of(gpus: Iterable[Gpu]) -> tuple[UnreachableGpu, ...]:
    """Return the unreachable GPUs of an observation; none of any other collection."""
    return gpus.unreachable if isinstance(gpus, ObservedGpus) else ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Pin:
    """Devices requested in the GPU instance that starts at a given memory slice."""

    start: int  # first memory slice of the GPU instance
    profile: Profile

    def __str__(self) -> str:
        return f"{self.profile}@{self.start}"


Devices = tuple[tuple[Profile, int], ...]  # devices by profile, ``in_order``
_Key = TypeVar("_Key", Profile, Pin)


def in_order(counts: Mapping[_Key, int]) -> tuple[tuple[_Key, int], ...]:
    """Return the positive counts in the order of their keys."""
    return tuple(sorted((key, count) for key, count in counts.items() if count > 0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DesiredGpu:
    """The state that a layout requests of one GPU; canonical, so that ``==`` compares meaning."""

    mode: MigMode
    devices: Devices = ()  # devices with any placement, ``in_order``; empty with MIG disabled
    pins: tuple[tuple[Pin, int], ...] = ()
    """Devices with a given start, ``in_order``. A GPU instance with pins has exactly these."""

    @staticmethod
    def of(
        mode: MigMode, devices: Mapping[Profile, int], pins: Mapping[Pin, int] | None = None
    ) -> "DesiredGpu":
        """Build the canonical value."""
        return DesiredGpu(mode=mode, devices=in_order(devices), pins=in_order(pins or {}))

    @property
    def counts(self) -> dict[Profile, int]:
        """All devices by profile, pinned or not."""
        total = dict(self.devices)
        for pin, count in self.pins:
            total[pin.profile] = total.get(pin.profile, 0) + count
        return total
