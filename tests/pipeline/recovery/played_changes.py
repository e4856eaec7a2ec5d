"""A change of the node in memory, played by one agent after another until it ends.

What must hold in the end is written here as data; neither the planner nor the journal is asked.
"""

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from mig_manager import errors, reasons
from mig_manager.agent import outcomes
from mig_manager.core import model, steps
from mig_manager.core.layout import custom_layouts
from mig_manager.core.node import well_known
from mig_manager.core.settings import node_settings
from tests import layout_table
from tests.node import (
    agents,
    cluster_parts,
    ends,
    fakes,
    inboxes,
    node_rig,
    parts,
    strikes,
    traces,
)
from tests.pipeline import agent_loop, dra_scenes
from tests.pipeline.swept_changes import Change, NodeEnd

_MAX_PAUSES = 16
_WITHOUT_PARENTHESES = str.maketrans("", "", "()")  # they mark what has no compute instance yet
_REPAIR_PAUSE_S = 1000.0  # longer than the first pause after a failed repair
_LIMITS = {
    "has_custom_layouts": True,
    "generated_layouts": node_settings.GeneratedLayouts.OFF,
    "repair": node_settings.RepairPolicy.RESET,
}


_NOT_COMPARED: Mapping[type, frozenset[str]] = {
    node_rig.NodeRig: frozenset(
        {
            # ``PlayedChange.key`` has what matters of them, without times and serial numbers.
            *("gpus", "pods", "verified_layout_file"),
            "request_file",  # it follows from the rest, with times
            "log",  # what happened, which no agent reads
            # They are the rig's own, or strike by themselves.
            *("clock", "slots", "on_call", "fail_once_at", "fail_always", "lose_answer_at"),
        }
    ),
    cluster_parts.NodeObject: frozenset(
        {
            "annotations",  # ``PlayedChange.key`` has what matters of them
            *("ready_condition", "recovery_condition"),  # they follow from the rest, with times
            # What happened, which no agent reads.
            *("states", "status_messages", "ready_reasons", "events", "event_messages"),
        }
    ),
    parts.Kubelet: frozenset(
        {
            # Times.
            *("all_listed_from_s", "pod_listed_from_s", "all_end_from_s", "pod_ends_from_s"),
            "reports_from_s",
            *("devices_by_pod", "claims"),  # ``PlayedChange.key`` has them by names of pods
            *("withdrawn", "reported_devices"),  # they repeat what is schedulable
        }
    ),
    # Their numbers are those of the driver's starts: ``PlayedChange.key`` has only the devices.
    parts.DraDriver: frozenset({"slices"}),
    parts.Daemons: frozenset({"controller_away_until_s"}),
    parts.Driver: frozenset({"step_error", "executed_steps"}),
    parts.Host: frozenset({"refreshes"}),
    parts.Hooks: frozenset({"commands", "environment"}),
}
"""The fields of the node and its parts that make no difference to a strike, or only by time."""


