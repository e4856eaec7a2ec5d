"""``mig-manager doctor`` on nodes whose cluster, kubelet or device plugin is ill."""

import dataclasses
import pathlib
import socket
from collections.abc import Iterator, Mapping

import pytest
import yaml

from mig_manager.cli.doctor import doctor_report
from mig_manager.core.node import rights
from mig_manager.core.node.devices import claims
from mig_manager.core.objects import pod_object, well_known
from mig_manager.core.records import journals
from mig_manager.sandbox import stages
from testkit import apiserver
from tests.rigs.node import samples
from tests.rigs.shell import doctor_rig
from tests.rigs.shell.doctor_rig import FAIL, OK, SKIPPED, WARN, DoctorRig, Findings, a_gpu, gpus
from tests.rigs.stage import agent_stage

ROOT = pathlib.Path(__file__).parents[2]


class DoctorCluster(agent_stage.AgentStage):
    """A node with kubelet and device plugin but no agent, and rights that can be taken away."""

    def __init__(self) -> None:
        super().__init__(doctor_rig.SPEC, text="")
        self.denied_rights: set[tuple[str, str, str]] = set()
        # The simulated components have no token.
        self.server = apiserver.ApiServer(
            authorizer=lambda access: (
                not access.token
                or (access.verb, access.resource, access.subresource) not in self.denied_rights
            )
        )

    def start_agent(self) -> None:
        """Leave the node to the doctor."""

    def write(self, **metadata: Mapping[str, str]) -> None:
        """Write labels or annotations of the node."""
        self.api.patch(agent_stage.NODE_PATH, {"metadata": metadata})

    def examine(self) -> Findings:
        doctor = DoctorRig(self.kubeconfig.parent, self.machine.state_file)
        return doctor.examine(
            *("--kubeconfig", str(self.kubeconfig), "--node-name", stages.NODE_NAME),
            *("--pod-resources-socket", str(self.machine.socket)),
        )


@pytest.fixture
def cluster_rig() -> Iterator[DoctorCluster]:
    with DoctorCluster() as stage:
        yield stage


@pytest.mark.slow
def test_a_node_that_is_served_has_nothing_to_fix(cluster_rig: DoctorCluster) -> None:
    result = cluster_rig.examine()

    assert not result.failing, result.by_check
    assert result.text("pod-resources") == "kubelet can schedule 2 nvidia.com/gpu"
    assert result.text("rights").endswith(
        f" has all {len(rights.RIGHTS)} rights that the agent needs"
    )
    assert "is ready" in result.text("device-plugin")


@pytest.mark.slow
def test_phantom_devices_are_named_with_the_command_that_removes_them(
    cluster_rig: DoctorCluster,
) -> None:
    stale = {"nvidia.com/mig-3g.20gb": "4"}
    path = agent_stage.NODE_PATH
    cluster_rig.api.patch(f"{path}/status", {"status": {"capacity": stale}})
    # Kubelet copies it.
    cluster_rig.wait(
        lambda: stale.items() <= cluster_rig.api.get(path)["status"]["allocatable"].items(),
        "the stale devices",
    )

    result = cluster_rig.examine()

    assert result.failing == {"phantom-devices"}
    assert "4 nvidia.com/mig-3g.20gb" in result.text("phantom-devices")
    assert "kubectl patch node sandbox --subresource=status" in result.remedies("phantom-devices")


def test_missing_rights_are_named_and_those_for_events_do_not_fail(
    cluster_rig: DoctorCluster,
) -> None:
    cluster_rig.denied_rights = {("create", "pods", "eviction"), ("create", "events", "")}

    result = cluster_rig.examine()

    assert result.failing == {"rights"}
    assert [(f.result, f.text.partition(":")[0]) for f in result.by_check["rights"]] == [
        (FAIL, "may not create pods/eviction"),
        (WARN, "may not create events"),
    ]


@pytest.mark.slow
def test_remnants_of_an_interrupted_run_are_named(cluster_rig: DoctorCluster) -> None:
    labels = {f"{well_known.DEPLOY_LABEL_PREFIX}dcgm": f"{well_known.PAUSED_VALUE}_by-another"}
    annotations = {
        well_known.JOURNAL_ANNOTATION: "{}",
        well_known.UNREADABLE_JOURNAL_ANNOTATION: "x",
    }
    cluster_rig.write(labels=labels, annotations=annotations)

    examination = cluster_rig.examine()
    cluster_rig.write(labels={well_known.STATE_LABEL: "pending"})
    under_way = cluster_rig.examine()

    assert "interrupted-run" in examination.failing
    assert "dcgm is paused, there is a journal" in examination.text("interrupted-run")
    assert well_known.UNREADABLE_JOURNAL_ANNOTATION in examination.text("interrupted-run")
    assert under_way.result_of("interrupted-run") is WARN


