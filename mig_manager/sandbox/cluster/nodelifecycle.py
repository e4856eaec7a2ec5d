"""The part of the node lifecycle controller that a new node waits for.

A real API server taints every new node as not ready; the taint goes when kubelet says Ready.
"""

from mig_manager.sandbox.cluster import objects, view

NOT_READY_TAINT = "node.kubernetes.io/not-ready"


class NodeLifecycle:
    """Takes the taint of new nodes off those that are ready.

    Args:
        cluster: Where the nodes are.
    """

    def __init__(self, cluster: view.ClusterView) -> None:
        self._cluster = cluster

    def sync(self) -> None:
        """Do so for every node, once.

        Raises:
            ClusterError: The API refused or does not answer; what was done stays done.
        """
        for node in self._cluster.list(view.Kind.NODE):
            taints = (node.get("spec") or {}).get("taints") or ()
            others = [taint for taint in taints if taint["key"] != NOT_READY_TAINT]
            if len(others) < len(taints) and objects.is_ready(node):
                # The version guards what others write into the same list meanwhile.
                version = {"resourceVersion": str(objects.version(node))}
                change = {"metadata": version, "spec": {"taints": others}}
                self._cluster.patch(view.Kind.NODE, node, change)
