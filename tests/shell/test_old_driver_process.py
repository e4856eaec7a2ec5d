"""``apply`` on drivers whose NVML library lacks functions."""

import pathlib

from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.shell.shell_node import Node

CREATE = "nvmlDeviceCreateGpuInstance"
CREATE_WITH_PLACEMENT = "nvmlDeviceCreateGpuInstanceWithPlacement"


def node_without(folder: pathlib.Path, *functions: str) -> Node:
    """Return two GPUs in seven instances each, on a driver that now lacks these functions."""
    node = Node(folder, "2xA100-SXM4-40GB", active="small")
    node.set_options(states.Options(absent_functions=functions))
    return node


def test_a_driver_without_placements_gets_all_instances_back_after_a_failure(
    tmp_path: pathlib.Path,
) -> None:
    node = node_without(tmp_path, CREATE_WITH_PLACEMENT)
    before = node.shape
    node.state.add_fault(
        nvml_faults.Fault(
            function="nvmlGpuInstanceCreateComputeInstance*",
            gpu=1,
            code=states.Code.INSUFFICIENT_RESOURCES,
        )
    )

    answer = node.run("apply", "before")

    assert answer.returncode == 1
    assert "the instances from before are back" in answer.stderr
    assert node.shape == before


def test_nothing_is_destroyed_where_the_driver_lacks_what_the_change_needs(
    tmp_path: pathlib.Path,
) -> None:
    node = node_without(tmp_path, CREATE, CREATE_WITH_PLACEMENT)
    before = node.state.read().gpus

    answer = node.run("apply", "before")

    assert answer.returncode == 1
    assert f"the driver's NVML library has no {CREATE}" in answer.stderr
    assert "nothing was changed" in answer.stderr
    assert node.state.read().gpus == before
    assert not node.journal.exists()
