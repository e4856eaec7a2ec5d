"""What our credentials may do, by the API server's own word; asking changes nothing."""

from typing import Any

from mig_manager.adapters.kubernetes import api
from mig_manager.core.node import cluster, rights

_PATH = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def may(kube: api.KubeApi, right: rights.Right, *, name: str = "") -> bool:
    """Ask by a SelfSubjectAccessReview, which every account may by default.

    Args:
        kube: The API.
        right: What is to be done, in all namespaces.
        name: To which object; empty: to any.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    attributes: dict[str, Any] = {
        "group": right.group,
        "resource": right.resource,
        "subresource": right.subresource,
        "verb": right.verb,
    }
    if name:
        attributes["name"] = name
    answer = kube.post(
        _PATH,
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        },
    )
    with cluster.understood("the review of our rights"):
        return answer["status"]["allowed"] is True
