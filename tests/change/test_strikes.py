"""Changes of GPUs in memory that are killed, or fail, at each of their steps."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import pytest

from mig_manager import errors
from mig_manager.core import model, steps
from mig_manager.core.files import checkpoint
from tests.change import forks
from tests.rigs.node import call_errors, gpu_values, strikes
from tests.rigs.node.local_rig import PROFILES, BootRig, LocalRig

CHECKPOINT = checkpoint.render(LocalRig("split").gpus)


@dataclasses.dataclass(frozen=True, slots=True)
class GpuChange:
    """A way from a start to a target."""

    name: str
    start: Callable[[], LocalRig]
    run: Callable[[LocalRig], object]

    def __str__(self) -> str:
        return self.name


def change_of_apply(start: str, layout: str) -> GpuChange:
    return GpuChange(
        f"{start} to {layout}", lambda: LocalRig(start), lambda rig: rig.change_to(layout)
    )


def change_of_restore(start: str) -> GpuChange:
    return GpuChange(
        f"{start} to a checkpoint",
        lambda: LocalRig(start),
        lambda rig: rig.restore(CHECKPOINT),
    )


def change_of_boot(product: str, *, is_faulty: bool) -> GpuChange:
    def start() -> LocalRig:
        rig = BootRig(product)
        rig.reboot()
        if is_faulty:
            rig.gpus = gpu_values.with_action(rig.gpus, model.RecoveryAction.GPU_RESET, 0)
        return rig

    def run(rig: LocalRig) -> None:
        assert rig.boot(resets_faulty=is_faulty).problems == ()
        assert not any(gpu.needs_recovery for gpu in rig.gpus)

    return GpuChange(f"boot of {'faulty ' * is_faulty}{product}", start, run)


APPLY_CHANGES = {
    "requested": change_of_apply("before", "requested"),
    "off": change_of_apply("before", "off"),
    "other": change_of_apply("off", "other"),
}
RESTORE_CHANGES = [change_of_restore("off"), change_of_restore("before")]
BOOT_CHANGES = [
    change_of_boot(product, is_faulty=faulty) for product in PROFILES for faulty in (False, True)
]


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """A change that nothing struck."""

    before: LocalRig
    kills: Sequence[LocalRig]  # as a kill before each of its steps leaves the node
    after: LocalRig


@functools.cache
def record(change: GpuChange) -> Recording:
    rig = change.start()
    before, forks_at_kills = (
        forks.fork(rig),
        rig.note(lambda: forks.fork_at_kill(rig), at=steps.Step),
    )
    change.run(rig)
    assert forks_at_kills
    assert all(killed.journal.text is not None for killed in forks_at_kills)
    return Recording(before, forks_at_kills, rig)


def kills(change: GpuChange) -> Iterator[LocalRig]:
    """Yield nodes on which a change was killed, before each of its steps."""
    return map(forks.fork, record(change).kills)


CHANGES = [*APPLY_CHANGES.values(), *RESTORE_CHANGES]


@pytest.mark.parametrize("change", [*CHANGES, *BOOT_CHANGES], ids=str)
def test_a_killed_change_is_finished_by_the_same_one(change: GpuChange) -> None:
    for rig in kills(change):
        change.run(rig)

        assert rig.geometry == record(change).after.geometry
        assert rig.journal.text is None
        assert not rig.lock.is_locked


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("again", ["other", "off"])
def test_after_a_kill_any_layout_can_be_applied(change: GpuChange, again: str) -> None:
    for rig in kills(change):
        rig.change_to(again)

        assert rig.has(again)
        assert rig.journal.text is None
        assert not rig.lock.is_locked


@pytest.mark.parametrize("name", APPLY_CHANGES)
@pytest.mark.parametrize("killed_rollbacks", [0, 19])
def test_after_a_kill_an_impossible_layout_restores_the_gpus(
    name: str, killed_rollbacks: int
) -> None:
    before = record(APPLY_CHANGES[name]).before.geometry
    for rig in kills(APPLY_CHANGES[name]):
        is_changed = rig.geometry != before
        for again in range(1, 1 + killed_rollbacks):
            with rig.kill_process(steps.Step, again), contextlib.suppress(errors.LayoutError):
                rig.change_to("too-much")

        with pytest.raises(errors.LayoutError) as caught:
            rig.change_to("too-much")

        assert rig.geometry == before
        assert rig.journal.text is None
        undone = f"the change to layout '{name}' was left unfinished and is undone now"
        assert killed_rollbacks or caught.value.message.endswith(undone) is is_changed


@pytest.mark.parametrize("change", RESTORE_CHANGES, ids=str)
def test_after_a_kill_a_bad_checkpoint_changes_nothing(change: GpuChange) -> None:
    for rig in kills(change):
        geometry, journal = rig.geometry, rig.journal.text

        with pytest.raises(errors.CheckpointError):
            rig.restore(CHECKPOINT[:-1])

        assert (rig.geometry, rig.journal.text) == (geometry, journal)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_change_that_fails_at_any_step_is_undone(change: GpuChange) -> None:
    before = record(change).before
    for at in range(1, 1 + len(record(change).kills)):
        rig = forks.fork(before)
        rig.failures.add(steps.Step, call_errors.IN_USE, when=strikes.nth(at))

        with pytest.raises(errors.HardwareError, match=r"in use; (the former instances|nothing)"):
            change.run(rig)

        assert rig.geometry == before.geometry
        assert rig.journal.text is None
