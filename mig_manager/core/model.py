"""The vocabulary: what a GPU has, what a layout wants, and the steps between the two.

Wanted and live things are different types on purpose: a wanted instance has a profile and a
place, a live one has ids and UUIDs which the driver gives, re-uses and changes at will.
GPUs are keyed by UUID, GPU instances within a GPU by placement: index, minor number, instance id
and MIG UUID may all change while we work.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Self

from mig_manager import errors


class MigMode(enum.Enum):
    """MIG mode of one GPU."""

    DISABLED = "disabled"
    ENABLED = "enabled"


class Architecture(enum.Enum):
    """GPU generations as far as MIG behaves differently on them."""

    AMPERE = "ampere"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"
    OTHER = "other"


class Virtualization(enum.Enum):
    """How this machine has a GPU (``nvmlGpuVirtualizationMode_t``): it decides what it may do."""

    NONE = "none"
    """The machine is real, or the driver does not say."""
    PASSTHROUGH = "passthrough"
    """A virtual machine with a whole GPU: an Ampere GPU cannot be reset from inside."""
    VGPU = "vgpu"
    """A virtual machine with a share of a GPU: its host decides about MIG."""
    HOST = "host"
    """The host of virtual machines that share the GPU."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Placement:
    """A span of slices: memory slices for a GPU instance, compute slices for a compute instance.

    NVML: ``nvmlGpuInstancePlacement_t`` and ``nvmlComputeInstancePlacement_t``.
    """

    start: int
    size: int

    @property
    def end(self) -> int:
        """First slice after the span."""
        return self.start + self.size

    def overlaps(self, other: "Placement") -> bool:
        """Tell whether both spans share a slice."""
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
    attributes: tuple[str, ...] = ()
    """Sorted; what follows ``+``: ``me``, ``me.all``, ``gfx``."""
    negated_attributes: tuple[str, ...] = ()
    """Sorted; what follows ``-``: ``me``."""

    @property
    def spans(self) -> bool:
        """Whether the compute instance takes its whole GPU instance."""
        return self.compute_slices == self.gpu_slices

    @property
    def gpu_instance(self) -> "Profile":
        """The profile of the GPU instance that such a compute instance lives in."""
        return dataclasses.replace(self, compute_slices=self.gpu_slices)

    @property
    def sort_key(self) -> tuple[int, int, int, bool, tuple[str, ...], tuple[str, ...]]:
        """Biggest first, attributed ones before plain ones: the order people read layouts in."""
        return (
            -self.gpu_slices,
            -self.compute_slices,
            -self.memory_gb,
            not (self.attributes or self.negated_attributes),
            self.attributes,
            self.negated_attributes,
        )

    def __str__(self) -> str:
        compute = "" if self.spans else f"{self.compute_slices}c."
        suffix = ""
        if self.attributes:
            suffix = "+" + ",".join(self.attributes)
        elif self.negated_attributes:
            suffix = "-" + ",".join(self.negated_attributes)
        return f"{compute}{self.gpu_slices}g.{self.memory_gb}gb{suffix}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Media engines, which instances of one GPU draw from a common pool.

    The pool of a GPU is the highest count of each engine over all its profiles: every published
    maximum (one ``+me`` a GPU, ``+me.all`` excludes all but ``-me``) follows from that.
    """

    decoders: int = 0
    encoders: int = 0
    jpegs: int = 0
    ofas: int = 0

    def __add__(self, other: "Engines") -> "Engines":
        return Engines(
            decoders=self.decoders + other.decoders,
            encoders=self.encoders + other.encoders,
            jpegs=self.jpegs + other.jpegs,
            ofas=self.ofas + other.ofas,
        )

    def within(self, pool: "Engines") -> bool:
        """Tell whether no engine is drawn more often than ``pool`` has it."""
        return (
            self.decoders <= pool.decoders
            and self.encoders <= pool.encoders
            and self.jpegs <= pool.jpegs
            and self.ofas <= pool.ofas
        )

    @staticmethod
    def pool(counts: Iterable["Engines"]) -> "Engines":
        """Return the highest count of each engine."""
        known = tuple(counts)
        return Engines(
            decoders=max((c.decoders for c in known), default=0),
            encoders=max((c.encoders for c in known), default=0),
            jpegs=max((c.jpegs for c in known), default=0),
            ofas=max((c.ofas for c in known), default=0),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInstanceProfile:
    """One compute-instance profile as one GPU-instance profile offers it."""

    profile_id: int
    slices: int
    multiprocessors: int
    max_instances: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuInstanceProfile:
    """One GPU-instance profile as one GPU offers it (``nvmlGpuInstanceProfileInfo_t``)."""

    profile: Profile
    enum_index: int
    """``NVML_GPU_INSTANCE_PROFILE_*``: what is asked about."""
    profile_id: int
    """The driver's id: what creation takes. Not the enum."""
    memory_mib: int
    multiprocessors: int
    max_instances: int
    """As NVML reports it; known to be wrong on A30, so never used to decide what fits."""
    engines: Engines
    placements: tuple[Placement, ...]
    """Possible placements in memory slices, whatever is allocated now; ascending."""
    compute_profiles: tuple[ComputeInstanceProfile, ...] = dataclasses.field(
        default=(), compare=False, repr=False
    )
    """What its instances can hold, in enum order; empty: not known, only an instance tells."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInstance:
    """A live compute instance."""

    instance_id: int
    profile: Profile
    placement: Placement | None
    """Compute slices within its GPU instance; None when the driver does not say."""
    uuid: str | None
    """MIG device UUID; None when the driver lists no MIG device for it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuInstance:
    """A live GPU instance; without compute instance it is garbage that blocks room."""

    instance_id: int
    profile: Profile
    profile_id: int
    placement: Placement
    compute_instances: tuple[ComputeInstance, ...]
    """Ascending by id."""


