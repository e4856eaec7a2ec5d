"""``apply`` and ``restore`` with hooks: which run when, and what a failing one costs."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors, reasons
from mig_manager.change import apply, hook_points, pod_use
from mig_manager.core import model, ports, steps
from mig_manager.core.files import checkpoint
from tests.rigs.node import fake_cluster, fake_host, local_rig, nodes, samples, strikes
from tests.rigs.node.local_rig import is_creation

STEPS = {
    steps.SetMode: "MODE",
    steps.DestroyGpuInstance: "DESTROY",
    steps.CreateGpuInstance: "CREATE",
}
POINTS = ("start", "mode", "config", "exit")
ASSIGNED_DEVICES = "allocations.assigned_devices"


class RecordingNode(local_rig.LocalNode):
    """A node with a layout, and all that happened on it since, in order."""

    def __init__(self, layout: str, hooks: str = nodes.HOOKS) -> None:
        super().__init__(layout)
        self.hooks.text = hooks
        self.on_step = self.note
        self.before = self.geometry

    @property
    def history(self) -> list[str]:
        """Hooks, and between two of them each kind of steps once."""
        return list(self.hooks.commands)

    def note(self, step: steps.Step) -> None:
        kind = STEPS.get(type(step))
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
    node = RecordingNode(start)

    node.change_to(layout)

    assert node.history == history
    assert node.has(layout)
    assert node.journal.text is None


def test_each_round_is_counted_against_the_gpus_before_it() -> None:
    applied = RecordingNode("before").change_to("one-off")

    assert [planned.kept for planned in applied.rounds] == [2, 1]


def test_point_without_hooks_or_instances_is_left_out() -> None:
    mode_only = RecordingNode("off")
    hookless = RecordingNode("off", "hooks: {pre-apply-mode: [{command: mode}]}")

    mode_only.change_to("requested", is_mode_only=True)
    applied = hookless.change_to("requested")

    assert mode_only.history == ["start", "mode", "MODE", "exit"]
    assert len(applied.rounds) == 1
    assert hookless.history[:2] == ["mode", "MODE"]


def test_hooks_of_a_point_run_once() -> None:
    node = RecordingNode("before")
    points = hook_points.HookPoints(fake_host.FakeHooks(node))
    for _ in range(2):
        points.start(lambda: None)
        points.exit()
    assert node.history == ["start", "exit"]


def test_first_failing_hook_of_a_point_is_the_last() -> None:
    node = RecordingNode(
        "before", "hooks: {pre-apply-config: [{command: a}, {command: b}, {command: c}]}"
    )
    node.hooks.broken = {"b"}

    with pytest.raises(errors.HostError):
        node.change_to("requested")

    assert node.history == ["a", "b"]


def test_variables_of_the_change_precede_those_of_the_hooks_file() -> None:
    node = RecordingNode(
        "before",
        "hooks: {apply-start: [{command: a, envs: {X: y, MIG_PARTED_SELECTED_CONFIG: other}}]}",
    )

    node.change_to("before")

    assert node.hooks.environment == {
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
    node = RecordingNode("off")
    node.hooks.broken = {point}

    with pytest.raises(errors.HostError, match=f"^{point} failed") as caught:
        node.change_to("requested")

    assert caught.value.reason is reasons.Reason.HOOK_FAILED
    assert node.history == AFTER_A_FAILURE[point]
    assert node.journal.text is None
    is_done = node.has("requested")
    assert is_done is (point == "exit")
    if is_done:
        assert caught.value.message.endswith("the layout is active all the same")
        assert node.verified_layout_file.text is not None
    else:
        assert node.geometry == node.before


def test_failing_change_is_undone_before_the_last_point() -> None:
    node = RecordingNode("before")
    node.refuses_step = lambda step: is_creation(step) and step.placement.size == 1  # type: ignore[union-attr]
    node.hooks.broken = {"exit"}

    with pytest.raises(errors.HardwareError) as caught:
        node.change_to("requested")

    assert caught.value.reason is reasons.Reason.IN_USE
    assert caught.value.message.endswith("the former instances are restored; exit failed")
    assert node.history[-2:] == ["CREATE", "exit"]
    assert node.geometry == node.before


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
    node = RecordingNode("before", hooks)

    with pytest.raises(error, match=message):
        node.change_to(layout)

    assert (node.history, node.geometry) == ([], node.before)


@pytest.mark.parametrize(
    ("layout", "missing"), [("before", "config"), ("requested", "mode")], ids=["config", "mode"]
)
def test_missing_program_of_a_point_that_the_change_skips_is_ignored(
    layout: str, missing: str
) -> None:
    node = RecordingNode("before")
    node.hooks.missing = {missing}

    node.change_to(layout)

    assert node.has(layout)
    assert missing not in node.history


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
    node = RecordingNode(start)
    node.hooks.missing = {missing}

    with pytest.raises(
        errors.HostError, match=f"program {missing} is not found; nothing was touched"
    ):
        node.change_to(layout)
    assert node.history == []
    assert node.geometry == node.before


def test_gpus_that_a_hook_has_changed_are_checked_again() -> None:
    node = RecordingNode("before")

    def tamper() -> None:
        if "start" in node.history:
            node.gpus = local_rig.LocalNode("requested").gpus

    node.on_call = tamper
    node.hooks.text = (
        "hooks: {apply-start: [{command: start}, {command: more}], apply-exit: [{command: exit}]}"
    )

    assert not node.change_to("requested").is_changed
    assert node.history == ["start", "more", "exit"]


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
    node = RecordingNode("off", hooks)
    node.interrupt_after(last_before)

    with pytest.raises(errors.Superseded):
        node.change_to("requested")

    assert node.history == history
    assert node.geometry == node.before
    assert node.journal.text is None


def test_an_unfinished_change_is_undone_where_a_first_hook_fails() -> None:
    node = RecordingNode("before", "")
    assert node.kill_apply("requested", steps.CreateGpuInstance)
    node.hooks.text = nodes.HOOKS
    node.hooks.broken = {"start"}

    with pytest.raises(errors.HostError, match="was left unfinished and is undone now"):
        node.change_to("requested")

    assert node.geometry == node.before
    assert node.history[1:] == ["start", "CREATE", "exit"]


def test_a_restore_passes_the_same_points_and_is_undone_like_any_change() -> None:
    then = local_rig.LocalNode("requested")
    text = checkpoint.render(then.gpus)
    node, failing = RecordingNode("off"), RecordingNode("off")
    failing.hooks.broken = {"config"}

    node.restore(text)
    with pytest.raises(errors.HostError, match="the former instances are restored"):
        failing.restore(text)

    assert node.history == ["start", "mode", "MODE", "config", "CREATE", "exit"]
    assert (node.geometry, failing.geometry) == (then.geometry, failing.before)
    assert set(node.hooks.environment) == {"MIG_PARTED_HOOKS_FILE"}


def test_profiles_reported_only_with_mig_on_keep_the_order() -> None:
    node = RecordingNode("off")
    node.driver.hides_profiles = True

    node.change_to("requested")

    assert node.has("requested")
    assert node.history == ["start", "mode", "MODE", "config", "CREATE", "exit"]


@pytest.mark.parametrize(
    ("is_kept", "message"),
    [
        (False, "already; the former instances are restored"),
        (True, r"3g\.20gb at 4:4 on GPU 0 is new, and is kept"),
    ],
    ids=["removed again", "kept"],
)
def test_a_stale_plan_in_a_later_round_rolls_the_first_round_back(
    message: str, *, is_kept: bool
) -> None:
    node = RecordingNode("off")
    foreign = samples.gpu(samples.A100, "3g.20gb@4").gpu_instances

    def change_first(instances: tuple[model.GpuInstance, ...]) -> None:
        first, *others = node.gpus
        node.gpus = (dataclasses.replace(first, gpu_instances=instances), *others)

    def create() -> None:
        change_first(foreign)
        if not is_kept:
            strikes.act_once(
                node, lambda: node.log[-1] == "gpus.observe", lambda: change_first(())
            )

    strikes.act_once(
        node, lambda: node.log[-1] == "gpus.execute" and "MODE" in node.history, create
    )

    with pytest.raises(errors.HardwareError, match=message):
        node.change_to("requested")

    assert node.gpus[0].gpu_instances == (foreign if is_kept else ())
    assert (node.geometry == node.before, node.journal.text is None) == (not is_kept,) * 2


def test_a_failing_hook_keeps_instances_in_use_of_an_interrupted_change() -> None:
    node = RecordingNode("before", "hooks: {pre-apply-config: [{command: config}]}")
    assert node.kill_apply("requested", steps.CreateComputeInstance)
    interrupted = node.geometry
    node.driver.clients = "train (pid 7)"
    node.hooks.broken = {"config"}

    with pytest.raises(errors.HostError, match="config failed"):
        node.change_to("small")

    assert node.geometry == interrupted
    assert node.journal.text is not None


@pytest.mark.parametrize(("idle_timeout_s", "history"), [(0.0, []), (9.0, ["start"])])
def test_devices_of_pods_are_kept_before_hooks_unless_the_command_waits(
    idle_timeout_s: float, history: list[str]
) -> None:
    node = RecordingNode("before")
    node.pods.add("train", devices=frozenset(node.gpus[0].mig_uuids))
    deps = dataclasses.replace(node.deps, idle_timeout_s=idle_timeout_s)

    with pytest.raises(errors.GpuInUseError, match=r"default/train.*; nothing was changed"):
        apply.apply(deps, lambda: node.layouts.layout("requested"))

    assert node.history[:1] == history
    assert node.geometry == node.before


def test_a_refusal_that_undoes_a_killed_change_claims_no_unchanged_gpus() -> None:
    node = RecordingNode("before", "")
    assert node.kill_apply("requested", steps.CreateGpuInstance)
    node.hooks.text = nodes.HOOKS
    kept = frozenset(uuid for gpu in node.gpus for uuid in gpu.mig_uuids)
    node.pods.add("train", devices=kept)

    with pytest.raises(errors.GpuInUseError, match="left unfinished") as caught:
        node.change_to("other")

    assert "nothing was changed" not in caught.value.message


def apply_while_kubelet_stops(
    node: RecordingNode, is_stopped: Callable[[], bool], *, has_socket: bool
) -> None:
    def kubelet() -> ports.DeviceAllocations | None:
        node.kubelet.is_silent = is_stopped()
        has_answer = has_socket or not node.kubelet.is_silent
        return fake_cluster.FakeAllocations(node) if has_answer else None

    deps = dataclasses.replace(node.deps, pods=pod_use.PodUse(kubelet=kubelet))
    apply.apply(deps, lambda: node.layouts.layout("requested"))


WITHOUT_ANSWER = pytest.mark.parametrize(
    "has_socket", [True, False], ids=["silent", "without a socket"]
)


@WITHOUT_ANSWER
def test_kubelet_that_a_hook_stops_does_not_end_the_change(*, has_socket: bool) -> None:
    node = RecordingNode("before")

    apply_while_kubelet_stops(node, lambda: bool(node.history), has_socket=has_socket)

    assert ASSIGNED_DEVICES in node.log
    assert node.kubelet.is_silent
    assert node.has("requested")


@WITHOUT_ANSWER
def test_a_kubelet_that_stops_without_a_hook_ends_the_change(*, has_socket: bool) -> None:
    node = RecordingNode("before", hooks="")

    with pytest.raises(errors.GpuInUseError):
        apply_while_kubelet_stops(
            node, lambda: ASSIGNED_DEVICES in node.log, has_socket=has_socket
        )

    assert node.kubelet.is_silent
    assert node.geometry == node.before
