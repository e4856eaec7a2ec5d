"""Which nodes a command is about, and how each of them stands."""

import dataclasses
import datetime as dt
import http
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.adapters import kubectl
from mig_manager.core import messages
from mig_manager.core.fleet import node_report
from mig_manager.core.layout import config
from mig_manager.core.node import cluster

_NODES = "/api/v1/nodes"
_PODS = "/api/v1/pods"
_EVENTS = "/api/v1/namespaces/default/events"
"""Events about objects without a namespace live here, by validation of the API server."""
_MOST_ONE_BY_ONE = 10
"""Nodes whose pods are asked for node by node; for more, all pods of the cluster are listed."""
_COMPONENT = "mig-manager"
_MAX_MESSAGE = 1024
CONFIG_MAPS = (
    ("mig-manager", "mig-manager-config"),
    ("gpu-operator", "mig-manager-config"),
    ("gpu-operator", "default-mig-parted-config"),
)
"""Where layouts are: by our manifests, with the GPU operator, and the operator's own."""
_DOCUMENT_KEY = "config.yaml"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One Event about a node."""

    at: dt.datetime | None
    reason: str
    message: str
    is_warning: bool
    count: int


class Cluster:
    """The cluster as its viewer may see it."""

    def __init__(self, api: kubectl.Kubectl) -> None:
        self._api = api

    def node(self, name: str) -> node_report.Node:
        """Return a node.

        Raises:
            ClusterError: It is not there (404), or the API refused or does not answer.
        """
        return read(self._api.get(f"{_NODES}/{urllib.parse.quote(name, safe='')}"))

    def selected(self, selector: str | None) -> Iterator[node_report.Node]:
        """Return the nodes that a selector selects; None: all.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        query = {"labelSelector": selector} if selector else None
        return map(read, self._api.items(_NODES, query))

    def pods(self, names: Sequence[str]) -> Mapping[str, tuple[cluster.Pod, ...]]:
        """Return the pods of nodes that ask for GPUs, by the node's name.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        found: dict[str, list[cluster.Pod]] = {name: [] for name in names}
        if len(names) > _MOST_ONE_BY_ONE:
            queries = [{"fieldSelector": "spec.nodeName!="}]
        else:
            queries = [{"fieldSelector": f"spec.nodeName={name}"} for name in names]
        for query in queries:
            for name, pods in read_pods(self._api.items(_PODS, query), names).items():
                found[name] += pods
        return {name: tuple(pods) for name, pods in found.items()}

    def events(self, node_name: str) -> tuple[Event, ...]:
        """Return the agent's Events about a node, in no order.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        query = {"fieldSelector": f"involvedObject.kind=Node,involvedObject.name={node_name}"}
        with cluster.understood("the list of Events"):
            return tuple(
                _event(item)
                for item in self._api.items(_EVENTS, query)
                if _COMPONENT in (item.get("reportingComponent"), _source(item))
            )

    def document(self, config_map: tuple[str, str] | None) -> config.Document:
        """Return the layouts.

        Args:
            config_map: Namespace and name of the ConfigMap; None: the first there is of those
                that are usual.

        Raises:
            ClusterError: The API refused or does not answer.
            ConfigError: The ConfigMap's document is not good.
            UsageError: None of the usual ones is there.
        """
        for namespace, name in (config_map,) if config_map else CONFIG_MAPS:
            try:
                found = self._api.get(
                    f"/api/v1/namespaces/{urllib.parse.quote(namespace, safe='')}"
                    f"/configmaps/{urllib.parse.quote(name, safe='')}"
                )
            except errors.ClusterError as error:
                if error.status == http.HTTPStatus.NOT_FOUND and not config_map:
                    continue
                raise
            return _document(found, f"ConfigMap {namespace}/{name}")
        tried = ", ".join("/".join(each) for each in CONFIG_MAPS)
        raise errors.UsageError(
            f"there is no ConfigMap with layouts ({tried}); name one with --config-map, or a file "
            "with -f"
        )


def read(item: Mapping[str, Any]) -> node_report.Node:
    """Return what a viewer wants to know of a Node object.

    Raises:
        ClusterError: It is not a Node object.
    """
    view = cluster.parse_node(item)
    with cluster.understood(f"node {view.name}"):
        conditions = (item.get("status") or {}).get("conditions") or ()
        is_ready = any(
            each.get("type") == "Ready" and each.get("status") == "True" for each in conditions
        )
        wished_by, wished_at = _wisher(item["metadata"])
    return node_report.Node(view=view, is_ready=is_ready, wished_by=wished_by, wished_at=wished_at)


