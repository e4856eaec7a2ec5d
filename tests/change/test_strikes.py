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
from tests.rigs.node import gpu_values
from tests.rigs.node.local_rig import PROFILES, BootNode, LocalNode

CHECKPOINT = checkpoint.render(LocalNode("split").gpus)


@dataclasses.dataclass(frozen=True, slots=True)
class GpuChange:
    """A way from a start to a target."""

    name: str
    start: Callable[[], LocalNode]
    run: Callable[[LocalNode], object]

    def __str__(self) -> str:
        return self.name


def change_of_apply(start: str, layout: str) -> GpuChange:
    return GpuChange(
        f"{start} to {layout}", lambda: LocalNode(start), lambda node: node.change_to(layout)
    )


def change_of_restore(start: str) -> GpuChange:
    return GpuChange(
        f"{start} to a checkpoint",
        lambda: LocalNode(start),
        lambda node: node.restore(CHECKPOINT),
    )


def change_of_boot(product: str, *, is_faulty: bool) -> GpuChange:
    def start() -> LocalNode:
        node = BootNode(product)
        node.reboot()
        if is_faulty:
            node.gpus = gpu_values.with_action(node.gpus, model.RecoveryAction.GPU_RESET, 0)
        return node

    def run(node: LocalNode) -> None:
        assert node.boot(resets_faulty=is_faulty).problems == ()
        assert not any(gpu.needs_recovery for gpu in node.gpus)

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

    before: LocalNode
    kills: Sequence[LocalNode]  # as a kill before each of its steps leaves the node
    after: LocalNode


@functools.cache
def record(change: GpuChange) -> Recording:
    node = change.start()
    before, forks_at_kills = forks.fork(node), list[LocalNode]()
    node.on_step = lambda _step: forks_at_kills.append(forks.fork_at_kill(node))
    change.run(node)
    assert forks_at_kills
    assert all(killed.journal.text is not None for killed in forks_at_kills)
    return Recording(before, forks_at_kills, node)


def kills(change: GpuChange) -> Iterator[LocalNode]:
    """Yield nodes on which a change was killed, before each of its steps."""
    return map(forks.fork, record(change).kills)


CHANGES = [*APPLY_CHANGES.values(), *RESTORE_CHANGES]


@pytest.mark.parametrize("change", [*CHANGES, *BOOT_CHANGES], ids=str)
def test_a_killed_change_is_finished_by_the_same_one(change: GpuChange) -> None:
    for node in kills(change):
        change.run(node)

        assert node.geometry == record(change).after.geometry
        assert node.journal.text is None
        assert not node.lock.is_locked


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("again", ["other", "off"])
def test_after_a_kill_any_layout_can_be_applied(change: GpuChange, again: str) -> None:
    for node in kills(change):
        node.change_to(again)

        assert node.has(again)
        assert node.journal.text is None
        assert not node.lock.is_locked


@pytest.mark.parametrize("name", APPLY_CHANGES)
@pytest.mark.parametrize("killed_rollbacks", [0, 19])
def test_after_a_kill_an_impossible_layout_restores_the_gpus(
    name: str, killed_rollbacks: int
) -> None:
    before = record(APPLY_CHANGES[name]).before.geometry
    for node in kills(APPLY_CHANGES[name]):
        is_changed = node.geometry != before
        for again in range(1, 1 + killed_rollbacks):
            with node.kill_process(steps.Step, again), contextlib.suppress(errors.LayoutError):
                node.change_to("too-much")

        with pytest.raises(errors.LayoutError) as caught:
            node.change_to("too-much")

        assert node.geometry == before
        assert node.journal.text is None
        undone = f"the change to layout '{name}' was left unfinished and is undone now"
        assert killed_rollbacks or caught.value.message.endswith(undone) is is_changed


@pytest.mark.parametrize("change", RESTORE_CHANGES, ids=str)
def test_after_a_kill_a_bad_checkpoint_changes_nothing(change: GpuChange) -> None:
    for node in kills(change):
        geometry, journal = node.geometry, node.journal.text

        with pytest.raises(errors.CheckpointError):
            node.restore(CHECKPOINT[:-1])

        assert (node.geometry, node.journal.text) == (geometry, journal)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_change_that_fails_at_any_step_is_undone(change: GpuChange) -> None:
    before = record(change).before
    for at in range(1, 1 + len(record(change).kills)):
        node = forks.fork(before)
        node.steps = 0
        node.refuses_step = lambda _step: node.steps == at  # noqa: B023 - only in this round

        with pytest.raises(errors.HardwareError, match=r"in use; (the former instances|nothing)"):
            change.run(node)

        assert node.geometry == before.geometry
        assert node.journal.text is None
