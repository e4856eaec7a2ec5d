"""What mig-manager reads of a node of the API, and of its quantities."""

from typing import Any

import pytest

from mig_manager import errors
from mig_manager.core.fleet import fleet_nodes
from mig_manager.core.objects import api_values


@pytest.mark.parametrize(
    "thing",
    [
        {},
        {"metadata": []},
        {"metadata": {"name": "n1", "labels": 3}},
        {"metadata": {"name": "n1"}, "spec": {"taints": [{}]}},
        {"metadata": {"name": "n1"}, "status": {"allocatable": {"nvidia.com/gpu": "many"}}},
        {"metadata": {"name": "n1"}, "status": {"conditions": [7]}},
    ],
)
def test_a_malformed_node_is_a_cluster_error(thing: dict[str, Any]) -> None:
    with pytest.raises(errors.ClusterError, match="from the Kubernetes API is malformed"):
        fleet_nodes.parse(thing)


def test_a_quantity_is_a_whole_number_rounded_up() -> None:
    values: dict[str | int, int] = {"0": 0, 7: 7, "1k": 1000, "1e3": 1000, "1E3": 1000}
    values |= {
        "2Ki": 2048,
        "1500m": 2,
        "0.5": 1,
        "3E": 3 * 10**18,
        "100E": 2**63 - 1,
        "-1e30": 1 - 2**63,
        "1e9999999": 2**63 - 1,
        "-1e999999999": 1 - 2**63,
        "1e-9999999": 1,
    }
    assert {text: api_values.parse_quantity(text) for text in values} == values


@pytest.mark.parametrize(
    "text",
    ["", "many", "1 k", "1kk", "1e", "1.2.3", "-", ".", "1e9999999999999999999"],
)
def test_an_invalid_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        api_values.parse_quantity(text)
