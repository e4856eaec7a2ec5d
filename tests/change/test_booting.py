"""``boot`` over GPUs in memory restores the verified layout, GPU by GPU if one fails."""

import dataclasses
import pathlib
from collections.abc import Callable

import pytest

from mig_manager import errors, reasons
from mig_manager.catalogue import hardware
from mig_manager.change import applying, boot
from mig_manager.core import model, steps
from tests.rigs.node import call_errors, gpu_values, local_rig, moments, nvml_rig, samples
from tests.rigs.node.local_rig import BootRig

NO_DRIVER = errors.HardwareError(
    "no driver", reason=reasons.Reason.DRIVER_NOT_LOADED, operation="nvmlInit"
)


class Notes(list[str]):
    def __init__(self, act: Callable[[str], None]) -> None:
        super().__init__()
        self._act = act

    def append(self, remark: str) -> None:
        super().append(remark)
        self._act(remark)


EACH_PRODUCT = pytest.mark.parametrize("rig", local_rig.PROFILES, indirect=True)


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> BootRig:
    """A node that was rebooted; a Hopper GPU loses its MIG mode in that too."""
    rig = BootRig(getattr(request, "param", "H100-SXM5-80GB"))
    rig.reboot()
    return rig


@pytest.fixture
def ampere() -> BootRig:
    return BootRig()


def test_boot_restores_placements_that_no_empty_gpu_would_get(ampere: BootRig) -> None:
    """A layout's instances may lie where history has put them."""
    moved = samples.gpu(samples.A100, "2g.10gb@4[]").gpu_instances
    verified = ampere.verified_layout
    first = dataclasses.replace(verified.snapshots[0], gpu_instances=moved)
    odd = dataclasses.replace(verified, layout="odd", snapshots=(first, *verified.snapshots[1:]))
    ampere.verified_layout_file.text = odd.to_json()
    ampere.reboot()

    ampere.boot()

    (instance,) = ampere.gpus[0].gpu_instances
    assert instance.placement == moved[0].placement


@pytest.mark.parametrize("product", local_rig.PROFILES)
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (steps.DestroyComputeInstance, 1),
        (steps.DestroyComputeInstance, 3),
        (steps.DestroyGpuInstance, 2),
        (steps.DestroyComputeInstance, 4),
    ],
)
def test_boot_after_power_loss_in_apply_restores_the_verified_layout(
    product: str, kind: moments.MomentSelector, number: int
) -> None:
    rig = BootRig(product)
    assert rig.kill_apply("off", kind, number)
    rig.reboot()

    # What is kept goes before a fallback.
    assert rig.boot("off").layout == "mixed"

    assert rig.is_restored()
    assert rig.lock.descriptions[-1] == "restore the layout of this node"


@EACH_PRODUCT
def test_a_reset_that_ends_no_fault_is_tried_once_and_the_layout_restored(
    rig: BootRig,
) -> None:
    rig.gpus = gpu_values.with_action(rig.gpus, model.RecoveryAction.GPU_RESET, 0, 1)
    rig.resets.action_after = model.RecoveryAction.GPU_RESET

    result = rig.boot(resets_faulty=True)

    assert rig.log.count("reset.reset") == 2
    for problem in result.problems:
        assert "still needs a reset, although it was reset" in problem.message
    assert len(result.problems) == 2
    assert len(result.faults) == 2
    assert rig.is_restored()


def test_a_driver_that_hangs_after_a_reset_hides_no_problem(rig: BootRig) -> None:
    rig.gpus = gpu_values.with_action(rig.gpus, model.RecoveryAction.GPU_RESET, 0)
    hung = errors.HardwareError("the driver hangs", reason=reasons.Reason.NVML_TIMEOUT)
    rig.callbacks.add("reset.reset", lambda: rig.failures.add("gpus.observe", hung))

    result = rig.boot(resets_faulty=True)

    assert "the driver hangs" in result.problems[-1].message
    assert len(result.faults) == 1


