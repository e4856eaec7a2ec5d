"""``apply`` and ``restore`` with hooks: which run when, and what a failing one costs."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors, reasons
from mig_manager.change import applying, hook_points, pod_use
from mig_manager.core import model, ports, steps
from mig_manager.core.files import checkpoint
from tests.rigs.node import (
    call_errors,
    fake_cluster,
    fake_host,
    local_rig,
    moments,
    nodes,
    samples,
)

STEPS = {
    steps.SetMode: "MODE",
    steps.DestroyGpuInstance: "DESTROY",
    steps.CreateGpuInstance: "CREATE",
}
POINTS = ("start", "mode", "config", "exit")
ASSIGNED_DEVICES = "allocations.assigned_devices"


class RecordingRig(local_rig.LocalRig):
    """A node with a layout, and all that happened on it since, in order."""

    def __init__(self, layout: str, hooks: str = nodes.HOOKS) -> None:
        super().__init__(layout)
        self.hooks.text = hooks
        self.callbacks.add(steps.Step, self.record_step)
        self.before = self.geometry

    @property
    def history(self) -> list[str]:
        """Hooks, and between two of them each kind of steps once."""
        return list(self.hooks.commands)

    def record_step(self) -> None:
        kind = STEPS.get(type(self.driver.next_step))
        events = self.hooks.commands
        since = next((at for at in reversed(range(len(events))) if events[at].islower()), -1)
        if kind and kind not in events[since + 1 :]:
            events.append(kind)

    def interrupt_after(self, last: str) -> None:
        """Have a signal that comes when this is the last thing that happened."""

        @contextlib.contextmanager
        def guard() -> Iterator[Callable[[], None]]:
            def check() -> None:
                if self.history[-1:] == [last]:
                    raise errors.Superseded("a signal", errors.SupersededBy.STOP)

            yield check

        self.guard = guard


@pytest.mark.parametrize(
    ("start", "layout", "history"),
    [
        ("before", "before", ["start", "exit"]),
        ("before", "requested", ["start", "config", "DESTROY", "CREATE", "exit"]),
        ("off", "requested", ["start", "mode", "MODE", "config", "CREATE", "exit"]),
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
    start: str, layout: str, history: list[str]
) -> None:
    rig = RecordingRig(start)

    rig.change_to(layout)

    assert rig.history == history
    assert rig.has(layout)
    assert rig.journal.text is None


def test_each_round_is_counted_against_the_gpus_before_it() -> None:
    applied = RecordingRig("before").change_to("one-off")

    assert [planned.kept for planned in applied.executed] == [2, 1]


def test_point_without_hooks_or_instances_is_left_out() -> None:
    mode_only = RecordingRig("off")
    hookless = RecordingRig("off", "hooks: {pre-apply-mode: [{command: mode}]}")

    mode_only.change_to("requested", is_mode_only=True)
    applied = hookless.change_to("requested")

    assert mode_only.history == ["start", "mode", "MODE", "exit"]
    assert len(applied.executed) == 1
    assert hookless.history[:2] == ["mode", "MODE"]


def test_hooks_of_a_point_run_once() -> None:
    rig = RecordingRig("before")
    points = hook_points.HookPoints(fake_host.FakeHooks(rig))
    for _ in range(2):
        points.start(lambda: None)
        points.exit()
    assert rig.history == ["start", "exit"]


def test_first_failing_hook_of_a_point_is_the_last() -> None:
    rig = RecordingRig(
        "before", "hooks: {pre-apply-config: [{command: a}, {command: b}, {command: c}]}"
    )
    rig.hooks.broken = {"b"}

    with pytest.raises(errors.HostError):
        rig.change_to("requested")

    assert rig.history == ["a", "b"]


def test_variables_of_the_change_precede_those_of_the_hooks_file() -> None:
    rig = RecordingRig(
        "before",
        "hooks: {apply-start: [{command: a, envs: {X: y, MIG_PARTED_SELECTED_CONFIG: other}}]}",
    )

    rig.change_to("before")

    assert rig.hooks.environment == {
        "X": "y",
        "MIG_PARTED_HOOKS_FILE": "hooks.yaml",
        "MIG_PARTED_SELECTED_CONFIG": "before",
    }


AFTER_A_FAILURE = {
    "start": ["start", "exit"],
    "mode": ["start", "mode", "exit"],
    "config": ["start", "mode", "MODE", "config", "MODE", "exit"],
    "exit": ["start", "mode", "MODE", "config", "CREATE", "exit"],
}


@pytest.mark.parametrize("point", POINTS)
def test_failing_hook_undoes_the_change_except_at_the_last_point(point: str) -> None:
    rig = RecordingRig("off")
    rig.hooks.broken = {point}

    with pytest.raises(errors.HostError, match=f"^{point} failed") as caught:
        rig.change_to("requested")

    assert caught.value.reason is reasons.Reason.HOOK_FAILED
    assert rig.history == AFTER_A_FAILURE[point]
    assert rig.journal.text is None
    is_done = rig.has("requested")
    assert is_done is (point == "exit")
    if is_done:
        assert caught.value.message.endswith("the layout is active all the same")
        assert rig.verified_layout_file.text is not None
    else:
        assert rig.geometry == rig.before


def test_failing_change_is_undone_before_the_last_point() -> None:
    rig = RecordingRig("before")
    rig.failures.add(
        steps.CreateGpuInstance,
        call_errors.IN_USE,
        when=lambda: rig.driver.next_step.placement.size == 1,
    )
    rig.hooks.broken = {"exit"}

    with pytest.raises(errors.HardwareError) as caught:
        rig.change_to("requested")

    assert caught.value.reason is reasons.Reason.IN_USE
    assert caught.value.message.endswith("the former instances are restored; exit failed")
    assert rig.history[-2:] == ["CREATE", "exit"]
    assert rig.geometry == rig.before


@pytest.mark.parametrize(
    ("layout", "hooks", "error", "message"),
    [
        ("too-much", nodes.HOOKS, errors.LayoutError, "fit"),
        (
            "requested",
            "hooks: {pre-apply: []}",
            errors.ConfigError,
            r"hooks\.yaml:1:9: unexpected key 'pre-apply'",
        ),
    ],
    ids=["a layout that cannot be had", "a hooks file that is no good"],
)
def test_an_impossible_layout_runs_no_hook_and_changes_nothing(
    layout: str, hooks: str, error: type[Exception], message: str
) -> None:
    rig = RecordingRig("before", hooks)

    with pytest.raises(error, match=message):
        rig.change_to(layout)

    assert (rig.history, rig.geometry) == ([], rig.before)


@pytest.mark.parametrize(
    ("layout", "missing"), [("before", "config"), ("requested", "mode")], ids=["config", "mode"]
)
def test_missing_program_of_a_point_that_the_change_skips_is_ignored(
    layout: str, missing: str
) -> None:
    rig = RecordingRig("before")
    rig.hooks.missing = {missing}

    rig.change_to(layout)

    assert rig.has(layout)
    assert missing not in rig.history


@pytest.mark.parametrize(
    ("start", "layout", "missing"),
    [
        ("before", "requested", "config"),
        ("off", "requested", "mode"),
        ("before", "before", "exit"),
        ("before", "requested", "start"),
    ],
)
def test_missing_program_of_a_hook_is_reported_before_any_runs(
    start: str, layout: str, missing: str
) -> None:
    rig = RecordingRig(start)
    rig.hooks.missing = {missing}

    with pytest.raises(
        errors.HostError, match=f"program {missing} is not found; nothing was touched"
    ):
        rig.change_to(layout)
    assert rig.history == []
    assert rig.geometry == rig.before


def test_gpus_that_a_hook_has_changed_are_checked_again() -> None:
    rig = RecordingRig("before")

    def tamper() -> None:
        rig.gpus = local_rig.LocalRig("requested").gpus

    rig.callbacks.add(moments.Call, tamper, when=lambda: "start" in rig.history)
    rig.hooks.text = (
        "hooks: {apply-start: [{command: start}, {command: more}], apply-exit: [{command: exit}]}"
    )

    assert not rig.change_to("requested").is_changed
    assert rig.history == ["start", "more", "exit"]


@pytest.mark.parametrize(
    ("hooks", "last_before", "history"),
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
    hooks: str, last_before: str, history: list[str]
) -> None:
    rig = RecordingRig("off", hooks)
    rig.interrupt_after(last_before)

    with pytest.raises(errors.Superseded):
        rig.change_to("requested")

    assert rig.history == history
    assert rig.geometry == rig.before
    assert rig.journal.text is None


def test_an_unfinished_change_is_undone_where_a_first_hook_fails() -> None:
    rig = RecordingRig("before", "")
    assert rig.kill_apply("requested", steps.CreateGpuInstance)
    rig.hooks.text = nodes.HOOKS
    rig.hooks.broken = {"start"}

    with pytest.raises(errors.HostError, match="was left unfinished and is undone now"):
        rig.change_to("requested")

    assert rig.geometry == rig.before
    assert rig.history == ["DESTROY", "CREATE", "start", "CREATE", "exit"]


def test_a_restore_passes_the_same_points_and_is_undone_like_any_change() -> None:
    then = local_rig.LocalRig("requested")
    text = checkpoint.render(then.gpus)
    rig, failing = RecordingRig("off"), RecordingRig("off")
    failing.hooks.broken = {"config"}

    rig.restore(text)
    with pytest.raises(errors.HostError, match="the former instances are restored"):
        failing.restore(text)

    assert rig.history == ["start", "mode", "MODE", "config", "CREATE", "exit"]
    assert (rig.geometry, failing.geometry) == (then.geometry, failing.before)
    assert set(rig.hooks.environment) == {"MIG_PARTED_HOOKS_FILE"}


def test_profiles_reported_only_with_mig_on_keep_the_order() -> None:
    rig = RecordingRig("off")
    rig.driver.hides_profiles = True

    rig.change_to("requested")

    assert rig.has("requested")
    assert rig.history == ["start", "mode", "MODE", "config", "CREATE", "exit"]


@pytest.mark.parametrize(
    ("is_kept", "message"),
    [
        (False, "already; the former instances are restored"),
        (True, r"3g\.20gb at 4:4 on GPU 0 is new, and is kept"),
    ],
    ids=["removed again", "kept"],
)
def test_an_outdated_plan_in_a_later_round_rolls_the_first_round_back(
    message: str, *, is_kept: bool
) -> None:
    rig = RecordingRig("off")
    unowned = samples.gpu(samples.A100, "3g.20gb@4").gpu_instances

    def change_first(instances: tuple[model.GpuInstance, ...]) -> None:
        first, *others = rig.gpus
        rig.gpus = (dataclasses.replace(first, gpu_instances=instances), *others)

    def create() -> None:
        change_first(unowned)
        if not is_kept:
            rig.callbacks.add("gpus.observe", lambda: change_first(()), times=1)

    rig.callbacks.add("gpus.execute", create, when=lambda: "MODE" in rig.history, times=1)

    with pytest.raises(errors.HardwareError, match=message):
        rig.change_to("requested")

    assert rig.gpus[0].gpu_instances == (unowned if is_kept else ())
    assert (rig.geometry == rig.before, rig.journal.text is None) == (not is_kept,) * 2


def test_a_failing_hook_keeps_instances_in_use_of_an_interrupted_change() -> None:
    rig = RecordingRig("before", "hooks: {pre-apply-config: [{command: config}]}")
    assert rig.kill_apply("requested", steps.CreateComputeInstance)
    interrupted = rig.geometry
    rig.driver.clients = "train (pid 7)"
    rig.hooks.broken = {"config"}

    with pytest.raises(errors.HostError, match="config failed"):
        rig.change_to("small")

    assert rig.geometry == interrupted
    assert rig.journal.text is not None


@pytest.mark.parametrize(("idle_timeout_s", "history"), [(0.0, []), (9.0, ["start"])])
def test_devices_of_pods_are_kept_before_hooks_unless_the_command_waits(
    idle_timeout_s: float, history: list[str]
) -> None:
    rig = RecordingRig("before")
    rig.pods.add("train", devices=frozenset(rig.gpus[0].mig_uuids))
    deps = dataclasses.replace(rig.deps, idle_timeout_s=idle_timeout_s)

    with pytest.raises(errors.GpuInUseError, match=r"default/train.*; nothing was changed"):
        applying.apply(deps, lambda: rig.layouts.layout("requested"))

    assert rig.history[:1] == history
    assert rig.geometry == rig.before


def test_a_refusal_that_undoes_a_killed_change_claims_no_unchanged_gpus() -> None:
    rig = RecordingRig("before", "")
    assert rig.kill_apply("requested", steps.CreateGpuInstance)
    rig.hooks.text = nodes.HOOKS
    kept = frozenset(uuid for gpu in rig.gpus for uuid in gpu.mig_uuids)
    rig.pods.add("train", devices=kept)

    with pytest.raises(errors.GpuInUseError, match="left unfinished") as caught:
        rig.change_to("other")

    assert "nothing was changed" not in caught.value.message


def apply_while_kubelet_stops(
    rig: RecordingRig, is_stopped: Callable[[], bool], *, has_socket: bool
) -> None:
    def kubelet() -> ports.DeviceAllocations | None:
        rig.kubelet.is_silent = is_stopped()
        has_answer = has_socket or not rig.kubelet.is_silent
        return fake_cluster.FakeAllocations(rig) if has_answer else None

    deps = dataclasses.replace(rig.deps, pods=pod_use.PodUse(kubelet=kubelet))
    applying.apply(deps, lambda: rig.layouts.layout("requested"))


WITHOUT_ANSWER = pytest.mark.parametrize(
    "has_socket", [True, False], ids=["silent", "without a socket"]
)


@WITHOUT_ANSWER
def test_kubelet_that_a_hook_stops_does_not_end_the_change(*, has_socket: bool) -> None:
    rig = RecordingRig("before")

    apply_while_kubelet_stops(rig, lambda: bool(rig.history), has_socket=has_socket)

    assert ASSIGNED_DEVICES in rig.log
    assert rig.kubelet.is_silent
    assert rig.has("requested")


@WITHOUT_ANSWER
def test_a_kubelet_that_stops_without_a_hook_ends_the_change(*, has_socket: bool) -> None:
    rig = RecordingRig("before", hooks="")

    with pytest.raises(errors.GpuInUseError):
        apply_while_kubelet_stops(rig, lambda: ASSIGNED_DEVICES in rig.log, has_socket=has_socket)

    assert rig.kubelet.is_silent
    assert rig.geometry == rig.before
