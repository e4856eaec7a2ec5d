"""``mig-manager doctor`` on nodes that are ill in every way we know."""

import contextlib
import dataclasses
import io
import json
import pathlib
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from mig_manager.adapters import host
from mig_manager.adapters.host import lock_file
from mig_manager.adapters.kubernetes import api
from mig_manager.catalogue import hardware
from mig_manager.cli import (
    command_settings,
    console,
    doctor,
    doctor_checks,
    main,
    parser,
)
from mig_manager.core import model, profile_name
from mig_manager.core.node import cluster
from mig_manager.core.records import status
from mig_manager.sandbox.apiserver import request
from mig_manager.sandbox.driver import library as simulated
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import node_options, sandbox_node
from testkit import apiserver, nvml_faults
from tests import waiting
from tests.adapters import proc_tree

ROOT = pathlib.Path(__file__).parents[2]
SPEC = "2xA100-SXM4-40GB"
FAIL, WARN, OK, SKIPPED = (
    doctor.Verdict.FAIL,
    doctor.Verdict.WARN,
    doctor.Verdict.OK,
    doctor.Verdict.SKIPPED,
)
POD = "0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f"
NODE_NAME = "n1"


class Examination:
    """The findings of some checks, by check."""

    def __init__(self, report: doctor.Report) -> None:
        self.findings: dict[str, list[doctor.Finding]] = {}
        for check, finding in report.findings:
            self.findings.setdefault(check.name, []).append(finding)

    def verdict(self, check: str) -> doctor.Verdict:
        """Return the worst verdict of a check."""
        worst = (FAIL, WARN, OK, SKIPPED)
        return min((f.verdict for f in self.findings[check]), key=worst.index)

    def text(self, check: str) -> str:
        return "; ".join(finding.text for finding in self.findings[check])

    def remedies(self, check: str) -> str:
        return "; ".join(finding.remedy for finding in self.findings[check])

    @property
    def failing(self) -> set[str]:
        return {name for name in self.findings if self.verdict(name) is FAIL}


