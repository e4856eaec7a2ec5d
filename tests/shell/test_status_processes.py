"""``status`` shows the processes that use a GPU; a driver that cannot list them is no failure."""

import pathlib

import pytest

from mig_manager.core import gpu_processes
from mig_manager.core.answers import gpu_answers
from mig_manager.sandbox.driver import state_file, states
from testkit import nvml_faults
from tests.rigs.shell import commandline

POD = "0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f"


@pytest.fixture
def state(shell: commandline.Shell, tmp_path: pathlib.Path) -> nvml_faults.SharedState:
    """Two GPUs that the shell simulates."""
    path = tmp_path / "gpus.json"
    state_file.SharedState(path).create("2xA100-SXM4-40GB")
    shell.environ["MIG_MANAGER_SIMULATE_STATE"] = str(path)
    return nvml_faults.SharedState(path)


def test_wide_and_json_status_list_the_processes_that_use_each_gpu(
    shell: commandline.Shell, state: nvml_faults.SharedState
) -> None:
    state.add_client(state.boards[1].uuid, name="/usr/bin/train", pid=77)

    free, used = shell("status", "-o", "json").data["gpus"]

    assert free["processes"] == []
    assert used["processes"] == [
        {"pid": 77, "name": "train", "gpuInstances": [], "podUid": None, "unit": None}
    ]
    assert "in use by train (pid 77)" in shell("status", "-o", "wide").out
    assert "in use by" not in shell("status").out


@pytest.mark.slow
def test_a_process_is_listed_with_the_instance_that_it_uses(
    shell: commandline.Shell, state: nvml_faults.SharedState
) -> None:
    assert shell("apply", "all-1g.5gb").status == 0
    gpu = shell("status", "-o", "json").data["gpus"][0]
    instance = gpu["gpuInstances"][2]
    state.add_client(instance["computeInstances"][0]["uuid"], name="train", pid=78)

    (process,) = shell("status", "-o", "json").data["gpus"][0]["processes"]

    assert (process["pid"], process["gpuInstances"]) == (78, [instance["id"]])


def test_status_works_where_the_driver_cannot_list_processes(
    shell: commandline.Shell, state: nvml_faults.SharedState
) -> None:
    code = states.Code.UNKNOWN
    state.add_fault(
        nvml_faults.Fault(function="nvmlSystemGetDriverVersion", count=None, code=code)
    )

    gpus = shell("status", "-o", "json").data["gpus"]

    assert [gpu["processes"] for gpu in gpus] == [None, None]


def test_a_process_is_named_with_its_pod_or_its_unit() -> None:
    pod = gpu_processes.GpuProcess(pid=1, name="a", owner=f"pod {POD}", gpu_instances=(3,))
    unit = gpu_processes.GpuProcess(pid=2, name="b", owner="unit dcgm.service", gpu_instances=())

    assert str(pod) == f"a (pid 1, GPU instance 3, pod {POD})"
    assert gpu_answers.process(pod)["pod_uid"] == POD
    assert gpu_answers.process(unit)["unit"] == "dcgm.service"
