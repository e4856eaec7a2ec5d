"""``kubectl mig history``: the moments of the runs of a node."""

import pytest

from mig_manager.core import model
from tests import api_objects
from tests.kit import plugin_rig

RUN = {"reason": "DrainTimeout", "startedAt": plugin_rig.ago(minutes=5)}
FINISHED = {"finishedAt": plugin_rig.ago(minutes=4)}
RETRIED = FINISHED | {"retryAt": plugin_rig.ago(minutes=-5)}


@pytest.mark.parametrize(
    ("times", "moments"),
    [
        pytest.param({}, ["started"], id="under way"),
        pytest.param(FINISHED, ["started", "DrainTimeout"], id="finished"),
        pytest.param(RETRIED, ["started", "DrainTimeout", "retry"], id="to be retried"),
    ],
)
def test_history_has_only_the_moments_that_the_status_has(
    empty_cluster: plugin_rig.KubectlUser, times: dict[str, str], moments: list[str]
) -> None:
    text = api_objects.a_status("all-1g.5gb", model.State.PENDING, **RUN, **times)
    node = plugin_rig.node("gpu-1", requested="all-1g.5gb", state=None)
    node["metadata"]["annotations"] |= api_objects.annotations_of_agent(status_text=text)
    empty_cluster.server.store.create(node)

    listed = empty_cluster.run_plugin("history", "gpu-1", "-o", "json").data["moments"]

    assert [each["what"] for each in listed] == moments
