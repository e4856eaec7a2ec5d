"""A node of eight GPUs loses one: before a change at a shell, during it, or in the rollback."""

import json
import pathlib

import pytest

from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.rigs.driver.eight_gpus import LAYOUTS, LOST, SPEC
from tests.rigs.shell import shell_node

OTHERS = (0, 1, 2, 4, 5, 6, 7)
CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"
LOSE_AT_CREATION = nvml_faults.Fault(function=CREATE, gpu=LOST, loses_gpu=True)
"""In the middle of the change of this GPU: its old instances are gone."""
REFUSE_ELSEWHERE = nvml_faults.Fault(
    function=CREATE, gpu=5, first=2, code=states.Code.INSUFFICIENT_RESOURCES
)
"""Has the change fail, and all GPUs be rolled back; once, so that the rollback succeeds."""
LOSE_AT_ROLLBACK = nvml_faults.Fault(function=CREATE, gpu=LOST, first=8, loses_gpu=True)
"""After the seven creations of the change."""


def modes_and_counts(state: nvml_faults.SharedState) -> list[tuple[bool, int]]:
    """Return MIG mode and number of instances of each GPU."""
    gpus = state.read().gpus
    return [(gpu.is_enabled, len(gpu.instances)) for gpu in gpus]


def of_others(state: nvml_faults.SharedState) -> set[tuple[bool, int]]:
    return {each for index, each in enumerate(modes_and_counts(state)) if index != LOST}


@pytest.fixture
def node(tmp_path: pathlib.Path) -> shell_node.ShellNode:
    return shell_node.ShellNode(tmp_path, SPEC, layouts=LAYOUTS, active="halves")


@pytest.mark.slow
def test_every_command_serves_the_seven_others_and_names_the_lost_gpu(
    node: shell_node.ShellNode, tmp_path: pathlib.Path
) -> None:
    node.state.lose_gpu(LOST)
    kept = str(tmp_path / "checkpoint.json")

    answers = {
        name: node.run(*argv)
        for name, argv in {
            "status": ["status"],
            "plan": ["plan", "sevenths"],
            "assert": ["assert", "halves"],
            "export": ["export"],
            "checkpoint": ["checkpoint", "-f", kept],
            "apply": ["apply", "sevenths"],
            "boot": ["boot"],
        }.items()
    }

    assert {name: answer.status for name, answer in answers.items()} == {
        **dict.fromkeys(answers, 0),
        "boot": 1,
    }
    texts = {name: " ".join((each.out + each.err).split()) for name, each in answers.items()}
    for name, text in texts.items():
        for part in (f"GPU {LOST}", "is unreachable", "GPU is lost"):
            assert part in text, name
    for name in ("status", "plan", "apply", "boot"):
        assert "no reset reaches it: drain and reboot the node" in texts[name], name
    assert "devices: all" not in answers["export"].out
    assert of_others(node.state) == {(True, 7)}
    data = node.run("status", "-o", "json").data
    assert [gpu["index"] for gpu in data["gpus"]] == list(OTHERS)
    assert [(gpu["index"], gpu["reason"]) for gpu in data["unreachableGpus"]] == [
        (LOST, "GpuLost")
    ]


def test_status_names_a_gpu_that_needs_recovery_with_its_remedy(
    node: shell_node.ShellNode,
) -> None:
    node.state.fail_gpu(LOST, action=1)

    text = " ".join(node.run("status").out.split())
    data = node.run("status", "-o", "json").data

    assert f"GPU {LOST} (" in text
    assert "needs a reset. End all processes that use it" in text
    assert f"'nvidia-smi --gpu-reset -i {LOST}'." in text
    actions = {gpu["index"]: gpu["recoveryAction"] for gpu in data["gpus"]}
    assert actions == dict.fromkeys(OTHERS, "none") | {LOST: "gpu-reset"}