@dataclasses.dataclass
class PlayedChange:
    """A node and what is requested of it, between two strikes or during one."""

    change: Change
    rig: node_rig.NodeRig
    config: fakes.FakeConfig
    moment: int = 0  # how many moments the present agent has lived through
    path: tuple[str, ...] = ()  # the strikes so far
    problems: list[str] = dataclasses.field(default_factory=list)
    is_dead: bool = False
    """Whether the agent's process was killed: nothing that it still does has an effect."""
    pods: dict[str, str] = dataclasses.field(default_factory=dict)
    """Names of the pods that have devices, by UID."""
    may_go: set[str] = dataclasses.field(default_factory=set)
    """Names of pods that end by themselves, or that a later request may evict."""
    deploy_labels: dict[str, str] = dataclasses.field(default_factory=dict)
    """What deploys the GPU clients, as their owner wants it."""
    is_cordoned: bool = False
    is_over: bool = False  # whether the last agent came to rest
    was_about_to_evict: bool = False
    """Whether an agent was killed after it wrote that it evicts: its successor counts that."""
    remnants: frozenset[str] = frozenset()
    """The GPU instances that a killed agent left, named as in ``devices_by_gpu``."""

    @classmethod
    def of(cls, change: Change) -> "PlayedChange":
        """Return the change at its start."""
        rig = change.make()
        play = cls(change, rig, fakes.FakeConfig(agents.CONFIG))
        play.request(change.layout, change.custom)
        assert layout_table.layout_of(rig.gpus) == change.before
        play.pods = {uid: pod.name for uid, pod in rig.pods.items() if devices_of(rig, uid)}
        play.deploy_labels = traces.deploy_labels(rig.node.labels)
        return play

    def fork(self) -> "PlayedChange":
        """Return another play that is as far as this one."""
        rig = self.rig
        rig.forget_past()
        forked = copy.deepcopy(self, {id(rig.gpus): rig.gpus, id(self.change): self.change})
        forked.moment = 0
        return forked

    # -- one agent ----------------------------------------------------------------------------

    def serve(self, strike: Callable[["PlayedChange"], object]) -> outcomes.Outcome | None:
        """Run an agent until it rests; None if it died. ``strike`` is called at each moment.

        The first one is before it starts.
        """
        rig = self.rig
        self.is_dead = self.is_over = False

        def begin_moment() -> None:
            if not self.is_dead:
                strike(self)
            if self.is_dead:
                raise strikes.Killed
            self.moment += 1

        def step(one: steps.Step) -> Exception | None:
            begin_moment()
            self._check_idle(one)
            return self._refuse(one)

        with (
            contextlib.suppress(strikes.Killed),
            strikes.on_calls(rig, begin_moment),
            strikes.on_steps(rig, step),
        ):
            begin_moment()
            return self._serve()
        return None

    def _serve(self) -> outcomes.Outcome | None:
        agent = agents.new_agent(self.rig, configs=self.config, limits=_LIMITS)
        pauses = _Pauses(self, agent)
        outcome = agent_loop.run_agent(self.rig, agent, self.config, pauses)
        self.is_over = pauses.is_over
        if not self.is_over:
            return None
        # What comes back by itself, such as the plugin of a failed change, does.
        away_s = self.rig.daemons.controller_away_until_s - self.rig.clock.now_s
        self.rig.clock.wait(max(agent_loop.RETRY_S, away_s))
        return outcome

    def kill(self) -> None:
        """End the agent's process."""
        self.is_dead = True
        instances = layout_table.devices_by_gpu(layout_table.layout_of(self.rig.gpus))
        self.remnants = frozenset(each.translate(_WITHOUT_PARENTHESES) for each in instances)
        journal = self.rig.node.annotations.get(well_known.JOURNAL_ANNOTATION) or ""
        self.was_about_to_evict |= '"hasEvicted": true' in journal

    def let_pods_go(self) -> None:
        """Let an agent evict every pod, as a request of another layout may."""
        self.may_go |= {"affected", "spared", "newcomer"}

    def request(self, layout: str | None, custom: custom_layouts.Custom | None = None) -> None:
        """Set what is requested on the Node."""
        agent_loop.request(self.rig, layout, custom)

    @property
    def request_key(self) -> tuple[str | None, ...]:
        """What a newer request differs from."""
        return *inboxes.requested_of(self.rig), self.config.text

    @property
    def is_as_begun(self) -> bool:
        """Whether the change itself is requested."""
        is_same_file = self.config.text == agents.CONFIG
        return is_same_file and self.request_key[0] == self.change.layout

    def _refuse(self, step: steps.Step) -> Exception | None:
        is_ours = isinstance(step, steps.CreateGpuInstance) and step.placement.start == 1
        is_requested = self.request_key[0] == self.change.layout
        if self.change.is_refused and is_requested and is_ours:
            return errors.HardwareError("no", reason=reasons.Reason.INSUFFICIENT_RESOURCES)
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
        self.problems += (
            f"{step} destroys a device of {pod.name}"
            for uid, pod in self.rig.pods.items()
            if devices_of(self.rig, uid) & doomed
        )

    # -- what is compared, and what must hold --------------------------------------------------

    @property
    def key(self) -> Hashable:
        """What the next agent and the pods meet: strikes that lead to the same count once.

        Every field of the node and of its parts is compared, but those in ``_NOT_COMPARED``.
        """
        rig = self.rig
        pods = sorted(
            (pod.name, pod.is_terminating, pod.is_ready, pod.phase, uid in rig.kubelet.claims)
            for uid, pod in rig.pods.items()
        )
        listed = {
            (rig.pods[uid].name if uid in rig.pods else "", devices)
            for uid, devices in rig.kubelet.devices_by_pod.items()
        }
        slices = rig.dra_driver.slices
        return (
            _as_key(rig),
            *(rig.node.status.get(name) for name in ("config", "configHash", "state", "phase")),
            rig.node.annotations.get(well_known.JOURNAL_ANNOTATION),
            layout_table.layout_of(rig.gpus),
            tuple(gpu.awaits_reset for gpu in rig.gpus),
            tuple(uuid for gpu in rig.gpus for uuid in gpu.mig_uuids),
            tuple(pods),
            frozenset(listed),
            None if slices is None else tuple(_as_key(each.uuids) for each in slices),
            rig.clock.now_s < rig.daemons.controller_away_until_s,
            rig.kubelet.withdrawn is rig.kubelet.schedulable,
            rig.kubelet.all_listed_from_s > rig.clock.now_s,
            len(rig.verified_layout_file.saved),
        )

    def problems_at_rest(
        self, outcome: outcomes.Outcome | None, node_ends: Sequence[NodeEnd]
    ) -> list[str]:
        """Return what is not as it must be at rest."""
        rig = self.rig
        if not self.is_over:
            if self.request_key[0] is None and rig.driver.lost:
                return []  # No repair follows, and the instances wait for this GPU.
            return [f"no end after {_MAX_PAUSES} pauses"]
        labels, gpus = rig.node.labels, layout_table.layout_of(rig.gpus)
        problems = [*self.problems]
        state, applied = labels.get(well_known.STATE_LABEL), labels.get(well_known.APPLIED_LABEL)
        if not any(self._is_end(NodeEnd(state, applied, gpus), each) for each in node_ends):
            problems.append(f"ended {state} {applied} {gpus}: {rig.node.status.get('message')}")
        expected_states = {outcome.state.value} if outcome and self.request_key[0] else set()
        if len({state, rig.node.status.get("state"), *expected_states}) != 1:
            problems.append(
                f"label {state}, status {rig.node.status.get('state')}, not {expected_states}"
            )
        problems += self._not_restored()
        if self.is_as_begun and any(gpu.awaits_reset for gpu in rig.gpus):
            problems.append(f"not repaired: {rig.node.recovery_condition}")
        problems += self._hurt()
        if rig.dra_driver.is_installed:
            serving = rig.pods.dra_drivers
            devices = dra_scenes.published_uuids(rig)
        else:
            serving = rig.pods.plugins
            devices = frozenset().union(*rig.kubelet.schedulable.values())
        if len(serving) != 1 or devices != names(rig.gpus).keys():
            problems.append(f"{len(serving)} plugins or drivers offer {sorted(devices)}")
        return problems

    def _is_end(self, end: NodeEnd, expected: NodeEnd) -> bool:
        """Return whether a node is as expected.

        What a killed agent created stays where it is if the changed file has it too: then it may
        stand, and have others stand, elsewhere.
        """
        is_changed = self.config.text != agents.CONFIG
        kept = layout_table.devices_by_gpu(end.gpus) & self.remnants if is_changed else set()
        if kept <= layout_table.devices_by_gpu(expected.gpus):
            return end == expected
        return end._replace(gpus=()) == expected._replace(gpus=()) and (
            [*map(layout_table.counts, end.gpus)] == [*map(layout_table.counts, expected.gpus)]
        )

    def _not_restored(self) -> Iterator[str]:
        rig = self.rig
        yield from ends.remaining(rig, is_cordoned=self.is_cordoned, deployed=self.deploy_labels)
        if "MonitorNotReady" in rig.node.events and not rig.daemons.controller_away_until_s:
            yield "a monitor is awaited that does not start"

    def misnaming_problems(self) -> Iterator[str]:
        """Yield a problem if the label names a layout that is not active."""
        change, gpus = self.change, layout_table.layout_of(self.rig.gpus)
        layouts = {change.was: change.before, change.layout: change.after, None: gpus}
        applied = self.rig.node.labels.get(well_known.APPLIED_LABEL)
        if layouts[applied] != gpus:
            yield f"killed with {gpus} as {applied}"

    def _hurt(self) -> Iterator[str]:
        may_go = self.change.evicted | self.may_go
        for uid, name in self.pods.items():
            if uid not in self.rig.pods and name not in may_go:
                yield f"{name} was evicted"


