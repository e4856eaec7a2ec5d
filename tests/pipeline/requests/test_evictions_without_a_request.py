"""Nodes whose agent is killed at any point: no pod is evicted without a request for it."""

from collections.abc import Callable, Iterator

import pytest

from mig_manager.core.fleet import slots
from mig_manager.core.objects import well_known
from mig_manager.reasons import Reason
from tests.pipeline import agent_loop, gpu_users
from tests.pipeline.custom_requests import CHANGED
from tests.pipeline.requests.stories import Kill, Story
from tests.rigs.node import agents, call_errors, nodes


def active(kill: Kill | None) -> Story:
    """Return a node whose requested layout is active."""
    story = Story(nodes.node(layout="all-balanced"), kill)
    story.rig.node_object.labels[well_known.CONFIG_LABEL] = "all-balanced"
    return story


def first_layout(kill: Kill | None) -> Story:
    """The GPUs drift after the first layout."""
    story = Story(nodes.node(), kill)
    story.run_agent(story.label("all-balanced"))
    nodes.add_pod_on_unowned_instances(story.rig)
    story.run_agent()
    return story


def passing_failure_after_a_reboot(kill: Kill | None) -> Story:
    """Another program repartitions after a reboot, and the first start meets no driver."""
    story = active(kill)
    story.rig.reboot()
    nodes.add_pod_on_unowned_instances(story.rig)
    story.rig.failures.add("gpus.observe", call_errors.NO_DRIVER)
    story.run_agent()
    story.rig.failures.remove("gpus.observe")
    story.run_agent()
    return story


def unrelated_change_of_the_file(kill: Kill | None) -> Story:
    """The GPUs have drifted, and a layout that no node has is edited."""
    story = active(kill)
    nodes.add_pod_on_unowned_instances(story.rig)
    story.run_agent(story.file(agents.LAYOUTS_TEXT.replace("1g.5gb: 7", "1g.5gb: 6")))
    return story


def new_rule_for_other_gpus(kill: Kill | None) -> Story:
    """The GPUs have drifted, one is lost, and the layout gets a rule for GPUs of other nodes."""
    story = active(kill)
    story.run_agent()
    nodes.add_pod_on_unowned_instances(story.rig)
    rule = "  - {device-filter: '0xFFFF10DE', devices: all, mig-enabled: false}\n"
    head = "  all-balanced:\n"
    story.source.text = agents.LAYOUTS_TEXT.replace(head, head + rule)
    story.rig.driver.lost.add(story.rig.gpus[1].uuid)
    story.run_agent()
    return story


def new_node_object(kill: Kill | None, record: str = "") -> Story:
    """The Node is deleted and registered again, with the label from kubelet's flags."""
    story = active(kill)
    nodes.add_pod_on_unowned_instances(story.rig)
    story.rig.node_object.annotations.clear()
    if record:
        story.rig.node_object.annotations[well_known.REQUEST_ANNOTATION] = record
    for key in (well_known.STATE_LABEL, well_known.APPLIED_LABEL):
        story.rig.node_object.labels.pop(key, None)
    story.run_agent()
    return story


def request_of_another_manager(kill: Kill | None, state: str = "failed") -> Story:
    """NVIDIA's manager served the label to this state, and pods use other instances."""
    story = active(kill)
    nodes.add_pod_on_unowned_instances(story.rig)
    story.rig.node_object.annotations.clear()
    story.rig.host_copy_file.text = None
    story.rig.node_object.labels.pop(well_known.APPLIED_LABEL, None)
    story.rig.node_object.labels[well_known.STATE_LABEL] = state
    story.rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] = well_known.PAUSED_VALUE
    story.run_agent()
    assert story.rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] == "true"
    return story


def partitioning_ended(kill: Kill | None) -> Story:
    """A custom layout is refused on an on-demand node, and the owner removes that label.

    If the agent is killed, that is before its successor starts.
    """
    story = Story(nodes.busy_node(), kill)
    story.rig.node_object.labels[well_known.PARTITIONING_LABEL] = well_known.ON_DEMAND
    story.rig.node_object.annotations[well_known.LAYOUT_ANNOTATION] = CHANGED

    def end_partitioning() -> None:
        if '"custom"' in story.rig.node_object.annotations.get(well_known.REQUEST_ANNOTATION, ""):
            story.rig.node_object.labels.pop(well_known.PARTITIONING_LABEL, None)

    story.on_kill = end_partitioning
    story.run_agent(story.label("custom"))
    end_partitioning()
    story.run_agent()
    return story


