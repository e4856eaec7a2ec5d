"""What an attempt may do with pods: every combination of the facts has one row."""

import itertools

import pytest

from mig_manager import reasons
from mig_manager.core import pod_rights
from mig_manager.core.node import policies
from mig_manager.core.records import change_failures, requests

FAILED = change_failures.FailedChanges(
    content_hash="x", boot_id="b1", reason=reasons.Reason.HOOK_FAILED, problem="it failed", count=3
)
AFFECTED, NODE, NONE = policies.DrainPolicy
ALL = pod_rights.Evict(is_whole_node=True)
BOTH = (False, True)
ANY = tuple(policies.DrainPolicy)

ROWS = (
    # is_repair, is_heal, is verified, may_evict, has failed, policy -> pods, is_passive
    ((True,), BOTH, BOTH, BOTH, BOTH, (AFFECTED,), pod_rights.Evict(), False),
    ((True,), BOTH, BOTH, BOTH, BOTH, (NODE,), ALL, False),
    ((True,), BOTH, BOTH, BOTH, BOTH, (NONE,), pod_rights.WaitOnly(), False),
    ((False,), (True,), BOTH, (True,), BOTH, ANY, pod_rights.RestoreOnly(), False),
    ((False,), (True,), BOTH, (False,), BOTH, ANY, pod_rights.RestoreOnly(), True),
    ((False,), (False,), (True,), (True,), BOTH, ANY, pod_rights.RestoreOnly(), False),
    ((False,), (False,), (True,), (False,), BOTH, ANY, pod_rights.RestoreOnly(), True),
    ((False,), (False,), (False,), (False,), BOTH, ANY, pod_rights.OnDemand(), True),
    ((False,), (False,), (False,), (True,), (True,), ANY, pod_rights.EvictedEnough(FAILED), False),
    ((False,), (False,), (False,), (True,), (False,), (AFFECTED,), pod_rights.Evict(), False),
    ((False,), (False,), (False,), (True,), (False,), (NODE,), ALL, False),
    ((False,), (False,), (False,), (True,), (False,), (NONE,), pod_rights.WaitOnly(), False),
)
EXPECTED = [(case, row[6], row[7]) for row in ROWS for case in itertools.product(*row[:6])]


def test_every_attempt_has_one_row() -> None:
    every = set(itertools.product(BOTH, BOTH, BOTH, BOTH, BOTH, ANY))

    assert {case for case, _, _ in EXPECTED} == every
    assert len(EXPECTED) == len(every)


@pytest.mark.parametrize(("case", "pods", "is_passive"), EXPECTED)
def test_rights_of_an_attempt_follow_from_its_facts(
    case: tuple[bool, bool, bool, bool, bool, policies.DrainPolicy],
    pods: pod_rights.PodRights,
    *,
    is_passive: bool,
) -> None:
    is_repair, is_heal, is_verified, may_evict, has_failed, policy = case
    record = requests.RequestRecord(
        layout="a",
        may_evict=may_evict,
        verified=requests.Verified(content_hash="x") if is_verified else None,
        failed_changes=FAILED if has_failed else None,
    )

    rights = pod_rights.decide(
        record, policy, is_repair=is_repair, is_heal=is_heal, content_hash="x", boot_id="b1"
    )

    assert rights == pod_rights.AttemptRights(pods=pods, is_passive=is_passive)