class _Pauses:
    """Lets time pass in an agent's pauses, and ends the agent where nothing is left to do."""

    def __init__(self, play: PlayedChange, agent: agents.AgentInMemory) -> None:
        self._play = play
        self._agent = agent
        self._pauses = 0
        self._checks: collections.Counter[int] = collections.Counter()
        """Drift checks after each run."""
        self.is_over = False
        """Whether the last run was the last one."""

    def __call__(self, pause: inboxes.Pause) -> None:
        past_outcomes = self._agent.outcomes
        is_refused = (
            past_outcomes and past_outcomes[-1].reason is reasons.Reason.INSUFFICIENT_RESOURCES
        )
        self._pauses += 1
        self.is_over = (pause.is_at_rest or bool(is_refused)) and self._pauses <= _MAX_PAUSES
        if self._pauses > _MAX_PAUSES:
            raise agent_loop.EndOfPause
        self._play.rig.clock.wait(self._repair_check_s() if self.is_over else pause.seconds)

    def _repair_check_s(self) -> float:
        """Return the pause before the next check that may begin a repair.

        Raises:
            EndOfPause: None is awaited.
        """
        play, rig = self._play, self._play.rig
        is_repair = play.change.is_repair and play.request_key[0] is not None
        if not (is_repair and any(gpu.awaits_reset for gpu in rig.gpus)):
            raise agent_loop.EndOfPause
        if play.is_cordoned:
            # No repair begins before people uncordon the node.
            rig.node.is_unschedulable = play.is_cordoned = False
            return agent_loop.CHECK_S
        checks = self._checks[len(self._agent.outcomes)]
        self._checks[len(self._agent.outcomes)] += 1
        # Which pods use a silent GPU may be known only at the second check, and no repair begins
        # while kubelet is silent.
        enough = 2 if rig.driver.lost or rig.kubelet.all_listed_from_s > rig.clock.now_s else 1
        present = {name for uid, name in play.pods.items() if uid in rig.pods}
        if checks >= enough and "affected" in present and not play.was_about_to_evict:
            play.problems.append("a repair that evicted no pod pauses")
        if checks > enough:
            raise agent_loop.EndOfPause
        return agent_loop.CHECK_S if checks < enough else _REPAIR_PAUSE_S