@dataclasses.dataclass(frozen=True, slots=True)
class Creation:
    """An instance that a change creates on a GPU, as the journal keeps it."""

    profile: Profile
    gpu_instance: Placement
    """Of the GPU instance, in memory slices."""
    span: Placement | None = None
    """Of a compute instance, in compute slices; None: the GPU instance itself. One that spans its
    GPU instance starts at 0 and is as large as its profile, whatever the driver reports."""

    @staticmethod
    def inside(profile: Profile, gpu_instance: Placement, span: Placement | None) -> "Creation":
        """Return the creation of a compute instance."""
        whole = Placement(0, profile.compute_slices)
        return Creation(profile, gpu_instance, span if span and not profile.spans else whole)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuSnapshot:
    """The mode and instances of a GPU before a change: what a rollback restores."""

    uuid: str
    current_mode: MigMode | None
    """None: the GPU has no MIG."""
    pending_mode: MigMode | None
    gpu_instances: tuple[GpuInstance, ...]
    """All of them, ascending by placement; of ids and MIG UUIDs nothing can be brought back."""
    created: tuple[Creation, ...] | None = None
    """What the change creates: a rollback removes no other instance. None: there is no record of
    it, and every instance that the snapshot lacks is removed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One observed GPU."""

    index: int
    """NVML index: good for people and config files within one boot, not an identity."""
    uuid: str
    name: str
    architecture: Architecture
    pci_address: str
    """Domain:bus:device.function, lower case, such as ``00000000:07:00.0``."""
    pci_device_id: int
    """Device and vendor packed as NVML does: ``0x20B010DE``."""
    pci_subsystem_id: int
    memory_mib: int
    current_mode: MigMode | None
    """None: the GPU has no MIG."""
    pending_mode: MigMode | None
    """Differs from the current mode while a mode change waits for a reset."""
    mode_change_needs_reset: bool
    """True on Ampere; Hopper and newer switch without."""
    profiles: tuple[GpuInstanceProfile, ...] | None
    """None: this driver does not tell while MIG is off (R535 and older)."""
    gpu_instances: tuple[GpuInstance, ...]
    """All of them, also those without a compute instance; ascending by placement."""
    virtualization: Virtualization = Virtualization.NONE

    @property
    def has_pending_mode(self) -> bool:
        """Whether a switch of MIG mode is pending."""
        return self.pending_mode is not None and self.pending_mode is not self.current_mode

    @property
    def is_mig_capable(self) -> bool:
        """Whether the GPU has MIG at all."""
        return self.current_mode is not None

    @property
    def snapshot(self) -> GpuSnapshot:
        """What a way back must bring back."""
        return GpuSnapshot(
            uuid=self.uuid,
            current_mode=self.current_mode,
            pending_mode=self.pending_mode,
            gpu_instances=self.gpu_instances,
        )

    @property
    def mig_uuids(self) -> tuple[str, ...]:
        """UUIDs of its MIG devices, in the order of the instances."""
        return tuple(
            ci.uuid for gi in self.gpu_instances for ci in gi.compute_instances if ci.uuid
        )

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.uuid})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnreachableGpu:
    """A GPU that the driver counts and that cannot be observed."""

    index: int
    """NVML index."""
    uuid: str = ""
    """From the driver, or from the last observation; empty: not known."""
    pci_address: str = ""
    """As ``Gpu.pci_address``; empty: not known."""
    pci_device_id: int | None = None
    """As ``Gpu.pci_device_id``; None: not known."""
    name: str = ""
    """Of the product; empty: not known."""
    reason: errors.Reason
    """What the driver's answer means."""
    code: int | None
    """The NVML return value; None: the answer was no error, but no description of a GPU."""
    message: str
    """The NVML function and its answer."""

    def identified(self, last: Gpu) -> "UnreachableGpu":
        """Return it with what an earlier observation of the same GPU had."""
        return dataclasses.replace(
            self,
            uuid=last.uuid,
            pci_address=last.pci_address,
            pci_device_id=last.pci_device_id,
            name=last.name,
        )

    @property
    def sentence(self) -> str:
        """What people are told of it, without a full stop."""
        return f"{self} is unreachable: {self.message}"

    def __str__(self) -> str:
        known = ", ".join(filter(None, (self.uuid, self.pci_address)))
        return f"GPU {self.index} ({known})" if known else f"GPU {self.index}"


