"""Which pods a change affects, on a node in memory."""

import dataclasses
import functools
import math
from collections.abc import Callable

import pytest

from mig_manager.core import steps
from mig_manager.core.objects import well_known
from mig_manager.reasons import Reason
from tests.rigs.node import agents, ends, moments, node_rig, nodes

SIX = """
version: v1
mig-configs:
  all-1g.5gb:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
  six:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 6}}
"""
SECOND_OFF = "  - {devices: [1], mig-enabled: false}\n"


def test_a_finished_pod_that_kubelet_still_lists_does_not_use_its_device() -> None:
    rig = nodes.node(layout="all-1g.5gb")
    uuids = rig.gpus[0].mig_uuids
    running = {
        rig.pods.add(f"running-{number}", devices=frozenset({uuid}))
        for number, uuid in enumerate(uuids)
        if number != 3
    }
    # Before 1.34 kubelet lists the devices of finished pods too.
    rig.pods.add("finished", devices=frozenset({uuids[3]}), phase="Succeeded")

    ends.run_to(rig, "six", Reason.APPLIED, layouts=SIX)

    assert running <= rig.pods.keys()
    assert "workloads.evict" not in rig.log


def test_a_pod_that_finishes_while_its_eviction_is_recorded_is_not_deleted() -> None:
    rig = nodes.busy_node()
    rig.pods.watched = lambda: tuple(rig.pods.values())
    rig.callbacks.add(
        "node.patch",
        lambda: rig.pods.change(rig.pods.uid_of("affected"), phase="Succeeded"),
        when=lambda: rig.log[-2] == "workloads.can_evict",
        times=1,
    )

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert "affected" in rig.pods.names


def test_pod_with_an_unknown_device_id_leaves_before_destruction() -> None:
    rig = nodes.node(layout="all-1g.5gb")
    trainer = rig.pods.add("trainer", devices=frozenset({"nvidia0/gi7"}))
    is_gone = rig.note(lambda: trainer not in rig.pods, at=steps.DestroyGpuInstance)
    ends.run_to(rig, "six", Reason.APPLIED, layouts=SIX)

    assert is_gone == [True]


@pytest.mark.parametrize(("is_heal", "reason"), [(False, Reason.APPLIED), (True, Reason.DRIFTED)])
def test_pod_on_a_device_without_uuid_counts_as_its_user(reason: Reason, *, is_heal: bool) -> None:
    rig = nodes.busy_node()
    used = nodes.device(rig, 0, "2g.10gb")
    rig.gpus = tuple(
        dataclasses.replace(
            gpu,
            gpu_instances=tuple(
                dataclasses.replace(
                    gi,
                    compute_instances=tuple(
                        dataclasses.replace(ci, uuid=None if ci.uuid == used else ci.uuid)
                        for ci in gi.compute_instances
                    ),
                )
                for gi in gpu.gpu_instances
            ),
        )
        for gpu in rig.gpus
    )
    # It has no process, but may be about to begin one.
    ends.run_to(rig, "one-slice-changed", reason, is_heal=is_heal)

    assert ("affected" in rig.pods.names) is is_heal
    assert "spared" in rig.pods.names
    assert ("gpus.execute" in rig.log) is not is_heal


def test_a_pod_stays_once_its_only_containers_with_a_gpu_have_ended() -> None:
    rig = nodes.busy_node()
    gpu = {"nvidia.com/gpu": 1}
    rig.pods.add("warmed", gpu_resources=gpu, completed_resources=frozenset(gpu))
    rig.pods.add("warming", gpu_resources=gpu, has_gpu_init=True)

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert "warmed" in rig.pods.names
    assert "warming" not in rig.pods.names


def test_a_pod_that_uses_a_device_of_another_gpu_stays() -> None:
    rig = nodes.node(layout="all-1g.5gb")
    device = nodes.device(rig, 1, "1g.5gb")
    devices, resources = frozenset({device, "mlx5_0"}), {"nvidia.com/gpu": 1}
    pod = rig.pods.add("trainer", devices=devices, gpu_resources=resources)

    ends.run_to(rig, "six", Reason.APPLIED, layouts=SIX)

    assert pod in rig.pods


