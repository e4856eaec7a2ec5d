"""What ``apply`` does about a change that was interrupted; over GPUs in memory."""

import dataclasses
import re

import pytest

from mig_manager import errors, reasons
from mig_manager.change import apply as applying
from mig_manager.change import layout_store, local_journal, pod_use
from mig_manager.core import model, steps
from tests.change.forks import refuse
from tests.rigs.node import fake_cluster, gpu_values, samples, strikes
from tests.rigs.node.local_rig import LocalNode, first_only, is_creation

OFF = model.MigMode.DISABLED


def test_a_layout_of_some_gpus_undoes_an_interrupted_change_of_others(
    node: LocalNode,
) -> None:
    before = node.geometry
    assert node.kill_apply("off", steps.SetMode, 2)
    node.gpus = (
        node.gpus[0],
        gpu_values.with_desired(node.gpus[1:], model.DesiredGpu(mode=OFF))[0],
    )

    node.change_to("first-only")

    assert node.has("first-only")
    assert node.geometry[1] == before[1]
    assert node.journal.text is None


@pytest.mark.parametrize("is_rebooted", [False, True])
def test_a_layout_of_other_gpus_spares_pods_of_an_interrupted_change(
    node: LocalNode, *, is_rebooted: bool
) -> None:
    node.change_to("before")
    before = node.geometry
    assert node.kill_apply("requested", steps.CreateComputeInstance, 4)
    killed = node.geometry[1]
    node.pods.add("train", devices=frozenset(node.gpus[1].mig_uuids))

    for is_changed in (True, False):
        assert node.change_to("first-only").is_changed is is_changed
        assert (node.has("first-only"), node.geometry[1]) == (True, killed)
        assert re.search(r"unfinished; GPU 1 .* while it is in use", node.notes[0])
        node.notes.clear()

    node.pods.clear()
    if is_rebooted:
        node.restart_machine()
        node.boot()
    else:
        node.change_to("first-only")
    assert (node.has("first-only"), node.geometry[1]) == (True, before[1])
    assert node.journal.text is None


@pytest.mark.parametrize(("requested", "error"), [("mixed", "in use"), ("other", "default/train")])
def test_a_failed_change_spares_pods_of_an_interrupted_one(
    node: LocalNode, requested: str, error: str
) -> None:
    before = node.geometry
    assert node.kill_apply("requested", steps.CreateComputeInstance, 4)
    done = node.geometry[0]
    node.pods.add("train", devices=frozenset(node.gpus[0].mig_uuids))
    node.refuses_step = first_only(is_creation)

    with pytest.raises(errors.HardwareError, match=error):
        node.change_to(requested)

    assert node.geometry == [done, before[1]]
    assert re.search(r"but not GPU 0 .*, which pods or processes use$", node.notes[0])
    node.pods.clear()
    refuse(node)
    assert node.geometry == before


def test_a_gpu_in_use_outside_the_layout_is_restored_later(node: LocalNode) -> None:
    before = node.geometry
    assert node.kill_apply("requested", steps.CreateComputeInstance, 4)
    killed = node.geometry
    node.pods.add("train", devices=frozenset(node.gpus[1].mig_uuids))

    node.change_to("first-only")

    assert "outside this layout, is not restored while it is in use" in node.notes[0]
    assert (node.has("first-only"), node.geometry[1]) == (True, killed[1])
    assert node.local_journal.config == "requested"

    node.pods.clear()
    node.change_to("first-only")

    assert (node.geometry[1], node.journal.text) == (before[1], None)


def test_a_silent_kubelet_blocks_a_layout_beside_an_interrupted_change(node: LocalNode) -> None:
    before = node.geometry
    assert node.kill_apply("requested", steps.CreateComputeInstance, 4)
    node.gpus = gpu_values.without_instances(node.gpus, 0)
    killed = node.geometry
    node.fail_always["allocations.assigned_devices"] = errors.KubeletError("no answer")

    with pytest.raises(errors.GpuInUseError, match="no answer"):
        node.change_to("first-only")

    assert node.geometry == killed
    assert not any("in use" in note for note in node.notes)

    pods = pod_use.PodUse(kubelet=lambda: fake_cluster.FakeAllocations(node), is_ignored=True)
    deps = dataclasses.replace(node.deps, pods=pods)
    applying.apply(deps, lambda: node.layouts.layout("first-only"))
    assert (node.has("first-only"), node.geometry[1]) == (True, before[1])


def test_after_a_kill_the_message_says_what_a_rollback_restores(node: LocalNode) -> None:
    before = node.geometry
    assert node.kill_apply("requested", steps.CreateGpuInstance)
    node.refuses_step = lambda step: is_creation(step) and node.steps == 3
    node.steps = 0

    with pytest.raises(errors.HardwareError):
        node.change_to("other")

    (note,) = node.notes
    assert note == (
        "the change to layout 'requested' was left unfinished; if this one fails, the GPUs "
        "are rolled back to their state before that one"
    )
    assert (node.geometry, node.journal.text, node.host.refreshes) == (before, None, 1)


def test_a_rollback_that_fails_is_reported_kept_and_tried_again(node: LocalNode) -> None:
    before = node.geometry

    with node.refusing_steps(is_creation):
        with pytest.raises(errors.HardwareError) as caught:
            node.change_to("requested")

        assert "; still to do: GPU 0: create" in caught.value.message
        assert caught.value.message.endswith("the next 'apply' tries again")
        assert node.journal.text is not None

        with pytest.raises(
            errors.LayoutError,
            match=r"was left unfinished; .*: in use; still to do: GPU 0: ",
        ):
            node.change_to("too-much")
        assert node.journal.text is not None

    refuse(node)
    assert node.geometry == before
    assert node.journal.text is None


