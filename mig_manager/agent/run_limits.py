"""The deadlines and permissions of the pipeline, most of them options of the agent."""

import dataclasses

from mig_manager.core import options, timing
from mig_manager.core.node import policy as policies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the pipeline may do and for how long; the agent's settings are such limits."""

    drain_timeout_s: float = options.seconds(
        "how long evicted pods may take to end", default=300.0
    )
    plugin_timeout_s: float = options.seconds(
        "how long the device plugin may take to stop or start", default=300.0
    )
    monitor_timeout_s: float = options.seconds(
        "how long each monitor may take to be ready before the next one starts", default=60.0
    )
    allows_foreign_managers: bool = options.switch(
        "continue although another program manages MIG on this node",
        name="allow-foreign-managers",
    )
    heals_drift: bool = options.switch(
        "restore the layout after another program changed it", name="heal-drift"
    )
    reboot_timeout_s: float = 600.0
    """How long the node may take to go down after a reboot was requested."""
    lock_timeout_s: float = 30.0
    in_use_timeout_s: float = 30.0
    """How long to wait, after the drain, for processes that use what the plan destroys."""
    is_lenient: bool = False
    """Whether to warn instead of failing where mig-parted ignores a problem of the file."""
    policy: policies.Policy = dataclasses.field(default_factory=policies.Policy)
    backoff: timing.Backoff = dataclasses.field(default_factory=timing.Backoff)
