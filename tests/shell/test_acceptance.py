"""``mig-manager acceptance`` as a command: its file, its summary, its exit status."""

import json
import pathlib

import pytest

from mig_manager.cli import main
from mig_manager.cli.toolkit import console
from testkit import nvml_faults
from tests.rigs import contract
from tests.rigs.driver import c_library
from tests.rigs.shell import commandline, shell_node

SPEC = "2xA100-SXM4-40GB"


@pytest.fixture
def node(tmp_path: pathlib.Path) -> shell_node.ShellNode:
    return shell_node.ShellNode(tmp_path, SPEC)


def accept(node: shell_node.ShellNode, *options: str) -> commandline.Answer:
    line = ["acceptance", "--simulate-state", str(node.path), *options]
    return commandline.run(line, {}, command=main.main)


@pytest.mark.slow
def test_gpus_as_expected_give_status_0_and_a_file(
    node: shell_node.ShellNode, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.chdir(tmp_path)

    answer = accept(node)

    assert answer.status == console.DONE, answer.err
    assert "verdict: as-expected" in answer.out
    assert "0 differences" in answer.out
    data = json.loads((tmp_path / "mig-manager-acceptance.json").read_text("utf-8"))
    contract.check("Acceptance", data)
    assert accept(node, "--output-file", "-").data.keys() == data.keys()


def test_a_difference_gives_status_1_and_its_consequence(node: shell_node.ShellNode) -> None:
    fault = nvml_faults.Fault(function="nvmlDeviceGetGpuInstanceById", gpu=1, code=2, count=None)
    node.state.add_fault(fault)

    answer = accept(node, "--output-file", str(node.path.with_name("found.json")))

    assert answer.status == console.FAILED
    assert "verdict: review" in answer.out
    assert "GPU 1: nvmlDeviceGetGpuInstanceById of an instance that does not exist" in answer.out
    assert "an operation may fail with it" in answer.out.replace("\n    ", " ")


@pytest.mark.slow
def test_a_file_that_cannot_be_written_gives_status_2(node: shell_node.ShellNode) -> None:
    answer = accept(node, "--output-file", str(node.path / "no-folder"))

    assert answer.status == console.UNUSABLE
    assert "cannot write" in answer.err


@pytest.mark.slow
def test_a_loaded_library_is_surveyed_as_the_simulated_one(node: shell_node.ShellNode) -> None:
    node.state.add_fault(
        nvml_faults.Fault(function="nvmlDeviceGetVirtualizationMode", code=3, count=None)
    )
    folder = node.path.parent / "lib"
    with c_library.serve(folder, node.path) as library:
        answer = commandline.run(
            ["acceptance", "--library-path", str(library), "--output-file", "-"],
            c_library.environ(node.path.parent),
            command=main.main,
        )

    assert answer.status == console.FAILED, answer.err
    assert {each["what"] for each in answer.data["differences"]} == {
        "nvmlDeviceGetVirtualizationMode"
    }


def test_a_gpu_with_a_fault_is_named_with_its_remedy(node: shell_node.ShellNode) -> None:
    node.state.fail_gpu(1, action=1)

    answer = accept(node, "--output-file", str(node.path.with_name("found.json")))

    assert answer.status == console.FAILED
    assert "verdict: review" in answer.out
    text = " ".join(answer.out.split())
    assert "GPU 1: its recovery action: gpu-reset, expected none" in text
    assert "'mig-manager status' says what to do" in text


@pytest.mark.slow
def test_an_unreachable_gpu_is_counted_and_named_once(node: shell_node.ShellNode) -> None:
    node.state.lose_gpu(1)

    answer = accept(node, "--output-file", str(node.path.with_name("found.json")))

    assert answer.status == console.FAILED
    text = " ".join(answer.out.split())
    assert "1 NVIDIA A100-SXM4-40GB, 1 unreachable; driver" in text
    assert "nvmlDeviceGetHandleByIndex: GPU_IS_LOST, SUCCESS, expected SUCCESS. A GPU is" in text
    assert "in spite of it" not in text


@pytest.mark.slow
def test_an_observation_says_that_a_change_was_left_unfinished(node: shell_node.ShellNode) -> None:
    node.kill("apply", "requested", function="nvmlDeviceCreateGpuInstanceWithPlacement")

    answer = accept(node, "--output-file", "-")

    assert "layout 'requested' was left unfinished; the next 'apply'" in " ".join(
        answer.err.split()
    )
    assert node.journal.exists()
