"""What pods ask for and take, and which nodes they can run on."""

import dataclasses
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.core.objects import api_values, well_known
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.nodes import exclusions, partitioned_nodes
from tests.rigs.cluster import partitions
from tests.rigs.cluster.partitions import pod
from tests.rigs.node import samples


def parse(item: dict[str, Any]) -> demand.PendingPod | demand.PodOfNode | None:
    return demand.parse(item)


def pending(item: dict[str, Any]) -> demand.PendingPod:
    needy = demand.parse(item)
    assert isinstance(needy, demand.PendingPod)
    return needy


def reason_to_exclude(
    spec: dict[str, Any], labels: dict[str, str] | None = None, *taints: Any
) -> str:
    return excluded_by(spec, labels or {}, demand.parse_taints({"taints": list(taints)}))


def excluded_by(
    spec: dict[str, Any], labels: dict[str, str], taints: tuple[demand.Taint, ...]
) -> str:
    node = dataclasses.replace(
        partitions.parse_cluster([partitions.node("a")], ())[0][0], labels=labels, taints=taints
    )
    needs = pending(pod("p", "1g.5gb", spec=spec)).needs
    return "".join(exclusions.Exclusions([node]).of(needs))


def affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"affinity": {"nodeAffinity": required}}


def expression(operator: str, *values: str, key: str = "tier") -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    "changed",
    [
        {"metadata": {"deletionTimestamp": "2026-03-01T12:00:00Z"}},
        {"metadata": {"labels": {well_known.PARTITIONING_LABEL: "off"}}},
        {"metadata": {"annotations": {well_known.PARTITIONING_LABEL: "off"}}},
        {"spec": {"schedulingGates": [{"name": "kueue"}]}},
    ],
)
def test_a_pod_that_is_deleted_gated_or_opted_out_does_not_count(changed: Any) -> None:
    assert demand.parse(pod("p", "1g.5gb", **changed)) is None


def test_only_unschedulable_pods_that_request_mig_count() -> None:
    assert isinstance(parse(pod("p", "1g.5gb")), demand.PendingPod)
    assert parse(pod("p")) is None
    for conditions in (
        [],
        [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}],
        [{"type": "PodScheduled", "status": "True"}],
    ):
        item = pod("p", "1g.5gb")
        item["status"]["conditions"] = conditions
        assert parse(item) is None


def test_a_bound_pod_takes_its_requests_until_it_has_ended() -> None:
    item = pod("p", "1g.5gb", node_name="a", requests={"cpu": "100m", "memory": "1Gi"})
    needy = parse(item)
    assert isinstance(needy, demand.BoundPod)
    assert needy.node_name == "a"
    assert dict(needy.amounts) == {
        "cpu": 100,
        "memory": 2**30,
        "nvidia.com/mig-1g.5gb": 1,
        "pods": 1,
    }
    terminating = pod("p", node_name="a", metadata={"deletionTimestamp": "2026-03-01T12:00:00Z"})
    assert isinstance(parse(terminating), demand.BoundPod)
    item["status"]["phase"] = "Succeeded"
    assert parse(item) is None


def test_needs_count_init_containers_sidecars_overhead_and_pod_requests() -> None:
    def container(cpu: str, **more: Any) -> dict[str, Any]:
        return {"name": "x", "resources": {"requests": {"cpu": cpu}}, **more}

    spec: dict[str, Any] = {
        "initContainers": [
            container("3"),
            container("1", restartPolicy="Always"),
            container("4"),
        ],
        "containers": [container("2"), container("1500m")],
        "overhead": {"cpu": "250m", "memory": "1Mi"},
    }
    assert dict(demand.parse_needs(spec).amounts) == {"cpu": 5250, "memory": 2**20, "pods": 1}
    spec["resources"] = {"requests": {"cpu": "2"}}
    assert dict(demand.parse_needs(spec).amounts)["cpu"] == 2250


def test_a_pod_knows_its_profiles_and_its_unknown_resources() -> None:
    needs = demand.Needs(
        amounts=demand.to_amounts(
            {
                "nvidia.com/mig-1g.5gb.me": 2,
                "nvidia.com/mig-1g.5gb.shared": 1,
                "nvidia.com/mig-big": 1,
                "cpu": 5,
            }
        )
    )
    assert needs.profiles == {samples.profile("1g.5gb+me"): 2}
    assert needs.unknown == ("nvidia.com/mig-1g.5gb.shared", "nvidia.com/mig-big")
    assert needs.others == (("cpu", 5),)


