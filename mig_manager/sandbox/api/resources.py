"""The resources that the embedded Kubernetes API serves, as data.

Names, kinds and short names are those of the Kubernetes API reference.
"""

import dataclasses

ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One kind of object and how it is reached."""

    group: str = ""
    version: str = "v1"
    plural: str
    singular: str
    kind: str
    is_namespaced: bool = True
    short_names: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    has_generation: bool = False
    """``metadata.generation`` starts at 1 and counts the changes of ``spec``."""
    categories: tuple[str, ...] = ()
    """Such as ``all``, for ``kubectl get all``."""
    stored_as: str = ""
    """Plural of the core resource that holds the objects, when this one is only another view."""

    @property
    def api_version(self) -> str:
        """``v1`` or ``group/version``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """Path under which the group version is served, without a slash at the end."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    @property
    def storage(self) -> str:
        """Key of the objects in the store; the same for two views of one resource."""
        return self.stored_as or self.plural

    def path(self, *, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the URL path of the collection, of an object, or of its subresource."""
        parts = [self.root]
        if self.is_namespaced and namespace:
            parts.append(f"namespaces/{namespace}")
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(parts)


NAMESPACES = Resource(
    plural="namespaces",
    singular="namespace",
    kind="Namespace",
    is_namespaced=False,
    short_names=("ns",),
    subresources=("status",),
)
NODES = Resource(
    plural="nodes",
    singular="node",
    kind="Node",
    is_namespaced=False,
    short_names=("no",),
    subresources=("status",),
)
PODS = Resource(
    plural="pods",
    singular="pod",
    kind="Pod",
    short_names=("po",),
    categories=("all",),
    subresources=("binding", "eviction", "status"),
)
EVENTS = Resource(plural="events", singular="event", kind="Event", short_names=("ev",))
NEW_EVENTS = Resource(
    group="events.k8s.io",
    plural="events",
    singular="event",
    kind="Event",
    short_names=("ev",),
    stored_as="events",
)
CONFIG_MAPS = Resource(
    plural="configmaps", singular="configmap", kind="ConfigMap", short_names=("cm",)
)
SERVICE_ACCOUNTS = Resource(
    plural="serviceaccounts",
    singular="serviceaccount",
    kind="ServiceAccount",
    short_names=("sa",),
)
DAEMON_SETS = Resource(
    group="apps",
    plural="daemonsets",
    singular="daemonset",
    kind="DaemonSet",
    short_names=("ds",),
    categories=("all",),
    subresources=("status",),
    has_generation=True,
)
REPLICA_SETS = Resource(
    group="apps",
    plural="replicasets",
    singular="replicaset",
    kind="ReplicaSet",
    short_names=("rs",),
    categories=("all",),
    subresources=("status",),
    has_generation=True,
)
LEASES = Resource(group="coordination.k8s.io", plural="leases", singular="lease", kind="Lease")
BUDGETS = Resource(
    group="policy",
    plural="poddisruptionbudgets",
    singular="poddisruptionbudget",
    kind="PodDisruptionBudget",
    short_names=("pdb",),
    subresources=("status",),
    has_generation=True,
)
CLAIMS = Resource(
    group="resource.k8s.io",
    plural="resourceclaims",
    singular="resourceclaim",
    kind="ResourceClaim",
    subresources=("status",),
)

RESOURCES = (
    NAMESPACES,
    NODES,
    PODS,
    EVENTS,
    CONFIG_MAPS,
    SERVICE_ACCOUNTS,
    DAEMON_SETS,
    REPLICA_SETS,
    LEASES,
    BUDGETS,
    CLAIMS,
    NEW_EVENTS,
)

REVIEWS = {
    ("authorization.k8s.io", "selfsubjectaccessreviews"): "SelfSubjectAccessReview",
    ("authentication.k8s.io", "selfsubjectreviews"): "SelfSubjectReview",
}
"""Kinds that are answered and never stored, by group and plural."""


def find(group: str, version: str, plural: str) -> Resource | None:
    """Return the resource served at a group, version and plural, or None."""
    for resource in RESOURCES:
        if (resource.group, resource.version, resource.plural) == (group, version, plural):
            return resource
    return None


def of_kind(api_version: str, kind: str) -> Resource | None:
    """Return the resource of an object by its ``apiVersion`` and ``kind``, or None."""
    for resource in RESOURCES:
        if (resource.api_version, resource.kind) == (api_version, kind):
            return resource
    return None