def read_pods(
    items: Iterable[Mapping[str, Any]], names: Sequence[str]
) -> Mapping[str, tuple[cluster.Pod, ...]]:
    """Return the pods that ask for GPUs on these nodes, by the node's name.

    Raises:
        ClusterError: One is not a Pod object.
    """
    found: dict[str, list[cluster.Pod]] = {name: [] for name in names}
    for item in items:
        with cluster.understood("the list of pods"):
            bound, pod = str(item["spec"].get("nodeName")), cluster.parse_pod(item)
        if bound in found and (pod.gpu_resources or pod.has_claims):
            found[bound].append(pod)
    return {name: tuple(pods) for name, pods in found.items()}


def _wisher(metadata: Mapping[str, Any]) -> tuple[str, dt.datetime | None]:
    """Return whose the label is, as the API server keeps it (``managedFields``)."""
    for entry in metadata.get("managedFields") or ():
        owned = (entry.get("fieldsV1") or {}).get("f:metadata") or {}
        if f"f:{cluster.CONFIG_LABEL}" in (owned.get("f:labels") or {}):
            who = messages.printable(str(entry.get("manager") or ""))
            return who, messages.parse_time(entry.get("time"))
    return "", None


def _source(item: Mapping[str, Any]) -> object:
    return (item.get("source") or {}).get("component")


def _event(item: Mapping[str, Any]) -> Event:
    series = item.get("series") or {}
    moments = (
        series.get("lastObservedTime"),
        item.get("lastTimestamp"),
        item.get("eventTime"),
        item["metadata"].get("creationTimestamp"),
    )
    count = series.get("count") or item.get("count") or 1
    return Event(
        at=next(filter(None, map(messages.parse_time, moments)), None),
        reason=messages.printable(str(item.get("reason") or "")),
        message=messages.printable(str(item.get("message") or "")[:_MAX_MESSAGE], " "),
        is_warning=item.get("type") == "Warning",
        count=int(count),
    )


def _document(config_map: Mapping[str, Any], source: str) -> config.Document:
    with cluster.understood(source):
        data = cluster.strings(config_map.get("data"))
    if _DOCUMENT_KEY in data:
        text = data[_DOCUMENT_KEY]
    elif len(data) == 1:
        text = next(iter(data.values()))
    else:
        raise errors.ConfigError(f"{source} has no entry {_DOCUMENT_KEY}")
    return config.parse(text, source=source)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was asked for on the command line."""

    names: tuple[str, ...]
    """Empty: see ``selector``."""
    selector: str | None
    """None: all nodes with GPUs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of nodes, or why they are not known."""

    by_node: Mapping[str, tuple[cluster.Pod, ...]] | None
    why_not: str = ""

    def of(self, name: str) -> tuple[cluster.Pod, ...] | None:
        """Return the pods of a node that ask for GPUs; None when they are not known."""
        return None if self.by_node is None else self.by_node.get(name, ())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The nodes that a command is about."""

    reports: tuple[node_report.Report, ...]
    """How each stands; by name, never empty."""
    missing: tuple[str, ...]
    """What was said of nodes that are not there."""

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes that are there."""
        return tuple(report.node.view.name for report in self.reports)


def find(seen: Cluster, selection: Selection, *, now: dt.datetime) -> Found:
    """Look how the selected nodes stand.

    Raises:
        ClusterError: None of the nodes named is there, or the API refused or does not answer.
        UsageError: Nodes are given by name and by selector, or nothing is selected.
    """
    if selection.names and selection.selector:
        raise errors.UsageError("name nodes or select them with -l, not both")
    missing: list[str] = []
    if selection.names:
        nodes = _named(seen, selection.names, missing)
    else:
        found = seen.selected(selection.selector)
        # Who selects by hand gets what was selected.
        nodes = [node for node in found if selection.selector or node.is_about_gpus]
    if not nodes:
        what = f"selector {selection.selector!r}" if selection.selector else "NVIDIA GPUs"
        raise errors.UsageError(f"the cluster has no node with {what}")
    ordered = sorted(nodes, key=lambda node: node.view.name)
    return Found(
        reports=tuple(node_report.judge(node, now) for node in ordered), missing=tuple(missing)
    )


def _named(seen: Cluster, names: Sequence[str], missing: list[str]) -> list[node_report.Node]:
    nodes: list[node_report.Node] = []
    for name in dict.fromkeys(names):
        try:
            nodes.append(seen.node(name))
        except errors.ClusterError as error:
            if error.status != http.HTTPStatus.NOT_FOUND or len(names) == 1:
                raise
            missing.append(error.message)
    if not nodes:
        raise errors.ClusterError("; ".join(missing), reason=errors.Reason.API_ERROR)
    return nodes


def pods(seen: Cluster, names: Sequence[str]) -> Pods:
    """Return the pods of nodes; without the right to list them, why they are not known."""
    try:
        return Pods(by_node=seen.pods(names))
    except errors.ClusterError as error:
        return Pods(by_node=None, why_not=error.message)
