"""The documents by which clients find out what the embedded Kubernetes API serves."""

import functools

from mig_manager.sandbox.api import resources, statuses

Object = statuses.Object

VERSION: Object = {
    "major": "1",
    "minor": "33",
    "gitVersion": "v1.33.0+sandbox",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2025-04-23T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "linux/amd64",
}
_HEALTH_PATHS = ("healthz", "livez", "readyz")


def is_health(path: str) -> bool:
    """Return whether a path asks if the server is well."""
    return path.strip("/").partition("/")[0] in _HEALTH_PATHS


def document(path: str) -> Object | None:
    """Return the discovery document at a path, or None when there is none."""
    return _documents().get(path.rstrip("/"))


@functools.cache
def _documents() -> dict[str, Object]:
    groups = [_group(name) for name in _group_names()]
    documents: dict[str, Object] = {
        "/version": VERSION,
        "/api": {"kind": "APIVersions", "apiVersion": "v1", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/api/v1": _resource_list(""),
    }
    for group in groups:
        path = f"/apis/{group['name']}"
        documents[path] = {"kind": "APIGroup", "apiVersion": "v1"} | group
        documents[f"{path}/v1"] = _resource_list(group["name"])
    return documents


def _group_names() -> list[str]:
    stored = {resource.group for resource in resources.RESOURCES if resource.group}
    return sorted(stored | {group for group, _ in resources.REVIEWS})


def _group(name: str) -> Object:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


def _resource_list(group: str) -> Object:
    entries: list[Object] = []
    for resource in resources.RESOURCES:
        if resource.group == group:
            entries += _entries(resource)
    for (review_group, plural), kind in resources.REVIEWS.items():
        if review_group == group:
            entries.append(
                {
                    "name": plural,
                    "singularName": kind.lower(),
                    "namespaced": False,
                    "kind": kind,
                    "verbs": ["create"],
                }
            )
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/v1" if group else "v1",
        "resources": entries,
    }


def _entries(resource: resources.Resource) -> list[Object]:
    entry: Object = {
        "name": resource.plural,
        "singularName": resource.singular,
        "namespaced": resource.is_namespaced,
        "kind": resource.kind,
        "verbs": list(resources.ALL_VERBS),
        "shortNames": list(resource.short_names),
        "categories": list(resource.categories),
    }
    return [entry, *(_subresource(resource, name) for name in resource.subresources)]


def _subresource(resource: resources.Resource, name: str) -> Object:
    entry: Object = {
        "name": f"{resource.plural}/{name}",
        "singularName": "",
        "namespaced": resource.is_namespaced,
        "kind": resource.kind,
        "verbs": ["get", "patch", "update"],
    }
    # The group and version of an eviction tell clients which Eviction they may send.
    if name == "eviction":
        entry |= {"kind": "Eviction", "group": "policy", "version": "v1", "verbs": ["create"]}
    elif name == "binding":
        entry |= {"kind": "Binding", "verbs": ["create"]}
    return entry
