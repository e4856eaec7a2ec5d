"""Two clusters of one kind: the embedded API server, and a real one. Both obey one suite."""

import contextlib
import dataclasses
import functools
import http
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from mig_manager import errors
from mig_manager.adapters.kubernetes import api
from mig_manager.sandbox import stages
from mig_manager.sandbox.node import objects
from testkit import apiserver
from tests.rigs import waiting
from tests.rigs.api_objects import Object
from tests.rigs.cluster import account_rights, deploy_files, envtest, operator_pod

EVENTS = "/api/v1/namespaces/default/events"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{account_rights.MANAGER.namespace}/leases"
_NAMESPACES = (
    "default",
    "kube-system",
    account_rights.MANAGER.namespace,
    account_rights.OPERATORS.namespace,
)
_ALL_RIGHTS = (
    account_rights.SHIPPED.everywhere
    | account_rights.BUDGET.within
    | account_rights.STOCK_OPERATOR.everywhere
)
_ALL_RIGHTS |= account_rights.STOCK_OPERATOR.within


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Kubeconfig files for an API server that runs elsewhere."""

    people: pathlib.Path  # with every right: for people and for the simulated cluster components
    agent: pathlib.Path


class EmbeddedCluster:
    """The embedded API server, cheap enough for a new one in every test."""

    def __init__(self) -> None:
        self._server: apiserver.ApiServer | None = None

    @contextlib.contextmanager
    def admit(self, folder: pathlib.Path, rights: account_rights.Rights) -> Iterator[Credentials]:
        """Give the agent these rights and no other; what came into being goes at the end."""
        with apiserver.serve(apiserver.ApiServer(authorizer=rights.authorize)) as self._server:
            yield Credentials(
                people=self._server.kubeconfig(folder / "people"),
                agent=self._server.kubeconfig(folder / "agent", token=account_rights.AGENT_TOKEN),
            )

    def expire_watches(self) -> None:
        """Break all watches, and let no version that a client has seen be good for another."""
        assert self._server is not None
        self._server.break_watches(apiserver.Break.EXPIRE)

    def count_disruptions(self, kube: api.KubeApi, budget: str, allowed: int = 0) -> None:
        """The server's own controller has done it already."""


