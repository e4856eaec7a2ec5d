"""What an attempt may do with the pods that its change affects: ``decide`` has all cases.

The facts that must outlive an attempt are in the record of the request. ``may_evict`` is one,
because it depends on the node's labels and annotation when the request was first read, which may
change while a run waits. What the attempt may do follows from all facts, and is never kept.

A drain gets the decision with the words of a refusal, because they name GPUs of the plan.
"""

import dataclasses

from mig_manager.core.node import policies
from mig_manager.core.records import change_failures, requests


@dataclasses.dataclass(frozen=True, slots=True)
class Evict:
    """Evict the affected pods."""

    is_whole_node: bool = False  # whether every plan affects every pod with a GPU


@dataclasses.dataclass(frozen=True, slots=True)
class WaitOnly:
    """Wait until the affected pods have ended: the owner lets the agent evict none."""


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreOnly:
    """Affect no pod: the layout was verified since it was requested."""


@dataclasses.dataclass(frozen=True, slots=True)
class OnDemand:
    """Affect no pod: a program chose the layout on demand, and chooses another if it fails."""


@dataclasses.dataclass(frozen=True, slots=True)
class EvictedEnough:
    """Affect no pod: earlier changes to the layout failed after they had evicted pods."""

    failed: change_failures.FailedChanges


PodRights = Evict | WaitOnly | RestoreOnly | OnDemand | EvictedEnough


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRights:
    """The rights of one attempt."""

    pods: PodRights
    is_passive: bool = False
    """Whether the attempt does not wait for processes on GPUs, reboot the machine, or keep the
    node tainted for a drain: the layout was chosen on demand, even if it is only restored."""


def decide(
    record: requests.RequestRecord,
    policy: policies.DrainPolicy,
    *,
    is_repair: bool,
    is_heal: bool,
    content_hash: str,
    boot_id: str,
) -> AttemptRights:
    """Return the rights of an attempt; the first case that applies decides.

    Args:
        record: The request, with the results of earlier attempts.
        policy: The owner's drain policy.
        is_repair: Whether the attempt resets GPUs: the owner's settings allow that, whatever the
            origin of the layout and its earlier attempts.
        is_heal: Whether the attempt restores a layout that has drifted.
        content_hash: Hash of the layout's content; empty: not known yet.
        boot_id: The present boot.
    """
    failed = record.failed_changes
    pods: PodRights
    if is_repair:
        pods = _by_policy(policy)
    elif is_heal or record.verified is not None:
        pods = RestoreOnly()
    elif not record.may_evict:
        pods = OnDemand()
    elif failed and failed.are_enough(content_hash, boot_id):
        pods = EvictedEnough(failed)
    else:
        pods = _by_policy(policy)
    return AttemptRights(pods=pods, is_passive=is_passive(record, is_repair=is_repair))


def is_passive(record: requests.RequestRecord, *, is_repair: bool) -> bool:
    """Return ``AttemptRights.is_passive``, which the content of the layout does not change."""
    return not (record.may_evict or is_repair)


def _by_policy(policy: policies.DrainPolicy) -> Evict | WaitOnly:
    match policy:
        case policies.DrainPolicy.AFFECTED:
            return Evict()
        case policies.DrainPolicy.NODE:
            return Evict(is_whole_node=True)
        case policies.DrainPolicy.NONE:
            return WaitOnly()
