"""``acceptance --change-gpu``: the course on a GPU, what it refuses, and kills in the middle."""

import contextlib
import json
import pathlib
from collections.abc import Iterator

import pytest

from mig_manager.change import course, local
from mig_manager.core import model, steps
from mig_manager.core.acceptance.stages import StageOutcome
from mig_manager.sandbox.driver import states
from testkit import nvidia_smi, nvml_faults
from tests import waiting
from tests.adapters import kubelet_rig
from tests.node import applying_rig, scenes
from tests.sandbox import library as c_library
from tests.shell import commandline, shell_node

A30 = "1xA30"
UNKNOWN = 999  # NVML_ERROR_UNKNOWN
RESET = "reset the GPU"
IN_USE = "refuse to destroy an instance in use"


class Host(applying_rig.Node):
    """A node in memory with two idle GPUs, whose worker and whole process can be killed."""

    def __init__(self, product: str = "A30") -> None:
        super().__init__("off", product=product)
        self.is_dead = False
        self.taken = 0
        self.dies_at = 0
        self._worker_dies_at = 0
        self.on_step = self._count

    @property
    def uuid(self) -> str:
        return self.gpus[1].uuid

    def called(self, name: str) -> None:
        if self.is_dead:
            raise scenes.Killed
        super().called(name)

    def _count(self, _step: steps.Step) -> None:
        if self.is_dead:
            raise scenes.Killed
        self.taken += 1
        if self.taken == self.dies_at:
            self.is_dead = True
            raise scenes.Killed
        if self.taken == self._worker_dies_at:
            raise course.WorkerKilledError

    @contextlib.contextmanager
    def killing_after(self, count: int) -> Iterator[None]:
        self._worker_dies_at = self.taken + count
        yield
        self._worker_dies_at = 0

    @contextlib.contextmanager
    def using(self, uuid: str) -> Iterator[str]:
        """Have the driver refuse to destroy the instances of a MIG device."""
        (used,) = (
            instance.instance_id
            for instance in self.gpus[1].gpu_instances
            if uuid in [each.uuid for each in instance.compute_instances]
        )
        others, self.fails = (
            self.fails,
            lambda step: (
                isinstance(step, steps.DestroyComputeInstance | steps.DestroyGpuInstance)
                and step.gpu_instance_id == used
            ),
        )
        try:
            yield ""
        finally:
            self.fails = others

    def play(self, using: course.Using | None = None) -> course.CourseResult:
        return course.run(self.deps, self.uuid, self.killing_after, using or self.using)


@pytest.mark.parametrize("product", ["A30", "A100-SXM4-40GB", "H100-SXM5-80GB", "RTX-PRO-6000"])
def test_the_course_shows_every_placement_and_restores_the_gpu(product: str) -> None:
    host = Host(product)
    before = host.shape

    result = host.play()

    outcomes = {stage.name: stage.outcome for stage in result.stages}
    placed = {
        f"{row.profile} at {at}" for row in host.gpus[1].profiles or () for at in row.placements
    }
    assert placed < outcomes.keys()
    assert {*outcomes.values()} == {StageOutcome.DONE}
    assert {IN_USE, RESET} <= outcomes.keys()
    assert host.shape == before
    assert host.journal.text is None
    assert host.boot_layout.text is None


def test_a_gpu_with_mig_on_keeps_its_mode() -> None:
    host = Host("H100-SXM5-80GB")
    host.set_up("bare")
    host.fails = lambda step: isinstance(step, steps.SetMode)

    result = host.play()

    assert {stage.outcome for stage in result.stages} == {StageOutcome.DONE}
    assert all(gpu.current_mode is model.MigMode.ENABLED for gpu in host.gpus)


def test_a_failing_step_is_named_and_the_gpu_restored() -> None:
    host = Host()
    before = host.shape
    host.fails = lambda step: (
        isinstance(step, steps.CreateGpuInstance) and str(step.profile) == "2g.12gb+me"
    )

    result = host.play()

    failed = [stage for stage in result.stages if stage.outcome is StageOutcome.FAILED]
    assert {stage.name for stage in failed} >= {"2g.12gb+me at 0:2", "2g.12gb+me at 2:2"}
    assert all(stage.why.startswith("InUse") for stage in failed)
    assert host.shape == before


def test_a_refusal_in_use_is_not_tried_without_cuda() -> None:
    result = Host().play(using=lambda _uuid: contextlib.nullcontext("no CUDA driver library"))

    (stage,) = (stage for stage in result.stages if stage.outcome is StageOutcome.NOT_TRIED)
    assert (stage.name, stage.why) == (IN_USE, "no CUDA driver library")


@pytest.mark.parametrize(
    ("using", "refusal", "name", "why"),
    [
        pytest.param(
            lambda _uuid: contextlib.nullcontext(""),
            "",
            IN_USE,
            "VerifyFailed: destroy an instance in use",
            id="a driver that destroys an instance in use",
        ),
        pytest.param(
            None, "GPU 1 must be reset with GPU 0", RESET, "ResetRequired", id="a refused reset"
        ),
    ],
)
def test_a_failing_stage_is_named_and_the_gpu_restored(
    using: course.Using | None, refusal: str, name: str, why: str
) -> None:
    host = Host()
    before = host.shape
    host.resets.refusal = refusal

    (failed,) = (
        stage for stage in host.play(using).stages if stage.outcome is StageOutcome.FAILED
    )

    assert (failed.name, failed.why) == (name, why)
    assert host.shape == before


