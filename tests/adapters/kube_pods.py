"""Pods as the API has them."""

from typing import Any

GPU = "nvidia.com/mig-1g.10gb"


def container(name: str = "main", *, gpus: int = 0, **fields: Any) -> dict[str, Any]:
    amounts = {GPU: str(gpus), "cpu": "100m"} if gpus else {}
    return {"name": name, "resources": {"limits": amounts, "requests": amounts}, **fields}


def make_pod(
    name: str = "p1", *, node: str = "n1", phase: str = "Running", **spec: Any
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", "labels": {"a": name}},
        "spec": {"nodeName": node, "containers": [container()], **spec},
        "status": {"phase": phase, "startTime": "2026-01-02T03:04:05Z"},
    }
