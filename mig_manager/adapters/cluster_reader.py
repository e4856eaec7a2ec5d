"""Read nodes, their pods, Events and layouts from a cluster, for commands.

The transport is a parameter. ``rollout`` watches and writes for hours with the Kubernetes library.
The plugin runs its user's ``kubectl``, which knows their contexts, credential programs, proxies
and impersonation.
"""

import dataclasses
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mig_manager import errors, reasons
from mig_manager.adapters import rest
from mig_manager.core import messages
from mig_manager.core.fleet import fleet_nodes, node_moments, node_reports
from mig_manager.core.layout import layout_documents, layout_parser
from mig_manager.core.node.devices import device_classes
from mig_manager.core.objects import api_values, pod_object, pod_parser, well_known

_NODES = "/api/v1/nodes"
_PODS = "/api/v1/pods"
_EVENTS = "/api/v1/namespaces/default/events"
"""The API server keeps Events about objects without a namespace here."""
_MAX_NODE_QUERIES = 10  # for more nodes, all pods of the cluster are listed at once
OPERATOR_NAMESPACE = "gpu-operator"
_CONFIG_MAPS = (
    ("mig-manager", "mig-manager-config"),
    (OPERATOR_NAMESPACE, "mig-manager-config"),
    (OPERATOR_NAMESPACE, "default-mig-parted-config"),
)
"""ConfigMaps of our manifests, of ours with the GPU operator, and of the operator."""
_DOCUMENT_KEY = "config.yaml"
_Event = TypeVar("_Event")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeSearch:
    """The nodes that a command searched for."""

    reports: tuple[node_reports.NodeReport, ...]  # by name, never empty
    missing: tuple[str, ...]  # why named nodes are not in ``reports``

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple(report.node.name for report in self.reports)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of nodes, or why they are unknown."""

    by_node: Mapping[str, pod_object.Pods] | None
    why_not: str = ""

    def of(self, name: str) -> pod_object.Pods | None:
        """Return the pods of a node that request GPUs; None if unknown."""
        return None if self.by_node is None else self.by_node.get(name, ())


Get = Callable[..., dict[str, Any]]
"""Gets an object or a list: takes a path and, by default none, a query.

