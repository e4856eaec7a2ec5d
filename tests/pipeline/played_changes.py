"""A change of the node in memory, played by one agent after another until it ends.

What must hold in the end is written here as data; neither the planner nor the journal is asked.
"""

import copy
import dataclasses
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mig_manager import errors
from mig_manager.agent import drift, outcomes, settings
from mig_manager.core import model, steps
from mig_manager.core.layout import custom_layouts
from mig_manager.core.node import clients, well_known
from tests import changes
from tests.node import fakes, gpu_values, scenes
from tests.pipeline import custom_requests

_MAX_ATTEMPTS = 8
_PAUSE_S = 5.0
_CHECK_PAUSE_S = 60.0
"""Between drift checks; longer than kubelet restarts, and shorter than any pause of repairs."""
_REPAIR_PAUSE_S = 1000.0
"""Longer than the first pause after a failed repair."""
_LIMITS = {
    "has_custom_layouts": True,
    "generated_layouts": settings.GeneratedLayouts.OFF,
    "repair": settings.RepairPolicy.RESET,
}


class Change(NamedTuple):
    """A request to a node, and how both end if nothing strikes."""

    make: Callable[[], fakes.NodeRig]
    layout: str
    was: str | None
    """The layout that is applied before."""
    custom: custom_layouts.Custom | None = None
    """Where it is this, the GPUs end with ``LAYOUT``."""
    is_refused: bool = False
    """Whether the driver refuses an instance of the layout, so that all is rolled back."""
    evicted: frozenset[str] = frozenset()
    """The pods that it evicts."""
    is_repair: bool = False
    """Whether a GPU awaits a reset, which the agent finds once the layout is active."""

    @property
    def before(self) -> changes.Gpus:
        return changes.gpus_with(self.was or "all-disabled")

    @property
    def after(self) -> changes.Gpus:
        """The GPUs once the layout is active."""
        return changes.gpus_with(scenes.LAYOUT if self.custom else self.layout)

    @property
    def other(self) -> "End":
        """How a request of another layout ends."""
        layout = "all-balanced" if self.layout == "all-1g.5gb" else "all-1g.5gb"
        return End("success", layout, changes.gpus_with(layout))

    @property
    def end(self) -> "End":
        """How it ends."""
        if self.is_refused:
            return End("failed", self.was, self.before)
        return End("success", self.layout, self.after)


class End(NamedTuple):
    """How a node is at rest."""

    state: str
    applied: str | None
    gpus: changes.Gpus


NEXT = End("success", "all-disabled", changes.gpus_with("all-disabled"))
"""How the request after a change ends."""


def silent_node() -> fakes.NodeRig:
    """Return a node whose GPU 0 answers nothing before a reset."""
    rig = faulty_node()
    gpus = rig.gpus
    rig.gpus = gpu_values.with_action(gpus, model.RecoveryAction.NONE, 0)
    scenes.run(rig, "all-balanced", by=scenes.reconciler(rig, limits=_LIMITS))
    rig.gpus = gpus
    rig.driver.lost.add(gpus[0].uuid)
    return rig


def faulty_node() -> fakes.NodeRig:
    """The first GPU of a busy node awaits a reset."""
    rig = scenes.busy_node()
    rig.resets.are_available = True
    first, *others = rig.gpus
    rig.gpus = (
        dataclasses.replace(first, recovery_action=model.RecoveryAction.GPU_RESET),
        *others,
    )
    return rig


CHANGES: Mapping[str, Change] = {
    "first layout": Change(scenes.node, "all-1g.5gb", was=None),
    "one slice": Change(
        scenes.busy_node,
        "one-slice-changed",
        was="all-balanced",
        evicted=frozenset({"affected"}),
    ),
    "one slice, services and hooks": Change(
        lambda: scenes.hooked(scenes.hosted_node()),
        "one-slice-changed",
        was="all-balanced",
        evicted=frozenset({"affected"}),
    ),
    "mode change": Change(
        scenes.busy_node,
        "all-disabled-first",
        was="all-balanced",
        evicted=frozenset({"affected"}),
    ),
    "rollback": Change(
        scenes.busy_node,
        "one-slice-changed",
        was="all-balanced",
        is_refused=True,
        evicted=frozenset({"affected"}),
    ),
    "on demand": Change(
        custom_requests.idle_node,
        "custom",
        was="all-balanced",
        custom=custom_requests.ON_DEMAND,
    ),
    "repair": Change(
        faulty_node,
        "all-balanced",
        was="all-balanced",
        evicted=frozenset({"affected"}),
        is_repair=True,
    ),
    "repair of a silent GPU": Change(
        silent_node,
        "all-balanced",
        was="all-balanced",
        evicted=frozenset({"affected"}),
        is_repair=True,
    ),
}


