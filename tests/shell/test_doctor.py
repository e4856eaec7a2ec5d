"""``mig-manager doctor`` on nodes that are ill in every way we know."""

import pathlib
import threading
from typing import Any

import pytest

from mig_manager.adapters import host
from mig_manager.adapters.host import lock_file
from mig_manager.cli.doctor import doctor_facts, doctor_report, examination
from mig_manager.core import model
from mig_manager.core.records import journals, verified_layouts
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.rigs.host import privileges, proc_tree
from tests.rigs.shell.commandline import Shell
from tests.rigs.shell.doctor_rig import FAIL, OK, SKIPPED, WARN, DoctorRig, Findings, a_gpu, gpus

ROOT = pathlib.Path(__file__).parents[2]
POD = "0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f"


@pytest.fixture
def proc(tmp_path: pathlib.Path) -> proc_tree.ProcTree:
    return proc_tree.ProcTree(tmp_path / "proc")


# -- as a whole -------------------------------------------------------------------------------


def test_a_healthy_node_without_a_cluster_has_nothing_to_fix(doctor: DoctorRig) -> None:
    result = doctor.create().examine()

    assert not result.failing
    assert result.text("driver") == "driver 580.95.05, NVML 580.95.05"
    assert result.text("rights") == "no kubeconfig; name one with --kubeconfig"
    assert list(result.by_check) == [check.name for check in examination.CHECKS]


@pytest.mark.slow
def test_the_answer_is_for_people_and_for_programs(doctor: DoctorRig, shell: Shell) -> None:
    doctor.create(driver_version="440.33.01")

    text = shell("doctor", *doctor.argv)
    data = shell("doctor", *doctor.argv, "-o", "json")

    assert (text.status, data.status) == (1, 1)
    assert "driver           fail     driver 440.33.01" in text.out
    assert "remedy: Install a newer NVIDIA driver." in text.out
    assert text.out.count("no kubeconfig") == 1
    answer_data = data.data
    assert answer_data["isGood"] is False
    assert {f["check"] for f in answer_data["findings"] if f["result"] == "fail"} == {"driver"}
    assert answer_data["counts"]["fail"] == 1


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"hang_s": 600.0}, marks=pytest.mark.slow),
        {"crashes": True},
        {"code": states.Code.DRIVER_NOT_LOADED},
    ],
    ids=["hangs", "crashes", "is not loaded"],
)
def test_a_driver_that_fails_hides_no_other_finding(
    doctor: DoctorRig, fault: dict[str, Any]
) -> None:
    doctor.create()
    doctor.state.add_fault(nvml_faults.Fault(function="nvmlInit*", count=None, **fault))

    result = doctor.examine(
        *("--timeout-s", "10" if "hang_s" in fault else "60"), has_worker="code" not in fault
    )

    assert result.failing == {"driver"}
    assert result.text("gpus") == "cannot be checked without the GPUs"
    assert "the agent" not in result.remedies("driver")
    assert "nvmlInit" in result.text("driver")
    assert "hang_s" not in fault or "has not returned for" in result.text("driver")
    assert "code" not in fault or "Load the NVIDIA driver" in result.remedies("driver")
    assert result.result_of("instances") is SKIPPED
    assert (result.result_of("config-file"), result.result_of("lock")) == (OK, OK)


@pytest.mark.parametrize(
    ("subfolder", "of_lock"),
    [
        pytest.param("new", WARN, id="missing"),
        # An existing lock is opened, and the others are replaced.
        pytest.param("", OK, id="existing"),
    ],
)
def test_a_file_that_apply_could_not_write_is_a_warning(
    doctor: DoctorRig, tmp_path: pathlib.Path, subfolder: str, of_lock: doctor_report.CheckResult
) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    (folder / "lock").touch()
    verified = verified_layouts.VerifiedLayout(
        layout="a", content_hash="", boot_id="", snapshots=(), covered=()
    )
    (folder / "verified-layout").write_text(verified.to_json(), "utf-8")
    folder.chmod(0o555)

    with privileges.bound_by_file_modes():
        result = doctor.create().examine(
            *(
                f"--{name}-file={folder / subfolder / name}"
                for name in ("lock", "journal", "verified-layout")
            )
        )

    expected = {"lock": of_lock, "journal-file": WARN, "verified-layout": WARN}
    for check, check_result in expected.items():
        assert result.result_of(check) is check_result
        assert ("may not write it" in result.text(check)) is (check_result is WARN)


def test_a_check_that_fails_or_hangs_is_a_finding_of_its_own(doctor: DoctorRig) -> None:
    def break_(_facts: doctor_facts.Facts) -> list[doctor_report.Finding]:
        raise RuntimeError("oh")

    def hang(_facts: doctor_facts.Facts) -> list[doctor_report.Finding]:
        with lock:
            return []

    rows = [
        doctor_facts.Check("broken", "", "", break_),
        doctor_facts.Check("hung", "", "", hang),
        doctor_facts.Check("good", "", "", lambda _facts: [doctor_report.ok("free")]),
    ]
    lock = threading.Lock()
    with lock:
        facts = doctor_facts.facts(doctor.settings())
        result = Findings(examination.examine(rows, facts, timeout_s=0.2))

    assert result.text("broken") == "the check failed: RuntimeError: oh"
    assert result.text("hung") == "no answer within 0.2 s"
    assert result.text("good") == "free"


