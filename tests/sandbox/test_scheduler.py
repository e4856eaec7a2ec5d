import copy
from typing import Any

import pytest

from mig_manager.sandbox.node import control_plane, objects

_SMALL = "nvidia.com/mig-1g.5gb"


def node(*, allocatable: int = 1, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "n1", "labels": {"zone": "a"}},
        "spec": spec,
        "status": {"allocatable": {"cpu": "64", _SMALL: str(allocatable)}},
    }


def pod(**spec: Any) -> objects.JsonObject:
    manifest = objects.gpu_pod("p", _SMALL)
    manifest["spec"].update(spec)
    return manifest


_TAINT = {"key": "hold", "effect": "NoSchedule"}
_TOLERATION = {"key": "hold", "operator": "Exists"}


@pytest.mark.parametrize(
    ("wanted", "where", "expected"),
    [
        (pod(), node(), None),
        (pod(), node(allocatable=0), f"insufficient {_SMALL}"),
        (pod(), node(unschedulable=True), "untolerated taint node.kubernetes.io/unschedulable"),
        (pod(), node(taints=[_TAINT]), "untolerated taint hold"),
        (pod(tolerations=[_TOLERATION]), node(taints=[_TAINT]), None),
        (pod(nodeSelector={"zone": "a"}), node(), None),
        (pod(nodeSelector={"zone": "b"}), node(), "node selector does not match"),
    ],
    ids=["fits", "full", "cordoned", "tainted", "tolerated", "selected", "not-selected"],
)
def test_a_node_takes_a_pod_unless_it_says_why_not(
    wanted: objects.JsonObject, where: dict[str, Any], expected: str | None
) -> None:
    assert control_plane.refusal(wanted, where, []) == expected


def test_devices_of_pods_that_have_not_finished_are_not_free() -> None:
    running = pod(nodeName="n1")
    finished = copy.deepcopy(running) | {"status": {"phase": "Succeeded"}}

    assert control_plane.refusal(pod(), node(), [finished]) is None
    assert control_plane.refusal(pod(), node(), [running]) == f"insufficient {_SMALL}"


def test_the_hungriest_init_container_counts_if_it_needs_more_than_all_others() -> None:
    container = pod()["spec"]["containers"][0]
    hungry = copy.deepcopy(container)
    hungry["resources"]["limits"][_SMALL] = "3"

    assert objects.gpu_requests(pod(initContainers=[hungry])) == {_SMALL: 3}
    sidecar = {**container, "restartPolicy": "Always"}
    assert objects.gpu_requests(pod(initContainers=[sidecar])) == {_SMALL: 2}
