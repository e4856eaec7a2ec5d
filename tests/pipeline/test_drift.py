"""GPUs at rest that somebody else changes; and others who manage them."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator

import pytest

from mig_manager import errors
from mig_manager.agent import drift, outcomes, reconcile
from mig_manager.core import model
from mig_manager.core.node import cluster
from mig_manager.core.planner import planner
from tests import fakes, scenes

LAYOUT = "all-balanced"


def steadfast(world: fakes.World) -> fakes.FakeWish:
    return fakes.FakeWish(world.clock, replaced=False)


def settled(*, heals: bool = False) -> tuple[fakes.World, reconcile.Reconciler, outcomes.Outcome]:
    """Return a node whose layout has just been found in force."""
    world = scenes.node(layout=LAYOUT)
    ours = scenes.reconciler(world, heals_drift=heals)
    outcome = ours.run(LAYOUT, steadfast(world))
    world.states.clear()
    world.events.clear()
    return world, ours, outcome


def tamper(world: fakes.World) -> tuple[model.Gpu, ...]:
    """Destroy the first instance of the first GPU; return what there was."""
    before = world.gpus
    first, *others = before
    world.gpus = (dataclasses.replace(first, gpu_instances=first.gpu_instances[1:]), *others)
    return before


def test_a_drift_is_published_once_and_taken_back_once_it_is_over() -> None:
    world, ours, ended = settled()
    assert ours.check_drift(LAYOUT, ended) is drift.Action.REST
    assert world.states == []
    before = tamper(world)

    for _ in range(3):
        assert ours.check_drift(LAYOUT, ended) is drift.Action.REST

    assert world.labels[cluster.STATE_LABEL] == "failed"
    assert cluster.APPLIED_LABEL not in world.labels
    assert world.events == ["Drifted"]
    assert "gpus.execute" not in world.log

    world.gpus = before
    ours.check_drift(LAYOUT, ended)
    assert world.labels[cluster.STATE_LABEL] == "success"
    assert world.labels[cluster.APPLIED_LABEL] == LAYOUT


def test_on_request_a_drift_is_healed() -> None:
    world, ours, ended = settled(heals=True)
    before = tamper(world)

    assert ours.check_drift(LAYOUT, ended) is drift.Action.HEAL
    outcome = ours.run(LAYOUT, steadfast(world), may_evict=False)

    assert outcome.state is model.State.SUCCESS
    assert planner.restore(world.gpus, [gpu.snapshot for gpu in before]).is_empty
    scenes.assert_nothing_taken(world)


def stranger_on_foreign_instances(world: fakes.World) -> None:
    """Somebody makes instances that the layout does not have, and a pod holds one."""
    balanced = {p.profile: p.profile for p in world.gpus[0].profiles or ()}
    sevenths = next(profile for profile in balanced if str(profile) == "1g.5gb")
    wanted = model.DesiredGpu.of(model.MigMode.ENABLED, {sevenths: 7})
    (changed,) = fakes.brought_to((world.gpus[0],), wanted)
    world.gpus = (changed, *world.gpus[1:])
    held = {uuid for gpu in world.gpus[:1] for uuid in gpu.mig_uuids}
    world.add_pod("stranger", devices=frozenset(held))


def test_healing_evicts_nobody_and_happens_once_the_way_is_free() -> None:
    world, ours, ended = settled(heals=True)
    stranger_on_foreign_instances(world)

    assert ours.check_drift(LAYOUT, ended) is drift.Action.REST
    assert "default/stranger" in world.told[-1]
    assert ours.check_drift(LAYOUT, ended) is drift.Action.REST
    assert world.events == ["Drifted"]

    uid = next(uid for uid, pod in world.pods.items() if pod.name == "stranger")
    del world.pods[uid], world.held[uid]
    assert ours.check_drift(LAYOUT, ended) is drift.Action.HEAL


def test_a_pod_that_comes_while_a_drift_is_healed_is_spared() -> None:
    world, ours, _ = settled(heals=True)
    stranger_on_foreign_instances(world)
    gpus = world.gpus

    outcome = ours.run(LAYOUT, steadfast(world), may_evict=False)

    assert outcome.reason is errors.Reason.DRIFTED
    assert "default/stranger" in outcome.message
    assert world.gpus == gpus
    assert "workloads.evict" not in world.log
    scenes.assert_nothing_taken(world)


def test_an_agent_that_starts_evicts_nobody_for_a_wish_that_had_been_fulfilled() -> None:
    world, _, _ = settled()
    stranger_on_foreign_instances(world)
    restarted = scenes.reconciler(world)

    restarted.recover(LAYOUT)
    outcome = restarted.run(LAYOUT, steadfast(world))

    assert outcome.reason is errors.Reason.DRIFTED
    assert "workloads.evict" not in world.log
    # A new wish is another matter, and so is the same one once it is wished anew.
    restarted.recover(None)
    restarted.rest()
    assert restarted.run(LAYOUT, steadfast(world)).state is model.State.SUCCESS


@pytest.mark.parametrize(
    "failure",
    [
        ("gpus.observe", errors.HardwareError("gone", reason=errors.Reason.DRIVER_NOT_LOADED)),
        ("node.patch", errors.ClusterError("503", reason=errors.Reason.API_UNAVAILABLE)),
    ],
    ids=["driver", "API"],
)
def test_a_passing_failure_at_the_start_does_not_make_the_retry_evict_for_an_old_request(
    failure: tuple[str, Exception],
) -> None:
    world, _, _ = settled()
    stranger_on_foreign_instances(world)
    restarted = scenes.reconciler(world)
    restarted.recover(LAYOUT)
    driver = errors.HardwareError("gone", reason=errors.Reason.DRIVER_NOT_LOADED)
    world.refusing["gpus.observe"] = driver
    assert restarted.run(LAYOUT, steadfast(world)).should_retry
    point, error = failure
    world.refusing = {point: error}
    with contextlib.suppress(errors.ClusterError):
        restarted.run(LAYOUT, steadfast(world), attempt=2)
    world.refusing = {}
    # As the agent's loop does after an API that did not answer.
    restarted.recover(LAYOUT)

    outcome = restarted.run(LAYOUT, steadfast(world), attempt=3)

    assert outcome.reason is errors.Reason.DRIFTED
    assert "workloads.evict" not in world.log


def test_an_agent_that_starts_brings_back_what_a_reboot_took() -> None:
    world, _, _ = settled()
    world.gpus = tuple(dataclasses.replace(gpu, gpu_instances=()) for gpu in world.gpus)
    restarted = scenes.reconciler(world)

    restarted.recover(LAYOUT)
    outcome = restarted.run(LAYOUT, steadfast(world))

    assert outcome.state is model.State.SUCCESS
    assert world.labels[cluster.APPLIED_LABEL] == LAYOUT


def test_gpus_that_cannot_be_seen_for_a_while_are_no_drift() -> None:
    world, ours, ended = settled()
    broken = errors.HardwareError("gone", reason=errors.Reason.DRIVER_NOT_LOADED)
    world.failing = {len(world.log): broken}

    assert ours.check_drift(LAYOUT, ended) is drift.Action.REST

    assert world.states == []
    assert world.labels[cluster.APPLIED_LABEL] == LAYOUT


def test_a_failure_for_good_is_worth_another_run_only_when_the_hardware_has_changed() -> None:
    world = scenes.node()
    ours = scenes.reconciler(world)
    ended = ours.run("too-much", steadfast(world))
    assert not ended.should_retry

    assert [ours.check_drift("too-much", ended) for _ in range(3)] == [drift.Action.REST] * 3
    tamper_with_modes(world)
    assert ours.check_drift("too-much", ended) is drift.Action.RUN


def tamper_with_modes(world: fakes.World) -> None:
    world.gpus = tuple(
        dataclasses.replace(
            gpu, current_mode=model.MigMode.ENABLED, pending_mode=model.MigMode.ENABLED
        )
        for gpu in world.gpus
    )


# -- other managers ------------------------------------------------------------------------------


class Busy:
    """Another manager is at work for so many more looks; implements ``ports.NodeLock``."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.told: list[str] = []

    @contextlib.contextmanager
    def hold(self, doing: str) -> Iterator[None]:
        if self.looks:
            self.looks -= 1
            raise errors.LockedError("apply (pid 7) is at work", owner="apply (pid 7)")
        self.told.append(doing)
        yield


