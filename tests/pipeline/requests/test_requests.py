"""Nodes whose agent is killed at any point: no pod is evicted without a request for it."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping

import pytest

from mig_manager import errors
from mig_manager.core import steps
from mig_manager.core.node import well_known
from mig_manager.errors import Reason
from tests import contract
from tests.node import fake_cluster, fakes, scenes
from tests.pipeline import lives
from tests.pipeline.gpus import gpu_processes
from tests.pipeline.requests.custom_requests import CHANGED

LAYOUT = "all-balanced"
Act = Callable[[], object]


class Story:
    """A node, what its owner does, and its agents, one after the other."""

    is_upgraded = False
    """Whether the agent that dies is of the version before."""

    def __init__(self, rig: fakes.NodeRig, dies_at: int | None = None) -> None:
        self.rig = rig
        self.source = fakes.FakeConfig(scenes.CONFIG)
        self.usage: dict[str, tuple[steps.GpuProcess, ...]] = {}
        self.ended: list[Reason] = []
        self.deaths = 0
        self.on_death: Callable[[], object] = list
        self._began_at = len(rig.log)
        if dies_at is not None:
            rig.failing = {self._began_at + dies_at: scenes.Killed()}

    @property
    def calls(self) -> int:
        return len(self.rig.log) - self._began_at

    def live(self, *acts: Act) -> None:
        """Run an agent; an act follows each of its runs. One that dies is replaced."""
        remaining = list(acts)
        while True:
            try:
                self._serve(remaining)
            except scenes.Killed:
                self.deaths += 1
                if self.is_upgraded:
                    self.rig.host.request_text = None
                    self.rig.annotations = dict(as_before(self.rig.annotations))
                self.on_death()
            else:
                return

    def _serve(self, acts: list[Act]) -> None:
        agent = scenes.reconciler(
            self.rig,
            configs=self.source,
            limits={"has_custom_layouts": True},
            processes=lambda: self.usage,
        )

        def go_on(pause: lives.Pause) -> None:
            (acts.pop(0) if acts else pause.stop)()

        try:
            lives.live(self.rig, agent, self.source, go_on)
        finally:
            self.ended += (outcome.reason for outcome in agent.ended)

    def label(self, value: str | None) -> Act:
        """Return an act: set the label that requests a layout, or remove it."""

        def act() -> None:
            self.rig.labels.pop(well_known.CONFIG_LABEL, None)
            if value:
                self.rig.labels[well_known.CONFIG_LABEL] = value

        return act

    def file(self, text: str) -> Act:
        """Return an act: write the layout file."""
        return functools.partial(setattr, self.source, "text", text)


def as_before(annotations: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what the version before would have written: it lacks a record, and some members."""
    for key, text in annotations.items():
        name = contract.ANNOTATIONS.get(key)
        if name is None:
            yield key, text
        elif (golden := contract.GOLDEN / f"{name}.jsonl").exists():
            known = set[str]().union(*map(json.loads, golden.read_text("utf-8").splitlines()))
            data = json.loads(text)
            yield key, json.dumps({each: data[each] for each in data if each in known})


def assert_no_pod_was_evicted(story: Story, name: str, reason: Reason) -> None:
    assert "workloads.evict" not in story.rig.log
    assert name in story.rig.pod_names
    assert story.ended[-1] is reason


def active(dies_at: int | None) -> Story:
    """Return a node whose requested layout is active."""
    story = Story(scenes.node(layout=LAYOUT), dies_at)
    story.rig.labels[well_known.CONFIG_LABEL] = LAYOUT
    return story


def first_layout(dies_at: int | None) -> Story:
    """The GPUs drift after the first layout."""
    story = Story(scenes.node(), dies_at)
    story.live(story.label(LAYOUT))
    scenes.add_pod_on_foreign_instances(story.rig)
    story.live()
    assert_no_pod_was_evicted(story, "foreign", Reason.DRIFTED)
    return story