@pytest.mark.slow
def test_a_layout_that_names_the_lost_gpu_fails_for_it_and_touches_nothing(
    node: shell_node.ShellNode,
) -> None:
    node.state.lose_gpu(LOST)
    before = node.state.read().gpus

    for command in ("plan", "assert", "apply"):
        answer = node.run(command, "names-it")
        assert answer.status == 1
        assert "names GPU 3, which is unreachable" in answer.err

    assert node.state.read().gpus == before
    assert node.run("apply", "names-others").status == 0
    assert [modes_and_counts(node.state)[index] for index in (0, 1, 7)] == [
        (True, 7),
        (True, 2),
        (True, 7),
    ]


@pytest.mark.slow
def test_gpu_lost_during_execute_leaves_the_others_the_layout(node: shell_node.ShellNode) -> None:
    node.state.add_fault(LOSE_AT_CREATION)

    answer = node.run("apply", "sevenths")

    assert answer.status == 0, answer.err
    assert of_others(node.state) == {(True, 7)}
    assert node.state.boards[LOST].uuid in answer.err
    assert "cannot create GPU instance 1g.5gb" in answer.err
    assert not node.journal.exists()


@pytest.mark.slow
def test_layout_that_names_a_gpu_lost_in_execute_is_rolled_back(
    node: shell_node.ShellNode,
) -> None:
    node.layouts.write_text(LAYOUTS.replace("devices: [3]", "devices: [1, 3]"), encoding="utf-8")
    node.state.add_fault(LOSE_AT_CREATION)

    answer = node.run("apply", "names-it")

    assert answer.status == 1
    assert of_others(node.state) == {(True, 2)}
    assert "names GPU 3" in answer.err
    assert "3g.20gb at 0:4, 3g.20gb at 4:4" in answer.err
    assert node.state.boards[LOST].uuid in node.journal.read_text()


def lose_in_rollback(node: shell_node.ShellNode) -> str:
    """Lose a GPU in the rollback of ``sevenths``, and return its UUID."""
    uuid = node.state.boards[LOST].uuid
    node.state.add_fault(REFUSE_ELSEWHERE)
    node.state.add_fault(LOSE_AT_ROLLBACK)
    answer = node.run("apply", "sevenths")
    node.state.clear_faults()
    assert answer.status == 1
    assert of_others(node.state) == {(True, 2)}
    assert f"GPU {LOST} ({uuid}" in answer.err
    assert f"still to restore: {uuid}: MIG enabled, 3g.20gb at 0:4" in answer.err
    return uuid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "times", "status"),
    [
        pytest.param("too-much", 0, 1, id="a layout that does not fit"),
        pytest.param("names-others", 2, 0, id="one that was applied, and is active"),
    ],
)
def test_gpu_lost_in_the_rollback_stays_in_the_journal(
    node: shell_node.ShellNode, layout: str, times: int, status: int
) -> None:
    uuid = lose_in_rollback(node)
    for _ in range(times):
        assert node.run("apply", layout).status == 0
    journal = json.loads(node.journal.read_text())
    assert journal["config"] == "sevenths"
    assert [gpu["uuid"] for gpu in journal["snapshot"]] == [uuid]

    # With the GPU back, the next change leads back to what it had before the first one.
    node.state.return_gpu(LOST)
    assert modes_and_counts(node.state)[LOST] == (True, 0)
    assert node.run("apply", layout).status == status
    assert modes_and_counts(node.state)[LOST] == (True, 2)
    assert not node.journal.exists()


@pytest.mark.slow
def test_a_layout_for_all_gpus_replaces_the_journal_of_a_lost_one(
    node: shell_node.ShellNode,
) -> None:
    lose_in_rollback(node)

    assert node.run("apply", "sevenths").status == 0

    assert not node.journal.exists()
    node.state.return_gpu(LOST)
    assert modes_and_counts(node.state)[LOST] == (True, 0)


@pytest.mark.slow
def test_boot_restores_the_former_instances_of_a_lost_gpu(node: shell_node.ShellNode) -> None:
    node.state.lose_gpu(LOST)
    assert node.run("apply", "sevenths").status == 0

    node.state.reboot()
    answer = node.run("boot")

    assert answer.status == 0, answer.err
    assert modes_and_counts(node.state)[LOST] == (True, 2)
    assert of_others(node.state) == {(True, 7)}