def test_a_driver_that_hangs_is_not_tried_again_for_each_gpu(rig: BootRig) -> None:
    hung = errors.HardwareError("the driver hangs", reason=reasons.Reason.NVML_TIMEOUT)
    rig.failures.add("gpus.execute", hung)
    rig.log.clear()

    (problem,) = rig.boot().problems

    assert "the driver hangs" in problem.message
    assert rig.log.count("gpus.execute") == 1


def test_a_faulty_gpu_without_a_saved_state_is_not_reset(rig: BootRig) -> None:
    verified = rig.verified_layout
    kept = dataclasses.replace(verified, snapshots=verified.snapshots[1:])
    rig.verified_layout_file.text = kept.to_json()
    rig.gpus = gpu_values.with_action(rig.gpus, model.RecoveryAction.GPU_RESET, 0)

    result = rig.boot(resets_faulty=True)

    assert len(result.faults) == 1
    assert "reset.reset" not in rig.log
    assert not any("resetting it" in note for note in rig.notes)


# -- what is kept, and by whom ----------------------------------------------------------------


def test_each_apply_saves_its_verified_layout_also_with_mig_off(
    ampere: BootRig,
) -> None:
    for _applied_and_already_applied in range(2):
        ampere.verified_layout_file.text = None
        ampere.change_to("off")
        assert ampere.verified_layout.layout == "off"
    ampere.reboot()

    assert (ampere.boot().executed, ampere.driver.executed_steps) == ((), [])


def test_a_failed_apply_keeps_the_layout_saved_before(ampere: BootRig) -> None:
    kept = ampere.verified_layout_file.text
    ampere.failures.add(steps.SetMode, call_errors.IN_USE)

    with pytest.raises(errors.HardwareError):
        ampere.change_to("off")

    assert ampere.verified_layout_file.text == kept


def test_apply_that_cannot_save_its_layout_succeeds_and_reports_it(ampere: BootRig) -> None:
    ampere.verified_layout_file.failing_operations = {"write"}
    ampere.change_to("off")

    assert ampere.notes == ["cannot write the journal; the next boot will not restore this layout"]


def test_boot_without_a_saved_layout_succeeds_without_the_driver(ampere: BootRig) -> None:
    ampere.verified_layout_file.text = None
    ampere.failures.add("gpus.observe", NO_DRIVER)

    result = ampere.boot()

    assert (result.layout, result.executed, result.problems) == ("", (), ())
    assert (ampere.clock.now_s, ampere.notes) == (0, [])


def test_boot_without_a_saved_layout_undoes_an_interrupted_apply(ampere: BootRig) -> None:
    ampere.change_to("off")
    off = ampere.geometry
    ampere.verified_layout_file.text = None
    assert ampere.kill_apply("mixed", steps.CreateComputeInstance)
    ampere.reboot()

    ampere.boot()

    assert ampere.geometry == off
    assert ampere.notes == ["the change to layout 'mixed' was left unfinished and is undone now"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 1}'])
def test_an_invalid_saved_layout_is_set_aside_and_reported(ampere: BootRig, text: str) -> None:
    ampere.verified_layout_file.text = text
    ampere.reboot()

    (problem,) = ampere.boot().problems

    assert problem.message.startswith("the layout saved for this boot is invalid (")
    assert problem.remedy
    assert (ampere.verified_layout_file.aside, ampere.driver.executed_steps) == (text, [])
    assert ampere.boot().problems == ()


def test_boot_sets_an_unreadable_layout_aside_for_the_fallback(ampere: BootRig) -> None:
    ampere.verified_layout_file.failing_operations = {"read"}
    ampere.reboot()

    assert len(ampere.boot("mixed").problems) == 1

    assert ampere.is_restored()
    assert (ampere.verified_layout.layout, ampere.verified_layout.boot_id) == ("mixed", "boot-2")
    ampere.verified_layout_file.failing_operations = {"read", "set_aside"}
    with pytest.raises(errors.UsageError) as caught:
        ampere.boot()
    assert "another file with --verified-layout-file" in str(caught.value.own_remedy)


# -- GPUs, drivers and signals ----------------------------------------------------------------


