"""The rights that the agent needs, as ``deploy/base/rbac.yaml`` grants them."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Right:
    """One verb on one kind of object, as RBAC grants it."""

    group: str  # API group; empty for the core group
    resource: str
    verb: str
    purpose: str  # the agent's purpose for it, as a verb phrase
    _: dataclasses.KW_ONLY
    subresource: str = ""
    is_needed: bool = True  # whether changes fail without it

    def __str__(self) -> str:
        sub = f"/{self.subresource}" if self.subresource else ""
        return f"{self.verb} {self.resource}{sub}"


RIGHTS = (
    Right("", "nodes", "get", "read its node"),
    Right("", "nodes", "list", "follow its node"),
    Right("", "nodes", "watch", "follow its node"),
    Right("", "nodes", "patch", "write state, journal and taint"),
    Right(
        "",
        "nodes",
        "patch",
        "keep pods from devices that no GPU has, and write the node's conditions",
        subresource="status",
        is_needed=False,
    ),
    Right("", "pods", "list", "find the pods of its node"),
    Right("", "pods", "watch", "see new and deleted pods at once", is_needed=False),
    Right("", "pods", "delete", "restart the device plugin"),
    Right(
        "",
        "pods",
        "create",
        "evict pods that use devices to be destroyed",
        subresource="eviction",
    ),
    Right(
        "policy",
        "poddisruptionbudgets",
        "list",
        "count the evictions that PodDisruptionBudgets grant",
        is_needed=False,
    ),
    Right(
        "resource.k8s.io",
        "resourceclaims",
        "get",
        "find which devices the ResourceClaims of pods have",
        is_needed=False,
    ),
    Right(
        "resource.k8s.io",
        "resourceclaims",
        "list",
        "find which devices pods have that are not bound to the node yet",
        is_needed=False,
    ),
    Right(
        "resource.k8s.io",
        "resourceslices",
        "list",
        "verify the devices that the DRA driver advertises",
        is_needed=False,
    ),
    Right(
        "resource.k8s.io",
        "resourceslices",
        "delete",
        "keep ResourceClaims from devices that are gone",
        is_needed=False,
    ),
    Right("", "events", "create", "publish the outcome as Events", is_needed=False),
)
"""Without an optional right the agent works, and reports its limits."""
