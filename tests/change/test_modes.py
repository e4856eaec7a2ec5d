"""MIG modes alone, modes that wait for a reset, and persistence mode."""

import dataclasses

import pytest

from mig_manager import errors, reasons
from mig_manager.core import model, steps
from mig_manager.core.layout import layout_parser, layouts
from mig_manager.core.records import journals
from tests.rigs.node import call_errors, gpu_values
from tests.rigs.node.local_rig import LocalRig


def test_apply_resets_no_gpu_where_resets_are_forbidden() -> None:
    rig = LocalRig("off")
    rig.driver.mode_waits = True

    with pytest.raises(errors.HardwareError, match="only the new mode stays pending"):
        rig.change_to("requested", may_reset=False)
    assert "reset.reset" not in rig.log

    rig.change_to("requested")
    assert rig.has("requested")


def test_mode_only_switches_mig_and_leaves_instances_alone() -> None:
    for rig in (off := LocalRig("off"), partitioned := LocalRig()):
        assert rig.change_to("requested", is_mode_only=True).layout == "requested"
        assert rig.verified_layout.layout == "requested (MIG mode only)"

    assert off.has("bare")
    assert partitioned.has("before")
    assert not off.change_to("requested", is_mode_only=True).is_changed
    assert off.change_to("requested").is_changed


def mode_of_first(rig: LocalRig) -> layouts.Layout:
    """Return the layout of GPU 0 alone, and interrupt a change of GPU 1."""
    text = """
version: v1
mig-configs:
  first: [{devices: [0], mig-enabled: true, mig-devices: {}}]
  second: [{devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 7}}]
"""
    rig.layouts = layout_parser.parse(text, source="two.yaml")
    assert rig.kill_apply("second", steps.CreateGpuInstance, 2)
    return rig.layouts.layout("first")


@pytest.mark.parametrize("has_interrupted", [False, True])
@pytest.mark.parametrize("is_in_use", [False, True], ids=["waits", "in use"])
def test_mode_only_without_resets_leaves_the_mode_pending(
    *, is_in_use: bool, has_interrupted: bool
) -> None:
    """A persistence daemon uses the GPU, so the driver says that it is in use."""
    rig = LocalRig("one-off" if has_interrupted else "off")
    before = rig.geometry[1]
    layout = mode_of_first(rig) if has_interrupted else rig.layouts.layout("bare")
    rig.driver.mode_waits = not is_in_use

    def put_off() -> None:
        rig.gpus = gpu_values.pending(rig.gpus, rig.driver.next_step)

    if is_in_use:
        rig.callbacks.add(steps.SetMode, put_off)
        rig.failures.add(steps.SetMode, call_errors.IN_USE)

    assert rig.apply(layout, is_mode_only=True, may_reset=False).is_changed

    assert {gpu.pending_mode for gpu in rig.gpus} == {model.MigMode.ENABLED}
    assert rig.journal.text is None
    assert (rig.geometry[1] == before) is has_interrupted


def test_mode_only_reports_a_failure_on_another_gpu_as_such() -> None:
    rig = LocalRig("one-off")
    layout = mode_of_first(rig)
    rig.driver.mode_waits = True
    rig.failures.add(
        steps.Step,
        call_errors.IN_USE,
        when=lambda: not isinstance(rig.driver.next_step, steps.SetMode),
    )

    with pytest.raises(errors.HardwareError) as caught:
        rig.apply(layout, is_mode_only=True, may_reset=False)

    assert caught.value.reason is reasons.Reason.RESET_REQUIRED


def test_mode_only_without_resets_reports_instances_in_use_of_other_gpus(
    rig: LocalRig,
) -> None:
    assert rig.kill_apply("requested", steps.CreateGpuInstance, 3)
    rig.failures.add(steps.Step, call_errors.IN_USE)

    with pytest.raises(errors.HardwareError) as caught:
        rig.change_to("first-only", is_mode_only=True, may_reset=False)

    assert caught.value.reason is reasons.Reason.IN_USE


@pytest.mark.parametrize(
    ("start", "has_empty"), [("before", False), ("before", True), ("off", False)]
)
def test_mode_only_cancels_a_pending_change_to_the_other_mode(
    start: str, *, has_empty: bool
) -> None:
    rig = LocalRig(start)
    if has_empty:
        first, *others = rig.gpus
        empty, *full = first.gpu_instances
        instances = (dataclasses.replace(empty, compute_instances=()), *full)
        rig.gpus = (dataclasses.replace(first, gpu_instances=instances), *others)
    before, mode = rig.geometry, rig.gpus[0].current_mode
    (other,) = {*model.MigMode} - {mode}
    rig.gpus = tuple(dataclasses.replace(gpu, pending_mode=other) for gpu in rig.gpus)

    assert rig.change_to(start, is_mode_only=True, may_reset=False).is_changed
    assert rig.geometry == before


@pytest.mark.parametrize(("boot_id", "is_restored"), [("boot-1", True), ("boot-0", False)])
def test_persistence_mode_is_restored_after_a_kill_and_not_after_a_reboot(
    rig: LocalRig, boot_id: str, *, is_restored: bool
) -> None:
    uuid = rig.gpus[0].uuid
    rig.journal.text = journals.Journal(
        layout="requested",
        boot_id=boot_id,
        gpus=journals.GpuEntries(
            snapshots=tuple(gpu.snapshot for gpu in rig.gpus),
            persistent_gpus=(uuid, "GPU-of-another-node"),
        ),
    ).to_json()
    rig.resets.without_persistence = {uuid}

    rig.change_to("before")

    assert (uuid not in rig.resets.without_persistence) is is_restored
    assert rig.journal.text is None


@pytest.mark.parametrize("obstacle", ["lost GPU", "stays off", "no program"])
def test_persistence_mode_that_stays_off_is_restored_by_a_later_run(
    rig: LocalRig, obstacle: str
) -> None:
    uuid = rig.gpus[0].uuid
    journal = journals.Journal(
        layout="requested", boot_id="boot-1", gpus=journals.GpuEntries(persistent_gpus=(uuid,))
    )
    rig.journal.text = journal.to_json()
    rig.resets.without_persistence = {uuid}

    rig.driver.lost = {uuid} if obstacle == "lost GPU" else set()
    rig.resets.keep_persistence_off = obstacle == "stays off"
    rig.resets.are_available = obstacle != "no program"
    for _ in range(2):
        rig.change_to("before")
    assert rig.resets.without_persistence == {uuid}
    rig.resets.are_available, rig.resets.keep_persistence_off = True, False
    rig.driver.lost.clear()
    rig.change_to("before")

    assert rig.resets.without_persistence == set()
    assert rig.journal.text is None
