"""The reconfigurations during which the agent is struck."""

import dataclasses
import enum

from mig_manager import errors
from mig_manager.core import model
from mig_manager.sandbox.driver import states
from testkit import nvml_faults

CONFIG = """\
version: v1
mig-configs:
  off:
  - {devices: all, mig-enabled: false}
  two-sizes:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 1, 1g.5gb: 1}}
  two-sizes-h100:
  - {devices: all, mig-enabled: true, mig-devices: {3g.40gb: 1, 1g.10gb: 1}}
  first-off:
  - {devices: [0], mig-enabled: false}
  - {devices: [1], mig-enabled: true, mig-devices: {3g.20gb: 1, 1g.5gb: 1}}
  balanced:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 1, 2g.10gb: 1, 1g.5gb: 2}}
  one-slice-changed:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 1, 1g.5gb: 4}}
  fewer:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 1, 1g.5gb: 2}}
  uneven:
  - {devices: [0], mig-enabled: true, mig-devices: {3g.20gb: 1, 2g.10gb: 1, 1g.5gb: 2}}
  - {devices: [1], mig-enabled: true, mig-devices: {3g.20gb: 1}}
  uneven-changed:
  - {devices: [0], mig-enabled: true, mig-devices: {3g.20gb: 1, 1g.5gb: 4}}
  - {devices: [1], mig-enabled: true, mig-devices: {3g.20gb: 1, 2g.10gb: 1}}
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    spec: str
    was: str = ""
    """The layout that is active before; empty: none, and MIG is off."""
    layout: str
    other: str = ""
    """A layout that may be requested instead; it spares the same pods."""
    ends: model.State = model.State.SUCCESS
    reason: errors.Reason = errors.Reason.APPLIED
    """Where it is not disturbed."""
    faults: tuple[nvml_faults.Fault, ...] = ()
    guarded: str = ""
    """A resource whose pods no budget allows to be evicted."""
    whole_gpu_pods: int = 0
    """Pods on whole GPUs; MIG devices have one each."""
    has_monitor: bool = False
    """Whether DCGM's exporter watches the GPUs, which must let go for a change of mode."""
    is_cordoned: bool = False
    """Whether the node was already cordoned."""
    options: tuple[tuple[str, str], ...] = ()
    has_hooks: bool = False
    """Whether the owner has a program at each of the four points."""


_FOR_GOOD = nvml_faults.Fault(
    function="nvmlDeviceCreateGpuInstance*", gpu=1, count=None, code=states.Code.NO_PERMISSION
)
"""Nothing can be created on the second GPU; its plan destroys nothing, so rollback is free."""
_ONCE_ON_THE_ROLLBACK = nvml_faults.Fault(
    function="nvmlDeviceCreateGpuInstance*", gpu=0, first=3, code=states.Code.UNKNOWN
)
"""On the first GPU two small instances come, and the large one that was before does not."""

FIRST = Scenario(
    name="first layout on A100",
    spec="2xA100-SXM4-40GB",
    layout="two-sizes",
    whole_gpu_pods=1,
    has_monitor=True,
)
FIRST_HOPPER = Scenario(name="first layout on H100", spec="1xH100", layout="two-sizes-h100")
ONE_SLICE = Scenario(
    name="one slice on a busy node",
    spec="1xA100-SXM4-40GB",
    was="balanced",
    layout="one-slice-changed",
    other="fewer",
)
MODE_OFF = Scenario(
    name="mode off on one of two GPUs",
    spec="2xA100-SXM4-40GB",
    was="two-sizes",
    layout="first-off",
    has_monitor=True,
)
FAILING = Scenario(
    name="failing apply",
    spec="2xA100-SXM4-40GB",
    was="uneven",
    layout="uneven-changed",
    ends=model.State.FAILED,
    reason=errors.Reason.NO_PERMISSION,
    faults=(_FOR_GOOD,),
)
FAILING_TWICE = dataclasses.replace(
    FAILING,
    name="failing apply and failing rollback",
    faults=(_FOR_GOOD, _ONCE_ON_THE_ROLLBACK),
)
DRAIN_TIMEOUT = dataclasses.replace(
    ONE_SLICE,
    name="drain timeout",
    ends=model.State.FAILED,
    reason=errors.Reason.DRAIN_TIMEOUT,
    guarded="nvidia.com/mig-2g.10gb",
    options=(("drain_timeout_s", "0.2"), ("retry_initial_s", "60"), ("retry_max_s", "60")),
)
ACTIVE = dataclasses.replace(
    ONE_SLICE,
    name="layout already active",
    layout="balanced",
    reason=errors.Reason.ALREADY_APPLIED,
)
CORDONED = dataclasses.replace(ONE_SLICE, name="one slice on a cordoned node", is_cordoned=True)
HOOKED = dataclasses.replace(FIRST, name="first layout with hooks", has_hooks=True)
ALL = (
    *(FIRST_HOPPER, ONE_SLICE, MODE_OFF, FAILING, FAILING_TWICE),
    *(DRAIN_TIMEOUT, ACTIVE, CORDONED, HOOKED),
)
"""Without the first layout on A100: with hooks it has the same points and more."""


class Aftermath(enum.Enum):
    """What happens between the end of the agent and the start of the next one."""

    RESTART = "restart"
    REBOOT = "reboot"
    """And what made the change fail is gone."""
    OTHER_LAYOUT = "another layout"
    NO_LAYOUT = "the label is removed"
    OLD_LAYOUT = "back to the old layout"
    CORRUPT_JOURNAL = "the journal is spoilt"
