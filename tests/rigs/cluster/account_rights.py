"""What roles give a ServiceAccount: those that are shipped, and those of the GPU operator."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from testkit import apiserver
from tests.rigs.cluster import deploy_files, operator_pod

AGENT_TOKEN = "agent"  # noqa: S105 - marks one client of the embedded server, and opens nothing

Right = tuple[str, str, str]  # API group, resource with its subresource, verb


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A ServiceAccount; its roles and their bindings have its name."""

    namespace: str
    name: str

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{self.name}"


MANAGER = Account(namespace="mig-manager", name="mig-manager")
OPERATORS = Account(namespace=operator_pod.NAMESPACE, name="nvidia-mig-manager")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What roles give an account: cluster-wide, and beyond that within its namespace."""

    account: Account = MANAGER
    everywhere: frozenset[Right]
    within: frozenset[Right] = frozenset()

    def allow(self, right: Right, namespace: str) -> bool:
        is_within = namespace == self.account.namespace
        return right in self.everywhere or (is_within and right in self.within)

    def authorize(self, access: apiserver.Access) -> bool:
        """Decide on a request to the embedded API server; other clients than the agent may all."""
        right = access.group, access.full_resource, access.verb
        return access.token != AGENT_TOKEN or self.allow(right, access.namespace)

    def without(self, right: Right) -> "Rights":
        return dataclasses.replace(
            self, everywhere=self.everywhere - {right}, within=self.within - {right}
        )


def to(resource: str, *verbs: str) -> frozenset[Right]:
    return frozenset(("", resource, verb) for verb in verbs)


def rights_of(*roles: Mapping[str, Any]) -> frozenset[Right]:
    return frozenset(
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )


SHIPPED = Rights(
    everywhere=rights_of(*deploy_files.manifest_objects("base/rbac.yaml", "ClusterRole"))
)
BUDGET = dataclasses.replace(
    SHIPPED, within=rights_of(*deploy_files.manifest_objects("budget/slots.yaml", "Role"))
)
"""With a budget for the cluster."""
BUDGET_OPTIONS = ("--max-concurrent-nodes", "1", "--slots-namespace", MANAGER.namespace)
STOCK_OPERATOR = Rights(
    account=OPERATORS,
    everywhere=to("nodes", "get", "list", "watch", "update", "patch") | to("pods", "list"),
    within=to("pods", "get", "list", "watch", "delete")
    | to("configmaps", "create", "get", "list", "update", "patch"),
)
"""What NVIDIA's GPU operator gives its MIG manager."""
