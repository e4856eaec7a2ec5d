"""What the agent may have to do at the Kubernetes API: the rights of ``deploy/base/rbac.yaml``."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """One verb on one kind of object, as RBAC grants it."""

    group: str
    """API group; empty for the core group."""
    resource: str
    verb: str
    subresource: str = ""
    purpose: str
    """What the agent cannot do without it."""
    is_needed: bool = True
    """Whether changes fail without it."""

    def __str__(self) -> str:
        sub = f"/{self.subresource}" if self.subresource else ""
        return f"{self.verb} {self.resource}{sub}"


RIGHTS = (
    Right(group="", resource="nodes", verb="get", purpose="read its node"),
    Right(group="", resource="nodes", verb="list", purpose="follow its node"),
    Right(group="", resource="nodes", verb="watch", purpose="follow its node"),
    Right(group="", resource="nodes", verb="patch", purpose="write state, journal and taint"),
    Right(group="", resource="pods", verb="list", purpose="find the pods of its node"),
    Right(
        group="",
        resource="pods",
        verb="watch",
        purpose="see at once that a pod has gone or come",
        is_needed=False,
    ),
    Right(group="", resource="pods", verb="delete", purpose="restart the device plugin"),
    Right(
        group="",
        resource="pods",
        subresource="eviction",
        verb="create",
        purpose="evict pods that use what a change destroys",
    ),
    Right(
        group="policy",
        resource="poddisruptionbudgets",
        verb="list",
        purpose="count what PodDisruptionBudgets grant before the first eviction",
        is_needed=False,
    ),
    Right(
        group="resource.k8s.io",
        resource="resourceclaims",
        verb="get",
        purpose="recognise pods with a ResourceClaim for a GPU",
        is_needed=False,
    ),
    Right(
        group="",
        resource="events",
        verb="create",
        purpose="say on the Node what happened",
        is_needed=False,
    ),
)
"""The agent works without those that are not needed, and says what it could not do."""