def partitioning_ended_on_a_new_node_object(kill: Kill | None) -> Story:
    """During a wait for a slot, the Node is registered again without the on-demand label."""
    story = Story(nodes.limited_node(), kill)
    rig = story.rig
    rig.slots.denials = [slots.Denial(limit=1, changing=("b",))] * 2
    rig.node_object.labels[well_known.PARTITIONING_LABEL] = well_known.ON_DEMAND
    rig.node_object.annotations[well_known.LAYOUT_ANNOTATION] = CHANGED

    def register_again() -> None:
        if rig.node_object.status.get("phase") == "Wait":
            del rig.node_object.labels[well_known.PARTITIONING_LABEL]
            agent_loop.register_again(rig)

    story.on_kill = register_again
    story.run_agent(story.label("custom"))
    return story


def partitioning_ended_before_any_agent(kill: Kill | None) -> Story:
    """No agent has seen the label, and the document says that it evicts no pod."""
    story = Story(nodes.busy_node(), kill)
    story.rig.node_object.annotations[well_known.LAYOUT_ANNOTATION] = CHANGED.replace(
        "mine", "on-demand"
    )
    story.run_agent(story.label("custom"))
    story.run_agent()
    return story


def silent_kubelet(kill: Kill | None) -> Story:
    """A layout is requested while kubelet does not answer."""
    story = Story(nodes.busy_node(), kill)
    story.rig.kubelet.is_silent = True
    story.run_agent(story.label("one-slice-changed"))
    return story


def pod_that_only_kubelet_lists(kill: Kill | None) -> Story:
    """A pod that was deleted by force still has an instance that is to go."""
    story = Story(nodes.busy_node(), kill)
    story.rig.kubelet.devices_of_unlisted_pods["deleted"] = frozenset(
        {nodes.device(story.rig, 0, "2g.10gb")}
    )
    story.run_agent(story.label("one-slice-changed"))
    return story


def process_on_a_gpu(kill: Kill | None) -> Story:
    """A process on the GPU itself would keep the first new instance out."""
    story = Story(nodes.busy_node(), kill)
    story.source.text = gpu_users.WHOLE
    story.rig.driver.processes = {story.rig.gpus[0].uuid: (gpu_users.process(),)}
    before = story.rig.gpus
    story.run_agent(story.label("whole"))
    assert story.rig.gpus == before
    return story


def lost_mig_mode(kill: Kill | None) -> Story:
    """MIG mode of one GPU went off behind its pods, and a service uses that GPU."""
    story = Story(gpu_users.outdated_node(), kill)
    service = gpu_users.process("unit train.service")
    users = (*gpu_users.processes_of_pods(story.rig, 0), service)
    story.rig.driver.processes = {story.rig.gpus[0].uuid: users}
    story.run_agent(story.label("all-balanced"))
    return story


def phantom_devices(kill: Kill | None) -> Story:
    """The node advertises devices that no GPU has."""
    story = active(kill)
    story.rig.pods.add("training", devices=frozenset({nodes.device(story.rig, 0, "3g.20gb")}))
    story.rig.kubelet.phantoms = {"nvidia.com/mig-7g.40gb": 2}
    story.run_agent()
    assert story.rig.kubelet.phantoms == {}
    return story


def killed_everywhere(
    make_story: Callable[[Kill | None], Story], *, loses_record: bool = False
) -> Iterator[tuple[int | None, Story]]:
    """Yield a story without a kill, and then with a kill at each call."""
    undisturbed = make_story(None)
    yield None, undisturbed
    assert undisturbed.calls > 2
    for at in range(undisturbed.calls):
        story = make_story(Kill(at, loses_record))
        assert story.kills == 1, at
        yield at, story


@pytest.mark.parametrize(
    ("make_story", "pod", "reason"),
    [
        pytest.param(first_layout, "foreign", Reason.DRIFTED, marks=pytest.mark.slow),
        (passing_failure_after_a_reboot, "foreign", Reason.DRIFTED),
        pytest.param(
            unrelated_change_of_the_file, "foreign", Reason.DRIFTED, marks=pytest.mark.slow
        ),
        pytest.param(new_rule_for_other_gpus, "foreign", Reason.DRIFTED, marks=pytest.mark.slow),
        (new_node_object, "foreign", Reason.DRIFTED),
        (request_of_another_manager, "foreign", Reason.DRIFTED),
        pytest.param(partitioning_ended, "affected", Reason.IN_USE, marks=pytest.mark.slow),
        (partitioning_ended_on_a_new_node_object, "affected", Reason.IN_USE),
        pytest.param(
            partitioning_ended_before_any_agent, "affected", Reason.IN_USE, marks=pytest.mark.slow
        ),
        pytest.param(
            silent_kubelet, "affected", Reason.POD_RESOURCES_UNAVAILABLE, marks=pytest.mark.slow
        ),
        pytest.param(
            pod_that_only_kubelet_lists, "affected", Reason.DRAIN_TIMEOUT, marks=pytest.mark.slow
        ),
        (process_on_a_gpu, "affected", Reason.IN_USE),
        (lost_mig_mode, "gpu1-0", Reason.IN_USE),
        (phantom_devices, "training", Reason.ALREADY_APPLIED),
    ],
)
def test_a_restart_at_any_point_evicts_no_pod_without_a_request(
    make_story: Callable[[Kill | None], Story], pod: str, reason: Reason
) -> None:
    for at, story in killed_everywhere(make_story):
        assert "workloads.evict" not in story.rig.log, at
        assert pod in story.rig.pods.names, at
        assert story.reasons[-1] is reason, at


