"""The reconfigurations during which the agent is struck, and how they must end, as data."""

import dataclasses
import enum
import signal
from typing import NamedTuple

from mig_manager import reasons
from mig_manager.core.records import run_status
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.rigs import layout_table

UNDISTURBED = frozenset({"Drain", "Pause", "Execute", "Resume", "Verify"})
"""Where pods are evicted the node is tainted within the drain."""
_BEFORE_THE_GPUS = frozenset({"Drain"})
_ROLLED_BACK = (UNDISTURBED - {"Verify"}) | {"RollBack"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessChange:
    name: str
    spec: str
    was: str = ""  # the layout that is active before; empty: none, and MIG is off
    layout: str
    other: str = ""  # a layout that may be requested instead; it spares the same pods
    ends: run_status.State = run_status.State.SUCCESS
    reason: reasons.Reason = reasons.Reason.APPLIED  # where it is not disturbed
    faults: tuple[nvml_faults.Fault, ...] = ()
    guarded_resource: str = ""  # a resource whose pods no budget allows to be evicted
    whole_gpu_pods: int = 0  # pods on whole GPUs; MIG devices have one each
    has_monitor: bool = False
    """Whether DCGM's exporter watches the GPUs, which must let go for a change of mode."""
    is_cordoned: bool = False  # whether the node was already cordoned
    options: tuple[tuple[str, str], ...] = ()
    has_hooks: bool = False  # whether the owner has a program at each of the four points
    phases: frozenset[str] = UNDISTURBED  # in each of them the agent must be struck at least once

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def after(self) -> layout_table.Gpus:
        """The GPUs with the requested layout."""
        return self.gpus_with(self.layout)

    @property
    def before(self) -> layout_table.Gpus:
        """The GPUs before the change, and after one that fails."""
        return self.gpus_with(self.was or "all-disabled")

    def gpus_with(self, layout: str) -> layout_table.Gpus:
        """Return what its GPUs have with a layout."""
        return layout_table.gpus_with(layout, int(self.spec.partition("x")[0]))

    @property
    def gpus_after_drain(self) -> layout_table.Gpus:
        """The GPUs as the change makes them, unless the drain before it fails."""
        return self.before if self.guarded_resource else self.after


_FOR_GOOD = nvml_faults.Fault(
    function="nvmlDeviceCreateGpuInstance*", gpu=1, count=None, code=states.Code.NO_PERMISSION
)
"""Nothing can be created on the second GPU; its plan destroys nothing, so rollback is free."""
_ONCE_ON_THE_ROLLBACK = nvml_faults.Fault(
    function="nvmlDeviceCreateGpuInstance*", gpu=0, first=3, code=states.Code.UNKNOWN
)
"""On the first GPU two small instances come, and the large one that was before does not."""

FIRST = ProcessChange(
    name="first layout on A100",
    spec="2xA100-SXM4-40GB",
    layout="two-sizes",
    whole_gpu_pods=1,
    has_monitor=True,
)
FIRST_HOPPER = ProcessChange(
    name="first layout on H100",
    spec="1xH100",
    layout="two-sizes-h100",
    phases=UNDISTURBED - {"Drain"} | {"Taint"},
)
ONE_SLICE = ProcessChange(
    name="one slice on a busy node",
    spec="1xA100-SXM4-40GB",
    was="all-balanced",
    layout="one-slice",
    other="fewer",
)
MODE_OFF = ProcessChange(
    name="mode off on one of two GPUs",
    spec="2xA100-SXM4-40GB",
    was="two-sizes",
    layout="first-off",
    has_monitor=True,
)
FAILING = ProcessChange(
    name="failing apply",
    spec="2xA100-SXM4-40GB",
    was="uneven",
    layout="uneven-changed",
    ends=run_status.State.FAILED,
    reason=reasons.Reason.NO_PERMISSION,
    faults=(_FOR_GOOD,),
    phases=_ROLLED_BACK,
)
FAILING_TWICE = dataclasses.replace(
    FAILING, name="failing apply and failing rollback", faults=(_FOR_GOOD, _ONCE_ON_THE_ROLLBACK)
)
DRAIN_TIMEOUT = dataclasses.replace(
    ONE_SLICE,
    name="drain timeout",
    ends=run_status.State.FAILED,
    reason=reasons.Reason.DRAIN_TIMEOUT,
    guarded_resource="nvidia.com/mig-2g.10gb",
    options=(("drain_timeout_s", "0.5"), ("retry_initial_s", "60"), ("retry_max_s", "60")),
    phases=_BEFORE_THE_GPUS,
)
ACTIVE = dataclasses.replace(
    ONE_SLICE,
    name="layout already active",
    layout="all-balanced",
    reason=reasons.Reason.ALREADY_APPLIED,
    phases=frozenset({"Done"}),
)
CORDONED = dataclasses.replace(ONE_SLICE, name="one slice on a cordoned node", is_cordoned=True)
SLOTTED = dataclasses.replace(
    ONE_SLICE, name="one slice within a budget", options=(("max_concurrent_nodes", "1"),)
)
HOOKED = dataclasses.replace(
    FIRST, name="first layout with hooks", has_hooks=True, phases=UNDISTURBED | {"Resolve"}
)
ALL = (
    FIRST_HOPPER,
    ONE_SLICE,
    MODE_OFF,
    FAILING,
    FAILING_TWICE,
    DRAIN_TIMEOUT,
    ACTIVE,
    CORDONED,
    SLOTTED,
    HOOKED,
)
"""Without the first layout on A100: with hooks it has the same moments and more."""


class Downtime(enum.Enum):
    """What happens while no agent runs."""

    RESTART = "restart"
    REBOOT = "reboot"  # and what made the change fail is gone
    OTHER_LAYOUT = "another layout"
    NO_LAYOUT = "the label is removed"
    OLD_LAYOUT = "back to the old layout"
    CORRUPT_JOURNAL = "the journal is spoilt"


class Variant(NamedTuple):
    """A change, the signal that strikes its agent, and what happens before the next one starts.

    It is a row of the matrix.
    """

    change: ProcessChange
    downtime: Downtime = Downtime.RESTART
    strike_with: signal.Signals = signal.SIGKILL

    def __str__(self) -> str:
        return f"{self.change}-{self.what.replace(', ', '-').replace(' ', '-')}"

    @property
    def what(self) -> str:
        """Signal and downtime, as the published results name them."""
        name = self.strike_with.name
        return f"{name}, {self.downtime.value}" if name == "SIGKILL" else name


VARIANTS = (
    *(Variant(each) for each in ALL),
    *(
        Variant(each, Downtime.REBOOT)
        for each in (FIRST, FIRST_HOPPER, ONE_SLICE, MODE_OFF, FAILING, DRAIN_TIMEOUT)
    ),
    Variant(ONE_SLICE, Downtime.OTHER_LAYOUT),
    Variant(ONE_SLICE, Downtime.NO_LAYOUT),
    Variant(ONE_SLICE, Downtime.OLD_LAYOUT),
    Variant(ONE_SLICE, Downtime.CORRUPT_JOURNAL),
    *(
        Variant(each, strike_with=signal.SIGTERM)
        for each in (ONE_SLICE, FAILING, DRAIN_TIMEOUT, HOOKED)
    ),
)
"""The kill matrix."""
