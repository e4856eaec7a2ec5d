"""Two clusters of one kind: the embedded API server, and a real one. Both obey one suite."""

import contextlib
import dataclasses
import functools
import http
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from mig_manager import errors, reasons
from mig_manager.adapters.kubernetes import api, responses
from mig_manager.sandbox import stages
from mig_manager.sandbox.node import objects
from testkit import apiserver
from tests.rigs import waiting
from tests.rigs.api_objects import Object
from tests.rigs.cluster import envtest, operator_pod
from tests.rigs.stage import agent_stage

ROOT = pathlib.Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
NODE = stages.NODE_NAME
AGENT_TOKEN = "agent"  # noqa: S105 - marks one client of the embedded server, and opens nothing
EVENTS = "/api/v1/namespaces/default/events"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
TRAIN = [("train", "nvidia.com/gpu", {"app": "train"})]
"""A pod for ``Stage.run_pods`` that uses a whole GPU."""

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
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{MANAGER.namespace}/leases"
_NAMESPACES = ("default", "kube-system", MANAGER.namespace, OPERATORS.namespace)


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


def manifest_objects(file: str, kind: str = "") -> list[Object]:
    """Return the objects of a manifest below ``deploy``, or those of one kind."""
    documents = yaml.safe_load_all((DEPLOY / file).read_text(encoding="utf-8"))
    return [each for each in documents if kind in ("", each["kind"])]


def rights_of(*roles: Mapping[str, Any]) -> frozenset[Right]:
    return frozenset(
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )


SHIPPED = Rights(everywhere=rights_of(*manifest_objects("base/rbac.yaml", "ClusterRole")))
BUDGET = dataclasses.replace(
    SHIPPED, within=rights_of(*manifest_objects("budget/slots.yaml", "Role"))
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
_ALL_RIGHTS = SHIPPED.everywhere | BUDGET.within | STOCK_OPERATOR.everywhere
_ALL_RIGHTS |= STOCK_OPERATOR.within


class EmbeddedCluster:
    """The embedded API server, cheap enough for a new one in every test."""

    def __init__(self) -> None:
        self._server: apiserver.ApiServer | None = None

    @contextlib.contextmanager
    def admit(self, folder: pathlib.Path, rights: Rights) -> Iterator[agent_stage.Credentials]:
        """Give the agent these rights and no other; what came into being goes at the end."""
        with apiserver.serve(apiserver.ApiServer(authorizer=rights.authorize)) as self._server:
            yield agent_stage.Credentials(
                people=self._server.kubeconfig(folder / "people"),
                agent=self._server.kubeconfig(folder / "agent", token=AGENT_TOKEN),
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
            obj for obj in manifest_objects("budget/slots.yaml") if "Policy" in obj["kind"]
        ]
        policies += [
            *manifest_objects("policy/policy.yaml"),
            *manifest_objects("evictions/evictions.yaml"),
        ]
        for obj in (*manifest_objects("base/rbac.yaml"), *policies):
            self._create(collection(obj), obj)
        self._introduce(MANAGER)
        self._introduce(OPERATORS)

    def close(self) -> None:
        self.kube.close()

    @contextlib.contextmanager
    def admit(self, folder: pathlib.Path, rights: Rights) -> Iterator[agent_stage.Credentials]:
        self.grant(rights)
        try:
            agent = self.kubeconfig(folder / "agent", rights.account, node=NODE)
            yield agent_stage.Credentials(people=self._people, agent=agent)
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

    def kubeconfig(self, path: pathlib.Path, account: Account, *, node: str = "") -> pathlib.Path:
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

    def _introduce(self, account: Account) -> None:
        """Make an account, with roles that give nothing yet."""
        metadata = {"metadata": {"name": account.name}}
        subject = {"kind": "ServiceAccount", "name": account.name, "namespace": account.namespace}
        self._create(account.path.rpartition("/")[0], metadata)
        for where, kind in (("", "ClusterRole"), (f"/namespaces/{account.namespace}", "Role")):
            role = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": account.name}
            plural = f"{RBAC}{where}/{kind.lower()}"
            self._create(f"{plural}s", metadata)
            self._create(f"{plural}bindings", {**metadata, "roleRef": role, "subjects": [subject]})

    def grant(self, rights: Rights) -> None:
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

    def _has_exactly(self, rights: Rights) -> bool:
        """Return whether the authorizer, which hears of roles a moment later, knows them."""
        return all(
            self.may(rights.account, right, namespace) is rights.allow(right, namespace)
            for right in _ALL_RIGHTS | rights.everywhere
            for namespace in ("default", rights.account.namespace)
            if right[1] != "nodes" or namespace == "default"
        )

    def may(self, account: Account, right: Right, namespace: str) -> bool:
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


def collection(obj: Mapping[str, Any]) -> str:
    """Return the path to create an object at."""
    version, namespace = str(obj["apiVersion"]), obj["metadata"].get("namespace")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    kind = str(obj["kind"]).lower()
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


@contextlib.contextmanager
def stage(
    where: Cluster,
    folder: pathlib.Path,
    *agent_options: str,
    kind: type[agent_stage.AgentStage] = agent_stage.AgentStage,
    spec: str = "1xA100-SXM4-40GB",
    rights: Rights = SHIPPED,
    style: objects.DeployStyle = objects.DeployStyle.GPU_OPERATOR,
) -> Iterator[agent_stage.AgentStage]:
    """A node of the cluster with the agent on it, who has these rights and no other."""
    with (
        where.admit(folder, rights) as credentials,
        kind(
            spec,
            *agent_options,
            node_options=dataclasses.replace(agent_stage.QUICK, deploy_style=style),
            credentials=credentials,
        ) as started,
    ):
        yield started


def slot_owners(kube: api.KubeApi) -> list[str]:
    return [lease["spec"].get("holderIdentity", "") for lease in kube.get(LEASES)["items"]]


def event_reasons(running: stages.Stage) -> set[str]:
    """Stop the agent, so that it has published its Events; return what they report."""
    assert running.stop_agent() == 0
    events = running.api.get(EVENTS)["items"]
    return {each["reason"] for each in events if each["source"].get("component") == "mig-manager"}


def refusal(act: Callable[[], object]) -> str:
    """Return the words of an admission policy; nothing if it lets the act pass."""
    try:
        act()
    except responses.ApiError as error:
        if error.reason is reasons.Reason.FORBIDDEN and "AdmissionPolicy" in error.explanation:
            return error.explanation
        if error.status != http.HTTPStatus.CONFLICT:
            raise
    return ""
