"""Pods, devices and slices: the fakes keep the promises of their ports as the adapters do."""

import dataclasses
import math
from collections.abc import Callable

import pytest

from mig_manager import errors, reasons
from mig_manager.core.node import eviction_rules
from mig_manager.core.objects import pod_object
from tests.adapters.kubernetes.ports import port_rigs
from tests.adapters.kubernetes.ports.port_rigs import GPU, Rig

Answer = eviction_rules.EvictionAnswer


def test_pods_of_the_node_are_listed_in_every_phase(rig: Rig) -> None:
    for phase in ("Pending", "Running", "Succeeded", "Failed"):
        rig.add_pod(phase.lower(), phase=phase)
    rig.add_pod("elsewhere", on="node-b")
    rig.add_pod("unscheduled", on="")

    assert {(pod.name, pod.phase) for pod in rig.workloads.list()} == {
        *(("pending", "Pending"), ("running", "Running")),
        *(("succeeded", "Succeeded"), ("failed", "Failed")),
    }
    assert rig.workloads.present() == rig.workloads.list()
    assert rig.workloads.from_watch() is None


REMOVALS: dict[str, Callable[[Rig, pod_object.Pod], object]] = {
    "evicted": lambda rig, pod: rig.workloads.evict(pod),
    "deleted": lambda rig, pod: rig.workloads.delete(pod),
}


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
def test_removed_pod_terminates_and_is_listed_until_its_end(
    rig: Rig, remove: Callable[[Rig, pod_object.Pod], object]
) -> None:
    pod = rig.add_pod("train")
    remove(rig, dataclasses.replace(pod, uid="of-another"))
    assert rig.workloads.list() == (pod,)
    rig.unlabel(pod)

    remove(rig, pod)

    (ending,) = rig.workloads.list()
    assert ending.is_terminating
    assert ending.ends_by_s < math.inf
    assert ending.labels == {}, "the pod as it is, and not as it was listed"
    rig.end(pod)
    remove(rig, pod)
    assert rig.workloads.list() == ()


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
def test_removed_pod_that_has_finished_is_gone_at_once(
    rig: Rig, remove: Callable[[Rig, pod_object.Pod], object]
) -> None:
    remove(rig, rig.add_pod("train", phase="Succeeded"))

    assert rig.workloads.list() == ()


def test_deletion_ignores_the_budgets(rig: Rig) -> None:
    pod = rig.add_pod("train")
    rig.add_budget("guard", 0)

    rig.workloads.delete(pod)

    assert rig.workloads.list()[0].is_terminating


@dataclasses.dataclass(frozen=True)
class GuardedPod:
    """A pod, the pods that its budgets allow to be unavailable, and the answer to its eviction."""

    budgets: tuple[int, ...]
    answer: Answer
    phase: str = "Running"
    is_ready: bool = True
    is_terminating: bool = False
    others: int = 0


GUARDED = {
    "no budget": GuardedPod((), Answer.ACCEPTED),
    "a budget with room": GuardedPod((1,), Answer.ACCEPTED),
    "a budget without room": GuardedPod((0,), Answer.BLOCKED, others=1),
    "two budgets": GuardedPod((1, 1), Answer.BLOCKED),
    "a pending pod": GuardedPod((0, 0), Answer.ACCEPTED, phase="Pending", is_ready=False),
    "a finished pod": GuardedPod((0, 0), Answer.ACCEPTED, phase="Failed"),
    "a terminating pod": GuardedPod((0, 0), Answer.ACCEPTED, is_terminating=True),
    "an unready pod beside enough": GuardedPod((1,), Answer.ACCEPTED, is_ready=False, others=1),
    "an unready pod beside too few": GuardedPod((0,), Answer.BLOCKED, is_ready=False, others=1),
    "an unready pod that is not needed": GuardedPod((1,), Answer.BLOCKED, is_ready=False),
}
"""By the rules of the API server: pkg/registry/core/pod/storage/eviction.go of Kubernetes."""


