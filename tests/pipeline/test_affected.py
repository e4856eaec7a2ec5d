"""Which pods a change affects, on a node in memory."""

from mig_manager.core import steps
from mig_manager.errors import Reason
from tests.node import scenes
from tests.node.scenes import assert_ends

SIX = """
version: v1
mig-configs:
  all-1g.5gb:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
  six:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 6}}
"""


def test_a_finished_pod_that_kubelet_still_lists_does_not_use_its_device() -> None:
    rig = scenes.node(layout="all-1g.5gb")
    uuids = [ci.uuid for gi in rig.gpus[0].gpu_instances for ci in gi.compute_instances if ci.uuid]
    running = {
        rig.add_pod(f"running-{number}", devices=frozenset({uuid}))
        for number, uuid in enumerate(uuids)
        if number != 3
    }
    # Before 1.34 kubelet lists the devices of finished pods too.
    rig.add_pod("finished", devices=frozenset({uuids[3]}), phase="Succeeded")

    assert_ends(rig, Reason.APPLIED, layout="six", text=SIX)

    assert running <= rig.pods.keys()
    assert "workloads.evict" not in rig.log


def test_pod_with_an_unknown_device_id_leaves_before_destruction() -> None:
    rig = scenes.node(layout="all-1g.5gb")
    trainer = rig.add_pod("trainer", devices=frozenset({"nvidia0/gi7"}))
    is_gone: list[bool] = []

    def watch(step: steps.Step) -> None:
        if isinstance(step, steps.DestroyGpuInstance):
            is_gone.append(trainer not in rig.pods)

    rig.step_error = watch
    assert_ends(rig, Reason.APPLIED, layout="six", text=SIX)

    assert is_gone == [True]


def test_a_pod_that_uses_a_device_of_another_gpu_stays() -> None:
    rig = scenes.node(layout="all-1g.5gb")
    device = scenes.device(rig, 1, "1g.5gb")
    devices, resources = frozenset({device, "mlx5_0"}), {"nvidia.com/gpu": 1}
    pod = rig.add_pod("trainer", devices=devices, gpu_resources=resources)

    assert_ends(rig, Reason.APPLIED, layout="six", text=SIX)

    assert pod in rig.pods


def test_an_unhealthy_device_elsewhere_ends_no_run_and_restarts_no_plugin() -> None:
    rig = scenes.node(layout="all-1g.5gb")
    faulty = scenes.device(rig, 1, "1g.5gb")

    def fail() -> None:
        ids = rig.schedulable.get("nvidia.com/gpu", frozenset())
        rig.schedulable = {"nvidia.com/gpu": ids - {faulty}}
        rig.unhealthy = {"nvidia.com/gpu": frozenset({faulty})}

    rig.clock.on_wait.append(fail)
    fail()

    assert_ends(rig, Reason.ALREADY_APPLIED, layout="all-1g.5gb")
    assert rig.log.count("workloads.delete") == 0
    assert_ends(rig, Reason.APPLIED, layout="six", text=SIX)
