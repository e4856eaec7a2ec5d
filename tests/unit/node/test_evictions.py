"""Which evictions a PodDisruptionBudget counts."""

import pytest

from mig_manager.core.node import evictions
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
    budget = evictions.parse_budget(
        {
            "metadata": {"namespace": "default", "name": "web"},
            "spec": {"unhealthyPodEvictionPolicy": policy},
            "status": {"currentHealthy": healthy, "desiredHealthy": desired},
        }
    )
    assert budget.is_used_by(samples.pod(is_ready=False)) is counts
    assert budget.is_used_by(samples.pod(is_ready=True))
