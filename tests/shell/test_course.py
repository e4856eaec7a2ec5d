"""``acceptance --change-gpu``: the course over the simulated driver, and what it refuses."""

import json
import pathlib
from collections.abc import Callable

import pytest

from mig_manager.core import model
from mig_manager.sandbox.driver import states
from testkit import nvidia_smi, nvml_faults
from tests.rigs import waiting
from tests.rigs.cluster import kubelet_rig
from tests.rigs.driver import c_library
from tests.rigs.shell import commandline, shell_node

A30 = "1xA30"
UNKNOWN = 999  # NVML_ERROR_UNKNOWN


@pytest.fixture
def node(tmp_path: pathlib.Path) -> shell_node.ShellNode:
    return shell_node.ShellNode(tmp_path, A30)


LAYOUT = """
version: v1
mig-configs:
  whole:
  - {devices: all, mig-enabled: true, mig-devices: {4g.24gb: 1}}
"""


def accept(node: shell_node.ShellNode, *options: str) -> commandline.Answer:
    uuid = node.state.boards[0].uuid
    line = ("acceptance", "--change-gpu", uuid, "--simulate-state", str(node.path), *options)
    return commandline.run(line, {})


@pytest.mark.slow
def test_the_course_over_the_simulated_driver_finds_no_difference(
    node: shell_node.ShellNode,
) -> None:
    before = node.geometry
    file = node.path.with_name("found.json")
    slow = nvml_faults.Fault(function="nvmlGpuInstanceDestroy", first=5, hang_s=0.4)
    node.state.add_fault(slow)

    answer = accept(node, "--yes", "--output-file", str(file))

    data = json.loads(file.read_text("utf-8"))
    assert answer.status == 0, answer.err + answer.out
    assert data["differences"] == []
    assert {each["outcome"] for each in data["course"]} == {"done"}
    assert all(row["computeProfiles"] for row in data["gpus"][0]["profiles"])
    called = {each["function"]: each for each in data["latencies"]}
    assert called["nvmlDeviceSetMigMode"]["calls"] == 2
    destroyed = called["nvmlGpuInstanceDestroy"]
    assert destroyed["longestMs"] >= slow.hang_s * 1000 > destroyed["medianMs"]
    assert node.state.boards[0].uuid not in file.read_text("utf-8")
    assert node.geometry == before
    assert not node.journal.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "first"),
    [
        ("nvmlDeviceSetMigMode", 1),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", 2),
        ("nvmlGpuInstanceCreateComputeInstance", 3),
        ("nvmlGpuInstanceDestroy", 2),
        # Only while a process uses the GPU.
        ("nvmlSystemGetProcessName", 1),
    ],
)
def test_after_kill_9_a_restore_leaves_the_gpu_as_before(
    node: shell_node.ShellNode, tmp_path: pathlib.Path, function: str, first: int
) -> None:
    before = node.geometry
    checkpoint = str(tmp_path / "before.json")
    state = ("--simulate-state", str(node.path))
    assert commandline.run(("checkpoint", "-f", checkpoint, *state), {}).status == 0
    line = ("acceptance", "--change-gpu", node.state.boards[0].uuid, "--yes")
    node.kill(*line, function=function, first=first)
    waiting.until(lambda: node.state.read().clients == (), "the end of the client")

    answer = commandline.run(("restore", "-f", checkpoint, *state), {})

    assert answer.status == 0, answer.err
    assert node.geometry == before
    assert not node.journal.exists()


@pytest.mark.slow
def test_a_mode_that_stays_pending_is_named_and_cancelled(node: shell_node.ShellNode) -> None:
    before = node.geometry
    virtual = model.Virtualization.PASSTHROUGH
    node.set_options(states.Options(virtualization=virtual))

    answer = accept(node, "--yes", "--output-file", "-")

    (entry,) = answer.data["differences"]
    assert (entry["subject"], entry["what"]) == ("course", "enable MIG mode")
    assert entry["actual"].startswith("RebootRequired")
    assert node.geometry == before


