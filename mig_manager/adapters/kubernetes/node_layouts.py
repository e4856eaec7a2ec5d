"""The ConfigMap ``NODE-mig-config`` with the layouts of one node.

Name, labels, key and owner are as from NVIDIA's agent (mig-parted v0.15,
``cmd/nvidia-mig-manager/main.go``): the agent's pod owns it, so that it is deleted with the pod.
"""

import structlog

from mig_manager import errors
from mig_manager.adapters import rest
from mig_manager.adapters.kubernetes import api, missing_rights
from mig_manager.core import timing
from mig_manager.core.objects import api_values

_HEADER = "# Written by mig-manager: the layouts that can be requested of this node.\n"

_log = structlog.get_logger()


class KubeNodeLayouts:
    """Writes the ConfigMap of one node."""

    def __init__(
        self,
        kube: api.KubeApi,
        clock: timing.Clock,
        *,
        node_name: str,
        namespace: str,
        pod_name: str,
        pod_uid: str | None,
    ) -> None:
        """Prepare; without ``pod_uid`` the first ``write`` reads the owning pod."""
        self._kube = kube
        self._node = node_name
        self._path = rest.api_path("/api/v1/namespaces", namespace)
        self._pod_name = pod_name
        self._pod_uid = pod_uid
        self._right = missing_rights.MissingRight(clock, _log_failure)

    def write(self, document: str) -> bool:
        """Replace the document; return whether that succeeded. A refusal is logged, not raised."""
        if self._right.is_missing:
            return False
        try:
            self._write(document)
        except errors.ClusterError as error:
            if not self._right.is_refusal(error):
                _log_failure(error)
            return False
        return True

    def _write(self, document: str) -> None:
        name = f"{self._node}-mig-config"
        owner = {"apiVersion": "v1", "kind": "Pod", "name": self._pod_name, "uid": self._uid()}
        config_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": name,
                "labels": {
                    "app.kubernetes.io/component": "nvidia-mig-manager",
                    "nvidia.com/node-name": self._node,
                },
                "ownerReferences": [owner],
            },
            "data": {"config.yaml": f"{_HEADER}{document}"},
        }
        config_maps = f"{self._path}/configmaps"
        try:
            self._kube.post(config_maps, config_map)
        except errors.ClusterError as exists:
            if not exists.is_conflict:
                raise
            try:
                self._kube.patch(rest.api_path(config_maps, name), config_map)
            except errors.ClusterError as gone:
                if not gone.is_not_found:
                    raise
                # The garbage collector has removed it with the previous agent's pod.
                self._kube.post(config_maps, config_map)

    def _uid(self) -> str:
        if self._pod_uid is None:
            pod = self._kube.get(rest.api_path(self._path, "pods", self._pod_name))
            with api_values.as_cluster_error("our own pod"):
                self._pod_uid = str(pod["metadata"]["uid"])
        return self._pod_uid


def _log_failure(error: errors.ClusterError) -> None:
    _log.info("node_layouts_not_written", reason=error.reason.value, detail=error.message)