def test_a_run_waits_for_another_manager_and_then_has_its_turn() -> None:
    world = scenes.node()
    other = Busy(looks=4)

    outcome = scenes.reconciler(world, lock=other).run("all-1g.5gb", steadfast(world))

    assert outcome.state is model.State.SUCCESS
    assert other.told == ["applying layout all-1g.5gb"]


def test_a_manager_that_does_not_finish_is_named_and_nothing_is_touched() -> None:
    world = scenes.node()

    ours = scenes.reconciler(world, lock=Busy(looks=10**9))
    outcome = ours.run("all-1g.5gb", steadfast(world))

    assert outcome.reason is errors.Reason.LOCKED
    assert outcome.should_retry
    assert "pid 7" in outcome.message
    assert [call for call in world.log if call.startswith("gpus.")] == []
    scenes.assert_nothing_taken(world)


def test_a_newer_wish_need_not_wait_for_another_manager() -> None:
    world = scenes.node()
    wish = fakes.FakeWish(world.clock, ends_at=2, replaced=True)

    with pytest.raises(errors.Superseded):
        scenes.reconciler(world, lock=Busy(looks=10**9)).run("all-1g.5gb", wish)

    assert world.clock.now_s < 1


def test_gpus_that_another_manager_works_on_are_looked_at_later() -> None:
    world = scenes.node(layout=LAYOUT)
    other = Busy(looks=0)
    ours = scenes.reconciler(world, lock=other)
    ended = ours.run(LAYOUT, steadfast(world))
    tamper(world)

    other.looks = 1
    assert ours.check_drift(LAYOUT, ended) is drift.Action.REST
    assert world.labels[cluster.STATE_LABEL] == "success"
    ours.check_drift(LAYOUT, ended)
    assert world.labels[cluster.STATE_LABEL] == "failed"


def test_beside_nvidias_own_manager_nothing_is_touched_and_it_is_named() -> None:
    world = scenes.node()
    world.add_pod(
        "nvidia-mig-manager-x",
        labels={"app": "nvidia-mig-manager"},
        container_names=("nvidia-mig-manager",),
        owner_kind="DaemonSet",
    )

    outcome = scenes.run(world, "all-1g.5gb")

    assert outcome.reason is errors.Reason.FOREIGN_MANAGER
    assert "nvidia-mig-manager-x" in outcome.message
    assert outcome.should_retry
    assert world.executed == []
    assert "retryAt" in json.loads(world.annotations[cluster.STATUS_ANNOTATION])
    scenes.assert_nothing_taken(world)