def passing_failure_after_a_reboot(dies_at: int | None) -> Story:
    """Another program repartitions after a reboot, and the first start meets no driver."""
    story = active(dies_at)
    story.rig.restart_machine()
    scenes.add_pod_on_foreign_instances(story.rig)
    story.rig.refusing["gpus.observe"] = errors.HardwareError(
        "gone", reason=Reason.DRIVER_NOT_LOADED
    )
    story.live()
    story.rig.refusing.clear()
    story.live()
    assert_no_pod_was_evicted(story, "foreign", Reason.DRIFTED)
    return story


def unrelated_change_of_the_file(dies_at: int | None) -> Story:
    """The GPUs have drifted, and a layout that no node has is edited."""
    story = active(dies_at)
    scenes.add_pod_on_foreign_instances(story.rig)
    story.live(story.file(scenes.CONFIG.replace("1g.5gb: 7", "1g.5gb: 6")))
    assert_no_pod_was_evicted(story, "foreign", Reason.DRIFTED)
    return story


def new_rule_for_other_gpus(dies_at: int | None) -> Story:
    """The GPUs have drifted, one is lost, and the layout gets a rule for GPUs of other nodes."""
    story = active(dies_at)
    story.live()
    scenes.add_pod_on_foreign_instances(story.rig)
    rule = "  - {device-filter: '0xFFFF10DE', devices: all, mig-enabled: false}\n"
    head = f"  {LAYOUT}:\n"
    story.source.text = scenes.CONFIG.replace(head, head + rule)
    story.rig.driver.lost.add(story.rig.gpus[1].uuid)
    story.live()
    assert_no_pod_was_evicted(story, "foreign", Reason.DRIFTED)
    return story


def new_node_object(dies_at: int | None, record: str = "") -> Story:
    """The Node is deleted and registered again, with the label from kubelet's flags."""
    story = active(dies_at)
    scenes.add_pod_on_foreign_instances(story.rig)
    story.rig.annotations.clear()
    if record:
        story.rig.annotations[well_known.REQUEST_ANNOTATION] = record
    for key in (well_known.STATE_LABEL, well_known.APPLIED_LABEL):
        story.rig.labels.pop(key, None)
    story.live()
    assert_no_pod_was_evicted(story, "foreign", Reason.DRIFTED)
    return story


def success_of_another_manager(dies_at: int | None) -> Story:
    """NVIDIA's manager applied the layout, and another program has repartitioned since."""
    story = active(dies_at)
    scenes.add_pod_on_foreign_instances(story.rig)
    story.rig.annotations.clear()
    story.rig.host.request_text = None
    story.rig.labels.pop(well_known.APPLIED_LABEL, None)
    story.rig.labels[well_known.STATE_LABEL] = "success"
    story.live()
    assert_no_pod_was_evicted(story, "foreign", Reason.DRIFTED)
    return story


def partitioning_ended(dies_at: int | None) -> Story:
    """A custom layout is refused on an on-demand node, and the owner removes that label.

    If the agent dies, that is before its successor starts.
    """
    story = Story(scenes.busy_node(), dies_at)
    story.rig.labels[well_known.PARTITIONING_LABEL] = well_known.ON_DEMAND
    story.rig.annotations[well_known.LAYOUT_ANNOTATION] = CHANGED

    def end_partitioning() -> None:
        if '"custom"' in story.rig.annotations.get(well_known.REQUEST_ANNOTATION, ""):
            story.rig.labels.pop(well_known.PARTITIONING_LABEL, None)

    story.on_death = end_partitioning
    story.live(story.label("custom"))
    end_partitioning()
    story.live()
    assert_no_pod_was_evicted(story, "affected", Reason.IN_USE)
    return story


def partitioning_ended_before_any_agent(dies_at: int | None) -> Story:
    """No agent has seen the label, and the document says that it evicts no pod."""
    story = Story(scenes.busy_node(), dies_at)
    story.rig.annotations[well_known.LAYOUT_ANNOTATION] = CHANGED.replace("mine", "on-demand")
    story.live(story.label("custom"))
    story.live()
    assert_no_pod_was_evicted(story, "affected", Reason.IN_USE)
    return story