@pytest.mark.slow
def test_a_journal_of_an_unreachable_gpu_is_not_an_interrupted_run(
    cluster_rig: DoctorCluster,
) -> None:
    snapshots = tuple(gpu.snapshot for gpu in samples.balanced_gpu())

    def examine(*, is_verified: bool) -> Findings:
        entries = journals.GpuEntries(snapshots=snapshots, is_verified=is_verified)
        journal = journals.Journal(layout="all-1g.5gb", gpus=entries).to_json()
        cluster_rig.write(annotations={well_known.JOURNAL_ANNOTATION: journal})
        return cluster_rig.examine()

    assert "interrupted-run" not in examine(is_verified=True).failing
    assert "interrupted-run" in examine(is_verified=False).failing


@pytest.mark.parametrize("state", ["success", pytest.param("failed", marks=pytest.mark.slow)])
def test_a_journal_of_persistence_mode_is_not_an_interrupted_run(
    cluster_rig: DoctorCluster, state: str
) -> None:
    entries = journals.GpuEntries(persistent_gpus=("GPU-1",))
    journal = journals.Journal(layout="all-1g.5gb", gpus=entries).to_json()
    annotations = {well_known.JOURNAL_ANNOTATION: journal}
    labels = {well_known.STATE_LABEL: state}
    cluster_rig.write(labels=labels, annotations=annotations)

    result = cluster_rig.examine()

    assert result.result_of("interrupted-run") is WARN
    assert "no interrupted run" in result.text("interrupted-run")
    assert "persistence mode of GPU-1" in result.text("interrupted-run")
    assert "nvidia-smi -pm 1" in result.remedies("interrupted-run")


@pytest.mark.slow
def test_missing_or_silent_cluster_hides_no_other_check(doctor: DoctorRig) -> None:
    doctor.create()
    missing = doctor.examine(
        *("--kubeconfig", str(doctor.folder / "none"), "--node-name", "n1"),
        *("--pod-resources-socket", str(doctor.folder / "none.sock")),
    )
    by_variable = doctor.examine(kubeconfig=doctor.folder / "none")
    with socket.create_server(("127.0.0.1", 0)) as mute, apiserver.serve() as server:
        config = server.kubeconfig(doctor.folder / "kubeconfig")
        unknown = doctor.examine("--kubeconfig", str(config), "--node-name", "n9")
        text = config.read_text().replace(server.url, f"http://127.0.0.1:{mute.getsockname()[1]}")
        config.write_text(text)

        silent = doctor.examine("--timeout-s", "10", "--kubeconfig", str(config))

    assert by_variable.result_of("api") is SKIPPED
    assert f"{doctor.folder}/none: no such file" in by_variable.text("api")
    assert missing.failing == {"api", "pod-resources"}
    assert missing.result_of("rights") is SKIPPED
    assert missing.text("rights") == "cannot be checked without the cluster"
    assert "--kubeconfig" in missing.remedies("api")
    assert 'nodes "n9" not found' in unknown.text("api")
    assert "--node-name" in unknown.remedies("api")
    for name in ("device-plugin", "other-managers"):
        assert unknown.text(name) == "cannot be checked without the node"
    assert silent.failing == {"api", "rights"}
    assert silent.result_of("driver") is OK


def a_pod(container: str, *, is_ready: bool = True) -> pod_object.Pod:
    return pod_object.Pod(
        namespace="gpu",
        name=container,
        uid=f"uid-{container}",
        phase="Running",
        owner_kind="DaemonSet",
        is_ready=is_ready,
        container_names=(container,),
        mounts_plugin_sockets=True,
        mounts_driver_sockets=True,
    )


def slice_of(*uuids: str, **taints: str) -> claims.Slice:
    return claims.Slice(
        name="s",
        pool="n",
        generation=1,
        count=1,
        uuids={uuid: uuid for uuid in uuids},
        for_machines=frozenset(),
        taints=taints,
    )


