"""Which pods a change affects, on a node in memory."""

import dataclasses

from mig_manager.core import model, steps
from tests import scenes

SIX = """
version: v1
mig-configs:
  all-1g.5gb:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
  six:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 6}}
"""


def test_a_finished_pod_that_kubelet_still_lists_does_not_use_its_device() -> None:
    world = scenes.node(layout="all-1g.5gb")
    uuids = [
        ci.uuid for gi in world.gpus[0].gpu_instances for ci in gi.compute_instances if ci.uuid
    ]
    running = {
        world.add_pod(f"running-{number}", devices=frozenset({uuid}))
        for number, uuid in enumerate(uuids)
        if number != 3
    }
    # Before 1.34 kubelet lists the devices of finished pods too.
    world.add_pod("finished", devices=frozenset({uuids[3]}), phase="Succeeded")

    outcome = scenes.run(world, "six", SIX)

    assert outcome.state is model.State.SUCCESS
    assert running <= world.pods.keys()
    assert "workloads.evict" not in world.log


def test_a_pod_with_a_device_id_of_an_unknown_form_leaves_before_instances_are_destroyed() -> None:
    world = scenes.node(layout="all-1g.5gb")
    trainer = world.add_pod("trainer", devices=frozenset({"nvidia0/gi7"}))
    is_gone: list[bool] = []

    def watch(step: steps.Step) -> None:
        if isinstance(step, steps.DestroyGpuInstance):
            is_gone.append(trainer not in world.pods)

    world.step_error = watch
    outcome = scenes.run(world, "six", SIX)

    assert outcome.state is model.State.SUCCESS
    assert is_gone == [True]


def test_a_pod_that_uses_a_device_of_another_gpu_stays() -> None:
    world = scenes.node(layout="all-1g.5gb")
    device = scenes.device(world, 1, "1g.5gb")
    pod = world.add_pod("trainer", devices=frozenset({device, "mlx5_0"}))
    world.pods[pod] = dataclasses.replace(world.pods[pod], gpu_resources={"nvidia.com/gpu": 1})

    assert scenes.run(world, "six", SIX).state is model.State.SUCCESS

    assert pod in world.pods


def test_an_unhealthy_device_elsewhere_ends_no_run_and_restarts_no_plugin() -> None:
    world = scenes.node(layout="all-1g.5gb")
    faulty = scenes.device(world, 1, "1g.5gb")

    def fail() -> None:
        ids = world.offered.get("nvidia.com/gpu", frozenset())
        world.offered = {"nvidia.com/gpu": ids - {faulty}}
        world.unhealthy = {"nvidia.com/gpu": frozenset({faulty})}

    world.clock.on_wait.append(fail)
    fail()

    again = scenes.run(world, "all-1g.5gb")
    restarts = world.log.count("workloads.delete")
    changed = scenes.run(world, "six", SIX)

    assert again.state is model.State.SUCCESS
    assert restarts == 0
    assert changed.state is model.State.SUCCESS