def test_an_unhealthy_device_elsewhere_ends_no_run_and_restarts_no_plugin() -> None:
    rig = nodes.node(layout="all-1g.5gb")
    faulty = nodes.device(rig, 1, "1g.5gb")

    def fail() -> None:
        ids = rig.kubelet.schedulable.get("nvidia.com/gpu", frozenset())
        rig.kubelet.schedulable = {"nvidia.com/gpu": ids - {faulty}}
        rig.plugin.unhealthy = {"nvidia.com/gpu": frozenset({faulty})}

    rig.callbacks.add(moments.Wait, fail)
    fail()

    ends.run_to(rig, "all-1g.5gb", Reason.ALREADY_APPLIED)
    assert rig.log.count("workloads.delete") == 0
    ends.run_to(rig, "six", Reason.APPLIED, layouts=SIX)


MODE_OF_ANOTHER = """
version: v1
mig-configs:
  off-and-three:
  - {devices: [0], mig-enabled: false}
  - {devices: [1], mig-enabled: true, mig-devices: {3g.20gb: 1, 1g.5gb: 3}}
"""


@pytest.mark.parametrize("hooks", ["", nodes.HOOKS], ids=["at once", "mode first"])
def test_the_stage_after_a_mode_change_keeps_the_devices_in_use(hooks: str) -> None:
    rig = nodes.node(layout="all-1g.5gb")
    rig.hooks.text = hooks
    used = {gi.placement.start: gi.compute_instances[0].uuid for gi in rig.gpus[1].gpu_instances}
    for start in (2, 3):
        rig.pods.add(f"pod-{start}", devices=frozenset({used[start] or ""}))

    ends.run_to(rig, "off-and-three", Reason.APPLIED, layouts=MODE_OF_ANOTHER)

    assert {"pod-2", "pod-3"} <= rig.pods.names
    assert {used[2], used[3]} <= set(rig.gpus[1].mig_uuids)


ONE_OF_TWO = """
version: v1
mig-configs:
  one-of-two:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 1, 2g.10gb: 1, 3g.20gb: 1}}
"""


@pytest.mark.parametrize(
    ("hooks", "mode_change"),
    [("", ""), (nodes.HOOKS, SECOND_OFF)],
    ids=["one stage", "mode first"],
)
@pytest.mark.parametrize(
    ("order", "ends_in_s", "ends_from_s", "is_spared"),
    [
        pytest.param(1, 0, 8.0, True, id="the first ends"),
        pytest.param(-1, 0, 8.0, True, id="the second ends"),
        pytest.param(1, -300, math.inf, False, id="the first is stuck"),
        pytest.param(1, 21600, math.inf, False, id="the first ends after the drain"),
    ],
)
def test_a_device_of_a_terminating_pod_is_destroyed_before_that_of_another(
    order: int,
    ends_in_s: int,
    ends_from_s: float,
    *,
    is_spared: bool,
    hooks: str,
    mode_change: str,
) -> None:
    rig = nodes.node(layout="all-balanced")
    rig.hooks.text = hooks
    first, second = [
        ci.uuid or ""
        for gi in rig.gpus[0].gpu_instances
        for ci in gi.compute_instances
        if str(gi.profile) == "1g.5gb"
    ][::order]
    ends_by_s = rig.clock.unix_s() + ends_in_s
    ending = rig.pods.add(
        "ending", devices=frozenset({first}), is_terminating=True, ends_by_s=ends_by_s
    )
    rig.kubelet.pod_ends_from_s[ending] = ends_from_s
    rig.pods.add("running", devices=frozenset({second}))

    agent = agents.new_agent(rig, layouts=ONE_OF_TWO + mode_change)
    ends.run_to(rig, "one-of-two", Reason.APPLIED, by=agent)

    assert ("workloads.evict" in rig.log) is not is_spared
    assert ("running" in rig.pods.names) is is_spared
    assert second in rig.gpus[0].mig_uuids or not is_spared


def _add_one(rig: node_rig.NodeRig, device: str) -> None:
    rig.pods.add(f"pod-{len(rig.pods)}", devices=frozenset({device}))


def _add_two(rig: node_rig.NodeRig, device: str) -> None:
    _add_one(rig, device)
    _add_one(rig, device)


def _add_wide(rig: node_rig.NodeRig, device: str) -> None:
    second = nodes.device(rig, 1, "1g.5gb")
    rig.pods.add(f"wide-{len(rig.pods)}", devices=frozenset({device, second}))


def _add_two_wide(rig: node_rig.NodeRig, device: str) -> None:
    _add_wide(rig, device)
    _add_wide(rig, device)


