"""``kubectl mig history``: the moments of the runs of a node, and who requested its layout."""

import pytest

from mig_manager.core.records import run_status
from tests.rigs import api_objects
from tests.rigs.shell import plugin_rig

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
    text = api_objects.a_status("all-1g.5gb", run_status.State.PENDING, **RUN, **times)
    node = plugin_rig.node("gpu-1", requested="all-1g.5gb", state=None)
    node["metadata"]["annotations"] |= api_objects.annotations_of_agent(status_text=text)
    empty_cluster.server.store.create(node)

    listed = empty_cluster.run_plugin("history", "gpu-1", "-o", "json").data["moments"]

    assert [each["what"] for each in listed] == moments


def test_history_orders_own_events_and_dates_the_layout(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    answer = five_node_cluster.run_plugin("history", "gpu-1", "-o", "json").data
    good, bad = (
        five_node_cluster.run_plugin("history", "gpu-1"),
        five_node_cluster.run_plugin("history", "gpu-2"),
    )

    assert [moment["what"] for moment in answer["moments"]] == [
        "Recovered", "Applied", "started", "Applied", "AlreadyApplied",
    ]  # fmt: skip
    assert answer["appliedSince"] == answer["moments"][1]["at"]
    assert (good.status, bad.status) == (0, 0)
    assert "applied at least since 20" in good.out
    assert "3h ago" in good.out
    assert "at least since" not in bad.out
    assert "UnknownProfile  GPU 0 has no profile 1g.5gb" in bad.out


def test_a_history_names_the_writer_of_the_request(empty_cluster: plugin_rig.KubectlUser) -> None:
    thing = plugin_rig.node("owned", requested="all-disabled", state=None)
    thing["metadata"]["managedFields"] = [
        {"manager": "kubelet", "time": plugin_rig.ago(minutes=1), "fieldsV1": {"f:status": {}}},
        {
            "manager": "kubectl-label",
            "time": plugin_rig.ago(minutes=7),
            "fieldsV1": {"f:metadata": {"f:labels": {"f:nvidia.com/mig.config": {}}}},
        },
    ]
    empty_cluster.server.store.create(thing)

    answer = empty_cluster.run_plugin("history", "owned")

    assert "last write by kubectl-label, which requested all-disabled" in answer.out
