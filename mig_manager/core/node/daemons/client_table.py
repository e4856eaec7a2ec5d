"""The table of GPU clients beside NVIDIA's, which are paused or deleted for a change.

    version: v1
    clients:
    - labels: {app: gpu-watcher}                        # pods with all of these labels
      namespace: monitoring                             # optional; DaemonSets anywhere without it
      deploy-label: nvidia.com/gpu.deploy.gpu-watcher   # optional

With ``deploy-label`` the daemon's DaemonSet selects nodes by that label's value ``true``. The
daemon is paused and resumed like the operands of the GPU operator. Without it the pods are
deleted, and a taint keeps their successors away until the device plugin runs again. A daemon that
tolerates every taint returns too early, and is deleted once more after the change.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core.files import yaml_fields, yaml_tree
from mig_manager.core.objects import pod_object, well_known

VERSION = "v1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExtraClient:
    """One daemon of the table."""

    labels: Mapping[str, str]
    namespace: str | None = None
    """None: any, but only pods of DaemonSets: others may have the same labels."""
    deploy_label: str | None = None
    """The node label that selects its nodes; None: its pods are deleted."""

    def matches(self, pod: pod_object.Pod) -> bool:
        """Return whether a pod belongs to this daemon."""
        if self.namespace is None and pod.owner_kind != "DaemonSet":
            return False
        is_in_namespace = self.namespace in (None, pod.namespace)
        return is_in_namespace and self.labels.items() <= pod.labels.items()


def members(pods: Iterable[pod_object.Pod], table: Sequence[ExtraClient]) -> pod_object.Pods:
    """Return the pods that belong to any of the clients."""
    return tuple(pod for pod in pods if any(client.matches(pod) for client in table))


def parse(text: str, *, source: str) -> tuple[ExtraClient, ...]:
    """Parse a table, which may be empty; ConfigError with a correction if invalid."""
    root = yaml_fields.document(text, source=source, section="clients", version=VERSION)
    listed = yaml_fields.items(root.get("clients") if root else None, "clients")
    return tuple(map(_client, listed))


def _client(item: yaml_tree.Node) -> ExtraClient:
    node = yaml_fields.mapping(item, "a client is a mapping with 'labels'")
    yaml_fields.check_keys(node, ("labels", "namespace", "deploy-label"))
    example = "{app: gpu-watcher}"
    labels = yaml_fields.require(node, "labels", example=example)
    # Without labels, the client would be every pod of the node.
    if not (isinstance(labels, yaml_tree.Mapping) and labels.entries):
        yaml_fields.fail(labels, f"labels must be a mapping such as {example}")
    namespace, deploy = node.get("namespace"), node.get("deploy-label")
    deploy_label = None if deploy is None else _text(deploy, "deploy-label")
    if deploy is not None and not well_known.is_deploy_label(deploy_label or ""):
        yaml_fields.fail(
            deploy,
            f"deploy-label must begin with '{well_known.DEPLOY_LABEL_PREFIX}' and be a label's "
            f"key, not {yaml_fields.shown(deploy)}",
        )
    return ExtraClient(
        labels={entry.key: _text(entry.value, f"label '{entry.key}'") for entry in labels.entries},
        namespace=None if namespace is None else _text(namespace, "namespace"),
        deploy_label=deploy_label,
    )


def _text(node: yaml_tree.Node, what: str) -> str:
    if not (isinstance(node, yaml_tree.Scalar) and isinstance(node.value, str)):
        yaml_fields.fail(node, f"{what} must be a text in quotes, not {yaml_fields.shown(node)}")
    return node.value