class ObservedGpus(tuple[Gpu, ...]):  # noqa: SLOT001 - a tuple has no room for named slots
    """The GPUs that were observed, ascending by index, and those that could not be.

    Iteration, length and indexing cover the reachable GPUs alone.

    Attributes:
        unreachable: GPUs that could not be observed, ascending by index.
    """

    unreachable: tuple[UnreachableGpu, ...]

    def __new__(cls, gpus: Iterable[Gpu] = (), unreachable: Iterable[UnreachableGpu] = ()) -> Self:
        """Sort nothing, check nothing: the observer has them in order."""
        observed = super().__new__(cls, tuple(gpus))
        observed.unreachable = tuple(unreachable)
        return observed

    def __getnewargs__(self) -> tuple[tuple[Gpu, ...], tuple[UnreachableGpu, ...]]:
        """Return what ``copy`` and ``pickle`` pass to ``__new__``."""
        return tuple(self), self.unreachable

    def __eq__(self, other: object) -> bool:
        unreachable = getattr(other, "unreachable", ())
        return super().__eq__(other) and self.unreachable == unreachable

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.unreachable))

    def missing(self, snapshot: Iterable[GpuSnapshot]) -> tuple[GpuSnapshot, ...]:
        """Return the snapshots of GPUs that are, or may be, among the unreachable."""
        here = {gpu.uuid for gpu in self}
        lost = {gpu.uuid for gpu in self.unreachable}
        return tuple(
            gpu for gpu in snapshot if gpu.uuid in lost or ("" in lost and gpu.uuid not in here)
        )

    def only(self, uuids: Iterable[str]) -> "ObservedGpus":
        """Return those with these UUIDs."""
        chosen = frozenset(uuids)
        return ObservedGpus(
            (gpu for gpu in self if gpu.uuid in chosen),
            (gpu for gpu in self.unreachable if gpu.uuid in chosen),
        )

    def updated(self, newer: "ObservedGpus") -> "ObservedGpus":
        """Return these GPUs with those of a newer, partial observation in their place.

        Args:
            newer: Some of these GPUs, by UUID; reachable or not.
        """
        fresh = {gpu.uuid: gpu for gpu in newer}
        lost = {gpu.uuid for gpu in newer.unreachable}
        return ObservedGpus(
            (fresh.get(gpu.uuid, gpu) for gpu in self if gpu.uuid not in lost),
            sorted({*self.unreachable, *newer.unreachable}, key=lambda gpu: gpu.index),
        )