@EACH_PRODUCT
def test_a_swapped_gpu_is_reported_twice_and_affects_no_other(rig: BootRig) -> None:
    first, second = rig.gpus
    other = dataclasses.replace(second, uuid="GPU-new")
    rig.gpus = (first, other)

    gone, new = (problem.message for problem in rig.boot().problems)

    assert f"GPU {second.uuid} is gone" in gone
    assert "GPU-new" in new
    assert "is new" in new
    assert rig.geometry[0] == rig.before[0]
    assert rig.gpus[1] == other
    assert rig.journal.text is None


def test_boot_names_a_gpu_with_the_state_of_an_earlier_layout(rig: BootRig) -> None:
    rig.boot()
    lost = rig.gpus[1]
    rig.driver.lost = {lost.uuid}
    for _ in range(2):
        rig.change_to("off")
    rig.driver.lost = set()
    rig.reboot()

    assert rig.boot().problems == ()

    (note,) = (each for each in rig.notes if str(lost) in each)
    assert "was unreachable when layout 'off' was verified" in note
    assert note.endswith("its saved state is of layout 'mixed'")
    assert rig.geometry[1] == rig.before[1]


def test_a_new_gpu_without_mig_is_no_problem(rig: BootRig) -> None:
    rig.gpus = (*rig.gpus, hardware.template(hardware.find("T4"), 2))

    assert rig.boot().problems == ()
    assert rig.geometry[:2] == rig.before


@EACH_PRODUCT
def test_a_failing_gpu_keeps_its_instances_and_affects_no_other(rig: BootRig) -> None:
    empty = rig.geometry
    bad = rig.gpus[1].uuid
    rig.failures.add(
        steps.CreateComputeInstance,
        call_errors.IN_USE,
        when=lambda: rig.driver.next_step.gpu_uuid == bad,
    )

    (problem,) = rig.boot().problems

    assert "in use; the former instances are restored" in problem.message
    assert problem.remedy == reasons.Reason.IN_USE.remedy_at_shell
    assert rig.geometry == [rig.before[0], empty[1]]
    assert rig.journal.text is None
    assert rig.notes[-1].endswith("trying one GPU after the other")


@EACH_PRODUCT
def test_the_journal_names_only_the_gpu_left_in_between(rig: BootRig) -> None:
    bad = rig.gpus[1].uuid
    with rig.failures.adding(
        steps.CreateComputeInstance | steps.DestroyGpuInstance,
        call_errors.IN_USE,
        when=lambda: rig.driver.next_step.gpu_uuid == bad,
    ):
        (problem,) = rig.boot().problems

    assert "still to do: GPU 1: " in problem.message
    assert rig.geometry[0] == rig.before[0]
    journal = rig.local_journal
    assert [gpu.uuid for gpu in journal.gpus.snapshots] == [bad]

    assert rig.boot().problems == ()
    assert rig.is_restored()


@EACH_PRODUCT
def test_a_boot_that_leaves_every_gpu_half_changed_reports_a_change(rig: BootRig) -> None:
    rig.failures.add(steps.CreateComputeInstance | steps.DestroyGpuInstance, call_errors.IN_USE)

    result = rig.boot()

    assert (result.executed, len(result.problems)) == ((), 2)
    assert result.to_data()["is_changed"]


def test_boot_waits_for_the_driver_and_for_another_manager(rig: BootRig) -> None:
    rig.failures.add("gpus.observe", NO_DRIVER)
    rig.lock.refusals = 3

    def load(remark: str) -> None:
        if remark == "no driver; waiting up to 120 s":
            rig.failures.clear()

    rig.notes = Notes(load)
    rig.boot()

    assert rig.is_restored()


@pytest.mark.parametrize("fallback", ["", "mixed"])
def test_boot_keeps_a_layout_verified_while_it_waits_for_the_lock(
    ampere: BootRig, fallback: str
) -> None:
    if fallback:
        ampere.verified_layout_file.text = None
    ampere.lock.refusals = 1
    ampere.callbacks.add(moments.Wait, lambda: ampere.has("off") or ampere.change_to("off"))

    result = ampere.boot(fallback)

    assert (result.layout, result.executed) == ("off", ())
    assert ampere.has("off")


