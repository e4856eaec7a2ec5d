"""``apply`` and ``restore`` with hooks: which run when, and what a failing one costs."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors
from mig_manager.change import apply, pod_use
from mig_manager.core import ports, steps
from mig_manager.core.files import checkpoint
from tests.node import applying_rig, fake_cluster, nodes, samples
from tests.node.applying_rig import is_creation

STEPS = {
    steps.SetMode: "MODE",
    steps.DestroyGpuInstance: "DESTROY",
    steps.CreateGpuInstance: "CREATE",
}
POINTS = ("start", "mode", "config", "exit")


class Played(applying_rig.ApplyingNode):
    """A node with a layout, and all that happened on it since, in order."""

    def __init__(self, layout: str, hooks: str = nodes.HOOKS) -> None:
        super().__init__(layout)
        self.hooks.text = hooks
        self.on_step = self.note
        self.before = self.shape

    @property
    def happened(self) -> list[str]:
        """Hooks, and between two of them each kind of steps once."""
        return list(self.hooks.commands)

    def note(self, step: steps.Step) -> None:
        kind = STEPS.get(type(step))
        seen = self.hooks.commands
        since = next((at for at in reversed(range(len(seen))) if seen[at].islower()), -1)
        if kind and kind not in seen[since + 1 :]:
            seen.append(kind)

    def interrupt_after(self, last: str) -> None:
        """Have a signal that comes when this is the last thing that happened."""

        @contextlib.contextmanager
        def guard() -> Iterator[Callable[[], None]]:
            def check() -> None:
                if self.happened[-1:] == [last]:
                    raise errors.Superseded("a signal", errors.SupersededBy.STOP)

            yield check

        self.guard = guard


@pytest.mark.parametrize(
    ("start", "layout", "happened"),
    [
        ("before", "before", ["start", "exit"]),
        ("before", "wanted", ["start", "config", "DESTROY", "CREATE", "exit"]),
        ("off", "wanted", ["start", "mode", "MODE", "config", "CREATE", "exit"]),
        ("off", "bare", ["start", "mode", "MODE", "exit"]),
        ("before", "off", ["start", "mode", "DESTROY", "MODE", "exit"]),
        (
            "before",
            "one-off",
            ["start", "mode", "DESTROY", "MODE", "config", "DESTROY", "CREATE", "exit"],
        ),
    ],
)
def test_hooks_run_in_order_and_only_before_a_change(
    start: str, layout: str, happened: list[str]
) -> None:
    played = Played(start)

    played.change_to(layout)

    assert played.happened == happened
    assert played.has(layout)
    assert played.journal.text is None


def test_each_round_is_counted_against_the_gpus_before_it() -> None:
    applied = Played("before").change_to("one-off")

    assert [planned.kept for planned in applied.rounds] == [2, 1]


def test_point_without_hooks_or_instances_is_left_out() -> None:
    mode_only = Played("off")
    hookless = Played("off", "hooks: {pre-apply-mode: [{command: mode}]}")

    mode_only.change_to("wanted", is_mode_only=True)
    applied = hookless.change_to("wanted")

    assert mode_only.happened == ["start", "mode", "MODE", "exit"]
    assert len(applied.rounds) == 1
    assert hookless.happened[:2] == ["mode", "MODE"]


def test_first_failing_hook_of_a_point_is_the_last() -> None:
    played = Played(
        "before", "hooks: {pre-apply-config: [{command: a}, {command: b}, {command: c}]}"
    )
    played.hooks.broken = {"b"}

    with pytest.raises(errors.HostError):
        played.change_to("wanted")

    assert played.happened == ["a", "b"]


def test_hooks_are_reported_of_the_change_and_the_change_wins() -> None:
    played = Played(
        "before",
        "hooks: {apply-start: [{command: a, envs: {X: y, MIG_PARTED_SELECTED_CONFIG: other}}]}",
    )

    played.change_to("before")

    assert played.hooks.environment == {
        "X": "y",
        "MIG_PARTED_HOOKS_FILE": "hooks.yaml",
        "MIG_PARTED_SELECTED_CONFIG": "before",
    }


AFTER_A_FAILURE = {
    "start": ["start"],
    "mode": ["start", "mode", "exit"],
    "config": ["start", "mode", "MODE", "config", "MODE", "exit"],
    "exit": ["start", "mode", "MODE", "config", "CREATE", "exit"],
}


@pytest.mark.parametrize("point", POINTS)
def test_failing_hook_undoes_the_change_except_at_the_last_point(point: str) -> None:
    played = Played("off")
    played.hooks.broken = {point}

    with pytest.raises(errors.HostError, match=f"^{point} failed") as caught:
        played.change_to("wanted")

    assert caught.value.reason is errors.Reason.HOOK_FAILED
    assert played.happened == AFTER_A_FAILURE[point]
    assert played.journal.text is None
    is_done = played.has("wanted")
    assert is_done is (point == "exit")
    if is_done:
        assert caught.value.message.endswith("the layout is active all the same")
        assert played.boot_layout.text is not None
    else:
        assert played.shape == played.before


def test_failing_change_is_undone_before_the_last_point() -> None:
    played = Played("before")
    played.fails = lambda step: is_creation(step) and step.placement.size == 1  # type: ignore[union-attr]
    played.hooks.broken = {"exit"}

    with pytest.raises(errors.HardwareError) as caught:
        played.change_to("wanted")

    assert caught.value.reason is errors.Reason.IN_USE
    assert caught.value.message.endswith("the former instances are restored; exit failed")
    assert played.happened[-2:] == ["CREATE", "exit"]
    assert played.shape == played.before


@pytest.mark.parametrize(
    ("layout", "hooks", "error", "message"),
    [
        ("too-much", nodes.HOOKS, errors.LayoutError, "fit"),
        (
            "wanted",
            "hooks: {pre-apply: []}",
            errors.ConfigError,
            r"hooks\.yaml:1:9: unexpected key 'pre-apply'",
        ),
    ],
    ids=["a layout that cannot be had", "a hooks file that is no good"],
)
def test_what_cannot_be_costs_no_hook_and_touches_nothing(
    layout: str, hooks: str, error: type[Exception], message: str
) -> None:
    played = Played("before", hooks)

    with pytest.raises(error, match=message):
        played.change_to(layout)

    assert (played.happened, played.shape) == ([], played.before)


@pytest.mark.parametrize(
    ("start", "layout", "missing", "is_refused"),
    [
        ("before", "wanted", "config", True),
        ("before", "before", "config", False),
        ("before", "wanted", "mode", False),
        ("off", "wanted", "mode", True),
        ("before", "before", "exit", True),
        ("before", "wanted", "start", True),
    ],
)
def test_missing_program_of_a_hook_is_reported_before_any_runs(
    start: str, layout: str, missing: str, *, is_refused: bool
) -> None:
    played = Played(start)
    played.hooks.missing = {missing}

    if not is_refused:
        played.change_to(layout)
        return
    with pytest.raises(
        errors.HostError, match=f"program {missing} is not found; nothing was touched"
    ):
        played.change_to(layout)
    assert played.happened == []
    assert played.shape == played.before


def test_gpus_that_a_hook_has_changed_are_checked_again() -> None:
    played = Played("before")

    def tamper() -> None:
        if "start" in played.happened:
            played.gpus = applying_rig.ApplyingNode("wanted").gpus

    played.on_call = tamper
    played.hooks.text = (
        "hooks: {apply-start: [{command: start}, {command: more}], apply-exit: [{command: exit}]}"
    )

    assert not played.change_to("wanted").is_changed
    assert played.happened == ["start", "more", "exit"]


@pytest.mark.parametrize(
    ("hooks", "last_before", "happened"),
    [
        (nodes.HOOKS, "start", ["start", "exit"]),
        (nodes.HOOKS, "MODE", ["start", "mode", "MODE", "exit"]),
        (
            "hooks: {apply-start: [{command: a}, {command: b}], apply-exit: [{command: c}]}",
            "a",
            ["a", "c"],
        ),
    ],
    ids=["before the mode", "before instances", "between two of the start"],
)
def test_a_signal_ends_the_hooks_but_the_last_and_all_is_undone(
    hooks: str, last_before: str, happened: list[str]
) -> None:
    played = Played("off", hooks)
    played.interrupt_after(last_before)

    with pytest.raises(errors.Superseded):
        played.change_to("wanted")

    assert played.happened == happened
    assert played.shape == played.before
    assert played.journal.text is None


def test_an_unfinished_change_is_undone_where_a_first_hook_fails() -> None:
    played = Played("before", "")
    assert played.cut_off("wanted", at=3)
    played.hooks.text = nodes.HOOKS
    played.hooks.broken = {"start"}

    with pytest.raises(errors.HostError, match="was left unfinished and is undone now"):
        played.change_to("wanted")

    assert played.shape == played.before


def test_a_restore_passes_the_same_points_and_is_undone_like_any_change() -> None:
    then = applying_rig.ApplyingNode("wanted")
    text = checkpoint.render(then.gpus)
    played, failing = Played("off"), Played("off")
    failing.hooks.broken = {"config"}

    played.restore(text)
    with pytest.raises(errors.HostError, match="the former instances are restored"):
        failing.restore(text)

    assert played.happened == ["start", "mode", "MODE", "config", "CREATE", "exit"]
    assert (played.shape, failing.shape) == (then.shape, failing.before)
    assert set(played.hooks.environment) == {"MIG_PARTED_HOOKS_FILE"}


def test_profiles_reported_only_with_mig_on_keep_the_order() -> None:
    played = Played("off")
    played.driver.hides_profiles = True

    played.change_to("wanted")

    assert played.has("wanted")
    assert played.happened == ["start", "mode", "MODE", "config", "CREATE", "exit"]


def test_a_stale_plan_in_a_later_round_rolls_the_first_round_back_too() -> None:
    played = Played("off")

    def step(each: steps.Step) -> None:
        played.is_stale = isinstance(each, steps.SetMode)

    played.on_step = step

    with pytest.raises(errors.StalePlanError):
        played.change_to("wanted")

    assert played.shape == played.before
    assert played.journal.text is None


def test_a_failing_hook_keeps_instances_in_use_of_an_interrupted_change() -> None:
    played = Played("before", "hooks: {pre-apply-config: [{command: config}]}")
    assert played.cut_off("wanted", at=4)
    interrupted = played.shape
    played.driver.clients = "train (pid 7)"
    played.hooks.broken = {"config"}

    with pytest.raises(errors.HostError, match="config failed"):
        played.change_to("small")

    assert played.shape == interrupted
    assert played.journal.text is not None


def test_a_stale_plan_in_a_later_round_keeps_foreign_instances() -> None:
    played = Played("off")
    (foreign,) = samples.gpu(samples.A100, "3g.20gb@4").gpu_instances

    def step(each: steps.Step) -> None:
        played.is_stale = isinstance(each, steps.SetMode)

    def create() -> None:
        if played.log[-1] == "gpus.execute" and played.is_stale:
            first, *others = played.gpus
            played.gpus = (dataclasses.replace(first, gpu_instances=(foreign,)), *others)

    played.on_step, played.on_call = step, create

    with pytest.raises(
        errors.HardwareError, match=r"3g\.20gb at 4:4 on GPU 0 is new, and is kept"
    ):
        played.change_to("wanted")
    assert played.gpus[0].gpu_instances == (foreign,)


@pytest.mark.parametrize(("idle_timeout_s", "happened"), [(0.0, []), (9.0, ["start"])])
def test_devices_of_pods_are_kept_before_hooks_unless_the_command_waits(
    idle_timeout_s: float, happened: list[str]
) -> None:
    played = Played("before")
    played.add_pod("train", devices=frozenset(played.gpus[0].mig_uuids))
    deps = dataclasses.replace(played.deps, idle_timeout_s=idle_timeout_s)

    with pytest.raises(errors.GpuInUseError, match=r"default/train.*; nothing was changed"):
        apply.apply(deps, lambda: played.layouts.layout("wanted"))

    assert played.happened[:1] == happened
    assert played.shape == played.before


def test_a_refusal_that_undoes_a_killed_change_claims_no_unchanged_gpus() -> None:
    played = Played("before", "")
    assert played.cut_off("wanted", at=3)
    played.hooks.text = nodes.HOOKS
    kept = frozenset(uuid for gpu in played.gpus for uuid in gpu.mig_uuids)
    played.add_pod("train", devices=kept)

    with pytest.raises(errors.GpuInUseError, match="left unfinished") as caught:
        played.change_to("other")

    assert "nothing was changed" not in caught.value.message


@pytest.mark.parametrize(
    ("hooks", "is_changed"), [(nodes.HOOKS, True), ("", False)], ids=["by a hook", "by itself"]
)
@pytest.mark.parametrize("has_socket", [True, False], ids=["silent", "without a socket"])
def test_a_kubelet_that_stops_ends_the_change_unless_a_hook_stopped_it(
    hooks: str, *, is_changed: bool, has_socket: bool
) -> None:
    played = Played("before", hooks)
    asked = "allocations.assigned_devices"

    def kubelet() -> ports.DeviceAllocations | None:
        is_stopped = bool(played.happened) if hooks else asked in played.log
        played.kubelet.is_silent = is_stopped
        return fake_cluster.FakeAllocations(played) if has_socket or not is_stopped else None

    deps = dataclasses.replace(played.deps, pods=pod_use.PodUse(kubelet=kubelet))
    refusal = contextlib.nullcontext() if is_changed else pytest.raises(errors.GpuInUseError)

    with refusal:
        apply.apply(deps, lambda: played.layouts.layout("wanted"))

    assert asked in played.log
    assert played.kubelet.is_silent
    assert played.has("wanted") == is_changed