def _as_key(value: object) -> Hashable:
    """Return what is compared of the node, of a part of it, or of a value in one."""
    if dataclasses.is_dataclass(value):
        skipped = _NOT_COMPARED.get(type(value), frozenset())
        return tuple(
            _as_key(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name not in skipped
        )
    if isinstance(value, Mapping):
        return frozenset((key, _as_key(each)) for key, each in value.items())
    if isinstance(value, AbstractSet):
        return frozenset(map(_as_key, value))
    if isinstance(value, list | tuple):
        return tuple(map(_as_key, value))
    assert isinstance(value, Hashable)
    return value


def devices_of(rig: node_rig.NodeRig, uid: str) -> frozenset[str]:
    """Return the devices of a pod, by kubelet or by claim."""
    return rig.kubelet.devices_by_pod.get(uid, frozenset()) | (
        rig.pods[uid].claimed_ids or frozenset()
    )


def names(gpus: Sequence[model.Gpu]) -> dict[str, str]:
    """Return GPU, profile and place of each device, by UUID."""
    off = model.MigMode.DISABLED
    return {gpu.uuid: f"{gpu.index}: off" for gpu in gpus if gpu.current_mode is off} | {
        ci.uuid or "": f"{gpu.index}: {ci.profile}@{gi.placement.start}"
        for gpu in gpus
        for gi in gpu.gpu_instances
        for ci in gi.compute_instances
    }
