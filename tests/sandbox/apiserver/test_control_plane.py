"""Scheduler, DaemonSet controller and node lifecycle, as far as a simulated node needs them."""

import copy
from typing import Any

import pytest

from mig_manager.core.objects import well_known
from mig_manager.sandbox.apiserver import store
from mig_manager.sandbox.node import cluster_view, control_plane, manifests, objects
from testkit import apiserver
from tests.rigs import api_objects

_SMALL = "nvidia.com/mig-1g.5gb"
_OPERATOR = manifests.plugin_daemon_set(objects.DeployStyle.GPU_OPERATOR)
_PLAIN = manifests.plugin_daemon_set(objects.DeployStyle.PLAIN)


def node(labels: dict[str, str] | None = None, *, free: int = 1, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "n1", "labels": labels or {}},
        "spec": spec,
        "status": {"allocatable": {"cpu": "64", _SMALL: str(free)}},
    }


def node_with_taint(key: str, effect: str = "NoSchedule") -> dict[str, Any]:
    return node(taints=[{"key": key, "effect": effect}])


def pod(**spec: Any) -> objects.JsonObject:
    manifest = manifests.gpu_pod("p", _SMALL)
    manifest["spec"].update(spec)
    return manifest


@pytest.mark.parametrize(
    ("new_pod", "where", "expected"),
    [
        (pod(), node(), None),
        (pod(), node(free=0), f"insufficient {_SMALL}"),
        (pod(), node(unschedulable=True), "untolerated taint node.kubernetes.io/unschedulable"),
        (pod(), node_with_taint("hold"), "untolerated taint hold"),
        (pod(tolerations=[{"key": "hold", "operator": "Exists"}]), node_with_taint("hold"), None),
        (pod(nodeSelector={"zone": "a"}), node({"zone": "a"}), None),
        (pod(nodeSelector={"zone": "b"}), node(), "node selector does not match"),
    ],
    ids=["fits", "full", "cordoned", "tainted", "tolerated", "selected", "not-selected"],
)
def test_a_node_accepts_a_pod_or_gives_a_reason(
    new_pod: objects.JsonObject, where: dict[str, Any], expected: str | None
) -> None:
    assert control_plane.refusal(new_pod, where, []) == expected


def test_devices_of_pods_that_have_not_finished_are_not_free() -> None:
    running = pod(nodeName="n1")
    finished = copy.deepcopy(running) | {"status": {"phase": "Succeeded"}}

    assert control_plane.refusal(pod(), node(), [finished]) is None
    assert control_plane.refusal(pod(), node(), [running]) == f"insufficient {_SMALL}"


@pytest.mark.parametrize(
    ("daemon_set", "where", "starts_and_stays"),
    [
        (_OPERATOR, node({well_known.PLUGIN_DEPLOY_LABEL: "true"}), (True, True)),
        (_OPERATOR, node(), (False, False)),
        (
            _OPERATOR,
            node({well_known.PLUGIN_DEPLOY_LABEL: well_known.PAUSED_VALUE}),
            (False, False),
        ),
        (_PLAIN, node(), (True, True)),
        (_PLAIN, node(unschedulable=True), (True, True)),
        (_PLAIN, node_with_taint("nvidia.com/gpu"), (True, True)),
        (_PLAIN, node_with_taint(well_known.RECONFIGURING_TAINT), (False, True)),
        (_PLAIN, node_with_taint("sick", "NoExecute"), (False, False)),
        (_PLAIN, node_with_taint("slow", "PreferNoSchedule"), (True, True)),
    ],
    ids=[
        *("gate-open", "gate-missing", "gate-paused", "plain", "cordoned", "tolerated"),
        *("hold-taint", "no-execute", "prefer"),
    ],
)
def test_selector_and_taints_decide_where_a_daemon_starts_and_stays(
    daemon_set: objects.JsonObject, where: dict[str, Any], starts_and_stays: tuple[bool, bool]
) -> None:
    starts = control_plane.takes(daemon_set, where)
    stays = control_plane.takes(daemon_set, where, is_running=True)
    assert (starts, stays) == starts_and_stays


def test_daemon_set_owns_and_counts_its_pod_on_a_node() -> None:
    daemon_set = copy.deepcopy(_PLAIN)
    daemon_set["metadata"]["uid"] = "ds-uid"
    first, leaving = (control_plane.pod_for(daemon_set, node()) for _ in range(2))
    first["status"] = manifests.running(first, restarts=0)
    leaving["metadata"]["deletionTimestamp"] = store.timestamp()

    status = control_plane.status(daemon_set, [node()], [first, leaving])

    assert objects.node_name(first) == "n1"
    assert objects.labels(first) == {"name": "nvidia-device-plugin-ds"}
    assert objects.name(first) != objects.name(leaving)
    assert control_plane.pods_of_daemon_set(daemon_set, [first, pod()]) == (first,)
    assert (status["desiredNumberScheduled"], status["currentNumberScheduled"]) == (1, 1)
    assert (status["numberReady"], status["numberUnavailable"]) == (1, 0)


NEW = {"key": well_known.NOT_READY_TAINT, "effect": "NoSchedule"}
OTHER = {"key": "example.com/flaky", "effect": "NoSchedule"}


@pytest.mark.parametrize(("is_ready", "expected"), [(True, [OTHER]), (False, [NEW, OTHER])])
def test_ready_node_loses_the_taint_of_new_nodes_and_no_other(
    server: apiserver.ApiServer, expected: list[api_objects.Object], *, is_ready: bool
) -> None:
    status = {"conditions": [{"type": "Ready", "status": str(is_ready)}]}
    server.create(api_objects.a_node() | {"spec": {"taints": [NEW, OTHER]}, "status": status})

    with cluster_view.ClusterView(server.url) as view:
        control_plane.sync_nodes(view)
        (ready,) = view.list(cluster_view.WatchedKind.NODE)

    assert ready["spec"]["taints"] == expected