def test_without_mig_mode_no_instance_is_tried() -> None:
    host = Host()
    before = host.shape
    host.fails = lambda step: isinstance(step, steps.SetMode)

    result = host.play()

    assert [stage.outcome for stage in result.stages] == [
        StageOutcome.FAILED,
        StageOutcome.NOT_TRIED,
    ]
    assert host.shape == before


def test_after_a_kill_in_the_course_the_next_command_restores_the_gpu() -> None:
    whole = Host()
    before = whole.shape
    whole.play()
    for at in range(1, whole.taken + 1, 3):  # each kind of step at some placements
        host = Host()
        host.dies_at = at
        with contextlib.suppress(scenes.Killed):
            host.play()
        assert host.is_dead
        host.is_dead = False
        host.on_step = lambda _step: None

        local.undo_interrupted(host.deps)

        assert host.shape == before, at
        assert host.journal.text is None
        assert host.apply(host.layouts.layout("off")).is_changed is False


# -- as a process ------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: pathlib.Path) -> shell_node.Node:
    return shell_node.Node(tmp_path, A30)


LAYOUT = """
version: v1
mig-configs:
  whole:
  - {devices: all, mig-enabled: true, mig-devices: {4g.24gb: 1}}
"""


def accept(node: shell_node.Node, *options: str) -> commandline.Answer:
    uuid = node.state.boards[0].uuid
    line = ("acceptance", "--change-gpu", uuid, "--simulate-state", str(node.path), *options)
    return commandline.run(line, {})


@pytest.mark.slow
def test_the_course_over_the_simulated_driver_finds_no_difference(node: shell_node.Node) -> None:
    before = node.shape
    file = node.path.with_name("found.json")
    slow = nvml_faults.Fault(function="nvmlGpuInstanceDestroy", first=5, hang_s=0.4)
    node.state.add_fault(slow)

    answer = accept(node, "--yes", "--output-file", str(file))

    data = json.loads(file.read_text("utf-8"))
    assert answer.status == 0, answer.err + answer.out
    assert data["differences"] == []
    assert {each["outcome"] for each in data["course"]} == {"done"}
    assert all(row["computeProfiles"] for row in data["gpus"][0]["profiles"])
    called = {each["function"]: each for each in data["latencies"]}
    assert called["nvmlDeviceSetMigMode"]["calls"] == 2
    destroyed = called["nvmlGpuInstanceDestroy"]
    assert destroyed["longestMs"] >= slow.hang_s * 1000 > destroyed["medianMs"]
    assert node.state.boards[0].uuid not in file.read_text("utf-8")
    assert node.shape == before
    assert not node.journal.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "first"),
    [
        ("nvmlDeviceSetMigMode", 1),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", 2),
        ("nvmlGpuInstanceCreateComputeInstance", 3),
        ("nvmlGpuInstanceDestroy", 2),
        # Only while a process uses the GPU.
        ("nvmlSystemGetProcessName", 1),
    ],
)
def test_after_kill_9_a_restore_leaves_the_gpu_as_before(
    node: shell_node.Node, tmp_path: pathlib.Path, function: str, first: int
) -> None:
    before = node.shape
    checkpoint = str(tmp_path / "before.json")
    state = ("--simulate-state", str(node.path))
    assert commandline.run(("checkpoint", "-f", checkpoint, *state), {}).status == 0
    line = ("acceptance", "--change-gpu", node.state.boards[0].uuid, "--yes")
    node.kill(*line, function=function, first=first)
    waiting.until(lambda: node.state.read().clients == ())

    answer = commandline.run(("restore", "-f", checkpoint, *state), {})

    assert answer.status == 0, answer.err
    assert node.shape == before
    assert not node.journal.exists()


@pytest.mark.slow
def test_the_course_refuses_a_gpu_with_a_fault_or_instances_and_says_what_to_do(
    node: shell_node.Node,
) -> None:
    node.state.fail_gpu(0, action=1)
    faulty = accept(node, "--yes")
    node.state.fail_gpu(0)
    node.layouts.write_text(LAYOUT, encoding="utf-8")
    assert node.run("apply", "whole").status == 0
    occupied = accept(node, "--yes")

    assert (faulty.status, occupied.status) == (1, 1)
    assert "needs a reset" in faulty.err
    assert "remedy: End all processes that use it, and run" in " ".join(faulty.err.split())
    assert "has GPU instances" in occupied.err
    assert "remedy: Apply a layout without instances" in " ".join(occupied.err.split())