def _add_two_with_network_cards(rig: node_rig.NodeRig, device: str) -> None:
    devices = frozenset({device, "mlx5_0", "mlx5_1", "mlx5_2"})
    for name in ("first", "second"):
        rig.pods.add(f"{name}-{device}", devices=devices)


def _add_kept(rig: node_rig.NodeRig, device: str) -> None:
    rig.pods.add(f"kept-{len(rig.pods)}", devices=frozenset({device}), is_kept=True)


def _add_mirror(rig: node_rig.NodeRig, device: str) -> None:
    rig.pods.add(f"static-{len(rig.pods)}", devices=frozenset({device}), is_mirror=True)


def _add_daemon(rig: node_rig.NodeRig, device: str) -> None:
    rig.owner.extra_clients = nodes.EXTRA_CLIENTS
    labels = {"app": "watcher"}
    rig.pods.add("watcher", devices=frozenset({device}), labels=labels, owner_kind="DaemonSet")


@pytest.mark.parametrize("start", [0, 3, 6])
@pytest.mark.parametrize(
    ("add_cheapest", "add_other", "second", "evictions"),
    [
        pytest.param(_add_one, _add_two, "", 1, id="the pods share devices"),
        pytest.param(_add_one, _add_two_wide, "", 1, id="the others have a device that stays"),
        pytest.param(_add_one, _add_two_with_network_cards, "", 1, id="others have network cards"),
        pytest.param(_add_two_wide, _add_one, SECOND_OFF, 2, id="pods lose a device anyway"),
        pytest.param(_add_daemon, _add_one, "", 0, id="a change pauses the pod of one device"),
        pytest.param(_add_two, _add_kept, "", 2, id="the others forbid their eviction"),
        pytest.param(_add_two, _add_mirror, "", 2, id="the others are static"),
    ],
)
def test_the_device_is_destroyed_whose_loss_evicts_the_fewest_pods(
    add_cheapest: Callable[[node_rig.NodeRig, str], None],
    add_other: Callable[[node_rig.NodeRig, str], None],
    second: str,
    evictions: int,
    start: int,
) -> None:
    rig = nodes.node(layout="all-1g.5gb")
    cheapest = nodes.device_at(rig, start)
    for device in sorted(rig.gpus[0].mig_uuids):
        (add_cheapest if device == cheapest else add_other)(rig, device)

    ends.run_to(rig, "six", Reason.APPLIED, layouts=SIX + second)

    assert cheapest not in rig.gpus[0].mig_uuids
    assert rig.log.count("workloads.evict") == evictions


def one_device(rig: node_rig.NodeRig, *, is_destroyed: bool) -> frozenset[str]:
    """Return the one of two equal devices that ``one-of-two`` destroys if both are idle."""
    undisturbed = nodes.node(layout="all-balanced")
    agents.run(undisturbed, "one-of-two", layouts=ONE_OF_TWO)
    kept = frozenset(undisturbed.gpus[0].mig_uuids)
    return frozenset(
        ci.uuid or ""
        for gi in rig.gpus[0].gpu_instances
        for ci in gi.compute_instances
        if str(ci.profile) == "1g.5gb" and (ci.uuid not in kept) is is_destroyed
    )


@pytest.mark.parametrize("when", ["hooks.run", "node.patch"])
def test_a_pod_bound_before_the_taint_keeps_its_device_if_another_is_free(when: str) -> None:
    rig = nodes.add_hooks(nodes.node(layout="all-balanced"))
    devices = one_device(rig, is_destroyed=True)

    rig.callbacks.add(
        when,
        lambda: rig.pods.add("bound", devices=devices),
        when=lambda: "gpus.observe" in rig.log,
        times=1,
    )
    ends.run_to(rig, "one-of-two", Reason.APPLIED, layouts=ONE_OF_TWO)

    assert "bound" in rig.pods.names
    assert "workloads.evict" not in rig.log


def test_a_pod_bound_before_the_pause_is_spared_if_another_device_is_free() -> None:
    undisturbed = nodes.node(layout="all-balanced")
    is_open = undisturbed.note(
        lambda: undisturbed.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] == "true",
    )
    agents.run(undisturbed, "one-of-two", layouts=ONE_OF_TWO)
    pause = is_open.index(False)
    for index in range(undisturbed.log.index("gpus.observe") + 1, pause):
        rig = nodes.node(layout="all-balanced")
        devices = one_device(rig, is_destroyed=True)
        rig.callbacks.add(index, functools.partial(rig.pods.add, "bound", devices=devices))

        ends.run_to(rig, "one-of-two", Reason.APPLIED, layouts=ONE_OF_TWO)

        assert "bound" in rig.pods.names, undisturbed.log[index]