@pytest.mark.parametrize("state", ["success", "failed", "pending", "rebooting"])
def test_migration_from_nvidias_manager_evicts_no_pod(state: str) -> None:
    story = request_of_another_manager(None, state)

    assert "workloads.evict" not in story.rig.log
    assert "foreign" in story.rig.pods.names
    assert story.reasons[-1] is Reason.DRIFTED


@pytest.mark.parametrize(
    ("make_story", "pod", "reason"),
    [
        (passing_failure_after_a_reboot, "foreign", Reason.DRIFTED),
        pytest.param(
            unrelated_change_of_the_file, "foreign", Reason.DRIFTED, marks=pytest.mark.slow
        ),
        pytest.param(partitioning_ended, "affected", Reason.IN_USE, marks=pytest.mark.slow),
        pytest.param(
            partitioning_ended_before_any_agent, "affected", Reason.IN_USE, marks=pytest.mark.slow
        ),
    ],
)
def test_a_record_lost_at_any_point_evicts_no_pod_without_a_request(
    make_story: Callable[[Kill | None], Story], pod: str, reason: Reason
) -> None:
    for at, story in killed_everywhere(make_story, loses_record=True):
        assert "workloads.evict" not in story.rig.log, at
        assert pod in story.rig.pods.names, at
        assert story.reasons[-1] is reason, at


def another_layout(kill: Kill | None) -> Story:
    """A layout is requested for which one pod must go."""
    story = active(kill)
    for name, gpu, profile in (("affected", 0, "2g.10gb"), ("spared", 1, "3g.20gb")):
        device = nodes.device(story.rig, gpu, profile)
        story.rig.pods.add(name, devices=frozenset({device}))
    story.run_agent(story.label("one-slice-changed"))
    return story


@pytest.mark.slow
def test_a_record_lost_at_any_point_evicts_only_for_the_request() -> None:
    for at, story in killed_everywhere(another_layout, loses_record=True):
        assert story.reasons[-1] in {Reason.APPLIED, Reason.ALREADY_APPLIED}, at
        assert "spared" in story.rig.pods.names, at
        assert "affected" not in story.rig.pods.names, at


@pytest.mark.parametrize(
    ("meanwhile", "refusals"), [(None, []), ("none", [Reason.UNKNOWN_CONFIG])]
)
def test_a_label_that_is_set_again_evicts_for_a_drifted_layout(
    meanwhile: str | None, refusals: list[Reason]
) -> None:
    story = active(None)
    nodes.add_pod_on_unowned_instances(story.rig)

    story.run_agent(story.label(meanwhile), story.label("all-balanced"))

    assert story.reasons == [Reason.DRIFTED, *refusals, Reason.APPLIED]
    assert "foreign" not in story.rig.pods.names


def test_new_content_of_a_layout_evicts_also_when_the_next_agent_retries() -> None:
    story = active(None)
    used = frozenset({nodes.device(story.rig, 0, "2g.10gb")})
    story.rig.pods.add("affected", devices=used)
    story.rig.disruptions.refusals["affected"] = "budget 'pdb-a' allows no disruption"

    story.run_agent(story.file(agents.LAYOUTS_TEXT.replace("2g.10gb: 1, ", "")))
    story.rig.disruptions.refusals.clear()
    story.run_agent()

    assert story.reasons == [Reason.ALREADY_APPLIED, Reason.DRAIN_TIMEOUT, Reason.APPLIED]
    assert "affected" not in story.rig.pods.names


def test_a_layout_requested_again_is_new_although_the_node_object_is_too() -> None:
    story = active(None)
    story.run_agent(story.label(None))
    agent_loop.register_again(story.rig)
    nodes.add_pod_on_unowned_instances(story.rig)
    story.rig.node_object.labels[well_known.CONFIG_LABEL] = "all-balanced"

    story.run_agent()

    assert story.reasons == [Reason.ALREADY_APPLIED, Reason.APPLIED]
    assert "foreign" not in story.rig.pods.names


def test_no_pod_is_evicted_on_a_new_node_with_an_unreadable_record() -> None:
    story = new_node_object(None, record="{")

    assert "foreign" in story.rig.pods.names
    assert (
        story.rig.node_object.annotations[well_known.REQUEST_ANNOTATION]
        == story.rig.host_copy_file.text
    )
