"""Which evictions a PodDisruptionBudget counts."""

import dataclasses

import pytest

from mig_manager.core.node import eviction_rules
from tests.rigs.node import samples


@pytest.mark.parametrize(
    ("policy", "healthy", "desired", "counts"),
    [
        pytest.param("IfHealthyBudget", 2, 2, False, id="enough pods are healthy"),
        pytest.param("IfHealthyBudget", 1, 2, True, id="too few pods are healthy"),
        pytest.param("IfHealthyBudget", 0, 0, True, id="no pod is desired"),
        pytest.param("AlwaysAllow", 1, 2, False, id="the policy allows it"),
    ],
)
def test_the_eviction_of_an_unready_pod_counts(
    policy: str, healthy: int, desired: int, *, counts: bool
) -> None:
    budget = eviction_rules.parse_budget(
        {
            "metadata": {"namespace": "default", "name": "web"},
            "spec": {"unhealthyPodEvictionPolicy": policy},
            "status": {"currentHealthy": healthy, "desiredHealthy": desired},
        }
    )
    assert budget.is_used_by(samples.pod(is_ready=False)) is counts
    assert budget.is_used_by(samples.pod(is_ready=True))


@pytest.mark.parametrize(
    ("allowed", "has_bare", "rolling", "refused", "exhausted"),
    [
        pytest.param(4, False, "", "", "", id="it allows more than all"),
        pytest.param(3, True, "", "", "", id="it allows all"),
        pytest.param(2, False, "ab", "c", "", id="it allows some"),
        pytest.param(0, False, "", "abc", "abc", id="it allows none"),
        pytest.param(-1, False, "", "abc", "abc", id="it is below its limit"),
        pytest.param(2, True, "ab", "c", "", id="the last pods have successors"),
        pytest.param(1, True, "", "abc", "abc", id="nothing replaces some of the last pods"),
    ],
)
def test_a_budget_grants_the_evictions_of_the_first_pods(
    allowed: int, rolling: str, refused: str, exhausted: str, *, has_bare: bool
) -> None:
    budget = eviction_rules.Budget(
        namespace="default", name="web", selector=(), allowed=allowed, healthy=0, desired=0
    )
    owners = (None, None, "ReplicaSet") if has_bare else ("ReplicaSet",) * 3
    pods = [samples.pod(name, owner_kind=owner) for name, owner in zip("abc", owners, strict=True)]
    not_running = samples.pod("d", phase="Pending")

    check = eviction_rules.check_budgets([*pods, not_running], [budget])

    assert "".join(pod.name for pod in check.rolling) == rolling
    assert {key.removeprefix("default/") for key in check.refused} == {*refused}
    assert {key.removeprefix("default/") for key in check.exhausted} == {*exhausted}
    assert check.spent == ((budget,) if refused else ())


def test_a_budget_whose_status_is_outdated_grants_no_eviction() -> None:
    current = eviction_rules.Budget(
        namespace="default", name="web", selector=(), allowed=9, healthy=0, desired=0
    )
    outdated = dataclasses.replace(current, is_current=False)

    check = eviction_rules.check_budgets([samples.pod("a")], [outdated])

    assert check.exhausted == {"default/a": "PodDisruptionBudget web is still being processed"}