@pytest.mark.parametrize(
    ("term", "tiers"),
    [
        (expression("In", "1", "2"), {"1", "2"}),
        (expression("NotIn", "1"), {"2", "x", ""}),
        (expression("Exists"), {"1", "2", "x"}),
        (expression("DoesNotExist"), {""}),
        (expression("Gt", "1"), {"2"}),
        (expression("Lt", "2"), {"1"}),
        (expression("Gt", "x"), set()),
        (expression("Near", "1"), set()),
        ({}, set()),
        (
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]},
            {"1", "2", "x", ""},
        ),
        (expression("Gt", "0_1"), set()),
        (expression("Lt", "9" * 5000), set()),
        ({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["b"]}]}, set()),
    ],
)
def test_node_affinity_is_matched_as_the_scheduler_does(term: Any, tiers: set[str]) -> None:
    matching = {
        tier
        for tier in ("1", "2", "x", "")
        if not reason_to_exclude(affinity(term), {"tier": tier} if tier else {})
    }
    assert matching == tiers
    assert not reason_to_exclude(affinity(term, expression("DoesNotExist", key="other")))


def test_all_lines_of_a_term_must_hold() -> None:
    both = {"matchExpressions": [*expression("In", "1")["matchExpressions"]] * 1}
    both["matchExpressions"] += expression("Exists", key="pool")["matchExpressions"]
    assert reason_to_exclude(affinity(both), {"tier": "1"}) == (
        "its node affinity requires tier in (1) and pool"
    )
    assert not reason_to_exclude(affinity(both), {"tier": "1", "pool": ""})


def test_the_selector_that_excludes_a_node_is_named() -> None:
    selector = {"nodeSelector": {"pool": "a"}}
    assert reason_to_exclude(selector, {"pool": "b"}) == "its node selector requires pool=a"
    assert not reason_to_exclude(selector, {"pool": "a"})


@pytest.mark.parametrize(
    ("toleration", "is_tolerated"),
    [
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "gpu", "value": "yes"}, True),
        ({"key": "gpu", "value": "yes", "effect": "NoSchedule"}, True),
        ({"key": "gpu", "value": "no"}, False),
        ({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "cpu", "operator": "Exists"}, False),
        ({"value": "yes"}, False),
        ({"key": "gpu", "operator": "Near", "value": "yes"}, False),
    ],
)
def test_taints_are_tolerated_as_by_the_scheduler(toleration: Any, is_tolerated: bool) -> None:  # noqa: FBT001 - a case
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    message = reason_to_exclude({"tolerations": [toleration]}, {}, taint)
    assert message == ("" if is_tolerated else "it does not tolerate taint gpu=yes:NoSchedule")


@pytest.mark.parametrize(
    ("operator", "value", "is_tolerated"),
    [
        ("Gt", "750", True),
        ("Gt", "950", False),
        ("Lt", "951", True),
        ("Lt", "750", False),
        ("Lt", "many", False),
    ],
)
def test_a_taint_is_tolerated_by_comparison(operator: str, value: str, is_tolerated: bool) -> None:  # noqa: FBT001 - a case
    toleration = {"key": "sla", "operator": operator, "value": value}
    taint = {"key": "sla", "value": "950", "effect": "NoSchedule"}
    assert (not reason_to_exclude({"tolerations": [toleration]}, {}, taint)) == is_tolerated


def test_own_taint_and_preferences_exclude_no_node() -> None:
    reconfiguring_taint = {"key": well_known.RECONFIGURING_TAINT, "effect": "NoSchedule"}
    soft = {"key": "soft", "effect": "PreferNoSchedule"}
    assert not reason_to_exclude({}, {}, reconfiguring_taint, soft)
    startup = {"key": "mig-manager.io/not-ready", "effect": "NoSchedule"}
    assert reason_to_exclude({}, {}, startup)


def test_a_cordon_excludes_pods_that_do_not_tolerate_it() -> None:
    taints = demand.parse_taints({"unschedulable": True})
    key = "node.kubernetes.io/unschedulable"
    assert taints == demand.parse_taints(
        {"unschedulable": True, "taints": [{"key": key, "effect": "NoSchedule"}]}
    )
    tolerant = {"tolerations": [{"key": key, "operator": "Exists"}]}
    for spec, message in (({}, "the node is cordoned"), (tolerant, "")):
        assert excluded_by(spec, {}, taints) == message


def test_a_malformed_pod_is_an_error_of_the_cluster() -> None:
    broken = pod("p", "1g.5gb", requests={"cpu": "much"})
    with pytest.raises(errors.ClusterError, match="from the Kubernetes API is malformed"):
        demand.parse(broken)
    with pytest.raises(errors.ClusterError):
        partitioned_nodes.parse({"metadata": {"name": "a"}, "spec": {"taints": [{}]}})


def test_a_quantity_can_be_counted_in_parts() -> None:
    assert [api_values.parse_quantity(text, parts=1000) for text in ("100m", "1", "0.0001")] == [
        100,
        1000,
        1,
    ]


def test_a_pod_may_ask_for_more_than_any_node_can_have() -> None:
    needy = pending(pod("p", "1g.5gb", requests={"cpu": "9E", "memory": "9E"}))
    assert dict(needy.needs.amounts)["cpu"] == 2**63 - 1
