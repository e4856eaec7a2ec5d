"""Pods that are starting as the node is drained: kubelet does not list their devices yet."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from mig_manager.reasons import Reason
from tests.rigs.node import agents, ends, moments, node_rig, nodes


def starting_pod(
    rig: node_rig.NodeRig, *, gpu: int = 1, profile: str = "1g.5gb", listed_after_s: float = 1.5
) -> str:
    """Bind a pod whose devices kubelet does not list yet."""
    devices = frozenset({nodes.device(rig, gpu, profile)})
    uid = rig.pods.add("starting", devices=devices, phase="Pending", is_ready=False)
    rig.kubelet.pod_listed_from_s[uid] = rig.clock.now_s + listed_after_s
    return uid


@pytest.mark.parametrize(
    ("is_due", "ends_from_s", "ends_within_s"),
    [
        pytest.param(lambda _rig: True, 0.0, 10, id="before"),
        pytest.param(
            lambda rig: rig.node_object.has_reconfiguring_taint, 0.0, 10, id="after the taint"
        ),
        pytest.param(lambda rig: rig.clock.now_s >= 6, 12.0, 20, id="late in the drain"),
    ],
)
@pytest.mark.parametrize(
    ("pod", "stays"),
    [
        pytest.param({"gpu": 1, "profile": "1g.5gb"}, True, id="device stays"),
        pytest.param({"gpu": 0, "profile": "2g.10gb"}, False, id="device goes"),
        pytest.param({"listed_after_s": math.inf}, False, id="never listed"),
    ],
)
def test_a_starting_pod_is_evicted_only_once_kubelet_had_time_to_list_it(
    pod: dict[str, Any],
    *,
    stays: bool,
    is_due: Callable[[node_rig.NodeRig], bool],
    ends_from_s: float,
    ends_within_s: float,
) -> None:
    rig = nodes.node(layout="all-balanced")
    affected = rig.pods.add("affected", devices=frozenset({nodes.device(rig, 0, "2g.10gb")}))
    rig.kubelet.pod_ends_from_s[affected] = ends_from_s
    uids: list[str] = []

    rig.callbacks.add(
        moments.Call,
        lambda: uids.append(starting_pod(rig, **pod)),
        when=lambda: is_due(rig),
        times=1,
    )
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert (uids[0] in rig.pods) is stays
    assert rig.log.count("workloads.evict") == 1 + (not stays)
    assert rig.clock.now_s < ends_within_s


@pytest.mark.parametrize("is_bound_late", [False, True], ids=["before", "after the taint"])
@pytest.mark.parametrize(
    ("is_admitted", "listed_after_s", "stays"),
    [(False, 10.0, True), (False, 12.0, True), (True, 10.0, False)],
)
def test_a_pod_that_kubelet_has_not_admitted_is_given_longer(
    *, is_admitted: bool, listed_after_s: float, stays: bool, is_bound_late: bool
) -> None:
    """While its watch is broken, kubelet sees no new pod."""
    rig = nodes.busy_node()
    uids: list[str] = []

    def bind_and_admit() -> None:
        if not uids and (rig.node_object.has_reconfiguring_taint or not is_bound_late):
            uids.append(starting_pod(rig, listed_after_s=listed_after_s))
            rig.pods.change(uids[0], is_admitted=is_admitted)
        elif uids and uids[0] in rig.pods and rig.clock.now_s > 10.5:
            rig.pods.change(uids[0], is_admitted=True)

    rig.callbacks.add(moments.Call, bind_and_admit)
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert (uids[0] in rig.pods) is stays
    assert rig.log.count("workloads.evict") == 1 + (not stays)


def test_a_pod_that_is_never_admitted_does_not_use_up_a_short_drain() -> None:
    rig = nodes.busy_node()
    uid = starting_pod(rig, listed_after_s=math.inf)
    rig.pods.change(uid, is_admitted=False)

    by = agents.new_agent(rig, settings={"drain_timeout_s": 8.0})
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED, by=by)

    assert rig.log.count("workloads.evict") == 2


def test_plugin_is_paused_once_kubelet_has_admitted_the_bound_pods() -> None:
    """Without the plugin, kubelet refuses them for good: UnexpectedAdmissionError."""
    rig = nodes.busy_node()
    uids: list[str] = []

    def bind_and_admit() -> None:
        if rig.node_object.has_reconfiguring_taint and not uids:
            resource = {"nvidia.com/mig-1g.5gb": 1}
            uids.append(
                rig.pods.add("bound", phase="Pending", gpu_resources=resource, is_admitted=False)
            )
        elif uids and not rig.pods[uids[0]].is_admitted and rig.clock.now_s > 4:
            is_refused = rig.node_object.is_plugin_paused
            phase = "Failed" if is_refused else "Running"
            rig.pods.change(uids[0], is_admitted=True, phase=phase)

    rig.callbacks.add(moments.Call, bind_and_admit)
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert rig.pods[uids[0]].phase == "Running"


@pytest.mark.parametrize(
    ("resource", "stays"),
    [
        ("nvidia.com/mig-1g.5gb", True),
        ("nvidia.com/mig-1g.5gb.shared", True),
        ("nvidia.com/mig-2g.10gb", False),
        ("nvidia.com/gpu", False),
    ],
)
def test_a_starting_pod_of_a_profile_that_stays_is_not_evicted(
    resource: str, *, stays: bool
) -> None:
    rig = nodes.busy_node()
    uid = rig.pods.add("starting", phase="Pending", gpu_resources={resource: 1})

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert (uid in rig.pods) is stays
    assert (rig.clock.now_s < 2) is stays


def test_a_pod_whose_devices_a_silent_kubelet_hides_is_not_evicted() -> None:
    rig = nodes.node(layout="all-balanced")
    rig.pods.add("affected", devices=frozenset({nodes.device(rig, 0, "2g.10gb")}))

    def bind() -> None:
        rig.kubelet.is_silent = True
        starting_pod(rig, listed_after_s=0.0)

    rig.callbacks.add(
        moments.Call, bind, when=lambda: rig.node_object.has_reconfiguring_taint, times=1
    )
    why = "not evicted before its devices are known, kubelet does not answer"
    ends.run_to(rig, "one-slice-changed", Reason.DRAIN_TIMEOUT, "default/starting", why)

    assert "workloads.evict" not in rig.log
