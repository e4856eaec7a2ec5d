"""Which GPU instances are in use, from values alone."""

import dataclasses
from typing import Any

import pytest

from mig_manager.core import model, steps
from mig_manager.core.node import clients, cluster, gpu_use
from tests import gpu_values
from tests.unit import samples
from tests.unit.samples import pod

LOW, HIGH, NONE = "4:2", "6:1", ""
MIG = {"4:2": gpu_values.mig_uuid("1"), "6:1": gpu_values.mig_uuid("2")}
WHOLE = model.Placement(0, 8)
GPU = gpu_values.mig_uuid("gpu").replace("MIG", "GPU")


def gpu() -> model.Gpu:
    """Build a GPU with two MIG devices, one at slices 4-5 and one at 6."""
    divided = samples.gpu(samples.A100, "2g.10gb@4", "1g.5gb@6")
    return dataclasses.replace(
        divided,
        uuid=GPU,
        gpu_instances=tuple(
            dataclasses.replace(
                gi,
                compute_instances=tuple(
                    dataclasses.replace(ci, uuid=MIG[str(gi.placement)])
                    for ci in gi.compute_instances
                ),
            )
            for gi in divided.gpu_instances
        ),
    )


PLAIN = dataclasses.replace(samples.gpu(samples.A100, mode=model.MigMode.DISABLED), uuid=GPU)


def has(name: str, *ids: str) -> cluster.PodDevices:
    return cluster.PodDevices(namespace="default", name=name, device_ids=frozenset(ids))


def process(*instances: int, name: str = "python", home: str = "") -> steps.GpuProcess:
    return steps.GpuProcess(pid=7, name=name, home=home, gpu_instances=instances)


def found(
    pods: list[cluster.Pod],
    assigned: list[cluster.PodDevices] | None,
    *processes: steps.GpuProcess,
    of: model.Gpu | None = None,
    **options: Any,
) -> tuple[str, bool]:
    """Return the placements in use as text, and whether that is stable."""
    here = of or gpu()
    use = gpu_use.find([here], pods, assigned, {here.uuid: processes}, **options)
    assert use is not None
    return " ".join(map(str, sorted(use.in_use[here.uuid]))), use.is_stable


def test_a_device_of_a_pod_and_an_instance_of_a_process_are_in_use() -> None:
    assert found([], []) == (NONE, True)
    assert found([pod("a")], [has("a", MIG[LOW])]) == (LOW, True)
    assert found([], [], process(1)) == (HIGH, False)
    assert found([pod("a")], [has("a", MIG[LOW])], process(0)) == (LOW, True)
    assert found([pod("a")], [has("a", MIG[LOW])], process(1)) == (f"{LOW} {HIGH}", False)


def test_a_finished_pod_uses_nothing_although_kubelet_still_lists_its_device() -> None:
    assert found([pod("a", phase="Succeeded")], [has("a", MIG[LOW])]) == (NONE, True)


def test_a_pod_that_has_the_whole_gpu_uses_each_of_its_instances() -> None:
    assert found([pod("a")], [has("a", GPU)]) == (f"{LOW} {HIGH}", True)


@pytest.mark.parametrize(
    ("starting", "assigned"),
    [
        (pod("a"), []),
        (pod("a", may_run_gpu_init=True), [has("a", MIG[LOW])]),
        (pod("a", gpu_resources={}, has_claims=True), []),
    ],
    ids=["no device yet", "init container", "unknown claim"],
)
def test_a_pod_whose_devices_are_not_shown_may_have_any_and_is_observed_again(
    starting: cluster.Pod, assigned: list[cluster.PodDevices]
) -> None:
    assert found([starting], assigned) == (f"{LOW} {HIGH}", False)


def test_a_device_that_kubelet_gave_a_pod_that_the_api_does_not_show_is_in_use_for_now() -> None:
    assert found([], [has("gone", MIG[HIGH])]) == (HIGH, False)


def test_without_kubelet_only_a_node_without_gpu_pods_is_known() -> None:
    assert gpu_use.find([gpu()], [pod("a")], None) is None
    assert found([pod("a", gpu_resources={})], None) == (NONE, True)


def test_daemons_that_a_change_pauses_use_nothing() -> None:
    operand = pod(
        "dcgm",
        gpu_resources={},
        owner_kind="DaemonSet",
        node_selector={cluster.DEPLOY_LABEL_PREFIX + "dcgm": "true"},
    )
    watcher = pod("watcher", labels={"app": "watcher"}, owner_kind="DaemonSet")
    listed = clients.ExtraClient(labels={"app": "watcher"})

    assert found([operand], [], process(0, home="pod dcgm")) == (NONE, True)
    assert found([watcher], [], process(1, home="pod watcher"), daemons=[listed]) == (NONE, True)
    assert found([pod("a", gpu_resources={})], [], process(1, home="pod a")) == (HIGH, False)


def test_a_gpu_without_mig_is_in_use_as_a_whole_by_a_pod_or_a_process_but_for_daemons() -> None:
    assert found([], [], of=PLAIN) == (NONE, True)
    assert found([pod("a")], [has("a", GPU)], of=PLAIN) == (str(WHOLE), True)
    assert found([], [], process(), of=PLAIN) == (str(WHOLE), False)
    assert found([], [], process(name="nvidia-persistenced"), of=PLAIN) == (NONE, True)


def test_a_gpu_that_does_not_answer_is_not_known_and_observed_again() -> None:
    use = gpu_use.find([gpu(), dataclasses.replace(PLAIN, uuid="GPU-9")], [], [], {"GPU-9": ()})

    assert use == gpu_use.GpuUse(in_use={"GPU-9": frozenset()}, is_stable=False)


def test_only_changes_that_concern_gpus_are_relevant() -> None:
    before = gpu_use.relevant([pod("a"), pod("b", gpu_resources={})])

    assert before == gpu_use.relevant([pod("a", is_ready=False), pod("c", gpu_resources={})])
    for changed in (
        [],
        [pod("a", phase="Succeeded")],
        [pod("a", may_run_gpu_init=True)],
        [pod("a"), pod("d", gpu_resources={}, has_claims=True)],
    ):
        assert before != gpu_use.relevant(changed)
