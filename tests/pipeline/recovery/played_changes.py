"""A change of the node in memory, played by one agent after another until it ends."""

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Hashable

from mig_manager import reasons
from mig_manager.agent import outcomes
from mig_manager.core import steps
from mig_manager.core.layout import custom_layouts
from mig_manager.core.objects import well_known
from mig_manager.core.settings import node_settings
from tests.pipeline import agent_loop
from tests.pipeline.recovery import node_keys
from tests.pipeline.swept_changes import NodeChange
from tests.rigs import layout_table
from tests.rigs.node import agents, call_errors, fakes, inboxes, moments, node_rig, strikes

MAX_PAUSES = 16
_WITHOUT_PARENTHESES = str.maketrans("", "", "()")  # they mark what has no compute instance yet
_REPAIR_PAUSE_S = 1000.0  # longer than the first pause after a failed repair
_SETTINGS = {
    "has_custom_layouts": True,
    "generated_layouts": node_settings.GeneratedLayouts.OFF,
    "repair": node_settings.RepairPolicy.RESET,
}


@dataclasses.dataclass
class PlayedChange:
    """A node and what is requested of it, between two strikes or during one."""

    change: NodeChange
    rig: node_rig.NodeRig
    config: fakes.FakeTextSource
    moment: int = 0  # how many moments the present agent has lived through
    path: tuple[str, ...] = ()  # the strikes so far
    problems: list[str] = dataclasses.field(default_factory=list)
    is_dead: bool = False
    """Whether the agent's process was killed: nothing that it still does has an effect."""
    is_abandoned: bool = False
    """Whether its end is known: the strike had no effect, or has led to such a node before."""
    pods: dict[str, str] = dataclasses.field(default_factory=dict)
    """Names of the pods that have devices, by UID."""
    may_go: set[str] = dataclasses.field(default_factory=set)
    """Names of pods that end by themselves, or that a later request may evict."""
    is_over: bool = False  # whether the last agent came to rest
    was_about_to_evict: bool = False
    """Whether an agent was killed after it wrote that it evicts: its successor counts that."""
    remnants: frozenset[str] = frozenset()
    """The GPU instances that a killed agent left, named as in ``devices_by_gpu``."""

    @classmethod
    def of(cls, change: NodeChange) -> "PlayedChange":
        """Return the change at its start."""
        rig = change.make()
        play = cls(change, rig, fakes.FakeTextSource(agents.LAYOUTS_TEXT))
        play.request(change.layout, change.custom)
        assert layout_table.devices_in_words(rig.gpus) == change.before
        play.pods = {uid: pod.name for uid, pod in rig.pods.items() if devices_of(rig, uid)}
        return play

    def fork(self) -> "PlayedChange":
        """Return another play that is as far as this one."""
        self.rig.forget_past()
        forked = copy.deepcopy(self, {id(self.rig): self.rig.fork(), id(self.change): self.change})
        forked.moment = 0
        return forked

    # -- one agent ----------------------------------------------------------------------------

    def serve(self, strike: Callable[["PlayedChange"], object]) -> outcomes.Outcome | None:
        """Run an agent until it rests; None if it died or its run was abandoned.

        ``strike`` is called at each moment; the first one is before the agent starts.
        """
        rig = self.rig
        self.is_dead = self.is_abandoned = self.is_over = False

        def begin_moment() -> None:
            # A run that has ended calls ports again while it unwinds.
            if not (self.is_dead or self.is_abandoned):
                strike(self)
            if self.is_dead or self.is_abandoned:
                raise strikes.Killed
            self.moment += 1

        def begin_step() -> None:
            begin_moment()
            self._check_idle(rig.driver.next_step)

        with (
            contextlib.suppress(strikes.Killed),
            rig.callbacks.adding(moments.Call, begin_moment),
            rig.callbacks.adding(steps.Step, begin_step),
            rig.failures.adding(
                steps.CreateGpuInstance, call_errors.REFUSED, when=self._is_step_refused
            ),
        ):
            begin_moment()
            return self._serve()
        return None

    def _serve(self) -> outcomes.Outcome | None:
        agent = agents.new_agent(self.rig, layout_source=self.config, settings=_SETTINGS)
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
        """Kill the agent's process."""
        self.is_dead = True
        instances = layout_table.devices_by_gpu(layout_table.devices_in_words(self.rig.gpus))
        self.remnants = frozenset(each.translate(_WITHOUT_PARENTHESES) for each in instances)
        journal = self.rig.node_object.annotations.get(well_known.JOURNAL_ANNOTATION) or ""
        self.was_about_to_evict |= '"hasEvicted": true' in journal

    def let_pods_go(self) -> None:
        """Let an agent evict every pod, as a request of another layout may."""
        self.may_go |= {"affected", "spared", "newcomer"}

    def request(
        self, layout: str | None, custom: custom_layouts.CustomRequest | None = None
    ) -> None:
        """Set what is requested on the Node."""
        agent_loop.request(self.rig, layout, custom)

    def abandon(self) -> None:
        """End the run without a check of its end."""
        self.is_abandoned = True

    @property
    def key(self) -> Hashable:
        """The node and its request: strikes that lead to the same count once."""
        return node_keys.key_of(self.rig), self.request_key

    @property
    def request_key(self) -> tuple[str | None, ...]:
        """What a newer request differs from."""
        return *inboxes.requested_of(self.rig), self.config.text

    @property
    def is_as_begun(self) -> bool:
        """Whether the change itself is requested."""
        is_same_file = self.config.text == agents.LAYOUTS_TEXT
        return is_same_file and self.request_key[0] == self.change.layout

    def _is_step_refused(self) -> bool:
        is_requested = self.request_key[0] == self.change.layout
        is_ours = self.rig.driver.next_step.placement.start == 1
        return self.change.is_refused and is_requested and is_ours

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
        self.is_over = (pause.is_at_rest or bool(is_refused)) and self._pauses <= MAX_PAUSES
        if self._pauses > MAX_PAUSES:
            raise agent_loop.EndOfPause
        self._play.rig.clock.wait(self._repair_check_s() if self.is_over else pause.seconds)

    def _repair_check_s(self) -> float:
        """Return the pause before the next check that may begin a repair.

        Raises:
            EndOfPause: None is awaited.
        """
        play, rig = self._play, self._play.rig
        is_repair = play.change.is_repair and play.request_key[0] is not None
        if not (is_repair and any(gpu.recovers_by_reset for gpu in rig.gpus)):
            raise agent_loop.EndOfPause
        if rig.owner.is_cordoned:
            # No repair begins before people uncordon the node.
            rig.node_object.is_unschedulable = rig.owner.is_cordoned = False
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


def devices_of(rig: node_rig.NodeRig, uid: str) -> frozenset[str]:
    """Return the devices of a pod, by kubelet or by claim."""
    return rig.kubelet.devices_by_pod.get(uid, frozenset()) | (
        rig.pods[uid].claimed_ids or frozenset()
    )