@pytest.mark.slow
def test_a_mode_that_stays_pending_is_named_and_cancelled(node: shell_node.Node) -> None:
    before = node.shape
    virtual = states.Virtualization.PASSTHROUGH
    node.set_options(states.Options(virtualization=virtual))

    answer = accept(node, "--yes", "--output-file", "-")

    (found,) = answer.data["differences"]
    assert (found["subject"], found["what"]) == ("course", "enable MIG mode")
    assert found["actual"].startswith("RebootRequired")
    assert node.shape == before


@pytest.mark.slow
def test_a_course_with_cuda_names_what_the_loaded_library_refuses(
    node: shell_node.Node, tmp_path: pathlib.Path
) -> None:
    before = node.shape
    refused = "1g.6gb+me at 2:1"
    create = "nvmlDeviceCreateGpuInstanceWithPlacement"
    node.state.add_fault(nvml_faults.Fault(function=create, first=14, code=UNKNOWN))
    line = ["acceptance", "--change-gpu", node.state.boards[0].uuid, "--yes", "--output-file", "-"]
    with c_library.served(tmp_path / "lib", node.path) as library:
        c_library.add_cuda(library)
        nvidia_smi.install(tmp_path / "bin", node.path)
        environ = c_library.environ(tmp_path) | {"PATH": str(tmp_path / "bin")}
        answer = commandline.run([*line, "--library-path", str(library)], environ)

    assert answer.status == 1, answer.err
    outcomes = {each["name"]: each["outcome"] for each in answer.data["course"]}
    assert {outcomes[IN_USE], outcomes[RESET]} == {"done"}
    assert node.state.read().gpus[0].attachments == 5  # and for MIG mode, with one rollback
    (found,) = answer.data["differences"]
    assert (found["subject"], found["what"], found["effect"]) == ("course", refused, "changes")
    assert found["actual"] == f"NvmlError: {create} answered {UNKNOWN}"
    assert node.shape == before
    assert node.state.read().clients == ()


def _use(node: shell_node.Node) -> None:
    node.state.add_client(node.state.boards[0].uuid, name="trainer")


def _write_layout(node: shell_node.Node) -> None:
    row = '{"devices": "all", "mig-enabled": true, "mig-devices": {"1g.6gb": 4}}'
    document = f'{{"version": "v1", "mig-configs": {{"a": [{row}]}}}}'
    node.layouts.write_text(document, encoding="utf-8")


def _divide(node: shell_node.Node) -> None:
    _write_layout(node)
    assert node.run("apply", "a").status == 0


def _kill_a_change(node: shell_node.Node) -> None:
    _write_layout(node)
    node.kill("apply", "a", function="nvmlDeviceCreateGpuInstanceWithPlacement", first=2)


def _kill_a_second_change(node: shell_node.Node) -> None:
    _divide(node)
    node.layouts.write_text(LAYOUT, encoding="utf-8")
    node.kill("apply", "whole", function="nvmlDeviceCreateGpuInstanceWithPlacement")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "options", "status", "message"),
    [
        (_use, ["--yes"], 1, "is in use by trainer"),
        (_divide, ["--yes"], 1, "has GPU instances (1g.6gb at 0:1"),
        (_kill_a_second_change, ["--yes"], 1, "has GPU instances (1g.6gb at 0:1"),
        (lambda _: None, ["--yes", "--change-gpu", "GPU-0"], 2, "no reachable GPU GPU-0"),
        (lambda _: None, [], 2, "without a terminal give --yes"),
        (_kill_a_change, [], 2, "without a terminal give --yes"),
        (_kill_a_change, ["--yes", "--change-gpu", "GPU-0"], 2, "no reachable GPU GPU-0"),
    ],
)
def test_a_gpu_in_use_or_not_confirmed_is_refused(
    node: shell_node.Node, prepare: object, options: list[str], status: int, message: str
) -> None:
    assert callable(prepare)
    prepare(node)
    before = node.shape

    answer = accept(node, *options)

    assert answer.status == status
    assert message in answer.err.replace("\n    ", " ")
    assert node.shape == before


@pytest.mark.slow
def test_a_gpu_of_a_pod_is_refused(node: shell_node.Node) -> None:
    before = node.shape
    uuid = node.state.boards[0].uuid
    with kubelet_rig.a_kubelet() as kubelet:
        kubelet.pods = [kubelet_rig.pod("train", kubelet_rig.devices("nvidia.com/gpu", uuid))]
        kubelet.start()

        answer = accept(node, "--yes", "--pod-resources-socket", str(kubelet.path))

    assert answer.status == 1
    assert f"ns/train ({uuid})" in " ".join(answer.err.split())
    assert node.shape == before


@pytest.mark.slow
def test_the_question_says_what_happens_and_no_changes_nothing(node: shell_node.Node) -> None:
    before = node.shape
    line = ("acceptance", "--change-gpu", node.state.boards[0].uuid)
    arguments = [*line, "--simulate-state", str(node.path)]

    answer = commandline.run(arguments, {}, stdin=commandline.Terminal("n\n"))

    assert answer.status == 2
    assert "the driver resets the GPU twice" in answer.err
    assert "not confirmed; nothing was changed" in answer.err
    assert node.shape == before
