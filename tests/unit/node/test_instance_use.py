"""Which GPU instances are in use, and whether that is stable, from values alone."""

import dataclasses
from typing import Any

import pytest

from mig_manager.core import gpu_processes, model
from mig_manager.core.node import gpu_use, instance_use
from mig_manager.core.node.daemons import client_table
from mig_manager.core.objects import pod_object, well_known
from tests.rigs.node import samples
from tests.rigs.node.samples import pod
from tests.unit.node.divided_gpu import GPU, HIGH, LOW, MIG, gpu, process

NONE = ""
WHOLE = model.Placement(0, 8)

PLAIN = dataclasses.replace(samples.gpu(samples.A100, mode=model.MigMode.DISABLED), uuid=GPU)


def has(name: str, *ids: str) -> pod_object.PodDevices:
    return pod_object.PodDevices(namespace="default", name=name, device_ids=frozenset(ids))


def use_and_stability(
    pods: list[pod_object.Pod],
    assigned: list[pod_object.PodDevices] | None,
    *processes: gpu_processes.GpuProcess,
    of: model.Gpu | None = None,
    **options: Any,
) -> tuple[str, bool]:
    """Return the placements in use as text, and whether that is stable."""
    used_gpu = of or gpu()
    usage = gpu_use.Usage(
        pods=tuple(pods),
        assigned=None if assigned is None else tuple(assigned),
        processes={used_gpu.uuid: processes},
        **options,
    )
    use = instance_use.find([used_gpu], usage)
    assert use is not None
    return " ".join(map(str, sorted(use.in_use[used_gpu.uuid]))), use.is_stable


A, A_HAS_LOW = [pod("a")], [has("a", MIG[LOW])]
BOTH = f"{LOW} {HIGH}"


@pytest.mark.parametrize(
    ("pods", "assigned", "processes", "use"),
    [
        pytest.param([], [], (), (NONE, True), id="nothing"),
        pytest.param(A, A_HAS_LOW, (), (LOW, True), id="a pod's device"),
        pytest.param([], [], (process(1),), (HIGH, False), id="a process"),
        pytest.param(A, A_HAS_LOW, (process(0),), (LOW, True), id="a pod's process"),
        pytest.param(A, A_HAS_LOW, (process(1),), (BOTH, False), id="a pod and a process"),
        pytest.param(
            [pod("a", phase="Succeeded")], A_HAS_LOW, (), (NONE, True), id="a finished pod"
        ),
        pytest.param(A, [has("a", GPU)], (), (BOTH, True), id="a pod with the whole GPU"),
        pytest.param(
            [pod("a", phase="Pending")], [], (), (BOTH, False), id="a pod without a device yet"
        ),
        pytest.param(
            [pod("a", phase="Pending", has_gpu_init=True)],
            A_HAS_LOW,
            (),
            (BOTH, False),
            id="an init container",
        ),
        pytest.param(
            [pod("a", gpu_resources={}, has_claims=True)],
            [],
            (),
            (BOTH, False),
            id="an unknown claim",
        ),
        pytest.param(
            [], [has("gone", MIG[HIGH])], (), (HIGH, False), id="a pod that only kubelet lists"
        ),
    ],
)
def test_instances_in_use_are_found_and_observed_again_if_unsure(
    pods: list[pod_object.Pod],
    assigned: list[pod_object.PodDevices],
    processes: tuple[gpu_processes.GpuProcess, ...],
    use: tuple[str, bool],
) -> None:
    assert use_and_stability(pods, assigned, *processes) == use


def test_without_kubelet_only_a_node_without_gpu_pods_is_known() -> None:
    silent = gpu_use.Usage(pods=(pod("a"),), assigned=None)
    assert instance_use.find([gpu()], silent) is None
    assert use_and_stability([pod("a", gpu_resources={})], None) == (NONE, True)


def test_daemons_that_a_change_pauses_use_nothing() -> None:
    operand = pod(
        "dcgm",
        gpu_resources={},
        owner_kind="DaemonSet",
        node_selector={well_known.DEPLOY_LABEL_PREFIX + "dcgm": "true"},
    )
    watcher = pod("watcher", labels={"app": "watcher"}, owner_kind="DaemonSet")
    listed = client_table.ExtraClient(labels={"app": "watcher"})
    gated = client_table.ExtraClient(
        labels={"app": "other"}, deploy_label=well_known.DEPLOY_LABEL_PREFIX + "other"
    )
    beside = pod(
        "beside",
        gpu_resources={},
        owner_kind="DaemonSet",
        node_selector={str(gated.deploy_label): "true"},
    )

    assert use_and_stability([operand], [], process(0, owner="pod dcgm")) == (NONE, True)
    assert use_and_stability(
        [watcher], [], process(1, owner="pod watcher"), extra_clients=(listed,)
    ) == (
        NONE,
        True,
    )
    assert use_and_stability(
        [beside], [], process(1, owner="pod beside"), extra_clients=(gated,)
    ) == (
        NONE,
        True,
    )
    assert use_and_stability([pod("a", gpu_resources={})], [], process(1, owner="pod a")) == (
        HIGH,
        False,
    )


def test_gpu_without_mig_is_in_use_as_a_whole() -> None:
    assert use_and_stability([], [], of=PLAIN) == (NONE, True)
    assert use_and_stability([pod("a")], [has("a", GPU)], of=PLAIN) == (str(WHOLE), True)
    assert use_and_stability([], [], process(), of=PLAIN) == (str(WHOLE), False)
    assert use_and_stability([], [], process(name="nvidia-persistenced"), of=PLAIN) == (NONE, True)


def test_a_gpu_that_does_not_answer_is_not_known_and_observed_again() -> None:
    usage = gpu_use.Usage(pods=(), assigned=(), processes={"GPU-9": ()})
    use = instance_use.find([gpu(), dataclasses.replace(PLAIN, uuid="GPU-9")], usage)

    assert use == instance_use.InstanceUse(in_use={"GPU-9": frozenset()}, is_stable=False)


def test_only_changes_that_concern_gpus_are_relevant() -> None:
    before = instance_use.relevant(pod("a"))

    assert before == instance_use.relevant(pod("a", is_ready=False))
    assert instance_use.relevant(None) == instance_use.relevant(pod("b", gpu_resources={}))
    for changed in (
        None,
        pod("a", phase="Succeeded"),
        pod("a", phase="Pending", has_gpu_init=True),
        pod("d", gpu_resources={}, has_claims=True),
    ):
        assert before != instance_use.relevant(changed)