def silent_kubelet(dies_at: int | None) -> Story:
    """A layout is requested while kubelet does not answer."""
    story = Story(scenes.busy_node(), dies_at)
    story.rig.kubelet.is_silent = True
    story.live(story.label(scenes.LAYOUT))
    assert_no_pod_was_evicted(story, "affected", Reason.POD_RESOURCES_UNAVAILABLE)
    return story


def pod_that_only_kubelet_lists(dies_at: int | None) -> Story:
    """A pod that was deleted by force still has an instance that is to go."""
    story = Story(scenes.busy_node(), dies_at)
    story.rig.kubelet.unlisted["deleted"] = frozenset({scenes.device(story.rig, 0, "2g.10gb")})
    story.live(story.label(scenes.LAYOUT))
    assert_no_pod_was_evicted(story, "affected", Reason.DRAIN_TIMEOUT)
    return story


def process_on_a_gpu(dies_at: int | None) -> Story:
    """A process on the GPU itself would keep the first new instance out."""
    story = Story(scenes.busy_node(), dies_at)
    story.source.text = gpu_processes.WHOLE
    story.usage = {story.rig.gpus[0].uuid: (gpu_processes.process(),)}
    before = story.rig.gpus
    story.live(story.label("whole"))
    assert_no_pod_was_evicted(story, "affected", Reason.IN_USE)
    assert story.rig.gpus == before
    return story


def lost_mig_mode(dies_at: int | None) -> Story:
    """MIG mode of one GPU went off behind its pods, and a service uses that GPU."""
    story = Story(gpu_processes.outdated_node(), dies_at)
    service = gpu_processes.process("unit train.service")
    first = story.rig.gpus[0].uuid
    story.usage = {first: (*gpu_processes.of_pods(story.rig, 0), service)}
    story.live(story.label("all-balanced"))
    assert_no_pod_was_evicted(story, "gpu1-0", Reason.IN_USE)
    return story


def phantom_devices(dies_at: int | None) -> Story:
    """The node offers devices that no GPU has."""
    story = active(dies_at)
    story.rig.add_pod("training", devices=frozenset({scenes.device(story.rig, 0, "3g.20gb")}))
    story.rig.kubelet.phantoms = {"nvidia.com/mig-7g.40gb": 2}
    story.live()
    assert_no_pod_was_evicted(story, "training", Reason.ALREADY_APPLIED)
    assert story.rig.kubelet.phantoms == {}
    return story


@pytest.mark.parametrize(
    "play",
    [
        pytest.param(first_layout, marks=pytest.mark.slow),
        passing_failure_after_a_reboot,
        pytest.param(unrelated_change_of_the_file, marks=pytest.mark.slow),
        pytest.param(new_rule_for_other_gpus, marks=pytest.mark.slow),
        new_node_object,
        success_of_another_manager,
        pytest.param(partitioning_ended, marks=pytest.mark.slow),
        pytest.param(partitioning_ended_before_any_agent, marks=pytest.mark.slow),
        pytest.param(silent_kubelet, marks=pytest.mark.slow),
        pytest.param(pod_that_only_kubelet_lists, marks=pytest.mark.slow),
        process_on_a_gpu,
        lost_mig_mode,
        phantom_devices,
    ],
)
def test_a_restart_at_any_point_evicts_no_pod_without_a_request(
    play: Callable[[int | None], Story],
) -> None:
    for dies_at in range(play(None).calls):
        assert play(dies_at).deaths == 1, dies_at


def another_layout(dies_at: int | None) -> Story:
    """A layout is requested for which one pod must go."""
    story = active(dies_at)
    for name, gpu, profile in (("affected", 0, "2g.10gb"), ("spared", 1, "3g.20gb")):
        device = scenes.device(story.rig, gpu, profile)
        story.rig.add_pod(name, devices=frozenset({device}))
    story.live(story.label(scenes.LAYOUT))
    assert story.ended[-1] in {Reason.APPLIED, Reason.ALREADY_APPLIED}
    assert story.rig.pod_names >= {"spared"}
    assert "affected" not in story.rig.pod_names
    return story