class EnvtestCluster:
    """A real API server; it is cleared between tests, not replaced."""

    def __init__(self, server: envtest.EnvtestServer, folder: pathlib.Path) -> None:
        self.server = server
        self._people = server.kubeconfig(folder / "people", token=envtest.ADMIN_TOKEN)
        self.kube = api.KubeApi.connect(kubeconfig=str(self._people))
        for namespace in _NAMESPACES:
            self._create("/api/v1/namespaces", {"metadata": {"name": namespace}})
            # In a whole cluster a controller makes it for each namespace.
            path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
            self._create(path, {"metadata": {"name": "default"}})
        policies = [
            obj
            for obj in deploy_files.manifest_objects("budget/slots.yaml")
            if "Policy" in obj["kind"]
        ]
        policies += [
            *deploy_files.manifest_objects("policy/policy.yaml"),
            *deploy_files.manifest_objects("evictions/evictions.yaml"),
        ]
        for obj in (*deploy_files.manifest_objects("base/rbac.yaml"), *policies):
            self._create(deploy_files.collection(obj), obj)
        self._introduce(account_rights.MANAGER)
        self._introduce(account_rights.OPERATORS)

    def close(self) -> None:
        self.kube.close()

    @contextlib.contextmanager
    def admit(self, folder: pathlib.Path, rights: account_rights.Rights) -> Iterator[Credentials]:
        self.grant(rights)
        try:
            agent = self.kubeconfig(folder / "agent", rights.account, node=stages.NODE_NAME)
            yield Credentials(people=self._people, agent=agent)
        finally:
            self.clear()

    def expire_watches(self) -> None:
        # A new server's cache knows no change from before itself: with a change after the node's
        # last one, that node's version is too old for it.
        later = {
            "involvedObject": {"namespace": "default"},
            "metadata": {"generateName": "later-"},
        }
        self.kube.post(EVENTS, later)
        self.server.kill()
        self.server.start()

    def count_disruptions(self, kube: api.KubeApi, budget: str, allowed: int = 0) -> None:
        change = {"status": {"observedGeneration": 1, "disruptionsAllowed": allowed}}
        kube.patch(f"{BUDGETS}/{budget}/status", change)

    def kubeconfig(
        self, path: pathlib.Path, account: account_rights.Account, *, node: str = ""
    ) -> pathlib.Path:
        """Write a kubeconfig with the token that kubelet would ask for, for a pod on a node.

        Without a node it is bound to no pod.
        """
        request: Object = {"expirationSeconds": 3600}
        if node:
            containers = [{"name": "mig-manager", "image": "mig-manager"}]
            spec = {"nodeName": node, "serviceAccountName": account.name, "containers": containers}
            pods = f"/api/v1/namespaces/{account.namespace}/pods"
            metadata = {"generateName": "mig-manager-"}
            pod = self.kube.post(pods, {"metadata": metadata, "spec": spec})
            named = {"name": objects.name(pod), "uid": objects.uid(pod)}
            request["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", **named}
        answer = self.kube.post(f"{account.path}/token", {"spec": request})
        return self.server.kubeconfig(path, token=answer["status"]["token"])

    def clear(self) -> None:
        paths = [
            f"/api/v1/namespaces/{namespace}/{plural}"
            for namespace in _NAMESPACES
            for plural in ("pods", "events")
        ]
        paths += [
            f"/apis/apps/v1/namespaces/{operator_pod.NAMESPACE}/daemonsets",
            "/apis/apps/v1/namespaces/kube-system/daemonsets",
            LEASES,
            BUDGETS,
            "/api/v1/nodes",
        ]
        for path in paths:
            self.kube.delete(path, {"gracePeriodSeconds": 0})

    def _introduce(self, account: account_rights.Account) -> None:
        """Make an account, with roles that give nothing yet."""
        metadata = {"metadata": {"name": account.name}}
        subject = {"kind": "ServiceAccount", "name": account.name, "namespace": account.namespace}
        self._create(account.path.rpartition("/")[0], metadata)
        for where, kind in (("", "ClusterRole"), (f"/namespaces/{account.namespace}", "Role")):
            role = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": account.name}
            plural = f"{RBAC}{where}/{kind.lower()}"
            self._create(f"{plural}s", metadata)
            self._create(f"{plural}bindings", {**metadata, "roleRef": role, "subjects": [subject]})

    def grant(self, rights: account_rights.Rights) -> None:
        """Give an account these rights and no other; return when the server knows."""
        account = rights.account
        for where, granted in (
            ("clusterroles", rights.everywhere),
            (f"namespaces/{account.namespace}/roles", rights.within),
        ):
            rules = [
                {"apiGroups": [group], "resources": [resource], "verbs": [verb]}
                for group, resource, verb in sorted(granted)
            ]
            path = f"{RBAC}/{where}/{account.name}"
            self.kube.patch(path, {"rules": rules})
        waiting.until(functools.partial(self._has_exactly, rights), "the agent's rights")

    def _has_exactly(self, rights: account_rights.Rights) -> bool:
        """Return whether the authorizer, which hears of roles a moment later, knows them."""
        return all(
            self.may(rights.account, right, namespace) is rights.allow(right, namespace)
            for right in _ALL_RIGHTS | rights.everywhere
            for namespace in ("default", rights.account.namespace)
            if right[1] != "nodes" or namespace == "default"
        )

    def may(
        self, account: account_rights.Account, right: account_rights.Right, namespace: str
    ) -> bool:
        """Return whether the authorizer grants an account a right."""
        group, resource, verb = right
        plural, _, subresource = resource.partition("/")
        attributes = {"group": group, "resource": plural, "subresource": subresource, "verb": verb}
        if plural != "nodes":
            attributes["namespace"] = namespace
        user = f"system:serviceaccount:{account.namespace}:{account.name}"
        review = {"spec": {"user": user, "resourceAttributes": attributes}}
        answer = self.kube.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    def _create(self, path: str, obj: Mapping[str, Any]) -> None:
        try:
            self.kube.post(path, obj)
        except errors.ClusterError as error:
            if error.status != http.HTTPStatus.CONFLICT:
                raise


Cluster = EmbeddedCluster | EnvtestCluster  # a cluster that has no node yet
