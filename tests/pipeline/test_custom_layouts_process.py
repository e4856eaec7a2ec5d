"""Custom layouts with the real agent process, over the embedded API server."""

import signal
from collections.abc import Iterator

import pytest

from mig_manager.core import model
from mig_manager.core.layout import custom
from mig_manager.core.node import cluster
from mig_manager.sandbox import stages
from mig_manager.sandbox.node import cluster_view, objects
from tests.pipeline import test_agent_process

SPEC = "2xA100-SXM4-40GB"


def document(instances: str, *, gpu: int = 0) -> str:
    rule = f"{{devices: [{gpu}], mig-enabled: true, mig-devices: {{{instances}}}}}"
    return f"version: v1\nmig-configs:\n  mine:\n  - {rule}\n"


SEVEN = document("1g.5gb: 7")
TWO = document("3g.20gb: 2")


@pytest.fixture
def stage() -> Iterator[stages.Stage]:
    with test_agent_process.new_stage(SPEC, "--custom-layouts") as stage:
        yield stage


def patch(stage: stages.Stage, *, label: str | None = None, text: str | None = None) -> None:
    """Write label and annotation as far as they are given, in one patch."""
    labels = {} if label is None else {cluster.CONFIG_LABEL: label}
    annotations = {} if text is None else {cluster.LAYOUT_ANNOTATION: text}
    change = {"metadata": {"labels": labels, "annotations": annotations}}
    stage.cluster.patch(cluster_view.Kind.NODE, stage.node(), change)


def wait_for(stage: stages.Stage, text: str) -> model.State:
    """Wait for the end of the run for a text of the annotation; return its state."""
    expected = custom.Custom(node_name="", text=text).annotation_hash

    def has_ended() -> bool:
        status = stage.status()
        return status.get("annotationHash") == expected and "finishedAt" in status

    stage.wait(has_ended, "an end", timeout_s=60)
    return model.State(stage.status()["state"])


def test_each_annotation_is_applied_while_the_label_is_custom(stage: stages.Stage) -> None:
    patch(stage, label="custom", text=SEVEN)
    assert wait_for(stage, SEVEN) is model.State.SUCCESS
    assert stage.allocatable() == {"nvidia.com/mig-1g.5gb": 7, "nvidia.com/gpu": 1}

    patch(stage, text=TWO)
    assert wait_for(stage, TWO) is model.State.SUCCESS
    assert stage.allocatable() == {"nvidia.com/mig-3g.20gb": 2, "nvidia.com/gpu": 1}

    stage.label("all-disabled")
    assert stage.wait_for_end("all-disabled") is model.State.SUCCESS
    assert "annotationHash" not in stage.status()


@pytest.mark.parametrize("label_first", [True, False])
def test_label_and_annotation_in_two_patches_end_right_in_either_order(
    stage: stages.Stage, *, label_first: bool
) -> None:
    patch(stage, label="custom", text=SEVEN)
    assert wait_for(stage, SEVEN) is model.State.SUCCESS
    stage.label("all-disabled")
    assert stage.wait_for_end("all-disabled") is model.State.SUCCESS

    for is_label in (label_first, not label_first):
        patch(stage, **{"label": "custom"} if is_label else {"text": TWO})

    assert wait_for(stage, TWO) is model.State.SUCCESS
    assert stage.allocatable() == {"nvidia.com/mig-3g.20gb": 2, "nvidia.com/gpu": 1}


def test_a_killed_agent_leaves_a_node_that_takes_the_next_annotation(stage: stages.Stage) -> None:
    patch(stage, label="custom", text=SEVEN)
    tainted = lambda: bool((stage.node()["spec"] or {}).get("taints"))  # noqa: E731 - once
    stage.wait(tainted, "the taint")
    stage.stop_agent(signal.SIGKILL)
    patch(stage, text=TWO)
    stage.start_agent()

    assert wait_for(stage, TWO) is model.State.SUCCESS
    assert stage.allocatable() == {"nvidia.com/mig-3g.20gb": 2, "nvidia.com/gpu": 1}
    test_agent_process.assert_nothing_taken(stage)


def test_on_demand_layout_that_affects_a_pod_is_refused(stage: stages.Stage) -> None:
    on_demand = {"metadata": {"labels": {cluster.PARTITIONING_LABEL: cluster.ON_DEMAND}}}
    stage.cluster.patch(cluster_view.Kind.NODE, stage.node(), on_demand)
    patch(stage, label="custom", text=TWO)
    assert wait_for(stage, TWO) is model.State.SUCCESS
    stage.run_pods([("job", "nvidia.com/mig-3g.20gb", {})])
    job = stage.workloads()["job"]

    patch(stage, text=SEVEN)
    assert wait_for(stage, SEVEN) is model.State.FAILED
    assert stage.status()["reason"] == "InUse"
    assert "retryAt" not in stage.status()
    assert objects.uid(stage.workloads()["job"]) == objects.uid(job)
    test_agent_process.assert_nothing_taken(stage)

    half = document("3g.20gb: 1, 1g.5gb: 3")
    patch(stage, text=half)
    assert wait_for(stage, half) is model.State.SUCCESS
    assert objects.uid(stage.workloads()["job"]) == objects.uid(job)
    assert stage.allocatable()["nvidia.com/mig-1g.5gb"] == 3


def test_with_the_setting_off_the_request_fails_and_says_so() -> None:
    with test_agent_process.new_stage(SPEC) as stage:
        patch(stage, label="custom", text=SEVEN)
        assert stage.wait_for_end("custom") is model.State.FAILED
        assert stage.status()["reason"] == "CustomLayoutsOff"
