"""Many nodes at once, for a person's commands: follow them by a selector, and label them.

Level-triggered, like the agent's own watch: whatever goes wrong, all nodes are listed anew.
"""

import http
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, node, watch
from mig_manager.core.fleet import nodes as fleet_nodes
from mig_manager.core.node import cluster

_NODES = "/api/v1/nodes"
_PAGE = 500
_MOST_PAGES = 1000
"""More pages than this are a server that repeats itself."""
_PACE = watch.Pace(watch_s=30.0, stall_s=40.0, steady_s=5.0, first_wait_s=0.2, longest_wait_s=10.0)
"""Short, for a connection that died in silence shows an old picture until the watch is over."""

_log = structlog.get_logger()


class Fleet:
    """The nodes that a selector names, as they are now; for one reader and one writer."""

    def __init__(self, kube: api.KubeApi, *, selector: str, pace: watch.Pace = _PACE) -> None:
        """Prepare to follow; nothing is sent yet.

        Args:
            kube: The API.
            selector: Of labels, as ``kubectl -l`` takes it.
            pace: How long a watch lasts and how it waits.
        """
        self._kube = kube
        self._changed = threading.Condition()
        self._nodes: dict[str, fleet_nodes.Node] = {}
        self._has_news = False
        self._trouble = ""
        followed = watch.Collection(path=_NODES, selector={"labelSelector": selector}, what="node")
        self._watch = watch.Watch(kube, followed, self, name="fleet", pace=pace)

    def start(self) -> None:
        """List the nodes, and follow them from now on.

        Raises:
            ClusterError: The API refused, does not answer, or cannot read the selector.
        """
        self._watch.list()
        self._watch.start()

    def close(self) -> None:
        """Follow no longer."""
        self._watch.end()

    @property
    def trouble(self) -> str:
        """Why changes of the nodes do not reach us now; empty: they do."""
        return self._trouble

    def nodes(self) -> tuple[fleet_nodes.Node, ...]:
        """Return the nodes as they are now."""
        with self._changed:
            self._has_news = False
            return tuple(self._nodes.values())

    def wait(self, seconds: float) -> None:
        """Sleep, and wake when a node has changed since ``nodes``."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_news, timeout=seconds)

    def ask(
        self, seen: fleet_nodes.Node, layout: str | None, mark: fleet_nodes.Mark | None
    ) -> bool:
        """Have a node's label ask for a layout, if the node is still as it was seen.

        Args:
            seen: The node.
            layout: What to ask for; None: remove the label.
            mark: What to write down for the way back; None: remove it.

        Returns:
            False when it has changed since, or is gone: look again.

        Raises:
            ClusterError: The API refused or does not answer; it may be done all the same.
        """
        text = mark.to_json() if mark else None
        change = {
            "metadata": {
                "resourceVersion": seen.version,
                "labels": {cluster.CONFIG_LABEL: layout},
                "annotations": {cluster.ROLLOUT_ANNOTATION: text},
            }
        }
        try:
            self._kube.patch(node.path(seen.name), change, kind=api.PatchType.MERGE)
        except errors.ClusterError as error:
            if error.status in (http.HTTPStatus.CONFLICT, http.HTTPStatus.NOT_FOUND):
                return False
            raise
        return True

    def listed(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Take all nodes; see ``watch.Listener``."""
        found = {seen.name: seen for seen in map(read, items)}
        with self._changed:
            self._nodes = found
            self._note()
        self._trouble = ""

    def changed(self, kind: str, item: Mapping[str, Any]) -> None:
        """Take one node; see ``watch.Listener``."""
        seen = read(item)
        with self._changed:
            if kind == "DELETED":
                self._nodes.pop(seen.name, None)
            else:
                self._nodes[seen.name] = seen
            self._note()

    def opened(self) -> None:
        """Trust what we hold again; see ``watch.Listener``."""
        self._trouble = ""

    def lost(self, error: Exception) -> None:
        """Say that what we hold may be old; see ``watch.Listener``."""
        if isinstance(error, errors.ClusterError):
            self._trouble = error.message
        else:
            _log.exception("fleet_watch_error")
            self._trouble = f"internal error: {type(error).__name__}: {error}"

    def _note(self) -> None:
        self._has_news = True
        self._changed.notify_all()


def read(item: Mapping[str, Any]) -> fleet_nodes.Node:
    """Return what a rollout wants to know of a Node object.

    Raises:
        ClusterError: It is not a Node object.
    """
    seen = cluster.parse_node(item)
    with cluster.understood("the node"):
        conditions = (item.get("status") or {}).get("conditions") or ()
        is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
        version = str(item["metadata"]["resourceVersion"])
    return fleet_nodes.Node(
        name=seen.name,
        version=version,
        wanted=seen.labels.get(cluster.CONFIG_LABEL) or None,
        state=seen.labels.get(cluster.STATE_LABEL, ""),
        applied=seen.labels.get(cluster.APPLIED_LABEL, ""),
        is_ready=is_ready,
        is_cordoned=seen.is_unschedulable or cluster.HOLD_TAINT in seen.taint_keys,
        told=fleet_nodes.told(seen.annotations.get(cluster.STATUS_ANNOTATION)),
        mark=fleet_nodes.mark(seen.annotations.get(cluster.ROLLOUT_ANNOTATION)),
        gpus=seen.annotations.get(cluster.GPUS_ANNOTATION, ""),
        allocatable=seen.allocatable,
    )


def pods_by_node(kube: api.KubeApi) -> dict[str, list[cluster.Pod]]:
    """Return the pods that use GPUs, by the node they are bound to.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    found: dict[str, list[cluster.Pod]] = {}
    query = {"limit": str(_PAGE)}
    for _ in range(_MOST_PAGES):
        page = kube.get("/api/v1/pods", query)
        with cluster.understood("the list of pods"):
            for item in page["items"] or ():
                where = str(item["spec"].get("nodeName") or "")
                pod = cluster.parse_pod(item)
                if where and (pod.gpu_resources or pod.has_claims) and not pod.is_finished:
                    found.setdefault(where, []).append(pod)
            token = (page.get("metadata") or {}).get("continue")
        if not token:
            return found
        query["continue"] = str(token)
    raise errors.ClusterError("the list of pods does not end", reason=errors.Reason.API_ERROR)


def config_text(kube: api.KubeApi, *, namespace: str, name: str) -> str | None:
    """Return the config document in a ConfigMap; None where there is none.

    Raises:
        ClusterError: The API refused or does not answer, or there is no document in it.
    """
    try:
        found = kube.get(f"/api/v1/namespaces/{namespace}/configmaps/{name}")
    except errors.ClusterError as error:
        if error.status == http.HTTPStatus.NOT_FOUND:
            return None
        raise
    with cluster.understood(f"ConfigMap {namespace}/{name}"):
        return str(found["data"]["config.yaml"])