class Patient:
    """A simulated node, and who looks at it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.path = folder / "gpus.json"
        self.state = nvml_faults.SharedState(self.path)
        self.argv = ["--simulate-state", str(self.path)]

    def born(self, spec: str = SPEC, **options: object) -> "Patient":
        simulated.create(spec, self.path, options=dataclasses.replace(states.Options(), **options))  # type: ignore[arg-type]
        return self

    def settings(self, *argv: str, **changes: object) -> command_settings.DoctorSettings:
        settings = command_settings.doctor_settings(
            parser.parse(["doctor", *self.argv, *argv]), {"HOME": str(self.folder)}
        )
        return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]

    def examine(self, *argv: str, **changes: object) -> Examination:
        facts = doctor.facts(self.settings(*argv, **changes))
        return Examination(doctor.examine(doctor_checks.CHECKS, facts, timeout_s=20.0))

    def check(
        self, name: str, facts: Mapping[str, object] | None = None, **settings: object
    ) -> Examination:
        """Run one check on these facts."""
        known = {
            each: doctor.Once(lambda value=value: value, what=each)  # type: ignore[misc]
            if each != "own_pod_uid"
            else value
            for each, value in (facts or {}).items()
        }
        read = doctor.facts(self.settings(**settings))
        checks = [each for each in doctor_checks.CHECKS if each.name == name]
        read = dataclasses.replace(read, **known)  # type: ignore[arg-type]
        return Examination(doctor.examine(checks, read, timeout_s=20.0))

    def shell(self, *argv: str) -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        terminal = console.Console(
            stdin=io.StringIO(), stdout=out, stderr=err, environ={"HOME": str(self.folder)}
        )
        done = main.main(["doctor", *self.argv, *argv], terminal)
        assert "Traceback" not in err.getvalue()
        return done, out.getvalue()


@pytest.fixture
def patient(tmp_path: pathlib.Path) -> Patient:
    return Patient(tmp_path)


@pytest.fixture
def proc(tmp_path: pathlib.Path) -> proc_tree.ProcTree:
    return proc_tree.ProcTree(tmp_path / "proc")


def on_machine(proc: proc_tree.ProcTree) -> dict[str, Any]:
    return {"proc": proc.root, "dev": proc.root / "dev"}


def gpus(*there: model.Gpu) -> dict[str, object]:
    return {"gpus": model.ObservedGpus(there)}


def a_gpu(product: str = "A100-SXM4-40GB") -> model.Gpu:
    return hardware.template(hardware.find(product), 0)


# -- as a whole ---------------------------------------------------------------------------


def test_a_healthy_node_without_a_cluster_has_nothing_to_fix(patient: Patient) -> None:
    result = patient.born().examine()

    assert not result.failing
    assert result.text("driver") == "driver 580.95.05, NVML 580.95.05"
    assert result.text("rights") == "no kubeconfig"
    assert list(result.findings) == [check.name for check in doctor_checks.CHECKS]


def test_the_answer_is_for_people_and_for_programs(patient: Patient) -> None:
    patient.born(driver_version="440.33.01")

    done, text = patient.shell()
    done_json, data = patient.shell("-o", "json")

    assert (done, done_json) == (1, 1)
    assert "driver               fail     driver 440.33.01" in text
    assert "remedy: Install a newer NVIDIA driver." in text
    found = json.loads(data)
    assert found["is_good"] is False
    assert {f["check"] for f in found["findings"] if f["verdict"] == "fail"} == {"driver"}
    assert found["counts"]["fail"] == 1


def test_a_driver_that_hangs_hides_nothing_else(patient: Patient) -> None:
    patient.born()
    patient.state.add_fault(nvml_faults.Fault(function="nvmlInit*", count=None, hang_s=600.0))
    since = time.monotonic()

    result = patient.examine("--timeout-s", "4")

    assert time.monotonic() - since < 30
    assert result.failing == {"driver", "gpus"}
    assert "nvmlInit has not returned for" in result.text("driver")
    assert result.verdict("instances") is SKIPPED
    assert result.verdict("config-file") is OK


def test_a_driver_that_crashes_hides_nothing_else(patient: Patient) -> None:
    patient.born()
    patient.state.add_fault(nvml_faults.Fault(function="nvmlInit*", count=None, crashes=True))

    result = patient.examine()

    assert result.failing == {"driver", "gpus"}
    assert result.verdict("lock") is OK


def test_a_check_that_fails_or_hangs_is_a_finding_of_its_own(patient: Patient) -> None:
    def break_(_facts: doctor.Facts) -> list[doctor.Finding]:
        raise RuntimeError("oh")

    def hang(_facts: doctor.Facts) -> list[doctor.Finding]:
        with lock:
            return []

    rows = [
        doctor.Check("broken", "", "", break_),
        doctor.Check("hung", "", "", hang),
        doctor.Check("good", "", "", lambda _facts: [doctor.ok("free")]),
    ]
    lock = threading.Lock()
    with lock:
        facts = doctor.facts(patient.settings())
        result = Examination(doctor.examine(rows, facts, timeout_s=0.2))

    assert result.text("broken") == "the check failed: RuntimeError: oh"
    assert result.text("hung") == "no answer within 0.2 s"
    assert result.text("good") == "free"


def test_the_document_has_every_check_with_its_remedy() -> None:
    text = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text[text.index("## Checks") :].splitlines()
        if line.startswith("| `")
    ]

    assert rows == [[f"`{c.name}`", c.meaning, c.remedy] for c in doctor_checks.CHECKS]


# -- GPUs ---------------------------------------------------------------------------------


def test_no_driver_fails_with_what_to_do(patient: Patient) -> None:
    patient.born()
    patient.path.unlink()

    result = patient.examine()

    assert result.failing == {"driver", "gpus"}
    assert "Load the NVIDIA driver" in result.remedies("driver")


def test_a_pending_mode_is_reported_with_its_remedy_and_the_gpu_processes(
    patient: Patient,
) -> None:
    patient.born(resets_itself=False)
    board = patient.state.boards[0]
    patient.state.update(
        lambda now: (
            dataclasses.replace(
                now,
                gpus=tuple(dataclasses.replace(gpu, is_pending=True) for gpu in now.gpus),
            ),
            None,
        )
    )
    patient.state.add_client(board.uuid, name="/usr/bin/train", pid=77)

    result = patient.examine()

    assert "GPU 1: MIG disabled, to be enabled after a reset" in result.text("gpus")
    assert "nvidia-smi --gpu-reset -i 1" in result.remedies("gpus")
    assert "GPU 0: train (pid 77)" in result.text("gpu-processes")
    assert result.verdict("gpu-processes") is WARN


@pytest.mark.parametrize(
    ("how", "verdict", "words"),
    [
        (states.Virtualization.VGPU, FAIL, "GPU 0 is a vGPU"),
        (states.Virtualization.PASSTHROUGH, WARN, "GPU 0 is passed through"),
    ],
)
def test_gpus_of_a_virtual_machine_are_explained(
    patient: Patient, how: states.Virtualization, verdict: doctor.Verdict, words: str
) -> None:
    result = patient.born(virtualization=how).examine()

    assert result.verdict("virtualization") is verdict
    assert words in result.text("virtualization")


def test_a_gpu_instance_without_compute_instances_is_named(patient: Patient) -> None:
    garbage = model.GpuInstance(
        instance_id=3,
        profile=profile_name.parse("1g.5gb"),
        profile_id=19,
        placement=model.Placement(4, 1),
        compute_instances=(),
    )
    gpu = dataclasses.replace(
        a_gpu(), current_mode=model.MigMode.ENABLED, gpu_instances=(garbage,)
    )

    result = patient.check("instances", gpus(gpu))

    assert result.verdict("instances") is WARN
    words = "GPU 0: GPU instance 3 (1g.5gb at 4:1) has no compute instance"
    assert words in result.text("instances")


def test_instances_that_we_may_not_list_are_not_taken_for_none(patient: Patient) -> None:
    patient.born(permitted=False)
    patient.state.update(
        lambda now: (
            dataclasses.replace(
                now,
                gpus=tuple(
                    dataclasses.replace(gpu, is_enabled=True, is_pending=True) for gpu in now.gpus
                ),
            ),
            None,
        )
    )

    result = patient.examine()

    assert result.failing == {"gpus"}
    assert "Run as root" in result.remedies("gpus")
    assert result.verdict("instances") is SKIPPED


def test_a_node_without_any_gpu_that_has_mig_fails(patient: Patient) -> None:
    result = patient.check("gpus", gpus())

    assert result.failing == {"gpus"}
    assert result.text("gpus") == "this node has no NVIDIA GPU"


# -- the machine --------------------------------------------------------------------------


def status_file(proc: proc_tree.ProcTree, *, user: int, rights_hex: str) -> None:
    (proc.root / "self").mkdir()
    (proc.root / "self/status").write_text(
        f"Name:\tx\nUid:\t{user}\t{user}\t0\t0\nCapEff:\t{rights_hex}\n"
    )


def test_root_with_all_rights_may_change_what_there_is(
    patient: Patient, proc: proc_tree.ProcTree
) -> None:
    status_file(proc, user=0, rights_hex="000001ffffffffff")

    for name in ("privileges", "mig-config-right"):
        assert patient.check(name, **on_machine(proc)).verdict(name) is OK


@pytest.mark.parametrize(
    ("mounted", "verdict"),
    [
        # A container's own /dev, and the host's as seen from a container.
        ("24 27 0:6 / {dev} rw,nosuid - tmpfs tmpfs rw,mode=755", OK),
        ("24 27 0:6 / {dev} rw,nosuid master:3 - devtmpfs udev rw,mode=755", WARN),
        ("24 27 0:6 / /elsewhere rw - tmpfs tmpfs rw", WARN),
    ],
)
def test_who_cannot_make_nodes_lacks_nothing_where_the_toolkit_makes_them(
    patient: Patient, proc: proc_tree.ProcTree, mounted: str, verdict: doctor.Verdict
) -> None:
    # As the unprivileged pod has them: SYS_ADMIN alone.
    status_file(proc, user=0, rights_hex="0000000000200000")
    (proc.root / "self/mountinfo").write_text(mounted.format(dev="/a/dev") + "\n")

    result = patient.check("privileges", proc=proc.root, dev=pathlib.Path("/a/dev"))

    assert result.verdict("privileges") is verdict
    assert "without MKNOD" in result.text("privileges")


def test_a_user_without_rights_needs_the_node_of_the_right(
    patient: Patient, proc: proc_tree.ProcTree
) -> None:
    status_file(proc, user=1000, rights_hex="0000000000000000")
    proc.add_right("config", 1, mode=0o400)
    nodes = proc.root / "dev/nvidia-caps"

    privileges = patient.check("privileges", **on_machine(proc))
    without = patient.check("mig-config-right", **on_machine(proc))
    nodes.mkdir(parents=True)
    (nodes / "nvidia-cap1").touch()
    with_node = patient.check("mig-config-right", **on_machine(proc))

    assert privileges.verdict("privileges") is WARN
    assert "without SYS_ADMIN and MKNOD" in privileges.text("privileges")
    assert without.failing == {"mig-config-right"}
    assert "nvidia-cap1: No such file or directory" in without.text("mig-config-right")
    assert with_node.verdict("mig-config-right") is OK


def modules(proc: proc_tree.ProcTree, **users: int) -> None:
    lines = [f"{name} 4096 {count} - Live 0x0" for name, count in users.items()]
    (proc.root / "modules").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("product", "verdict"), [("A100-SXM4-40GB", WARN), ("H100-SXM5-80GB", OK)]
)
def test_what_may_hold_off_a_reset_is_named(
    patient: Patient, proc: proc_tree.ProcTree, product: str, verdict: doctor.Verdict
) -> None:
    modules(proc, nvidia=3, nvidia_uvm=0, nvidia_drm=2)
    proc.add(5, "/dev/nvidia0", name="nvidia-persiste")

    result = patient.check("kernel-modules", gpus(a_gpu(product)), **on_machine(proc))

    assert result.verdict("kernel-modules") is verdict
    assert "nvidia_drm has 2 users; nvidia-persiste (pid 5)" in result.text("kernel-modules")


def test_a_kernel_without_the_driver_says_so(patient: Patient, proc: proc_tree.ProcTree) -> None:
    modules(proc, ext4=1)

    assert patient.check("kernel-modules", gpus(a_gpu()), **on_machine(proc)).failing


def test_processes_are_reported_with_their_pod(patient: Patient, proc: proc_tree.ProcTree) -> None:
    modules(proc, nvidia=3, nvidia_uvm=0)
    proc.add(4711, "/dev/nvidia0", name="dcgm", cgroup=f"0::/kubepods/pod{POD}/x")

    result = patient.born().examine(proc=proc.root)

    assert f"GPU 0: dcgm (pid 4711, pod {POD})" in result.text("gpu-processes")


def test_the_lock_is_reported_with_its_owner_and_not_taken(patient: Patient) -> None:
    path = patient.folder / "lock"
    lock = lock_file.LockFile(path, program="other", clock=host.SystemClock(), is_required=True)

    before = patient.check("lock", lock_file=path)
    with lock.hold("apply all-1g.5gb"):
        during = patient.check("lock", lock_file=path)
    with lock.hold("again"):
        pass
    after = patient.check("lock", lock_file=path)

    assert during.verdict("lock") is WARN
    assert "apply all-1g.5gb" in during.text("lock")
    assert (before.verdict("lock"), after.verdict("lock")) == (OK, OK)


def test_files_that_make_no_sense_are_named(patient: Patient) -> None:
    patient.born()
    layouts, verified, journal = (patient.folder / name for name in ("l.yaml", "p", "j"))
    layouts.write_text("version: v2\n")
    verified.write_text("{")
    journal.write_text(status.Journal(config="all-1g.5gb").to_json())

    result = patient.examine(
        *("-f", str(layouts)),
        *("--verified-layout-file", str(verified)),
        *("--journal-file", str(journal)),
    )

    assert result.failing == {"config-file", "verified-layout"}
    assert f"{layouts}:1:10" in result.text("config-file")
    assert result.verdict("journal-file") is WARN


# -- the cluster --------------------------------------------------------------------------


class Cluster:
    """A node with kubelet and device plugin, and rights that can be taken away."""

    def __init__(self, patient: Patient, folder: pathlib.Path) -> None:
        self.denied: set[tuple[str, str, str]] = set()
        self.server = apiserver.ApiServer(authorizer=self._may)
        self.socket = folder / "pr.sock"
        self.patient = patient

    def _may(self, asked: request.Access) -> bool:
        # The scenery has no token.
        what = (asked.verb, asked.resource, asked.subresource)
        return not asked.token or what not in self.denied

    def examine(self) -> Examination:
        kubeconfig = self.server.kubeconfig(self.patient.folder / "kubeconfig")
        return self.patient.examine(
            *("--kubeconfig", str(kubeconfig), "--node-name", NODE_NAME),
            *("--pod-resources-socket", str(self.socket)),
        )

    def patch(self, change: Mapping[str, object]) -> None:
        with contextlib.closing(api.KubeApi.at(self.server.url)) as kube:
            kube.patch(f"/api/v1/nodes/{NODE_NAME}", change, kind=api.PatchType.MERGE)


@pytest.fixture
def cluster_rig(patient: Patient) -> Iterator[Cluster]:
    patient.born()
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = Cluster(patient, folder)
        stack.enter_context(apiserver.serve(found.server))
        options = node_options.NodeOptions(
            name=NODE_NAME,
            tick_s=0.02,
            pod_start_s=0.01,
            pod_stop_s=0.01,
            plugin_start_s=0.01,
            pod_resources_socket=found.socket,
        )
        sandbox = stack.enter_context(
            sandbox_node.SandboxNode(found.server.url, patient.path, options=options)
        )
        with contextlib.closing(api.KubeApi.at(found.server.url)) as kube:
            waiting.until(
                lambda: any(sandbox.devices.allocatable().values()) and is_published(kube),
                within_s=20,
            )
        yield found


def is_published(kube: api.KubeApi) -> bool:
    shown = kube.get(f"/api/v1/nodes/{NODE_NAME}").get("status", {}).get("allocatable", {})
    return bool(shown.get("nvidia.com/gpu"))


def test_a_node_that_is_served_has_nothing_to_fix(cluster_rig: Cluster) -> None:
    result = cluster_rig.examine()

    assert not result.failing, result.findings
    assert result.text("pod-resources") == "kubelet can schedule 2 nvidia.com/gpu"
    assert result.text("rights") == f"all {len(cluster.RIGHTS)} that the agent needs"
    assert "is ready" in result.text("device-plugin")


def test_rights_that_are_lacking_are_named_and_events_are_no_failure(cluster_rig: Cluster) -> None:
    cluster_rig.denied = {("create", "pods", "eviction"), ("create", "events", "")}

    result = cluster_rig.examine()

    assert result.failing == {"rights"}
    assert [(f.verdict, f.text.partition(":")[0]) for f in result.findings["rights"]] == [
        (FAIL, "may not create pods/eviction"),
        (WARN, "may not create events"),
    ]


def test_what_an_interrupted_run_left_is_named(cluster_rig: Cluster) -> None:
    labels = {f"{cluster.DEPLOY_LABEL_PREFIX}dcgm": cluster.PAUSED_VALUE}
    annotations = {
        cluster.JOURNAL_ANNOTATION: "{}",
        cluster.UNREADABLE_JOURNAL_ANNOTATION: "x",
    }
    cluster_rig.patch({"metadata": {"labels": labels, "annotations": annotations}})

    left = cluster_rig.examine()
    cluster_rig.patch({"metadata": {"labels": {cluster.STATE_LABEL: "pending"}}})
    under_way = cluster_rig.examine()

    assert "interrupted-run" in left.failing
    assert "dcgm is paused, there is a journal" in left.text("interrupted-run")
    assert cluster.UNREADABLE_JOURNAL_ANNOTATION in left.text("interrupted-run")
    assert under_way.verdict("interrupted-run") is WARN


def test_a_cluster_that_was_asked_for_and_is_not_there_is_a_failure(patient: Patient) -> None:
    result = patient.born().examine(
        *("--kubeconfig", str(patient.folder / "none"), "--node-name", NODE_NAME),
        *("--pod-resources-socket", str(patient.folder / "none.sock")),
    )

    assert result.failing == {"api", "pod-resources"}
    assert result.verdict("rights") is SKIPPED
    assert result.text("rights") == "not known: the cluster"
    assert "--kubeconfig" in result.remedies("api")


def test_an_api_that_does_not_answer_hides_nothing_else(patient: Patient) -> None:
    patient.born()
    with socket.create_server(("127.0.0.1", 0)) as mute, apiserver.serve() as server:
        config = server.kubeconfig(patient.folder / "kubeconfig")
        text = config.read_text().replace(server.url, f"http://127.0.0.1:{mute.getsockname()[1]}")
        config.write_text(text)

        result = patient.examine("--timeout-s", "4", "--kubeconfig", str(config))

    assert result.failing == {"api", "rights"}
    assert result.verdict("driver") is OK


def test_missing_and_removed_devices_are_counted(patient: Patient) -> None:
    schedulable = {"nvidia.com/gpu": frozenset({"GPU-of-yesterday"})}

    result = patient.check("schedulable-devices", {"allocatable": schedulable, **gpus(a_gpu())})

    assert result.failing == {"schedulable-devices"}
    assert "1 allocatable devices: 0 exist" in result.text("schedulable-devices")


def a_pod(container: str, *, is_ready: bool = True) -> cluster.Pod:
    return cluster.Pod(
        namespace="gpu",
        name=container,
        uid=f"uid-{container}",
        phase="Running",
        labels={},
        node_selector={},
        owner_kind="DaemonSet",
        is_mirror=False,
        is_ready=is_ready,
        is_terminating=False,
        gpu_resources={},
        container_names=(container,),
        mounts_plugin_sockets=True,
    )


@pytest.mark.parametrize(
    ("container", "found"),
    [
        ("other", "no device plugin on this node"),
        ("nvidia-device-plugin-ctr", "gpu/nvidia-device-plugin-ctr is not ready (Running)"),
    ],
)
def test_a_plugin_that_is_absent_or_not_ready_fails(
    patient: Patient, container: str, found: str
) -> None:
    pods = (a_pod(container, is_ready=False),)

    result = patient.check("device-plugin", {"pods": pods})

    assert result.failing == {"device-plugin"}
    assert result.text("device-plugin") == found


def test_another_manager_fails_and_we_ourselves_do_not(patient: Patient) -> None:
    manager = a_pod("nvidia-mig-manager")

    for own_pod_uid, verdict in (("uid-of-ours", FAIL), (manager.uid, OK)):
        facts = {"pods": (manager,), "own_pod_uid": own_pod_uid}
        assert patient.check("other-managers", facts).verdict("other-managers") is verdict


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
        for r in cluster.RIGHTS
    }
    assert len(granted) == len(cluster.RIGHTS)