@pytest.mark.slow
def test_a_course_with_cuda_names_what_the_loaded_library_refuses(
    node: shell_node.ShellNode, tmp_path: pathlib.Path
) -> None:
    before = node.geometry
    refused = "1g.6gb+me at 2:1"
    create = "nvmlDeviceCreateGpuInstanceWithPlacement"
    node.state.add_fault(nvml_faults.Fault(function=create, first=14, code=UNKNOWN))
    line = ["acceptance", "--change-gpu", node.state.boards[0].uuid, "--yes", "--output-file", "-"]
    with c_library.serve(tmp_path / "lib", node.path) as library:
        c_library.add_cuda(library)
        nvidia_smi.install(tmp_path / "bin", node.path)
        environ = c_library.environ(tmp_path) | {"PATH": str(tmp_path / "bin")}
        answer = commandline.run([*line, "--library-path", str(library)], environ)

    assert answer.status == 1, answer.err
    outcomes = {each["name"]: each["outcome"] for each in answer.data["course"]}
    assert {outcomes["refuse to destroy an instance in use"], outcomes["reset the GPU"]} == {
        "done"
    }
    assert node.state.read().gpus[0].attachments == 5  # and for MIG mode, with one rollback
    (entry,) = answer.data["differences"]
    assert (entry["subject"], entry["what"], entry["effect"]) == ("course", refused, "changes")
    assert entry["actual"] == f"NvmlError: {create} answered {UNKNOWN}"
    assert node.geometry == before
    assert node.state.read().clients == ()


def _use(node: shell_node.ShellNode) -> None:
    node.state.add_client(node.state.boards[0].uuid, name="trainer")


def _fail(node: shell_node.ShellNode) -> None:
    node.state.fail_gpu(0, action=1)


def _write_layout(node: shell_node.ShellNode) -> None:
    row = '{"devices": "all", "mig-enabled": true, "mig-devices": {"1g.6gb": 4}}'
    document = f'{{"version": "v1", "mig-configs": {{"a": [{row}]}}}}'
    node.layouts.write_text(document, encoding="utf-8")


def _divide(node: shell_node.ShellNode) -> None:
    _write_layout(node)
    assert node.run("apply", "a").status == 0


def _kill_a_change(node: shell_node.ShellNode) -> None:
    _write_layout(node)
    node.kill("apply", "a", function="nvmlDeviceCreateGpuInstanceWithPlacement", first=2)


def _kill_a_second_change(node: shell_node.ShellNode) -> None:
    _divide(node)
    node.layouts.write_text(LAYOUT, encoding="utf-8")
    node.kill("apply", "whole", function="nvmlDeviceCreateGpuInstanceWithPlacement")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "options", "status", "message"),
    [
        (_use, ["--yes"], 1, "is in use by trainer"),
        (_divide, ["--yes"], 1, "remedy: Apply a layout without instances"),
        (_fail, ["--yes"], 1, "remedy: End all processes that use it, and run"),
        (_kill_a_second_change, ["--yes"], 1, "has GPU instances (1g.6gb at 0:1"),
        (lambda _: None, ["--yes", "--change-gpu", "GPU-0"], 2, "no reachable GPU GPU-0"),
        (lambda _: None, [], 2, "without a terminal give --yes"),
        (_kill_a_change, [], 2, "without a terminal give --yes"),
        (_kill_a_change, ["--yes", "--change-gpu", "GPU-0"], 2, "no reachable GPU GPU-0"),
    ],
)
def test_a_gpu_in_use_or_not_confirmed_is_refused(
    node: shell_node.ShellNode,
    prepare: Callable[[shell_node.ShellNode], object],
    options: list[str],
    status: int,
    message: str,
) -> None:
    prepare(node)
    before = node.geometry

    answer = accept(node, *options)

    assert answer.status == status
    assert message in " ".join(answer.err.split())
    assert node.geometry == before


@pytest.mark.slow
def test_a_gpu_of_a_pod_is_refused(node: shell_node.ShellNode) -> None:
    before = node.geometry
    uuid = node.state.boards[0].uuid
    with kubelet_rig.a_kubelet() as kubelet:
        kubelet.pods = [kubelet_rig.pod("train", kubelet_rig.devices("nvidia.com/gpu", uuid))]
        kubelet.start()

        answer = accept(node, "--yes", "--pod-resources-socket", str(kubelet.path))

    assert answer.status == 1
    assert "the change destroys or resets: ns/train (GPU 0)" in " ".join(answer.err.split())
    assert node.geometry == before


@pytest.mark.slow
def test_the_question_names_the_changes_and_the_answer_no_changes_nothing(
    node: shell_node.ShellNode,
) -> None:
    before = node.geometry
    line = ("acceptance", "--change-gpu", node.state.boards[0].uuid)
    arguments = [*line, "--simulate-state", str(node.path)]

    answer = commandline.run(arguments, {}, stdin=commandline.Terminal("n\n"))

    assert answer.status == 2
    assert "the driver resets the GPU twice" in answer.err
    assert "not confirmed; nothing was changed" in answer.err
    assert node.geometry == before
