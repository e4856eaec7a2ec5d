"""One attempt at a request, and what its steps share."""

import dataclasses

from mig_manager.agent import gpu_clients, kept_request, publish, settings, undo
from mig_manager.change import hook_points
from mig_manager.core import model, ports
from mig_manager.core.layout import custom as customs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is requested, and what earlier attempts know."""

    config: str
    custom: customs.Custom | None = None
    """What ``custom`` stands for; None: the layout is not that."""
    may_evict: bool = True
    """Whether pods may be evicted, if the layout was not verified since it was requested."""
    attempt: int = 1
    rebooted_hash: str | None = None
    """Content hash of the layout that the machine was rebooted for; None: it was not."""
    seen: model.ObservedGpus = model.NO_GPUS
    """The GPUs as last observed; none: not yet."""

    @property
    def is_on_demand(self) -> bool:
        """Whether the rules for a custom layout on a node that a program repartitions apply."""
        return self.custom is not None and self.custom.is_on_demand


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attempt at a request; nothing in it is replaced while it lasts."""

    request: Request
    cancel: ports.Cancellation
    """Ends the attempt, until GPUs are touched."""
    deps: ports.Dependencies
    limits: settings.Limits
    clients: gpu_clients.GpuClients
    kept: kept_request.KeptRequest
    progress: publish.Progress
    taken: undo.Taken
    hooks: hook_points.HookPoints

    @property
    def plugin_config(self) -> str | None:
        """The device plugin's config for this layout; None: it stays."""
        return self.limits.policy.plugin_config(self.request.config)
