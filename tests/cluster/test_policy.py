"""What an agent's token is worth: its own node, its own keys, its node's pods, its own slot."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.adapters import host
from mig_manager.adapters.kubernetes import api, kube_node
from mig_manager.cli.doctor import doctor_report
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import gpu_recovery, readiness
from mig_manager.sandbox import advertising_gpus
from mig_manager.sandbox.node import objects
from tests.rigs import api_objects, waiting
from tests.rigs.cluster import account_rights, api_servers, envtest
from tests.rigs.cluster.apirig import NODES, PODS
from tests.rigs.shell import doctor_rig
from tests.rigs.stage import clusters

pytestmark = pytest.mark.cluster

NODE, OTHER = clusters.NODE, "other"
RIGHTS = dataclasses.replace(
    account_rights.BUDGET,
    everywhere=account_rights.SHIPPED.everywhere | account_rights.to("nodes", "create", "delete"),
)
"""All that overlays add, and more: to see what the policy alone forbids."""
KUBERNETES = tuple(
    {"key": key, "effect": "NoSchedule"}
    for key in (
        "node.kubernetes.io/memory-pressure",
        "node.cloudprovider.kubernetes.io/uninitialized",
        "readiness.k8s.io/gpu",
    )
)
"""Taints that controllers of Kubernetes add and remove."""
TAINT = {"key": "example.com/flaky", "effect": "NoSchedule"}
HOLD = {"key": well_known.RECONFIGURING_TAINT, "effect": "NoSchedule"}
LABELS = {
    well_known.CONFIG_LABEL: "all-disabled",
    well_known.PLUGIN_DEPLOY_LABEL: "true",
    "example.com/rack": "7",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyScene:
    """Two nodes with a pod each, and a pod that waits for a node."""

    people: api.KubeApi
    agent: api.KubeApi
    unbound: api.KubeApi  # with a token that is bound to no pod


Act = Callable[[PolicyScene], Any]


@pytest.fixture(scope="module")
def module_scene(
    real_cluster: api_servers.EnvtestCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PolicyScene]:
    folder = tmp_path_factory.mktemp("policy")
    people = real_cluster.kube
    with real_cluster.admit(folder, RIGHTS) as credentials, contextlib.ExitStack() as exits:
        bare = real_cluster.kubeconfig(folder / "unbound", account_rights.MANAGER)
        agent, unbound = (
            exits.enter_context(contextlib.closing(api.KubeApi.connect(kubeconfig=str(path))))
            for path in (credentials.agent, bare)
        )
        scene = PolicyScene(people=people, agent=agent, unbound=unbound)
        for name in (NODE, OTHER):
            people.post(NODES, a_node(name))
        memory = {"status": {"allocatable": {"memory": "1Gi"}, "capacity": {"memory": "1Gi"}}}
        people.patch(f"{NODES}/{NODE}/status", memory)
        kubelets = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
        people.patch_lists(f"{NODES}/{NODE}/status", kubelets)
        for place in (NODE, OTHER, None):
            containers = {"containers": [{"name": "main", "image": "app:1"}]}
            spec = {**containers, "nodeName": place} if place else containers
            people.post(PODS, {"metadata": {"name": f"on-{place or 'none'}"}, "spec": spec})
        # The policies become active, and the pods into their view, a moment after their creation.
        for act in (
            evicting(f"on-{OTHER}", dryRun=["All"]),
            evicting("on-none", dryRun=["All"]),
            patching({}, OTHER),
            posting_lease("other", ""),
        ):
            waiting.until(lambda: bool(clusters.refusal(lambda: act(scene))), "a policy")  # noqa: B023
        yield scene


@pytest.fixture
def scene(module_scene: PolicyScene) -> PolicyScene:
    """Make the nodes what each test begins with; the server has tainted them as not ready.

    The policy does not confine people: it lets them change what the agent may not.
    """
    for name in (NODE, OTHER):
        path = f"{NODES}/{name}"
        initial = a_node(name)
        initial["metadata"]["resourceVersion"] = module_scene.people.get(path)["metadata"][
            "resourceVersion"
        ]
        module_scene.people.put(path, initial)
    module_scene.people.delete(api_servers.LEASES)
    return module_scene


def a_node(name: str) -> api_objects.Object:
    metadata = {"name": name, "labels": LABELS, "annotations": {"example.com/owner": "team-a"}}
    return {"metadata": metadata, "spec": {"taints": [TAINT, *KUBERNETES]}}


def a_lease(name: str, identity: str) -> api_objects.Object:
    spec = {"holderIdentity": identity, "leaseDurationSeconds": 90}
    return {"metadata": {"name": name}, "spec": spec}


def labels(**values: str | None) -> api_objects.Object:
    return {"metadata": {"labels": values}}


def annotations(**values: str | None) -> api_objects.Object:
    return {"metadata": {"annotations": values}}


def taints(*values: api_objects.Object) -> api_objects.Object:
    return {"spec": {"taints": list(values)}}


def patching(change: api_objects.Object, name: str = NODE) -> Act:
    return lambda scene: scene.agent.patch(f"{NODES}/{name}", change)


def with_conditions(*conditions: api_objects.Object) -> Act:
    body = {"status": {"conditions": list(conditions)}}
    return lambda scene: scene.agent.patch_lists(f"{NODES}/{NODE}/status", body)


def evicting(pod: str, *, pod_labels: Mapping[str, str] = api.LABELS, **options: object) -> Act:
    metadata = {"name": pod, "namespace": "default", "labels": pod_labels}
    body = {"metadata": metadata, "deleteOptions": options}
    return lambda scene: scene.agent.post(f"{PODS}/{pod}/eviction", body)


def deleting(pod: str) -> Act:
    return lambda scene: scene.agent.delete(f"{PODS}/{pod}")


def publishing(kind: str, name: str, *, namespace: str = "", **metadata: object) -> Act:
    involved = {"namespace": namespace} if namespace else {}
    event = {
        "metadata": {"generateName": "test-", **metadata},
        "involvedObject": {"apiVersion": "v1", "kind": kind, "name": name, **involved},
        "reason": "Test",
        "source": {"component": "mig-manager"},
    }
    path = f"/api/v1/namespaces/{namespace or 'default'}/events"
    return lambda scene: scene.agent.post(path, event)


def posting_lease(name: str, identity: str, **metadata: object) -> Act:
    lease = a_lease(name, identity)
    lease["metadata"] |= metadata
    return lambda scene: scene.agent.post(api_servers.LEASES, lease)


LABELS_OF_OTHERS = (
    (well_known.CONFIG_LABEL, "all-enabled"),
    (well_known.CONFIG_LABEL, None),
    ("example.com/rack", "8"),
    ("example.com/rack", None),
    ("example.com/new", "1"),
    ("node-role.kubernetes.io/control-plane", ""),
    (f"{well_known.DEPLOY_LABEL_PREFIX}new", "true"),
    (well_known.PARTITIONING_LABEL, well_known.ON_DEMAND),
    ("mig-manager.io/simulated", "true"),
    (well_known.PLUGIN_DEPLOY_LABEL, None),
)
ANNOTATIONS_OF_OTHERS = (
    ("example.com/owner", "me"),
    ("example.com/owner", None),
    ("a.b/c", "d"),
    (well_known.LAYOUT_ANNOTATION, "version: v1"),
    (well_known.ROLLOUT_ANNOTATION, "{}"),
)
OUR_ANNOTATIONS = (
    well_known.STATUS_ANNOTATION,
    well_known.GPUS_ANNOTATION,
    well_known.LAYOUTS_ANNOTATION,
    well_known.CAPACITY_ANNOTATION,
    well_known.REQUEST_ANNOTATION,
    well_known.JOURNAL_ANNOTATION,
    well_known.UNREADABLE_JOURNAL_ANNOTATION,
)
OUR_STATE = labels(**{well_known.STATE_LABEL: "failed"})
READY = {"type": "Ready", "status": "True", "reason": "Pretended"}
MIG_READY = {"type": well_known.READY_CONDITION, "status": "True"}
PENDING = readiness.Condition(is_true=False, reason="Pending", message="soon")
VERIFIED = readiness.Condition(is_true=True, reason="LayoutVerified", message="now")
FAULTY = dataclasses.replace(gpu_recovery.NONE_NEEDED, is_true=True, is_default=False)
CORDON = {"spec": {"unschedulable": True}}
AGENT = f"mig-manager of node {NODE}"


@pytest.mark.parametrize(
    ("words", "acts"),
    [
        *(
            (f"mig-manager may not change the labels {key}", [patching(labels(**{key: value}))])
            for key, value in LABELS_OF_OTHERS
        ),
        *(
            (
                f"mig-manager may not change the annotations {key}",
                [patching(annotations(**{key: value}))],
            )
            for key, value in ANNOTATIONS_OF_OTHERS
        ),
        (
            "mig-manager may not add or change taints of others",
            [
                patching(taints(*KUBERNETES, TAINT, TAINT | {"effect": "NoExecute"})),
                patching(taints(*KUBERNETES, TAINT | {"value": "x"})),
                patching(taints(*KUBERNETES, TAINT, TAINT | {"key": "example.com/new"}, HOLD)),
                patching(taints(*KUBERNETES, TAINT, HOLD | {"effect": "NoExecute"})),
                patching(taints(*KUBERNETES, TAINT, HOLD | {"effect": "PreferNoSchedule"})),
                patching(taints(*KUBERNETES, TAINT, HOLD | {"value": "x"})),
            ],
        ),
        (
            "mig-manager may not remove taints of Kubernetes",
            [
                patching(taints(TAINT, *(each for each in KUBERNETES if each is not removed)))
                for removed in KUBERNETES
            ],
        ),
        (
            "and nothing else",
            [
                patching({"spec": {"providerID": "cloud://1"}}),
                patching({"spec": {"podCIDR": "10.9.0.0/24", "podCIDRs": ["10.9.0.0/24"]}}),
                patching({"metadata": {"finalizers": ["example.com/keep"]}}),
            ],
        ),
        (
            "mig-manager may change the resources nvidia.com/* and the conditions MigReady",
            [
                with_conditions(READY),
                with_conditions(READY | {"status": "False"}, MIG_READY),
                with_conditions({"type": "Ready", "$patch": "delete"}),
                patching({"status": {"nodeInfo": {"kubeletVersion": "v1"}}}, f"{NODE}/status"),
                patching({"status": {"phase": "Running"}}, f"{NODE}/status"),
                patching({"status": {"runtimeHandlers": [{"name": "runc"}]}}, f"{NODE}/status"),
                patching({"status": {"capacity": {"cpu": "64"}}}, f"{NODE}/status"),
                patching({"status": {"capacity": {"nvidia.com/hostdev": "1"}}}, f"{NODE}/status"),
                patching({"status": {"allocatable": {"cpu": "64"}}}, f"{NODE}/status"),
                patching({"status": {"allocatable": {"memory": None}}}, f"{NODE}/status"),
            ],
        ),
        ("may not cordon", [patching(CORDON)]),
        (
            f"{AGENT} may not change another node",
            [
                patching(OUR_STATE, OTHER),
                patching(annotations(**{well_known.STATUS_ANNOTATION: "{}"}), OTHER),
                patching(CORDON, OTHER),
                lambda scene: advertising_gpus.publish_resources(
                    scene.agent, OTHER, {"nvidia.com/gpu": 8}
                ),
            ],
        ),
        (
            "mig-manager creates and deletes no nodes",
            [
                lambda scene: scene.agent.post(NODES, a_node("new")),
                lambda scene: scene.agent.delete(f"{NODES}/{NODE}"),
            ],
        ),
        (
            "mig-manager's token names no node",
            [lambda scene: patching(OUR_STATE)(dataclasses.replace(scene, agent=scene.unbound))],
        ),
        (
            "mig-manager may not evict pods of other nodes",
            [
                evicting(f"on-{OTHER}"),
                evicting("on-none"),
                lambda scene: evicting(f"on-{NODE}")(
                    dataclasses.replace(scene, agent=scene.unbound)
                ),
            ],
        ),
        (
            "mig-manager's evictions carry the label",
            [evicting(f"on-{name}", pod_labels={}) for name in (NODE, OTHER)],
        ),
        (f"{AGENT} may not delete pods of others", [deleting(f"on-{OTHER}"), deleting("on-none")]),
        (
            f"{AGENT} may write plain Events about its node alone",
            [
                publishing("Node", OTHER),
                publishing("Namespace", NODE),
                publishing("Node", NODE, namespace="kube-system"),
                publishing("Node", NODE, finalizers=["example.com/keep"]),
            ],
        ),
        (
            "AdmissionPolicy",
            [
                posting_lease("mig-manager-slot-0", "other"),
                posting_lease("leader", NODE),
                posting_lease("mig-manager-slot-0", NODE, finalizers=["example.com/keep"]),
            ],
        ),
    ],
)
def test_the_policy_forbids_foreign_objects_whatever_the_role_grants(
    scene: PolicyScene, words: str, acts: list[Act]
) -> None:
    for act in acts:
        assert words in clusters.refusal(functools.partial(act, scene))


def test_the_agent_may_write_all_that_it_needs_on_its_own_node(scene: PolicyScene) -> None:
    published = {well_known.STATE_LABEL: "pending", well_known.APPLIED_LABEL: "all-disabled"}
    paused = {
        well_known.PLUGIN_DEPLOY_LABEL: well_known.PAUSED_VALUE,
        well_known.PLUGIN_CONFIG_LABEL: "large",
    }
    resumed = {well_known.PLUGIN_CONFIG_LABEL: None, well_known.PLUGIN_DEPLOY_LABEL: "true"}
    spoilt = {
        well_known.JOURNAL_ANNOTATION: None,
        well_known.UNREADABLE_JOURNAL_ANNOTATION: "nonsense",
    }
    status = dict.fromkeys(OUR_ANNOTATIONS, "{}")
    kept = (TAINT, *KUBERNETES)
    changes = [labels(**published, **paused), annotations(**status), taints(*kept, HOLD)]
    changes += [annotations(**spoilt), labels(**resumed), taints(*kept)]
    written = [patching(change)(scene) for change in changes][-1]

    assert written["spec"]["taints"] == list(kept)
    assert written["metadata"]["labels"] == LABELS | published
    patching(labels(**{well_known.APPLIED_LABEL: None}))(scene)
    written = patching(annotations(**{well_known.UNREADABLE_JOURNAL_ANNOTATION: None}))(scene)
    assert well_known.APPLIED_LABEL not in written["metadata"]["labels"]
    assert well_known.UNREADABLE_JOURNAL_ANNOTATION not in written["metadata"]["annotations"]


def test_agent_may_remove_an_owners_taint_and_write_its_condition(scene: PolicyScene) -> None:
    port = kube_node.KubeNode(scene.agent, name=NODE, clock=host.SystemClock())
    conditions: dict[str, Any] = {}
    for condition in (PENDING, VERIFIED, FAULTY, gpu_recovery.NONE_NEEDED):
        port.set_condition(condition)
        written = scene.people.get(f"{NODES}/{NODE}")
        conditions = {each["type"]: each for each in written["status"]["conditions"]}
        assert conditions["Ready"]["status"] == "Unknown"
        assert condition.entry(conditions[condition.type], "now") is None
    assert conditions.keys() == {
        "Ready",
        well_known.READY_CONDITION,
        well_known.RECOVERY_CONDITION,
    }

    port.update(
        lambda _view: node_object.NodePatch(
            labels={well_known.STATE_LABEL: "success"}, removed_taints=frozenset({TAINT["key"]})
        )
    )

    written = scene.people.get(f"{NODES}/{NODE}")
    assert written["spec"]["taints"] == list(KUBERNETES)
    assert written["metadata"]["labels"][well_known.STATE_LABEL] == "success"


def test_the_agent_may_not_remove_a_cordon(scene: PolicyScene) -> None:
    scene.people.patch(f"{NODES}/{NODE}", CORDON)
    lifted = {"spec": {"unschedulable": None}}
    assert "may not cordon" in clusters.refusal(lambda: patching(lifted)(scene))


def test_agent_of_simulated_gpus_offers_devices_and_0_of_removed_ones(scene: PolicyScene) -> None:
    advertising_gpus.publish_resources(scene.agent, NODE, {"nvidia.com/gpu": 8})
    advertising_gpus.publish_resources(scene.agent, NODE, {"nvidia.com/mig-1g.5gb": 56})

    status = scene.people.get(f"{NODES}/{NODE}")["status"]
    expected = {"memory": "1Gi", "nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "56"}
    assert (status["capacity"], status["allocatable"]) == (expected, expected)


def test_the_agent_may_remove_resources_of_gpus_from_its_own_node(scene: PolicyScene) -> None:
    advertising_gpus.publish_resources(scene.agent, NODE, {"nvidia.com/mig-3g.20gb": 4})

    port = kube_node.KubeNode(scene.agent, name=NODE, clock=host.SystemClock())
    view = port.remove_resources(["nvidia.com/mig-3g.20gb"])

    assert "nvidia.com/mig-3g.20gb" not in {**view.capacity, **view.allocatable}


def test_the_agent_may_publish_events_of_its_own_node(scene: PolicyScene) -> None:
    assert publishing("Node", NODE)(scene)["reason"] == "Test"


def test_the_agent_may_evict_and_delete_pods_of_its_own_node(scene: PolicyScene) -> None:
    path = f"{PODS}/on-{NODE}"

    evicting(f"on-{NODE}")(scene)
    assert scene.people.get(path)["metadata"]["deletionTimestamp"]

    scene.agent.delete(path, {"gracePeriodSeconds": 0})
    with pytest.raises(errors.ClusterError, match="404"):
        scene.people.get(path)


@pytest.mark.parametrize("namespace", ["default", "kube-public"])
def test_a_pod_that_has_gone_is_gone_to_the_agent_and_not_forbidden(
    scene: PolicyScene, namespace: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods/gone"
    body = {"metadata": {"name": "gone", "namespace": namespace, "labels": api.LABELS}}

    with pytest.raises(errors.ClusterError, match="404"):
        scene.agent.post(f"{path}/eviction", body)
    with pytest.raises(errors.ClusterError, match="404"):
        scene.agent.delete(path)


@pytest.mark.parametrize(
    ("name", "before", "now", "is_allowed"),
    [
        ("mig-manager-slot-0", None, NODE, True),
        ("mig-manager-slot-0", "", NODE, True),
        ("mig-manager-slot-12", "other", NODE, True),
        ("mig-manager-slot-0", NODE, NODE, True),
        ("mig-manager-slot-0", NODE, "", True),
        ("mig-manager-slot-0", "other", "", False),
        ("mig-manager-slot-0", "", "other", False),
        ("mig-manager-slot-01", "", NODE, False),
        ("leader", "", NODE, False),
    ],
)
def test_the_agent_writes_slots_alone_and_for_its_own_node(
    scene: PolicyScene,
    name: str,
    before: str | None,
    now: str,
    is_allowed: bool,  # noqa: FBT001 - a row of the table
) -> None:
    lease, write = a_lease(name, now), functools.partial(scene.agent.post, api_servers.LEASES)
    if before is not None:
        made = scene.people.post(api_servers.LEASES, a_lease(name, before))
        lease["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"]
        write = functools.partial(scene.agent.put, f"{api_servers.LEASES}/{name}")

    assert (not clusters.refusal(lambda: write(lease))) is is_allowed


@pytest.mark.parametrize(
    ("account", "expected"),
    [
        (account_rights.MANAGER, doctor_rig.OK),
        (account_rights.OPERATORS, doctor_rig.WARN),
        (None, doctor_rig.SKIPPED),
    ],
    ids=["confined", "another account", "an administrator"],
)
def test_doctor_reports_whether_a_policy_confines_the_account(
    scene: PolicyScene,
    real_cluster: api_servers.EnvtestCluster,
    tmp_path: pathlib.Path,
    account: account_rights.Account | None,
    expected: doctor_report.CheckResult,
) -> None:
    path = tmp_path / "kubeconfig"
    if account is None:
        real_cluster.server.kubeconfig(path, token=envtest.ADMIN_TOKEN)
    else:
        real_cluster.grant(dataclasses.replace(RIGHTS, account=account))
        real_cluster.kubeconfig(path, account, node=NODE)
    doctor = doctor_rig.DoctorRig(tmp_path).create()

    examination = doctor.examine("--kubeconfig", str(path), "--node-name", NODE)

    assert examination.result_of("admission-policy") is expected
    assert well_known.PARTITIONING_LABEL not in objects.labels(scene.people.get(f"{NODES}/{NODE}"))