It raises ``ClusterError`` if the API refuses or does not answer: with reason FORBIDDEN for a 403;
``status`` shows a 404.
"""


class ClusterReader:
    """Reads through a transport; its methods raise the transport's errors."""

    def __init__(self, get: Get) -> None:
        self._get = get

    def find(self, names: Sequence[str], selector: str | None, *, now: dt.datetime) -> NodeSearch:
        """Report on the named nodes, or else on the nodes that ``selector`` selects.

        Raises:
            ClusterError: No named node exists, or as each request.
            UsageError: Both names and a selector are given, or no node is selected.
        """
        if names and selector:
            raise errors.UsageError("name nodes or select them with -l, not both")
        nodes = [] if names else self.select_nodes(selector)
        missing: list[str] = []
        for name in dict.fromkeys(names):
            try:
                nodes.append(fleet_nodes.parse(self._get(rest.api_path(_NODES, name))))
            except errors.ClusterError as error:
                if not error.is_not_found:
                    raise
                missing.append(error.message)
        if missing and not nodes:
            raise errors.ClusterError(
                "; ".join(missing), reason=reasons.Reason.API_ERROR, remedy=self._remedy()
            )
        if not nodes:
            what = f"selector {selector!r}" if selector else "NVIDIA GPUs"
            raise errors.UsageError(
                f"the cluster has no node with {what}",
                remedy="See all labels with 'kubectl get nodes --show-labels'.",
            )
        ordered = sorted(nodes, key=lambda node: node.order)
        reports = tuple(node_reports.of(node, now) for node in ordered)
        return NodeSearch(reports=reports, missing=tuple(missing))

    def _remedy(self) -> str:
        """Return the names to choose from, for a node that does not exist."""
        try:
            names = [node.name for node in self.select_nodes(None)]
        except errors.ClusterError:
            names = []
        if not names:
            return "See all nodes with 'kubectl get nodes'."
        return f"Name a node with NVIDIA GPUs: {messages.list_names(names)}."

    def select_nodes(self, selector: str | None) -> list[fleet_nodes.FleetNode]:
        """Return the nodes that a selector matches; None: all nodes with GPUs."""
        query = {"labelSelector": selector} if selector else {}
        nodes = rest.list_items(self._get, _NODES, query, fleet_nodes.parse)
        return [node for node in nodes if selector or node.has_gpus]

    def pods(self, names: Sequence[str]) -> Pods:
        """Return the pods of nodes that request GPUs, or why they are unknown."""
        try:
            return Pods(by_node=self.gpu_pods(names))
        except errors.ClusterError as error:
            return Pods(by_node=None, why_not=error.message)

    def gpu_pods(self, names: Sequence[str]) -> Mapping[str, pod_object.Pods]:
        """Return the pods that request GPUs, by the name of their node."""
        selectors = [f"spec.nodeName={name}" for name in names]
        if len(names) > _MAX_NODE_QUERIES:
            selectors = ["spec.nodeName!="]
        by_node: dict[str, list[pod_object.Pod]] = {name: [] for name in names}
        for selector in selectors:
            query = {"fieldSelector": selector}
            for pod in rest.list_items(self._get, _PODS, query, pod_parser.parse):
                if pod.node_name in by_node and (pod.gpu_resources or pod.has_claims):
                    by_node[pod.node_name].append(pod)
        return {name: tuple(pods) for name, pods in by_node.items()}

    def every_gpu_pod(self) -> pod_object.Pods:
        """Return the running or pending pods that request GPUs, also without a node yet."""
        query = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
        pods = rest.list_items(self._get, _PODS, query, pod_parser.parse)
        return tuple(pod for pod in pods if pod.gpu_resources or pod.has_claims)

    def device_classes(self) -> tuple[device_classes.DeviceClass, ...]:
        """Return the DeviceClasses that serve MIG resources."""
        classes = rest.list_items(self._get, device_classes.PATH, {}, device_classes.parse)
        return tuple(filter(None, classes))

    def events(self, node_name: str) -> tuple[node_moments.Moment, ...]:
        """Return the agent's Events about a node, in no order."""
        return agent_events(self._get, node_name, node_moments.parse)

    def document(
        self,
        config_map: tuple[str, str] | None,
        default: layout_documents.Document | None = None,
        *,
        is_lenient: bool = False,
    ) -> layout_documents.Document:
        """Return the layouts.

        Args:
            config_map: Namespace and name of the ConfigMap; None: the first of ``_CONFIG_MAPS``.
            default: The layouts if no ConfigMap exists.
            is_lenient: How to parse them.

        Raises:
            ClusterError: As each request.
            ConfigError: The ConfigMap's layout file is invalid.
            UsageError: The named ConfigMap is missing, or all are and ``default``, too.
        """
        config_maps = (config_map,) if config_map else _CONFIG_MAPS
        for namespace, name in config_maps:
            source = f"ConfigMap {namespace}/{name}"
            path = rest.api_path("/api/v1/namespaces", namespace, "configmaps", name)
            try:
                item = self._get(path)
            except errors.ClusterError as error:
                if error.is_not_found:
                    continue
                if error.reason is reasons.Reason.FORBIDDEN:
                    error.add("-f FILE needs no ConfigMap")
                raise
            with api_values.as_cluster_error(source):
                data = api_values.strings(item.get("data"))
            if _DOCUMENT_KEY not in data and len(data) != 1:
                raise errors.ConfigError(
                    f"{source} has no entry {_DOCUMENT_KEY}",
                    remedy="Add this entry, or name another ConfigMap or a file (-f).",
                )
            text = data.get(_DOCUMENT_KEY, next(iter(data.values())))
            document = layout_parser.parse(text, source=source, is_lenient=is_lenient)
            return dataclasses.replace(document, is_presumed=config_map is None)
        if default is not None and config_map is None:
            return default
        tried = ", ".join("/".join(each) for each in config_maps)
        raise errors.UsageError(
            f"no ConfigMap with layouts found ({tried}); name one with --config-map, or a file "
            "with -f"
        )


def agent_events(
    get: Get,
    node_name: str,
    parse: Callable[[Mapping[str, Any]], _Event],
) -> tuple[_Event, ...]:
    """Return the Events about a node that the agent reported, in no order."""
    query = {"fieldSelector": f"involvedObject.kind=Node,involvedObject.name={node_name}"}

    def parse_own(item: Mapping[str, Any]) -> _Event | None:
        source = (item.get("source") or {}).get("component")
        return (
            parse(item)
            if well_known.EVENT_COMPONENT in (item.get("reportingComponent"), source)
            else None
        )

    return tuple(filter(None, rest.list_items(get, _EVENTS, query, parse_own)))
