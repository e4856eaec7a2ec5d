"""The table of extra GPU clients: daemons of the node's owner that must be gone during a change.

    version: v1
    clients:
    - labels: {app: gpu-watcher}                        # pods with all of these labels
      namespace: monitoring                             # optional; DaemonSets anywhere without it
      deploy-label: nvidia.com/gpu.deploy.gpu-watcher   # optional

With ``deploy-label`` the daemon's DaemonSet selects nodes by that label's value ``true``, and the
daemon is paused and resumed through it like the operands of the GPU operator. Without it the pods
are deleted, and a taint keeps their successors away until the device plugin comes back; a daemon
that tolerates every taint returns too early, and is deleted once more after the change.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core import fields, yaml_tree
from mig_manager.core.node import cluster

VERSION = "v1"

_DOCUMENT_KEYS = ("version", "clients")
_CLIENT_KEYS = ("labels", "namespace", "deploy-label")
_EXAMPLE = "{app: gpu-watcher}"
_DEPLOY_LABEL = re.compile(
    re.escape(cluster.DEPLOY_LABEL_PREFIX) + r"[A-Za-z0-9._-]{0,51}[A-Za-z0-9]"
)
"""63 characters are all that may follow the slash, and the prefix takes some of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExtraClient:
    """One daemon."""

    labels: Mapping[str, str]
    namespace: str | None = None
    """None: any, but then only pods of DaemonSets: others may have the same labels."""
    deploy_label: str | None = None
    """The node label that places it; None: its pods are deleted."""

    def matches(self, pod: cluster.Pod) -> bool:
        """Tell whether a pod is this daemon's."""
        is_in_place = (
            pod.owner_kind == "DaemonSet"
            if self.namespace is None
            else pod.namespace == self.namespace
        )
        return is_in_place and self.labels.items() <= pod.labels.items()


def members(pods: Iterable[cluster.Pod], table: Sequence[ExtraClient]) -> tuple[cluster.Pod, ...]:
    """Return the pods that belong to any of the daemons."""
    return tuple(pod for pod in pods if any(client.matches(pod) for client in table))


def parse(text: str, *, source: str) -> tuple[ExtraClient, ...]:
    """Read a table; an empty one has no clients.

    Args:
        text: YAML or JSON.
        source: Name of the file for error messages.

    Raises:
        ConfigError: The table breaks the format; the message says where and what is right.
    """
    root = yaml_tree.parse(text, source=source)
    if root is None or fields.is_null(root):
        return ()
    if not isinstance(root, yaml_tree.Mapping):
        fields.fail(root, f"expected a mapping with 'version: {VERSION}' and 'clients'")
    fields.check_keys(root, _DOCUMENT_KEYS)
    version = fields.required(root, "version", example=VERSION)
    if _text(version, "version") != VERSION:
        fields.fail(version, f"version must be the text {VERSION}, not {fields.shown(version)}")
    clients = root.get("clients")
    if clients is None or fields.is_null(clients):
        return ()
    if not isinstance(clients, yaml_tree.Sequence):
        fields.fail(clients, f"clients must be a list, not {fields.shown(clients)}")
    return tuple(_client(item) for item in clients.items)


def _client(node: yaml_tree.Node) -> ExtraClient:
    if not isinstance(node, yaml_tree.Mapping):
        fields.fail(node, f"a client is a mapping with 'labels', not {fields.shown(node)}")
    fields.check_keys(node, _CLIENT_KEYS)
    labels = fields.required(node, "labels", example=_EXAMPLE)
    # No labels at all would mean every pod of the node.
    if not (isinstance(labels, yaml_tree.Mapping) and labels.entries):
        fields.fail(labels, f"labels must be a mapping such as {_EXAMPLE}")
    namespace, deploy = node.get("namespace"), node.get("deploy-label")
    return ExtraClient(
        labels={entry.key: _text(entry.value, f"label '{entry.key}'") for entry in labels.entries},
        namespace=None if namespace is None else _text(namespace, "namespace"),
        deploy_label=None if deploy is None else _deploy_label(deploy),
    )


def _deploy_label(node: yaml_tree.Node) -> str:
    key = _text(node, "deploy-label")
    if not _DEPLOY_LABEL.fullmatch(key):
        fields.fail(
            node,
            f"deploy-label must begin with '{cluster.DEPLOY_LABEL_PREFIX}' and be a label's key, "
            f"not {fields.shown(node)}",
        )
    return key


def _text(node: yaml_tree.Node, what: str) -> str:
    if not (isinstance(node, yaml_tree.Scalar) and isinstance(node.value, str)):
        fields.fail(node, f"{what} must be a text, in quotes if need be, not {fields.shown(node)}")
    return node.value