@pytest.mark.parametrize(
    "play",
    [
        pytest.param(another_layout, marks=pytest.mark.slow),
        passing_failure_after_a_reboot,
        pytest.param(unrelated_change_of_the_file, marks=pytest.mark.slow),
        pytest.param(partitioning_ended, marks=pytest.mark.slow),
        pytest.param(partitioning_ended_before_any_agent, marks=pytest.mark.slow),
    ],
)
def test_an_upgrade_at_any_point_evicts_no_pod_without_a_request(
    play: Callable[[int | None], Story], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Story, "is_upgraded", True)

    for dies_at in range(play(None).calls):
        assert play(dies_at).deaths == 1, dies_at


def test_a_label_that_is_set_again_evicts_for_a_drifted_layout() -> None:
    story = active(None)
    scenes.add_pod_on_foreign_instances(story.rig)

    story.live(story.label(None), story.label(LAYOUT))

    assert story.ended == [Reason.DRIFTED, Reason.APPLIED]
    assert "foreign" not in story.rig.pod_names


def test_new_content_of_a_layout_evicts_also_when_the_next_agent_retries() -> None:
    story = active(None)
    used = frozenset({scenes.device(story.rig, 0, "2g.10gb")})
    story.rig.add_pod("affected", devices=used)
    story.rig.disruptions.refusals["affected"] = "budget 'pdb-a' allows no disruption"

    story.live(story.file(scenes.CONFIG.replace("2g.10gb: 1, ", "")))
    story.rig.disruptions.refusals.clear()
    story.live()

    assert story.ended == [Reason.ALREADY_APPLIED, Reason.DRAIN_TIMEOUT, Reason.APPLIED]
    assert "affected" not in story.rig.pod_names


OWN = scenes.CONFIG.replace("2g.10gb: 1, ", "")
"""The layout has other content than the generated one of its name."""


def active_by_own_file() -> Story:
    """Return a node with a layout of the owner, whose name a generated one has, too."""
    story = Story(scenes.node())
    story.source.text = OWN
    story.live(story.label(LAYOUT))
    used = frozenset({scenes.device(story.rig, 0, "3g.20gb")})
    story.rig.add_pod("training", devices=used)
    story.rig.driver.executed.clear()
    story.rig.events.clear()
    return story


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        (OWN.replace("{1g.5gb: 2,", "{1g.5gb: 2,,"), "InvalidConfig", "test.yaml:8:"),
        (OWN.replace("  all-balanced:", "  all-balancd:"), "UnknownConfig", "a generated layout"),
    ],
    ids=["typo", "misspelt name"],
)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_active_layout_survives_a_file_that_lacks_it(
    text: str, reason: str, words: str, *, is_restarted: bool
) -> None:
    story = active_by_own_file()
    gpus = story.rig.gpus

    if is_restarted:
        story.source.text = text
        story.live()
    else:
        story.live(story.file(text))

    assert story.ended[-1] is Reason.ALREADY_APPLIED
    assert (story.rig.labels[well_known.STATE_LABEL], story.rig.gpus) == ("success", gpus)
    assert not story.rig.driver.executed
    assert reason in story.rig.events
    assert story.rig.condition is not None
    assert story.rig.condition["status"] == "True"
    for message in (story.rig.statuses[-1], story.rig.condition["message"]):
        assert words in message


def test_no_pod_is_evicted_on_a_new_node_with_an_unreadable_record() -> None:
    new_node_object(None, record="{")


def test_a_new_request_fails_for_a_file_that_cannot_be_read() -> None:
    story = active_by_own_file()

    story.live(story.file("version: ["), story.label("all-1g.5gb"), story.label(LAYOUT))

    assert story.ended[-2:] == [Reason.INVALID_CONFIG, Reason.INVALID_CONFIG]
    assert story.rig.labels[well_known.STATE_LABEL] == "failed"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_drifted_layout_fails_for_a_file_that_cannot_be_read(*, is_restarted: bool) -> None:
    story = active_by_own_file()
    scenes.add_pod_on_foreign_instances(story.rig)

    if is_restarted:
        story.source.text = "version: ["
        story.live()
    else:
        story.live(story.file("version: ["))

    assert story.ended[-1] is Reason.INVALID_CONFIG
    assert well_known.APPLIED_LABEL not in story.rig.labels