ONE_OF_THREE = """
version: v1
mig-configs:
  one-of-three:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 1, 3g.20gb: 1}}
"""


@pytest.mark.parametrize("is_blocked", [True, False], ids=["blocked", "after an eviction"])
def test_a_pod_bound_during_a_drain_is_spared_if_another_device_is_free(
    *, is_blocked: bool
) -> None:
    rig = nodes.busy_node()
    if is_blocked:
        rig.disruptions.refusals["affected"] = "budget"
    rig.kubelet.pod_ends_from_s[rig.pods.uid_of("affected")] = 10.0
    devices = one_device(rig, is_destroyed=True)
    rig.callbacks.add(moments.Time(3), lambda: rig.pods.add("late", devices=devices))
    rig.callbacks.add(moments.Time(7), rig.disruptions.refusals.clear)

    ends.run_to(rig, "one-of-three", Reason.APPLIED, layouts=ONE_OF_THREE)

    assert "late" in rig.pods.names
    assert rig.log.count("workloads.evict") == 1


def test_a_pod_is_spared_once_an_equal_device_is_free_before_the_evictions() -> None:
    rig = nodes.node(layout="all-balanced")
    rig.pods.add("blocked", devices=one_device(rig, is_destroyed=True))
    ending = rig.pods.add("ending", devices=one_device(rig, is_destroyed=False))
    rig.disruptions.refusals["blocked"] = "budget"
    rig.callbacks.add(moments.Time(7), lambda: rig.pods.terminate(ending))

    ends.run_to(rig, "one-of-two", Reason.APPLIED, layouts=ONE_OF_TWO)

    assert "blocked" in rig.pods.names
    assert "workloads.evict" not in rig.log


def test_no_plan_for_changed_pods_begins_at_the_end_of_a_drain() -> None:
    rig = nodes.busy_node()
    rig.disruptions.refusals["affected"] = "budget"
    devices = one_device(rig, is_destroyed=True)
    rig.callbacks.add(moments.Time(20), lambda: rig.pods.add("late", devices=devices))
    answered: list[float] = []

    def fall_silent() -> None:
        rig.kubelet.is_silent = bool(answered)
        answered.append(rig.clock.now_s)

    rig.callbacks.add(
        "allocations.assigned_devices", fall_silent, when=lambda: rig.clock.now_s >= 20
    )
    why = "not evicted because the use of devices just changed"
    ends.run_to(rig, "one-of-three", Reason.DRAIN_TIMEOUT, why, layouts=ONE_OF_THREE)

    assert rig.clock.now_s < 25
    assert "late" in rig.pods.names


def test_a_drain_by_force_goes_on_by_force_after_another_plan() -> None:
    rig = nodes.guarded_node()
    devices = one_device(rig, is_destroyed=True)
    rig.callbacks.add(moments.Time(20.2), lambda: rig.pods.add("late", devices=devices))

    ends.run_to(rig, "one-of-three", Reason.APPLIED, layouts=ONE_OF_THREE)

    assert rig.clock.now_s < 30
    assert "late" in rig.pods.names


def test_no_pod_is_evicted_if_one_that_came_during_slow_checks_must_stay() -> None:
    rig = nodes.busy_node()
    devices = one_device(rig, is_destroyed=True) | one_device(rig, is_destroyed=False)
    rig.disruptions.refusals["late"] = "budget"

    def start_late() -> None:
        rig.clock.wait(11)
        rig.pods.add("late", devices=devices)

    rig.callbacks.add("workloads.can_evict", start_late, times=1)
    ends.run_to(rig, "one-of-three", Reason.DRAIN_TIMEOUT, layouts=ONE_OF_THREE)

    assert {"affected", "late"} <= rig.pods.names


@pytest.mark.parametrize("call", ["workloads.can_evict", "workloads.evict"])
def test_a_newer_request_ends_a_drain_between_two_evictions(call: str) -> None:
    rig = nodes.node(layout="all-1g.5gb")
    for number, device in enumerate(rig.gpus[0].mig_uuids):
        rig.pods.add(f"pod-{number}", devices=frozenset({device}))

    ends.supersede(rig, "all-disabled", ends_when=lambda: call in rig.log, is_replaced=True)
    ends.assert_restored(rig)

    assert rig.log.count(call) == 1