GPU = gpus(a_gpu())
DRIVER, PLUGIN, MANAGER = a_pod("gpus"), a_pod("nvidia-device-plugin"), a_pod("nvidia-mig-manager")
DRA = {"pods": (DRIVER,), "allocatable": {}, **GPU}
STALE = {"allocatable": {"nvidia.com/gpu": frozenset({"GPU-of-yesterday"})}, **GPU}
SLICED = samples.gpu(samples.A100, "7g.40gb@0")
WHOLE = {
    "pods": (PLUGIN,),
    "allocatable": {"nvidia.com/gpu": frozenset({SLICED.uuid})},
    **gpus(SLICED),
}
ALL_SERVED = "the DRA driver has all devices and no others"


def waiting_pod(container: str) -> dict[str, object]:
    return {"pods": (a_pod(container, is_ready=False),)}


def vgpus(mode: str) -> dict[str, object]:
    """Return a node whose instances Volcano's vGPU plugin may manage."""
    labels = {"name": "volcano-device-plugin"}
    plugin = dataclasses.replace(a_pod("volcano-device-plugin"), labels=labels)
    annotations = {"volcano.sh/node-vgpu-register": f"GPU-1,10,1,NVIDIA-A30,true,{mode}:"}
    node = samples.node_view(annotations=annotations)
    return {"pods": (plugin,), "node": node}


@pytest.mark.parametrize(
    ("check", "facts", "expected", "text"),
    [
        ("gpus", gpus(), FAIL, "this node has no NVIDIA GPU"),
        (
            "instances",
            gpus(samples.gpu(samples.A100, "1g.5gb@4[]")),
            WARN,
            "GPU 0: GPU instance 0 (1g.5gb at 4:1) has no compute instance",
        ),
        ("schedulable-devices", STALE, FAIL, "1 allocatable devices: 0 exist"),
        ("schedulable-devices", {**DRA, "slices": (slice_of(a_gpu().uuid),)}, OK, ALL_SERVED),
        ("schedulable-devices", {**DRA, "slices": (slice_of(),)}, FAIL, "0 exist, 1 are expected"),
        ("schedulable-devices", {**DRA, "slices": None}, WARN, "cannot be listed"),
        (
            "schedulable-devices",
            {**DRA, "slices": (slice_of(a_gpu().uuid, gpu0="gpu.nvidia.com/xid=79"),)},
            WARN,
            "keeps pods from gpu0 (gpu.nvidia.com/xid=79)",
        ),
        (
            "schedulable-devices",
            {**DRA, "slices": (slice_of(a_gpu().uuid),), "pods": (DRIVER, PLUGIN)},
            FAIL,
            "kubelet has 0 allocatable devices",
        ),
        ("schedulable-devices", WHOLE, OK, "all devices and no others"),
        (
            "schedulable-devices",
            {**WHOLE, "pods": (dataclasses.replace(PLUGIN, mig_strategy="mixed"),)},
            FAIL,
            "1 allocatable devices: 0 exist",
        ),
        ("device-plugin", waiting_pod("other"), FAIL, "no device plugin and no DRA driver on"),
        ("device-plugin", waiting_pod("gpus"), FAIL, "gpu/gpus is not ready (Running)"),
        (
            "device-plugin",
            waiting_pod("nvidia-device-plugin-ctr"),
            FAIL,
            "plugin-ctr is not ready",
        ),
        ("other-managers", vgpus("mig"), FAIL, ""),
        ("other-managers", vgpus("hami-core"), OK, ""),
    ],
)
def test_cluster_check_derives_its_result_from_the_facts(
    doctor: DoctorRig,
    check: str,
    facts: Mapping[str, object],
    expected: doctor_report.CheckResult,
    text: str,
) -> None:
    result = doctor.check(check, facts)

    assert result.result_of(check) is expected
    assert text in result.text(check)


@pytest.mark.parametrize(("uid", "expected"), [(MANAGER.uid, OK), ("uid-of-another", FAIL)])
def test_the_pod_that_runs_doctor_is_not_another_manager(
    doctor: DoctorRig, uid: str, expected: doctor_report.CheckResult
) -> None:
    result = doctor.check("other-managers", {"pods": (MANAGER,)}, own_pod_uid=uid)

    assert result.result_of("other-managers") is expected


def test_the_rights_are_those_of_the_manifest() -> None:
    documents = yaml.safe_load_all((ROOT / "deploy/base/rbac.yaml").read_text(encoding="utf-8"))
    rules = next(d for d in documents if d["kind"] == "ClusterRole")["rules"]
    granted = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }

    assert granted == {
        (r.group, "/".join(filter(None, (r.resource, r.subresource))), r.verb)
        for r in rights.RIGHTS
    }
    assert len(granted) == len(rights.RIGHTS)