def test_the_wait_for_the_driver_ends_at_the_deadline(rig: BootRig) -> None:
    rig.failures.add("gpus.observe", NO_DRIVER)

    with pytest.raises(errors.HardwareError, match="no driver; waited 7 s for it") as caught:
        rig.boot(driver_timeout_s=7.04)

    assert caught.value.reason is reasons.Reason.DRIVER_NOT_LOADED
    assert rig.clock.now_s == pytest.approx(7.04)
    assert rig.notes[0].endswith("waiting up to 7 s")
    assert not rig.lock.is_locked


@pytest.mark.parametrize(
    ("product", "layout"), [("h100-sxm5-80gb", "bare"), ("a100-sxm4-40gb", "before")]
)
def test_gpus_in_use_are_awaited_together_and_a_lost_one_is_reported_once(
    tmp_path: pathlib.Path, product: str, layout: str
) -> None:
    owner = local_rig.LocalRig("off")
    with nvml_rig.booted(tmp_path / "state", f"5x{product}", in_use_timeout_s=30.0) as rig:
        deps = dataclasses.replace(owner.deps, gpus=rig.gpus, clock=rig.clock, idle_timeout_s=30.0)
        applying.apply(deps, lambda: local_rig.LAYOUTS.layout(layout))
        before = rig.gpus.observe()
        rig.state.reboot()
        for gpu in before[:3]:
            rig.state.add_client(gpu.uuid, name="python", pid=4711)
        rig.clock.on_wait.append(lambda: rig.state.lose_gpu(3))
        began_s = rig.clock.now_s

        problems = boot.boot(deps, None, driver_timeout_s=1.0).problems

        assert rig.clock.now_s - began_s < 60
        texts = [problem.message for problem in problems]
        assert [sum(f"GPU {n} " in text for text in texts) for n in range(5)] == [1, 1, 1, 1, 0]
        assert [gpu for gpu in rig.gpus.observe() if gpu.index == 4] == [before[4]]


def test_device_files_that_fail_at_boot_are_a_problem_and_undo_nothing(rig: BootRig) -> None:
    rig.failures.add(
        "refresh_files",
        errors.HostError("nvidia-ctk failed", reason=reasons.Reason.DEVICE_FILES_FAILED),
    )

    result = rig.boot()

    assert rig.geometry == rig.before
    assert result.executed
    assert [problem.message for problem in result.problems] == ["nvidia-ctk failed"]

    rig.failures.clear()
    rig.host.refreshes = 0
    assert rig.boot().problems == ()
    assert rig.host.refreshes == 1
    assert rig.is_restored()


def failing_after(rig: BootRig, observations: int) -> None:
    """Let NVML fail after some observations."""
    rig.log.clear()
    rig.failures.add(
        "gpus.observe",
        errors.HardwareError("gone", reason=reasons.Reason.NVML_ERROR),
        when=lambda: rig.log.count("gpus.observe") > observations,
    )


def test_a_boot_that_changes_nothing_keeps_the_journal_of_a_killed_apply(
    ampere: BootRig,
) -> None:
    assert ampere.kill_apply("off", steps.DestroyGpuInstance)
    journal = ampere.local_journal
    failing_after(ampere, 1)

    assert ampere.boot().problems

    assert ampere.local_journal.gpus.snapshots == journal.gpus.snapshots


@EACH_PRODUCT
def test_a_failed_boot_refreshes_device_files_for_what_it_has_changed(rig: BootRig) -> None:
    refreshed = rig.host.refreshes
    executed = rig.driver.executed_steps
    rig.callbacks.add(
        steps.Step, lambda: failing_after(rig, 0), when=lambda: len(executed) == 2, times=1
    )
    rig.failures.add(steps.Step, call_errors.IN_USE, when=lambda: len(executed) >= 2)

    assert rig.boot().problems

    assert rig.host.refreshes > refreshed


def test_a_boot_whose_journal_cannot_be_written_changes_nothing(rig: BootRig) -> None:
    rig.journal.failing_operations.add("write")

    with pytest.raises(errors.UsageError):
        rig.boot()

    assert rig.driver.executed_steps == []
