import copy
from typing import Any

import pytest

from mig_manager.core.node import cluster
from mig_manager.sandbox.node import control_plane, node_options, objects

_OPERATOR = objects.plugin_daemon_set(node_options.DeployStyle.GPU_OPERATOR)
_PLAIN = objects.plugin_daemon_set(node_options.DeployStyle.PLAIN)
_GATED = {cluster.PLUGIN_DEPLOY_LABEL: "true"}


def with_uid(obj: objects.JsonObject, uid: str) -> objects.JsonObject:
    result = copy.deepcopy(obj)
    result["metadata"]["uid"] = uid
    return result


def node(
    labels: dict[str, str] | None = None, *taints: tuple[str, str], cordoned: bool = False
) -> dict[str, Any]:
    listed = [{"key": key, "effect": effect} for key, effect in taints]
    return {
        "metadata": {"name": "n1", "labels": labels or {}},
        "spec": {"taints": listed, "unschedulable": cordoned},
    }


@pytest.mark.parametrize(
    ("daemon_set", "where", "starts", "continues"),
    [
        (_OPERATOR, node(_GATED), True, True),
        (_OPERATOR, node(), False, False),
        (_OPERATOR, node({cluster.PLUGIN_DEPLOY_LABEL: cluster.PAUSED_VALUE}), False, False),
        (_PLAIN, node(), True, True),
        (_PLAIN, node(cordoned=True), True, True),
        (_PLAIN, node(None, ("nvidia.com/gpu", "NoSchedule")), True, True),
        (_PLAIN, node(None, (cluster.HOLD_TAINT, "NoSchedule")), False, True),
        (_PLAIN, node(None, ("sick", "NoExecute")), False, False),
        (_PLAIN, node(None, ("slow", "PreferNoSchedule")), True, True),
    ],
    ids=[
        "gate-open",
        "gate-missing",
        "gate-paused",
        "plain",
        "cordoned",
        "tolerated",
        "hold-taint",
        "no-execute",
        "prefer",
    ],
)
def test_selector_and_taints_decide_where_a_daemon_starts_and_stays(
    daemon_set: objects.JsonObject,
    where: dict[str, Any],
    starts: bool,  # noqa: FBT001 - columns of a table
    continues: bool,  # noqa: FBT001
) -> None:
    assert control_plane.should_start(daemon_set, where) is starts
    assert control_plane.should_continue(daemon_set, where) is continues


def test_a_daemon_is_bound_to_its_node_and_owned_by_its_daemon_set() -> None:
    daemon_set = with_uid(_PLAIN, "ds-uid")

    pod = control_plane.pod_for(daemon_set, node())
    other = control_plane.pod_for(daemon_set, node())

    assert pod["spec"]["nodeName"] == "n1"
    assert pod["metadata"]["labels"] == {"name": "nvidia-device-plugin-ds"}
    assert control_plane.owned(daemon_set, [pod]) == (pod,)
    assert objects.name(pod) != objects.name(other)


def test_the_status_counts_what_runs_where_it_should() -> None:
    daemon_set = with_uid(_PLAIN, "ds-uid")
    pod = with_uid(control_plane.pod_for(daemon_set, node()), "p1")
    pod["status"] = objects.running(pod, restarts=0)
    leaving = with_uid(control_plane.pod_for(daemon_set, node()), "p2")
    leaving["metadata"]["deletionTimestamp"] = objects.now_iso()

    found = control_plane.status(daemon_set, [node()], [pod, leaving])

    assert found["desiredNumberScheduled"] == 1
    assert found["currentNumberScheduled"] == 1
    assert found["numberReady"] == 1
    assert found["numberUnavailable"] == 0
