"""``status`` shows the processes that use a GPU; a driver that cannot list them is no failure."""

import io
import json
import pathlib
from collections.abc import Iterator

import pytest

from mig_manager.cli import main
from mig_manager.cli.toolkit import console
from mig_manager.core import gpu_answers, steps
from mig_manager.sandbox.driver import library as simulated
from mig_manager.sandbox.driver import states
from testkit import nvml_faults

POD = "0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f"


class Shell:
    def __init__(self, folder: pathlib.Path) -> None:
        self.path = folder / "gpus.json"
        simulated.create("2xA100-SXM4-40GB", self.path)
        self.state = nvml_faults.SharedState(self.path)
        self.environ = {"HOME": str(folder)}

    def __call__(self, *argv: str) -> str:
        out, err = io.StringIO(), io.StringIO()
        terminal = console.Console(
            stdin=io.StringIO(), stdout=out, stderr=err, environ=self.environ
        )
        line = (*argv, "--simulate-state", str(self.path))
        assert main.main(line, terminal) == 0, err.getvalue()
        return out.getvalue()


@pytest.fixture
def shell(tmp_path: pathlib.Path) -> Iterator[Shell]:
    yield Shell(tmp_path)
    simulated.load(None)


def test_wide_and_json_status_list_the_processes_that_use_each_gpu(shell: Shell) -> None:
    shell.state.add_client(shell.state.boards[1].uuid, name="/usr/bin/train", pid=77)

    free, used = json.loads(shell("status", "-o", "json"))["gpus"]

    assert free["processes"] == []
    assert used["processes"] == [
        {"pid": 77, "name": "train", "gpuInstances": [], "podUid": None, "unit": None}
    ]
    assert "in use by train (pid 77)" in shell("status", "-o", "wide")
    assert "in use by" not in shell("status")


@pytest.mark.slow
def test_a_process_is_listed_with_the_instance_that_it_uses(shell: Shell) -> None:
    shell("apply", "all-1g.5gb")
    gpu = json.loads(shell("status", "-o", "json"))["gpus"][0]
    instance = gpu["gpuInstances"][2]
    shell.state.add_client(instance["computeInstances"][0]["uuid"], name="train", pid=78)

    (process,) = json.loads(shell("status", "-o", "json"))["gpus"][0]["processes"]

    assert (process["pid"], process["gpuInstances"]) == (78, [instance["id"]])


def test_status_works_where_the_driver_cannot_list_processes(shell: Shell) -> None:
    code = states.Code.UNKNOWN
    shell.state.add_fault(
        nvml_faults.Fault(function="nvmlSystemGetDriverVersion", count=None, code=code)
    )

    found = json.loads(shell("status", "-o", "json"))["gpus"]

    assert [gpu["processes"] for gpu in found] == [None, None]


def test_a_process_is_named_with_its_pod_or_its_unit() -> None:
    pod = steps.GpuProcess(pid=1, name="a", owner=f"pod {POD}", gpu_instances=(3,))
    unit = steps.GpuProcess(pid=2, name="b", owner="unit dcgm.service", gpu_instances=())

    assert str(pod) == f"a (pid 1, GPU instance 3, pod {POD})"
    assert gpu_answers.process(pod)["pod_uid"] == POD
    assert gpu_answers.process(unit)["unit"] == "dcgm.service"