@pytest.mark.parametrize("case", GUARDED.values(), ids=GUARDED)
def test_budgets_decide_about_an_eviction_and_its_dry_run(rig: Rig, case: GuardedPod) -> None:
    pod = rig.add_pod("train", phase=case.phase, is_ready=case.is_ready)
    for number in range(case.others):
        rig.add_pod(f"other-{number}")
    if case.is_terminating:
        rig.workloads.evict(pod)
    for number, max_unavailable in enumerate(case.budgets):
        rig.add_budget(f"guard-{number}", max_unavailable)
    before = rig.workloads.list()

    assert rig.workloads.can_evict(pod).answer is case.answer
    assert rig.workloads.list() == before
    evicted = rig.workloads.evict(pod)
    assert evicted.answer is case.answer
    assert bool(evicted.why) is (case.answer is Answer.BLOCKED)


def test_pod_that_is_gone_is_not_evicted(rig: Rig) -> None:
    pod = rig.add_pod("train")
    rig.end(pod)

    assert rig.workloads.can_evict(pod).answer is Answer.GONE
    assert rig.workloads.evict(pod).answer is Answer.GONE


def test_eviction_uses_up_a_budget_and_a_dry_run_does_not(rig: Rig) -> None:
    one, other = rig.add_pod("one"), rig.add_pod("other")
    for name, where in (("elsewhere", "node-b"), ("unscheduled", "")):
        rig.add_pod(name, on=where)
    rig.add_budget("guard", 2)
    rig.workloads.can_evict(one)
    (before,) = rig.workloads.budgets({"default", "of-others"})

    rig.workloads.evict(one)

    assert rig.workloads.can_evict(other).answer is Answer.BLOCKED
    (after,) = rig.workloads.budgets({"default"})
    assert (before.allowed, after.allowed) == (1, 0)
    assert (before.healthy, before.desired) == (3, 2)
    names = {pod.name for pod in rig.workloads.covered_by(before)}
    assert names == {"one", "other", "elsewhere", "unscheduled"}
    assert rig.workloads.budgets({"of-others"}) == ()


def test_budgets_of_every_requested_namespace_count_its_own_pods(rig: Rig) -> None:
    for namespace in ("default", "team"):
        rig.add_pod(f"of-{namespace}", namespace=namespace)
        rig.add_budget("guard", 1, namespace=namespace)

    budgets = rig.workloads.budgets({"default", "team"})

    assert {(each.namespace, each.healthy, each.desired) for each in budgets} == {
        ("default", 1, 0),
        ("team", 1, 0),
    }


# -- kubelet and the DRA driver ---------------------------------------------------------------


def test_kubelet_lists_each_pod_with_its_devices(rig: Rig) -> None:
    rig.add_pod("train", devices=frozenset({"GPU-0::1", "GPU-1"}))
    rig.add_pod("plain")

    assert rig.allocations.assigned_devices() == (
        pod_object.PodDevices(
            namespace="default",
            name="train",
            device_ids=frozenset({"GPU-0", "GPU-1"}),
            gpu_resources=frozenset({GPU}),
        ),
        pod_object.PodDevices(namespace="default", name="plain", device_ids=frozenset()),
    )
    assert rig.allocations.allocatable() == port_rigs.UUIDS


def test_kubelet_that_does_not_answer_is_an_error(rig: Rig) -> None:
    rig.end_kubelet()

    for ask in (rig.allocations.assigned_devices, rig.allocations.allocatable):
        with pytest.raises(errors.KubeletError) as caught:
            ask()
        assert caught.value.reason is reasons.Reason.POD_RESOURCES_UNAVAILABLE


def test_deleted_slices_are_returned_and_gone(rig: Rig) -> None:
    (published,) = rig.slices.list() or ()
    assert published.uuids == {"gpu-0": "GPU-0"}

    assert rig.slices.delete() == (published,)

    assert rig.slices.list() == rig.slices.delete() == ()


def test_slices_that_may_not_be_listed_are_unknown(rig: Rig) -> None:
    rig.forbid_slices()

    assert rig.slices.list() is None
    assert rig.slices.delete() == ()