def test_a_new_request_takes_a_generated_layout_for_that_of_the_file() -> None:
    story = active_by_own_file()

    story.live(
        story.file(OWN.replace("  all-balanced:", "  all-balancd:")),
        story.label(None),
        story.label(LAYOUT),
    )

    assert story.ended[-1] is Reason.APPLIED


def break_change(rig: fakes.NodeRig) -> None:
    """Let the driver refuse the change, and not the rollback."""

    def refuse(step: steps.Step) -> Exception | None:
        is_new = isinstance(step, steps.CreateGpuInstance) and str(step.profile) == "1g.5gb"
        error = errors.HardwareError("the driver refuses", reason=Reason.VERIFY_FAILED)
        return error if is_new else None

    rig.driver.step_error = refuse


def break_service(rig: fakes.NodeRig) -> None:
    rig.host.services["dcgm.service"] = True
    rig.host.broken_services.add("dcgm.service")


def break_hook(rig: fakes.NodeRig) -> None:
    scenes.hooked(rig).hooks.broken.add("config")


@pytest.mark.parametrize(
    ("break_it", "problem", "remedy", "is_restarted"),
    [
        (break_change, "the driver refuses", "pod ends", False),
        (break_change, "the driver refuses", "pod ends", True),
        (break_change, "the driver refuses", "label", False),
        (break_change, "the driver refuses", "label", True),
        (break_change, "the driver refuses", "reboot", True),
        (break_service, "dcgm.service does not answer", "pod ends", True),
        (break_hook, "config failed", "label", False),
    ],
)
def test_a_change_that_always_fails_after_its_drain_soon_evicts_no_pod(
    break_it: Callable[[fakes.NodeRig], None], problem: str, remedy: str, *, is_restarted: bool
) -> None:
    rig = scenes.busy_node()
    device = scenes.device(rig, 0, "2g.10gb")
    break_it(rig)
    agent = scenes.reconciler(rig)
    for attempt in range(1, 7):
        assert scenes.run(rig, by=agent, attempt=attempt).should_retry
        if "affected" not in rig.pod_names:
            rig.add_pod("affected", devices=frozenset({device}))
    outcome = scenes.run(rig, by=agent, attempt=7)
    assert outcome.should_retry
    assert rig.log.count("workloads.evict") == 3
    assert "3 changes to layout" in outcome.message
    assert problem in outcome.message
    assert "default/affected" in outcome.message

    rig.driver.step_error = lambda _step: None
    rig.host.broken_services.clear()
    rig.hooks.broken.clear()
    if remedy == "pod ends":
        rig.pods = {uid: pod for uid, pod in rig.pods.items() if pod.name != "affected"}
    elif remedy == "reboot":
        rig.host.boot_id = "boot-2"
    if is_restarted or remedy == "reboot":
        agent = scenes.reconciler(rig)
        agent.recover(scenes.LAYOUT)
    scenes.assert_ends(rig, Reason.APPLIED, by=agent, is_new=remedy == "label")
    assert "affected" not in rig.pod_names
    assert rig.log.count("workloads.evict") == (3 if remedy == "pod ends" else 4)


@pytest.mark.parametrize("error", [scenes.BROKEN["node"], scenes.Killed()])
def test_an_eviction_counts_though_its_answer_is_lost_or_the_agent_killed(
    error: BaseException,
) -> None:
    rig = scenes.busy_node()
    device = scenes.device(rig, 0, "2g.10gb")
    break_change(rig)
    for _ in range(5):
        workloads = fake_cluster.UnansweredWorkloads(rig, error)
        agent = scenes.reconciler(rig, workloads=workloads)
        agent.recover(scenes.LAYOUT)
        with contextlib.suppress(scenes.Killed):
            scenes.run(rig, by=agent)
        if rig.has_hold_taint:
            scenes.resume(rig, scenes.LAYOUT)
        if "affected" not in rig.pod_names:
            rig.add_pod("affected", devices=frozenset({device}))

    assert rig.log.count("workloads.evict") == 3