@dataclasses.dataclass
class Play:
    """A node and what is requested of it, between two strikes or during one."""

    change: Change
    rig: fakes.NodeRig
    config: fakes.FakeConfig
    layout: str
    custom: custom_layouts.Custom | None
    moment: int = 0
    """How many moments the present agent has lived through."""
    path: tuple[str, ...] = ()
    """The strikes so far."""
    problems: list[str] = dataclasses.field(default_factory=list)
    is_dead: bool = False
    """Whether the agent's process was killed: nothing that it still does has an effect."""
    pods: dict[str, str] = dataclasses.field(default_factory=dict)
    """Names of the pods that have devices, by UID."""
    may_go: set[str] = dataclasses.field(default_factory=set)
    """Names of pods that end by themselves, or that a later request may evict."""

    @classmethod
    def of(cls, change: Change) -> "Play":
        """Return the change at its start."""
        rig = change.make()
        play = cls(change, rig, fakes.FakeConfig(scenes.CONFIG), change.layout, change.custom)
        assert changes.described(rig.gpus) == change.before
        play.pods = {uid: pod.name for uid, pod in rig.pods.items() if uid in rig.kubelet.assigned}
        return play

    def fork(self) -> "Play":
        """Return another play that is as far as this one."""
        rig = self.rig
        rig.on_call, rig.driver.step_error = _nothing, _accept
        for past in (rig.log, rig.driver.executed, rig.statuses, rig.events, rig.messages):
            past.clear()
        forked = copy.deepcopy(self, {id(rig.gpus): rig.gpus, id(self.change): self.change})
        forked.moment = 0
        return forked

    # -- one agent ---------------------------------------------------------------------------

    def serve(self, strike: Callable[["Play"], object]) -> outcomes.Outcome | None:
        """Run an agent until it rests; None if it died. ``strike`` is called at each moment."""
        rig = self.rig
        self.is_dead = False

        def come_to() -> None:
            if not self.is_dead:
                strike(self)
            if self.is_dead:
                raise scenes.Killed
            self.moment += 1

        def step(one: steps.Step) -> Exception | None:
            come_to()
            self._check_idle(one)
            return self._refuse(one)

        rig.on_call, rig.driver.step_error = come_to, step
        try:
            return self._serve()
        except scenes.Killed:
            return None
        finally:
            rig.on_call, rig.driver.step_error = _nothing, _accept

    def _serve(self) -> outcomes.Outcome | None:
        agent = scenes.reconciler(self.rig, configs=self.config, limits=_LIMITS)
        is_recovered = False
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            request = fakes.FakeRequest(self.rig.clock, replaced=True)
            asked = self.requested
            request.ends_when = lambda asked=asked: asked != self.requested  # type: ignore[misc]
            try:
                if not is_recovered:
                    agent.recover(self.layout, self.custom)
                    is_recovered = True
                outcome = agent.run(self.layout, request, custom=self.custom, attempt=attempt)
            except errors.Superseded:
                continue
            except errors.ClusterError:
                is_recovered = False
            else:
                is_refused = outcome.reason is errors.Reason.INSUFFICIENT_RESOURCES
                is_over = is_refused or not outcome.should_retry
                if is_over and self._begins_repair(agent, outcome, asked):
                    continue
                if is_over and asked == self.requested:
                    # What comes back by itself, such as the plugin of a failed change, does.
                    away_s = self.rig.daemons.controller_away_until_s - self.rig.clock.now_s
                    self.rig.clock.wait(max(_PAUSE_S, away_s))
                    return outcome
            self.rig.clock.wait(_PAUSE_S)
        return None

    def _begins_repair(
        self, agent: scenes.Agent, outcome: outcomes.Outcome, asked: Hashable
    ) -> bool:
        if not self.change.is_repair:
            return False
        is_silent = bool(self.rig.driver.lost)
        for pause_s in (0.0, *([_CHECK_PAUSE_S] if is_silent else []), _REPAIR_PAUSE_S):
            is_faulty = any(gpu.awaits_reset for gpu in self.rig.gpus)
            if not is_faulty or asked != self.requested:
                break
            if pause_s:
                self.rig.clock.wait(pause_s)
            if agent.check_drift(self.layout, outcome, self.custom) is drift.Action.RUN:
                return True
            present = {name for uid, name in self.pods.items() if uid in self.rig.pods}
            # Which pods use a silent GPU may be known only at the next check.
            is_early = is_silent and not pause_s
            if "affected" in present and asked == self.requested and not is_early:
                self.problems.append("a repair that evicted no pod pauses")
        return False

    @property
    def requested(self) -> tuple[object, ...]:
        """What a newer request differs from."""
        return self.layout, self.custom, self.config.text

    def _refuse(self, step: steps.Step) -> Exception | None:
        is_ours = isinstance(step, steps.CreateGpuInstance) and step.placement.start == 1
        if self.change.is_refused and self.layout == self.change.layout and is_ours:
            return errors.HardwareError("no", reason=errors.Reason.INSUFFICIENT_RESOURCES)
        return None

    def _check_idle(self, step: steps.Step) -> None:
        """Note a pod whose device a step destroys."""
        (gpu,) = (each for each in self.rig.gpus if each.uuid == step.gpu_uuid)
        match step:
            case steps.SetMode() | steps.Reset():
                doomed = {gpu.uuid, *gpu.mig_uuids}
            case steps.DestroyComputeInstance() | steps.DestroyGpuInstance():
                doomed = {
                    ci.uuid or ""
                    for gi in gpu.gpu_instances
                    if gi.instance_id == step.gpu_instance_id
                    for ci in gi.compute_instances
                }
            case _:
                return
        for uid, devices in self.rig.kubelet.assigned.items():
            if uid in self.rig.pods and devices & doomed:
                self.problems.append(f"{step} destroys a device of {self.rig.pods[uid].name}")

    # -- judging -----------------------------------------------------------------------------

    @property
    def key(self) -> Hashable:
        """What the next agent and the pods meet: strikes that lead to the same count once."""
        rig = self.rig
        published = json.loads(rig.annotations.get(well_known.STATUS_ANNOTATION, "{}"))
        pods = sorted((p.name, p.is_terminating, p.is_ready, p.phase) for p in rig.pods.values())
        return (
            *(published.get(name) for name in ("config", "configHash", "state", "phase")),
            rig.annotations.get(well_known.JOURNAL_ANNOTATION),
            tuple(sorted(rig.labels.items())),
            rig.has_hold_taint,
            changes.described(rig.gpus),
            tuple(gpu.awaits_reset for gpu in rig.gpus),
            tuple(uuid for gpu in rig.gpus for uuid in gpu.mig_uuids),
            tuple(pods),
            rig.is_controller_away,
            tuple(rig.host.services.items()),
            rig.hooks.pending_exit,
            tuple(rig.hooks.broken_once),
            tuple(sorted((name, tuple(sorted(ids))) for name, ids in rig.schedulable.items())),
            rig.kubelet.withdrawn is rig.schedulable,
            rig.kubelet.lists_from_s > rig.clock.now_s,
            len(rig.host.boot_layouts),
        )

    def judge(self, outcome: outcomes.Outcome | None, ends: Sequence[End]) -> list[str]:
        """Return what is not as it must be at rest."""
        rig = self.rig
        if outcome is None:
            return [f"no end after {_MAX_ATTEMPTS} attempts"]
        labels, gpus = rig.labels, changes.described(rig.gpus)
        problems = [*self.problems]
        state, applied = labels.get(well_known.STATE_LABEL), labels.get(well_known.APPLIED_LABEL)
        published = json.loads(rig.annotations[well_known.STATUS_ANNOTATION])
        if (state, applied, gpus) not in ends:
            problems.append(f"ended {state} {applied} {gpus}: {outcome.message}")
        if {state, published["state"]} != {outcome.state.value}:
            problems.append(f"label {state}, status {published['state']}, not {outcome.state}")
        try:
            scenes.assert_restored(rig)
        except AssertionError:
            journal = rig.annotations.get(well_known.JOURNAL_ANNOTATION)
            problems.append(f"taken: taint {rig.has_hold_taint}, journal {journal}, {labels}")
        is_same = (self.layout, self.config.text) == (self.change.layout, scenes.CONFIG)
        if is_same and any(gpu.awaits_reset for gpu in rig.gpus):
            problems.append(f"not repaired: {rig.recovery_condition}")
        if labels.get(well_known.PLUGIN_DEPLOY_LABEL) != "true":
            problems.append(f"plugin {labels.get(well_known.PLUGIN_DEPLOY_LABEL)}")
        problems += self._hurt()
        plugins = [pod for pod in rig.pods.values() if clients.is_device_plugin(pod)]
        devices = set().union(*rig.schedulable.values())
        if len(plugins) != 1 or devices != names(rig.gpus).keys():
            problems.append(f"{len(plugins)} plugins offer {sorted(devices)}")
        return problems

    def _hurt(self) -> Iterator[str]:
        may_go = self.change.evicted | self.may_go
        for uid, name in self.pods.items():
            if uid not in self.rig.pods and name not in may_go:
                yield f"{name} was evicted"


def names(gpus: Sequence[model.Gpu]) -> dict[str, str]:
    """Return GPU, profile and place of each device, by UUID."""
    names = {}
    for gpu in gpus:
        if gpu.current_mode is model.MigMode.DISABLED:
            names[gpu.uuid] = f"{gpu.index}: off"
        for gi in gpu.gpu_instances:
            for ci in gi.compute_instances:
                names[ci.uuid or ""] = f"{gpu.index}: {ci.profile}@{gi.placement.start}"
    return names


def _nothing() -> None: ...


def _accept(_step: steps.Step) -> None: ...