def test_a_failed_apply_restores_gpus_that_an_older_journal_does_not_name(
    node: LocalNode,
) -> None:
    """A 'boot' that was killed left a journal of the first GPU alone."""
    second = node.gpus[1].uuid
    node.change_to("mixed")
    before = node.geometry
    node.gpus = gpu_values.without_instances(node.gpus, 0)
    empty = node.geometry[0]
    with node.kill_process(steps.CreateComputeInstance):
        node.boot()
    journal = node.local_journal
    assert [gpu.uuid for gpu in journal.gpus.snapshot] == [node.gpus[0].uuid]
    node.refuses_step = first_only(lambda step: is_creation(step) and step.gpu_uuid == second)

    with pytest.raises(errors.HardwareError, match="the former instances are restored"):
        node.change_to("requested")

    assert node.geometry == [empty, before[1]]
    assert node.journal.text is None


@pytest.mark.parametrize(("since", "is_undone"), [("other", False), ("off", True)])
def test_after_a_reboot_only_the_gpus_that_it_emptied_are_restored(
    node: LocalNode, since: str, *, is_undone: bool
) -> None:
    before = node.geometry
    assert node.kill_apply("requested", steps.CreateGpuInstance)
    node.host.boot_id = "boot-2"
    node.set_up(since)
    rebooted = node.geometry

    with pytest.raises(errors.LayoutError) as caught:
        node.change_to("too-much")

    assert node.geometry == (before if is_undone else rebooted)
    assert ("is undone now" in caught.value.message) is is_undone
    assert is_undone or "was left unfinished when the node was rebooted" in node.notes[0]
    assert node.journal.text is None


def test_after_a_reboot_instances_on_another_gpu_do_not_prevent_the_undo(
    node: LocalNode,
) -> None:
    before = node.geometry
    assert node.kill_apply("first-only", steps.DestroyGpuInstance)
    node.restart_machine()
    whole = samples.desired_gpu({"7g.40gb": 1})
    node.gpus = (node.gpus[0], *gpu_values.with_desired(node.gpus[1:], whole))
    other = node.geometry[1]

    refuse(node)

    assert node.geometry == [before[0], other]


def test_a_verified_layout_of_other_gpus_does_not_end_a_killed_change(node: LocalNode) -> None:
    before = node.geometry
    assert node.kill_apply("requested", steps.CreateGpuInstance, 3)
    assert node.geometry[1] != before[1]
    killed = node.local_journal
    # Another program has its own journal.
    node.journal.text = None
    node.change_to("first-only")
    snapshot = tuple(gpu for gpu in killed.gpus.snapshot if gpu.uuid == node.gpus[1].uuid)
    changed = dataclasses.replace(killed, gpus=killed.gpus.with_snapshot(snapshot))
    node.journal.text = changed.to_json()

    refuse(node)

    assert node.geometry[1] == before[1]
    assert node.has("first-only")


def test_a_journal_older_than_an_agents_verified_layout_undoes_nothing(node: LocalNode) -> None:
    assert node.kill_apply("requested", steps.CreateGpuInstance)
    node.set_up("other")
    saved = layout_store.VerifiedLayoutStore(node.verified_layout_file, "boot-1")
    gpus = node.deps.gpus.observe()
    saved.save(gpus, config="other", config_hash="h", covered={gpu.uuid for gpu in gpus})
    verified = node.geometry

    observed = node.deps.gpus.observe()
    assert local_journal.as_if_undone(node.deps, observed, node.gpus[0]) == node.gpus[0]
    with pytest.raises(errors.LayoutError):
        node.change_to("too-much")

    assert node.geometry == verified
    assert "layout 'other' was verified since" in node.notes[0]
    assert node.journal.text is None


def test_an_unknown_layout_needs_neither_lock_nor_gpus_and_undoes_nothing(
    node: LocalNode,
) -> None:
    assert node.kill_apply("requested", steps.CreateGpuInstance)
    geometry, journal = node.geometry, node.journal.text
    node.steps, node.lock.refusals = 0, 10_000
    unknown = errors.LayoutError("no layout 'x'", reason=reasons.Reason.UNKNOWN_CONFIG)

    with pytest.raises(errors.LayoutError, match=r"^no layout 'x'$"):
        node.apply(unknown)

    assert node.clock.now_s == 0
    assert (node.steps, node.geometry, node.journal.text) == (0, geometry, journal)


@pytest.mark.parametrize(
    ("layout", "kind", "number", "is_undone", "message"),
    [
        ("off", steps.SetMode, 2, False, "is not undone, because that resets a GPU"),
        ("requested", steps.CreateGpuInstance, 1, True, "is undone now"),
    ],
)
def test_a_rollback_that_needs_a_forbidden_reset_does_not_run(
    node: LocalNode,
    layout: str,
    kind: strikes.StepKind,
    number: int,
    message: str,
    *,
    is_undone: bool,
) -> None:
    before = node.geometry
    assert node.kill_apply(layout, kind, number)
    now = node.geometry
    assert now != before

    with pytest.raises(errors.LayoutError, match=message):
        node.change_to("too-much", may_reset=False)

    assert node.geometry == (before if is_undone else now)
    assert (node.journal.text is None) is is_undone