# -- GPUs -------------------------------------------------------------------------------------


def test_a_pending_mode_is_reported_with_its_remedy_and_the_gpu_processes(
    doctor: DoctorRig,
) -> None:
    doctor.create(resets_itself=False)
    board = doctor.state.boards[0]
    doctor.set_modes(is_enabled=False, is_pending=True)
    doctor.state.add_client(board.uuid, name="/usr/bin/train", pid=77)

    result = doctor.examine()

    assert "GPU 1: MIG disabled, enabled after a reset" in result.text("gpus")
    assert "nvidia-smi --gpu-reset -i 1" in result.remedies("gpus")
    assert "GPU 0: train (pid 77)" in result.text("gpu-processes")
    assert result.result_of("gpu-processes") is WARN


def test_a_gpu_that_needs_recovery_fails_with_its_remedy(doctor: DoctorRig) -> None:
    doctor.create()
    doctor.state.fail_gpu(1, action=4)

    result = doctor.examine()

    assert result.result_of("gpu-recovery") is FAIL
    assert "GPU 1" in result.text("gpu-recovery")
    assert "GPU 0: no recovery action needed" in result.text("gpu-recovery")
    assert "nvidia-smi --gpu-reset -i 1" in result.remedies("gpu-recovery")


def test_a_driver_without_recovery_actions_is_not_reported(doctor: DoctorRig) -> None:
    assert (
        doctor.create(reports_recovery_action=False).examine().result_of("gpu-recovery") is SKIPPED
    )


