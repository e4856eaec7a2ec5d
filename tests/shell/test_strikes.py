"""Changes of GPUs in memory that are killed, or fail, at each of their steps."""

import contextlib
import dataclasses
from collections.abc import Callable

import pytest

from mig_manager import errors
from mig_manager.core import checkpoint, model
from tests.node import gpu_values
from tests.node.applying_rig import PROFILES, BootNode, Node

CHECKPOINT = checkpoint.render(Node("split").gpus)


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A way from a start to a target."""

    name: str
    start: Callable[[], Node]
    run: Callable[[Node], object]

    def __str__(self) -> str:
        return self.name


def applied(start: str, layout: str) -> Change:
    return Change(f"{start} to {layout}", lambda: Node(start), lambda node: node.change_to(layout))


def restored(start: str) -> Change:
    return Change(
        f"{start} to a checkpoint", lambda: Node(start), lambda node: node.restore(CHECKPOINT)
    )


def booted(product: str, *, is_faulty: bool) -> Change:
    def start() -> Node:
        node = BootNode(product)
        node.reboot()
        if is_faulty:
            node.gpus = gpu_values.with_action(node.gpus, model.RecoveryAction.GPU_RESET, 0)
        return node

    def run(node: Node) -> None:
        assert node.boot(repairs=is_faulty).problems == ()
        assert not any(gpu.needs_recovery for gpu in node.gpus)

    return Change(f"boot of {'faulty ' * is_faulty}{product}", start, run)


APPLIED = {
    "wanted": applied("before", "wanted"),
    "off": applied("before", "off"),
    "other": applied("off", "other"),
}
RESTORED = [restored("off"), restored("before")]
BOOTED = [booted(product, is_faulty=faulty) for product in PROFILES for faulty in (False, True)]


def strikes(*changes: Change) -> pytest.MarkDecorator:
    """Parametrize a test with each step of each change, counted from 1."""
    cells = []
    for change in changes:
        node = change.start()
        node.steps = 0
        change.run(node)
        cells += [
            pytest.param(change, at, id=f"{change} at {at}") for at in range(1, node.steps + 1)
        ]
    return pytest.mark.parametrize(("change", "at"), cells, ids=str)


def killed(change: Change, at: int) -> Node:
    """Return the node on which a change was killed before a step."""
    node = change.start()
    with node.killed(at=at):
        change.run(node)
        pytest.fail("the change has fewer steps")
    assert node.journal.text is not None
    return node


@strikes(*APPLIED.values(), *RESTORED, *BOOTED)
def test_a_killed_change_is_finished_by_the_same_one(change: Change, at: int) -> None:
    node, whole = killed(change, at), change.start()
    change.run(whole)

    change.run(node)

    assert node.shape == whole.shape
    assert node.journal.text is None
    assert not node.exclusion.is_locked


@strikes(*APPLIED.values(), *RESTORED)
@pytest.mark.parametrize("again", ["wanted", "other", "off", "before"])
def test_after_a_kill_any_layout_can_be_applied(change: Change, at: int, again: str) -> None:
    node = killed(change, at)

    node.change_to(again)

    assert node.has(again)
    assert node.journal.text is None
    assert not node.exclusion.is_locked


@strikes(*APPLIED.values())
@pytest.mark.parametrize("killed_rollbacks", [0, 19])
def test_after_a_kill_an_impossible_layout_restores_what_was(
    change: Change, at: int, killed_rollbacks: int
) -> None:
    node, before = killed(change, at), change.start().shape
    is_changed = node.shape != before
    for again in range(1, 1 + killed_rollbacks):
        with node.killed(at=again), contextlib.suppress(errors.LayoutError):
            node.change_to("too-much")

    with pytest.raises(errors.LayoutError) as caught:
        node.change_to("too-much")

    assert node.shape == before
    assert node.journal.text is None
    (name,) = (name for name, each in APPLIED.items() if each is change)
    undone = f"the change to layout '{name}' was left unfinished and is undone now"
    assert killed_rollbacks or caught.value.message.endswith(undone) is is_changed


@strikes(*RESTORED)
def test_after_a_kill_a_bad_checkpoint_changes_nothing(change: Change, at: int) -> None:
    node = killed(change, at)
    left, journal = node.shape, node.journal.text

    with pytest.raises(errors.CheckpointError):
        node.restore(CHECKPOINT[:-1])

    assert (node.shape, node.journal.text) == (left, journal)


@strikes(*APPLIED.values(), *RESTORED)
def test_a_change_that_fails_at_any_step_is_undone(change: Change, at: int) -> None:
    node = change.start()
    before = node.shape
    node.steps = 0
    node.fails = lambda _step: node.steps == at

    with pytest.raises(errors.HardwareError, match=r"in use; (the former instances|nothing)"):
        change.run(node)

    assert node.shape == before
    assert node.journal.text is None
