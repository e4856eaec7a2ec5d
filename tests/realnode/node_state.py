"""What stories check from outside once a change has ended."""

import dataclasses
from collections.abc import Iterable

from tests.realnode import contract_keys, real_cluster
from tests.rigs import api_objects, waiting


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """What a running pod has; equal for as long as nothing disturbed it."""

    uid: str
    containers: tuple[tuple[str, int], ...]  # each container's id and count of restarts
    devices: tuple[tuple[str, int], ...]
    """UUID of each device that kubelet assigned, and the serial number of its GPU instance."""


def use(cluster: real_cluster.RealCluster, *workloads: str) -> dict[str, Use]:
    """Return what the running pods of some workloads have, by name of the pod."""
    assigned, serials = cluster.node.devices_by_uid(), cluster.driver.serials()
    return {
        pod["metadata"]["name"]: Use(
            uid=pod["metadata"]["uid"],
            containers=tuple(
                (each["containerID"], each["restartCount"])
                for each in pod["status"]["containerStatuses"]
            ),
            devices=tuple(
                (device, serials[device])
                for device in sorted(assigned.get(pod["metadata"]["uid"], ()))
            ),
        )
        for workload in workloads
        for pod in cluster.pods(app=workload)
        if real_cluster.is_running(pod)
    }


def assert_at_rest(cluster: real_cluster.RealCluster, name: str = real_cluster.NODE) -> None:
    """Check that a node is as its owner wants it, with plugin and agent running."""
    assert_released(cluster, name)
    waiting.until(lambda: is_served(cluster, name), f"plugin and agent of {name}")


def assert_released(cluster: real_cluster.RealCluster, name: str = real_cluster.NODE) -> None:
    """Check that nothing of a change keeps pods or operands from a node."""
    node = cluster.get("node", name)
    spec, metadata = node["spec"], node["metadata"]
    assert contract_keys.RECONFIGURING_TAINT not in [
        taint["key"] for taint in spec.get("taints", [])
    ]
    assert not spec.get("unschedulable", False)
    assert contract_keys.JOURNAL_ANNOTATION not in metadata.get("annotations", {})
    labels = metadata["labels"].items()
    assert [
        key
        for key, value in labels
        if key.startswith(contract_keys.DEPLOY_PREFIX) and value == contract_keys.PAUSED_VALUE
    ] == []


def is_served(cluster: real_cluster.RealCluster, name: str = real_cluster.NODE) -> bool:
    """Check whether exactly one plugin and one agent run on a node, and both are ready."""
    every = (plugins(cluster, name), agents(cluster, name))
    return all([_is_ready(pod) for pod in pods] == [True] for pods in every)


def plugins(
    cluster: real_cluster.RealCluster, name: str = real_cluster.NODE
) -> list[api_objects.Object]:
    """Return the device plugin's pods on a node, those that end included."""
    return _on(name, cluster.pods("kube-system", name="nvidia-device-plugin-ds"))


def agents(
    cluster: real_cluster.RealCluster, name: str = real_cluster.NODE
) -> list[api_objects.Object]:
    """Return the agent's pods on a node, those that end included."""
    return _on(name, cluster.pods("mig-manager", **{"app.kubernetes.io/name": "mig-manager"}))


def containers(pods: Iterable[api_objects.Object]) -> list[str]:
    """Return the ids of the containers of pods that run, as the container runtime has them."""
    return [
        each["containerID"].rpartition("/")[2]
        for pod in pods
        for each in pod["status"].get("containerStatuses", ())
        if "running" in each["state"]
    ]


def is_terminating(pod: api_objects.Object) -> bool:
    """Check whether a pod was deleted or evicted and has not ended yet."""
    return "deletionTimestamp" in pod["metadata"]


def _on(name: str, pods: Iterable[api_objects.Object]) -> list[api_objects.Object]:
    return [pod for pod in pods if pod["spec"].get("nodeName") == name]


def _is_ready(pod: api_objects.Object) -> bool:
    statuses = pod["status"].get("containerStatuses", ())
    return not is_terminating(pod) and bool(statuses) and all(one["ready"] for one in statuses)
