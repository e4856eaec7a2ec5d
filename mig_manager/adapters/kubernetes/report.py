"""Read a node and its agent from the API for a report: our part of each object, and logs.

All functions raise ``ClusterError`` if the API refuses or does not answer, or an object is
malformed.
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.adapters import cluster_reader, rest
from mig_manager.adapters.kubernetes import api, kube_node
from mig_manager.core.files import json_text
from mig_manager.core.node.daemons import mig_managers
from mig_manager.core.objects import api_values, pod_parser

_OUR_KEYS = ("nvidia.com/", "mig-manager.io/")
_LOG = {"tailLines": "3000", "limitBytes": str(4 << 20), "timestamps": "true"}  # PodLogOptions

Object = Mapping[str, Any]


def of_node(kube: api.KubeApi, name: str) -> dict[str, Any]:
    """Return our labels, annotations and devices of a node, its taints, conditions and versions.

    Annotations with JSON are parsed.
    """
    item = kube.get(kube_node.path(name))
    with api_values.as_cluster_error(f"node {name}"):
        meta, spec, status = (item.get(key) or {} for key in ("metadata", "spec", "status"))
        annotations = _our_entries(meta.get("annotations"))
        return {
            "name": name,
            "labels": _our_entries(meta.get("labels")),
            "annotations": {key: _parse_json(value) for key, value in annotations.items()},
            "unschedulable": bool(spec.get("unschedulable")),
            "taints": [_part(each, "key effect") for each in spec.get("taints") or ()],
            "capacity": _our_entries(status.get("capacity")),
            "allocatable": _our_entries(status.get("allocatable")),
            "conditions": status.get("conditions") or [],
            "nodeInfo": _part(
                status.get("nodeInfo") or {},
                "kernelVersion osImage containerRuntimeVersion kubeletVersion architecture",
            ),
        }


def events(kube: api.KubeApi, node_name: str) -> list[dict[str, Any]]:
    """Return our Events about a node."""
    fields = "type reason message count firstTimestamp lastTimestamp eventTime"
    parse = functools.partial(_part, fields=fields)
    return list(cluster_reader.agent_events(kube.get, node_name, parse))


def agents(kube: api.KubeApi, node_name: str) -> tuple[Object, ...]:
    """Return the pods of MIG managers on a node, as the API has them."""
    query = {"fieldSelector": f"spec.nodeName={node_name}"}

    def manager(item: Object) -> Object:
        pod = pod_parser.parse(item)
        return item if mig_managers.is_mig_manager(pod.labels, pod.container_names) else {}

    return tuple(filter(None, rest.list_items(kube.get, "/api/v1/pods", query, manager)))


def of_agents(pods: Iterable[Object]) -> list[dict[str, Any]]:
    """Return the images of these pods, their restarts, and how they ended."""
    fields = "phase startTime containerStatuses"
    return [
        _part(pod["metadata"], "namespace name labels") | _part(pod.get("status") or {}, fields)
        for pod in pods
    ]


def command(pods: Sequence[Object]) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the literal variables of the first pod's first container."""
    with api_values.as_cluster_error("the agent's pod"):
        main = pods[0]["spec"]["containers"][0]
        variables = {each["name"]: each.get("value") or "" for each in main.get("env") or ()}
        return [*(main.get("command") or ()), *(main.get("args") or ())], variables


def logs(kube: api.KubeApi, pods: Iterable[Object], **more: str) -> str:
    """Return the last lines of these pods' containers; ``previous="true"``: before their restart.

    A container without a log is left out, unless no container has one.
    """
    parts: list[str] = []
    refusal = None
    for pod in pods:
        with api_values.as_cluster_error("the agent's pod"):
            namespace, name = (pod["metadata"][key] for key in ("namespace", "name"))
            containers = [each["name"] for each in pod["spec"]["containers"]]
        path = rest.api_path("/api/v1/namespaces", namespace, "pods", name, "log")
        for container in containers:
            try:
                text = kube.text(path, {**_LOG, **more, "container": container})
            except errors.ClusterError as error:
                refusal = error
            else:
                parts.append(f"==> {namespace}/{name} {container} <==\n{text}")
    if refusal and not parts:
        raise refusal
    return "\n".join(parts)


def layout_file(kube: api.KubeApi, pods: Sequence[Object]) -> str:
    """Return the layout file in the first ConfigMap that the first pod mounts, if it exists."""
    with api_values.as_cluster_error("the agent's pod"):
        volumes = pods[0]["spec"].get("volumes") or ()
        name = next(each["configMap"]["name"] for each in volumes if "configMap" in each)
        namespace = pods[0]["metadata"]["namespace"]
    try:
        config_map = kube.get(rest.api_path("/api/v1/namespaces", namespace, "configmaps", name))
    except errors.ClusterError as error:
        if error.is_not_found:
            return ""
        raise
    with api_values.as_cluster_error(f"ConfigMap {namespace}/{name}"):
        return str(config_map["data"]["config.yaml"])


def _our_entries(values: Mapping[str, str] | None) -> dict[str, str]:
    return {key: each for key, each in (values or {}).items() if key.startswith(_OUR_KEYS)}


def _parse_json(text: str) -> Any:
    try:
        data = json_text.parse(text)
        # Python also parses and writes NaN, and infinity for 1e999.
        json.dumps(data, allow_nan=False)
    except ValueError:
        return text
    return data


def _part(item: Object, fields: str) -> dict[str, Any]:
    return {key: item[key] for key in fields.split() if item.get(key) is not None}
