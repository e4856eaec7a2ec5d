"""How each part of the machine in memory behaves, and what it keeps for tests to look at."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mig_manager import errors
from mig_manager.core import gpu_processes, model, steps
from mig_manager.core.fleet import slots
from mig_manager.core.node import policies
from mig_manager.core.node.devices import claims
from mig_manager.core.objects import pod_object


@dataclasses.dataclass(slots=True)
class Kubelet:
    """The devices that kubelet offers, and lists by pod."""

    schedulable: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    """The devices that the plugin has registered, by resource."""
    devices_by_pod: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    """UID of a pod -> its devices."""
    devices_of_unlisted_pods: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    """Name of a pod that only kubelet lists -> its devices."""
    claims: set[str] = dataclasses.field(default_factory=set)
    """UIDs of pods that hold a GPU by ResourceClaim."""
    is_silent: bool = False
    all_listed_from_s: float = 0.0  # before it, a kubelet that has just started lists no pod
    pod_listed_from_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """UID of a starting pod -> when kubelet lists its devices."""
    all_end_from_s: float = 0.0  # before it, pods keep terminating
    pod_ends_from_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """UID of a pod -> the same for this pod alone."""
    phantoms: dict[str, int] = dataclasses.field(default_factory=dict)
    """Capacity that kubelet has forgotten, because its one update without it was lost."""
    hidden: Mapping[str, frozenset[str]] | None = None
    """What was schedulable when the agent last hid it; kubelet has not reported since."""
    reports_from_s: float = 0.0
    """Before it, the Node shows what the agent reports and not what kubelet has."""
    reported_devices: dict[str, int] = dataclasses.field(default_factory=dict)
    """The devices that the agent reported since it hid the former ones."""

    @property
    def devices_in_use(self) -> frozenset[str]:
        return frozenset().union(*self.devices_by_pod.values())


@dataclasses.dataclass(slots=True)
class Plugin:
    """The device plugin."""

    is_label_managed: bool = True  # whether a label of the node deploys it
    is_broken: bool = False
    waiting: pod_object.ContainerWaiting | None = None
    """Why kubelet cannot start the container of a broken plugin."""
    unhealthy: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    """Devices that it has registered and calls unhealthy."""


@dataclasses.dataclass(slots=True)
class DraDriver:
    """NVIDIA's DRA driver."""

    is_installed: bool = False
    is_label_managed: bool = True  # whether a label of the node deploys it
    is_broken: bool = False
    feature_gates: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    slices: tuple[claims.Slice, ...] | None = ()
    """What it has published; None: the API does not list it."""


@dataclasses.dataclass(slots=True)
class Daemons:
    """Further DaemonSets, and the controller that stops and starts all daemons."""

    is_ready_by_label: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Deploy label -> whether its pod becomes ready."""
    without_label: set[str] = dataclasses.field(default_factory=set)
    """Names of daemons that only the reconfiguring taint keeps away."""
    controller_away_until_s: float = 0.0


@dataclasses.dataclass(slots=True)
class Driver:
    """NVIDIA's driver."""

    lost: set[str] = dataclasses.field(default_factory=set)
    """UUIDs of GPUs that have fallen off the bus, or require a reset if they await one."""
    processes: dict[str, tuple[gpu_processes.GpuProcess, ...]] = dataclasses.field(
        default_factory=dict
    )
    """UUID of a GPU -> the processes that it lists there, which the executor sees too."""
    clients: str = ""  # what uses the instances that a plan destroys, and is not listed
    mode_waits: bool = False  # whether a MIG mode change waits for a reset or a reboot
    hides_profiles: bool = False  # whether it lists profiles only while MIG is on, as R535 does
    next_step: Any = None  # the step that begins at this moment
    executed_steps: list[steps.Step] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Resets:
    """How the host resets GPUs."""

    are_available: bool = True  # False: the agent has ``--no-gpu-reset``
    action_after: model.RecoveryAction = model.RecoveryAction.NONE
    """The recovery action of a GPU after its repair."""
    need_persistence_off: bool = False
    """Whether GPUs have persistence mode, without which they are reset."""
    keep_persistence_off: bool = False  # whether it cannot be switched on
    without_persistence: set[str] = dataclasses.field(default_factory=set)
    """GPUs that have lost it."""


@dataclasses.dataclass(slots=True)
class Host:
    """The machine: its services, its files and its boots."""

    services: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Name of a service -> whether it runs."""
    broken_services: set[str] = dataclasses.field(default_factory=set)
    boot_id: str = "boot-1"
    may_reboot: bool = False
    reboots: int = 0
    refreshes: int = 0  # how often the device files were refreshed


@dataclasses.dataclass(slots=True)
class Slots:
    """The slots of a cluster that limits how many nodes are under change."""

    are_limited: bool = False
    is_taken: bool = False  # whether one is this node's
    is_stale: bool = False  # whether the agent cannot renew it
    denials: list[slots.Denial] = dataclasses.field(default_factory=list)
    """The answers to the next attempts to take one; so with the next."""
    next_errors: list[errors.ClusterError] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Owner:
    """What the node's owner decides, and what every change restores."""

    policy: policies.Policy = dataclasses.field(default_factory=policies.Policy)
    extra_clients: str = ""  # their file of GPU clients; empty: none is configured
    deploy_labels: dict[str, str] = dataclasses.field(default_factory=dict)
    """Those of the GPU clients, as the first agent met them, if none was paused then."""
    plugin_config: str | None = None  # for the layouts that the policy does not list
    stopped_services: frozenset[str] = frozenset()
    is_cordoned: bool = False


@dataclasses.dataclass(slots=True)
class Hooks:
    """The owner's hooks."""

    text: str = ""  # their file; empty: no hooks are configured
    missing: set[str] = dataclasses.field(default_factory=set)
    """Commands that are not found; so with the next two."""
    broken: set[str] = dataclasses.field(default_factory=set)
    broken_once: set[str] = dataclasses.field(default_factory=set)  # these fail the next time
    commands: list[str] = dataclasses.field(default_factory=list)
    """Those that have run, failed ones included."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the last one
    pending_exit: bool = False
    """Whether hooks of the start have run, and those of the end have not."""
