"""The course of ``acceptance --change-gpu`` over GPUs in memory."""

import contextlib
from collections.abc import Iterator

import pytest

from mig_manager import errors, reasons
from mig_manager.change import journal_file
from mig_manager.cli.acceptance import gpu_course
from mig_manager.core import model, steps
from mig_manager.core.acceptance.stages import StageOutcome
from tests.change import forks
from tests.rigs.node import call_errors, local_rig, strikes

RESET = "reset the GPU"
IN_USE = "refuse to destroy an instance in use"


class CourseNode(local_rig.LocalRig):
    """A node in memory with two idle GPUs, whose worker can be killed."""

    def __init__(self, product: str = "A30") -> None:
        super().__init__("off", product=product)

    @property
    def uuid(self) -> str:
        return self.gpus[1].uuid

    @contextlib.contextmanager
    def killing_after(self, count: int) -> Iterator[None]:
        killed = gpu_course.WorkerKilledError()
        with self.failures.adding(steps.Step, killed, when=strikes.nth(count)):
            yield

    @contextlib.contextmanager
    def using(self, uuid: str) -> Iterator[str]:
        """Have the driver refuse to destroy the instances of a MIG device."""
        (used,) = (
            instance.instance_id
            for instance in self.gpus[1].gpu_instances
            if uuid in [each.uuid for each in instance.compute_instances]
        )
        with self.failures.adding(
            steps.DestroyComputeInstance | steps.DestroyGpuInstance,
            call_errors.IN_USE,
            when=lambda: self.driver.next_step.gpu_instance_id == used,
        ):
            yield ""

    def run_course(self, using: gpu_course.Using | None = None) -> gpu_course.CourseResult:
        return gpu_course.run(self.deps, self.uuid, self.killing_after, using or self.using)


@pytest.mark.parametrize("product", ["A30", "A100-SXM4-40GB", "H100-SXM5-80GB", "RTX-PRO-6000"])
def test_the_course_shows_every_placement_and_restores_the_gpu(product: str) -> None:
    host = CourseNode(product)
    before = host.geometry

    result = host.run_course()

    outcomes = {stage.name: stage.outcome for stage in result.stages}
    placed = {
        f"{row.profile} at {at}" for row in host.gpus[1].profiles or () for at in row.placements
    }
    assert placed < outcomes.keys()
    assert {*outcomes.values()} == {StageOutcome.DONE}
    assert {IN_USE, RESET} <= outcomes.keys()
    assert host.geometry == before
    assert host.journal.text is None
    assert host.verified_layout_file.text is None


def test_a_gpu_with_mig_on_keeps_its_mode() -> None:
    host = CourseNode("H100-SXM5-80GB")
    host.set_up("bare")
    host.failures.add(steps.SetMode, call_errors.IN_USE)

    result = host.run_course()

    assert {stage.outcome for stage in result.stages} == {StageOutcome.DONE}
    assert all(gpu.current_mode is model.MigMode.ENABLED for gpu in host.gpus)


def test_a_failing_step_is_named_and_the_gpu_restored() -> None:
    host = CourseNode()
    before = host.geometry
    host.failures.add(
        steps.CreateGpuInstance,
        call_errors.IN_USE,
        when=lambda: str(host.driver.next_step.profile) == "2g.12gb+me",
    )

    result = host.run_course()

    failed = [stage for stage in result.stages if stage.outcome is StageOutcome.FAILED]
    assert {stage.name for stage in failed} >= {"2g.12gb+me at 0:2", "2g.12gb+me at 2:2"}
    assert all(stage.why.startswith("InUse") for stage in failed)
    assert host.geometry == before


def test_a_refusal_in_use_is_not_tried_without_cuda() -> None:
    result = CourseNode().run_course(
        using=lambda _uuid: contextlib.nullcontext("no CUDA driver library")
    )

    (stage,) = (stage for stage in result.stages if stage.outcome is StageOutcome.NOT_TRIED)
    assert (stage.name, stage.why) == (IN_USE, "no CUDA driver library")


@pytest.mark.parametrize(
    ("using", "failures", "name", "why"),
    [
        pytest.param(
            lambda _uuid: contextlib.nullcontext(""),
            {},
            IN_USE,
            "VerifyFailed: destroy an instance in use",
            id="a driver that destroys an instance in use",
        ),
        pytest.param(
            None,
            {"reset.reset": errors.HostError("no", reason=reasons.Reason.RESET_REQUIRED)},
            RESET,
            "ResetRequired",
            id="a refused reset",
        ),
    ],
)
def test_a_failing_stage_is_named_and_the_gpu_restored(
    using: gpu_course.Using | None, failures: dict[str, Exception], name: str, why: str
) -> None:
    host = CourseNode()
    before = host.geometry
    host.failures.add_all(failures)

    (failed,) = (
        stage for stage in host.run_course(using).stages if stage.outcome is StageOutcome.FAILED
    )

    assert (failed.name, failed.why) == (name, why)
    assert host.geometry == before


def test_without_mig_mode_no_instance_is_tried() -> None:
    host = CourseNode()
    before = host.geometry
    host.failures.add(steps.SetMode, call_errors.IN_USE)

    result = host.run_course()

    assert [stage.outcome for stage in result.stages] == [
        StageOutcome.FAILED,
        StageOutcome.NOT_TRIED,
    ]
    assert host.geometry == before


def test_after_a_kill_in_the_course_the_next_command_restores_the_gpu() -> None:
    host = CourseNode()
    before, kills = host.geometry, host.note(lambda: forks.fork_at_kill(host), at=steps.Step)
    host.run_course()
    assert len(kills) > len(host.driver.executed_steps)  # also before those that are refused
    for killed in kills[::3]:  # each kind of step at some placements
        journal_file.undo_interrupted(killed.deps)

        assert killed.geometry == before
        assert killed.journal.text is None
        assert killed.apply(killed.layouts.layout("off")).is_changed is False