@pytest.mark.parametrize(
    ("how", "expected", "words"),
    [
        (model.Virtualization.VGPU, FAIL, "GPU 0 is a vGPU"),
        pytest.param(
            *(model.Virtualization.PASSTHROUGH, WARN, "GPU 0 is passed through"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(model.Virtualization.HOST, WARN, "GPU 0 is shared with virtual machines"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gpus_of_a_virtual_machine_are_explained(
    doctor: DoctorRig, how: model.Virtualization, expected: doctor_report.CheckResult, words: str
) -> None:
    result = doctor.create(virtualization=how).examine()

    assert result.result_of("virtualization") is expected
    assert words in result.text("virtualization")


def test_instances_that_may_not_be_listed_do_not_count_as_absent(doctor: DoctorRig) -> None:
    doctor.create(permitted=False)
    doctor.set_modes(is_enabled=True, is_pending=True)

    result = doctor.examine()

    assert result.failing == {"gpus"}
    assert "Run as root" in result.remedies("gpus")
    assert result.result_of("instances") is SKIPPED


# -- the machine ------------------------------------------------------------------------------


def status_file(proc: proc_tree.ProcTree, *, user: int, rights_hex: str) -> None:
    (proc.root / "self").mkdir(exist_ok=True)
    (proc.root / "self/status").write_text(
        f"Name:\tx\nUid:\t{user}\t{user}\t0\t0\nCapEff:\t{rights_hex}\n"
    )


@pytest.mark.parametrize(
    ("mounted", "expected"),
    [
        # A container's own /dev, and the host's as seen from a container.
        ("24 27 0:6 / {dev} rw,nosuid - tmpfs tmpfs rw,mode=755", OK),
        ("24 27 0:6 / {dev} rw,nosuid master:3 - devtmpfs udev rw,mode=755", WARN),
        ("24 27 0:6 / /elsewhere rw - tmpfs tmpfs rw", WARN),
    ],
)
def test_no_right_is_missing_where_the_toolkit_creates_device_nodes(
    doctor: DoctorRig, proc: proc_tree.ProcTree, mounted: str, expected: doctor_report.CheckResult
) -> None:
    # As the unprivileged pod has them: SYS_ADMIN alone.
    status_file(proc, user=0, rights_hex="0000000000200000")
    (proc.root / "self/mountinfo").write_text(mounted.format(dev="/a/dev") + "\n")

    result = doctor.check("privileges", proc=proc.root, dev=pathlib.Path("/a/dev"))

    assert result.result_of("privileges") is expected
    assert "without MKNOD" in result.text("privileges")


def test_user_needs_the_node_of_the_right_and_root_does_not(
    doctor: DoctorRig, proc: proc_tree.ProcTree
) -> None:
    status_file(proc, user=1000, rights_hex="0000000000000000")
    proc.add_right("config", 1, mode=0o400)
    nodes = proc.root / "dev/nvidia-caps"
    machine: dict[str, Any] = {"proc": proc.root, "dev": proc.root / "dev"}

    examined = doctor.check("privileges", **machine)
    without = doctor.check("mig-config-right", **machine)
    nodes.mkdir(parents=True)
    (nodes / "nvidia-cap1").touch()
    with_node = doctor.check("mig-config-right", **machine)

    assert examined.result_of("privileges") is WARN
    assert "without SYS_ADMIN and MKNOD" in examined.text("privileges")
    assert without.failing == {"mig-config-right"}
    assert "nvidia-cap1: No such file or directory" in without.text("mig-config-right")
    assert with_node.result_of("mig-config-right") is OK

    (nodes / "nvidia-cap1").unlink()
    status_file(proc, user=0, rights_hex="000001ffffffffff")
    for name in ("privileges", "mig-config-right"):
        assert doctor.check(name, **machine).result_of(name) is OK


@pytest.mark.parametrize(
    ("product", "expected"), [("A100-SXM4-40GB", WARN), ("H100-SXM5-80GB", OK)]
)
def test_modules_and_programs_that_may_prevent_a_reset_are_named(
    doctor: DoctorRig, proc: proc_tree.ProcTree, product: str, expected: doctor_report.CheckResult
) -> None:
    proc.load_modules(nvidia=3, nvidia_uvm=0, nvidia_drm=0, ext4=1)
    proc.add(5, "/dev/nvidia0", name="nvidia-persiste")

    result = doctor.check("kernel-modules", gpus(a_gpu(product)), proc=proc.root)
    proc.load_modules(ext4=1)
    without = doctor.check("kernel-modules", gpus(a_gpu(product)), proc=proc.root)

    assert result.result_of("kernel-modules") is expected
    text = result.text("kernel-modules")
    assert text.startswith("loaded: nvidia, nvidia_drm, nvidia_uvm; ")
    assert "nvidia_drm is loaded; nvidia-persiste (pid 5)" in text
    assert without.failing == {"kernel-modules"}


def test_processes_are_reported_with_their_pod(
    doctor: DoctorRig, proc: proc_tree.ProcTree
) -> None:
    proc.load_modules(nvidia=3, nvidia_uvm=0)
    proc.add(4711, "/dev/nvidia0", name="dcgm", cgroup=f"0::/kubepods/pod{POD}/x")

    result = doctor.create().examine(proc=proc.root, has_worker=True)

    assert f"GPU 0: dcgm (pid 4711, pod {POD})" in result.text("gpu-processes")


def test_the_lock_is_reported_with_its_owner_and_not_taken(doctor: DoctorRig) -> None:
    path = doctor.folder / "lock"
    lock = lock_file.LockFile(path, program="other", clock=host.SystemClock(), is_required=True)

    before = doctor.check("lock", lock_file=path)
    with lock.hold("apply all-1g.5gb"):
        during = doctor.check("lock", lock_file=path)
    with lock.hold("again"):
        pass
    after = doctor.check("lock", lock_file=path)

    assert during.result_of("lock") is WARN
    assert "apply all-1g.5gb" in during.text("lock")
    assert (before.result_of("lock"), after.result_of("lock")) == (OK, OK)


def test_a_journal_of_persistence_mode_is_not_an_unfinished_change(doctor: DoctorRig) -> None:
    doctor.create()
    journal = doctor.folder / "j"
    entries = journals.GpuEntries(persistent_gpus=("GPU-1",))
    journal.write_text(journals.Journal(layout="all-1g.5gb", gpus=entries).to_json())

    result = doctor.examine("--journal-file", str(journal))

    assert result.result_of("journal-file") is WARN
    assert "has not finished" not in result.text("journal-file")
    assert "persistence mode of GPU-1" in result.text("journal-file")
    assert "nvidia-smi -pm 1" in result.remedies("journal-file")


def test_invalid_files_are_named(doctor: DoctorRig) -> None:
    doctor.create()
    layouts, verified, journal = (doctor.folder / name for name in ("l.yaml", "p", "j"))
    layouts.write_text("version: v2\n")
    verified.write_text("{")
    journal.write_text(journals.Journal(layout="all-1g.5gb").to_json())

    result = doctor.examine(
        *("-f", str(layouts)),
        *("--verified-layout-file", str(verified)),
        *("--journal-file", str(journal)),
    )

    assert result.failing == {"config-file", "verified-layout"}
    assert f"{layouts}:1:10" in result.text("config-file")
    assert result.result_of("journal-file") is WARN
    assert "it first resumes or rolls back" in result.remedies("journal-file")
    journal.write_text("{")

    again = doctor.examine(*("--journal-file", str(journal)))

    assert again.failing == {"journal-file"}
    assert "ignores it" in again.remedies("journal-file")


def test_a_layout_files_doubtful_content_is_a_warning_if_lenient(doctor: DoctorRig) -> None:
    layouts = doctor.create().folder / "l.yaml"
    off = "[{devices: all, mig-enabled: false}]"
    layouts.write_text(f"version: v1\nversion: v1\nmig-configs: {{x: [], x: {off}}}\n")

    strict = doctor.examine("-f", str(layouts))
    lenient = doctor.examine("-f", str(layouts), "--lenient")

    assert (strict.result_of("config-file"), lenient.result_of("config-file")) == (FAIL, WARN)
    assert lenient.text("config-file").startswith(f"{layouts}:2:1: key 'version' is given twice")
    assert lenient.text("config-file").endswith("; and 1 more")
    assert lenient.remedies("config-file") == "Correct the file at this place."
