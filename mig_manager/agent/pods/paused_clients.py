"""What a change paused, and resumes afterwards with new pods."""

import dataclasses
from collections.abc import Iterable

from mig_manager.agent import attempts
from mig_manager.agent.pods import node_advertisers
from mig_manager.core import model
from mig_manager.core.node.daemons import client_table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PausedClients:
    """The GPU clients that a change paused."""

    advertisers: node_advertisers.Advertisers  # those that must serve the node again
    old_uids: frozenset[str]  # their pods from before the change, which advertise stale devices
    kept_uids: frozenset[str] = frozenset()
    """DRA driver pods that are not restarted: they advertise what the GPUs have."""
    changed: frozenset[str]  # UUIDs of the changed GPUs
    labels_with_pods: frozenset[str] = frozenset()
    """Deploy labels that placed a pod here: worth waiting for its successor."""
    extra_clients: tuple[client_table.ExtraClient, ...] = ()  # that the owner lists


def remove_phantoms_as_if_paused(
    attempt: attempts.Attempt, gpus: model.ObservedGpus, changed: Iterable[model.GpuSnapshot]
) -> PausedClients:
    """Remove phantom devices; return the advertisers as if a change had paused them.

    An up-to-date DRA driver is kept: restarting it would change nothing.
    """
    pods = attempt.deps.workloads.list()
    kept_uids = node_advertisers.DRIVER.current_uids(attempt.deps, gpus, pods)
    return PausedClients(
        advertisers=node_advertisers.remove_phantoms_and_find(attempt, pods, gpus),
        old_uids=node_advertisers.uids(pods) - kept_uids,
        kept_uids=kept_uids,
        changed=frozenset(gpu.uuid for gpu in changed),
    )