NO_GPUS = ObservedGpus()
"""Before the first observation."""


def unreachable(gpus: Iterable[Gpu]) -> tuple[UnreachableGpu, ...]:
    """Return the unreachable GPUs of an observation; none for any other collection of GPUs."""
    return gpus.unreachable if isinstance(gpus, ObservedGpus) else ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Devices wanted in the one GPU instance that starts at a given memory slice."""

    profile: Profile
    """Of each device; one that does not span names a compute instance."""
    start: int
    """First memory slice of the GPU instance."""

    def __str__(self) -> str:
        return f"{self.profile}@{self.start}"

    @property
    def sort_key(self) -> tuple[object, ...]:
        """By place, then as profiles are ordered."""
        return self.start, self.profile.sort_key


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DesiredGpu:
    """What a layout wants of one GPU; canonical, so that ``==`` compares meaning."""

    mode: MigMode
    devices: tuple[tuple[Profile, int], ...] = ()
    """Those that may lie anywhere: profile and positive count, in ``Profile.sort_key`` order;
    empty with MIG disabled."""
    pins: tuple[tuple[Pin, int], ...] = ()
    """Those that have a place of their own, with positive counts, in ``Pin.sort_key`` order. A
    GPU instance with pins holds exactly these devices."""

    @staticmethod
    def of(
        mode: MigMode, devices: Mapping[Profile, int], pins: Mapping[Pin, int] | None = None
    ) -> "DesiredGpu":
        """Build the canonical value: zero counts dropped, profiles sorted."""
        kept = sorted(
            ((p, n) for p, n in devices.items() if n > 0), key=lambda item: item[0].sort_key
        )
        placed = sorted(
            ((pin, n) for pin, n in (pins or {}).items() if n > 0),
            key=lambda item: item[0].sort_key,
        )
        return DesiredGpu(mode=mode, devices=tuple(kept), pins=tuple(placed))

    @property
    def counts(self) -> dict[Profile, int]:
        """All devices by profile, wherever they shall lie."""
        total = dict(self.devices)
        for pin, count in self.pins:
            total[pin.profile] = total.get(pin.profile, 0) + count
        return total


class State(enum.Enum):
    """Value of ``nvidia.com/mig.config.state``; the peer's four values and no other."""

    PENDING = "pending"
    REBOOTING = "rebooting"
    SUCCESS = "success"
    FAILED = "failed"


class Phase(enum.Enum):
    """Where a run is; published in the status annotation, in logs and as Events."""

    RESOLVE = "Resolve"
    WAIT = "Wait"
    """For a slot, where an owner allows only so many nodes to be under change at once."""
    CORDON = "Cordon"
    DRAIN = "Drain"
    PAUSE = "Pause"
    EXECUTE = "Execute"
    ROLL_BACK = "RollBack"
    REBOOT = "Reboot"
    RESUME = "Resume"
    PROVE = "Prove"
    DONE = "Done"
