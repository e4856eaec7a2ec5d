"""Custom layouts with the real agent process, over the embedded API server."""

import pytest

from mig_manager.core import model
from mig_manager.core.layout import custom_layouts
from mig_manager.core.node import well_known
from tests.stage import agent_stage


def document(instances: str, *, gpu: int = 0) -> str:
    rule = f"{{devices: [{gpu}], mig-enabled: true, mig-devices: {{{instances}}}}}"
    return f"version: v1\nmig-configs:\n  mine:\n  - {rule}\n"


SEVEN = document("1g.5gb: 7")
TWO = document("3g.20gb: 2")


def request(stage: agent_stage.Stage, text: str, **labels: str) -> None:
    stage.patch(annotations={well_known.LAYOUT_ANNOTATION: text}, **labels)


def wait_for(stage: agent_stage.Stage, text: str) -> model.State:
    """Wait for the end of the run for a text of the annotation; return its state."""
    expected = custom_layouts.Custom(node_name="", text=text).annotation_hash

    def has_ended() -> bool:
        status = stage.status()
        return status.get("annotationHash") == expected and "finishedAt" in status

    stage.wait(has_ended, "an end")
    return model.State(stage.status()["state"])


@pytest.mark.slow
def test_each_annotation_is_applied_while_the_label_is_custom() -> None:
    with agent_stage.Stage("2xA100-SXM4-40GB", "--custom-layouts") as stage:
        request(stage, SEVEN, config="custom")
        assert wait_for(stage, SEVEN) is model.State.SUCCESS
        assert stage.allocatable() == {"nvidia.com/mig-1g.5gb": 7, "nvidia.com/gpu": 1}

        request(stage, TWO)
        assert wait_for(stage, TWO) is model.State.SUCCESS
        assert stage.allocatable() == {"nvidia.com/mig-3g.20gb": 2, "nvidia.com/gpu": 1}

        # Two patches, in either order.
        stage.assert_ends("all-disabled")
        assert "annotationHash" not in stage.status()
        stage.patch(config="custom")
        request(stage, SEVEN)
        assert wait_for(stage, SEVEN) is model.State.SUCCESS
        stage.assert_ends("all-disabled")
        request(stage, TWO)
        stage.patch(config="custom")
        assert wait_for(stage, TWO) is model.State.SUCCESS
        assert stage.allocatable() == {"nvidia.com/mig-3g.20gb": 2, "nvidia.com/gpu": 1}
