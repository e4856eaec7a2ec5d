"""The phases of a run as the pipeline really goes through them: played, and written down.

Nothing here says which phase follows which. The real pipeline runs on the tests' node in memory,
undisturbed, with every call to the world failing once, with the wish ending at every question, and
killed at every call; what the status annotation then says is what is known of phases.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.node import cluster
from tests import fakes, scenes

Make = Callable[[], fakes.World]
Move = tuple[model.Phase, model.Phase]

_OTHER_LAYOUT = "all-disabled"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Marks:
    """What a node shows of a run, beside the phase."""

    state: str
    is_tainted: bool
    is_paused: bool
    """Whether GPU clients are paused by label."""
    has_way_back: bool
    """Whether the journal has the instances from before."""
    names_layout: bool
    """Whether the node names a layout as in force."""


@dataclasses.dataclass(slots=True)
class Story:
    """What was seen of any number of runs."""

    moves: set[Move] = dataclasses.field(default_factory=set)
    """From phase to phase."""
    failures: dict[model.Phase, set[errors.Reason]] = dataclasses.field(default_factory=dict)
    """Reasons of the runs that ended badly, by the phase they ended in."""
    gives_way: set[model.Phase] = dataclasses.field(default_factory=set)
    """Phases in which a newer wish ends a run."""
    marks: dict[model.Phase, set[Marks]] = dataclasses.field(default_factory=dict)


class _Recorder:
    """Follows the runs of one node by its status annotation."""

    def __init__(self, world: fakes.World, story: Story) -> None:
        self._world = world
        self._story = story
        self._seen = world.annotations.get(cluster.STATUS_ANNOTATION)
        self._phase = model.Phase.RESOLVE
        world.on_call = self.look

    def look(self) -> None:
        """Write down what has been published since the last look."""
        text = self._world.annotations.get(cluster.STATUS_ANNOTATION)
        if text is None or text == self._seen:
            return
        self._seen = text
        told = json.loads(text)
        phase = model.Phase(told["phase"])
        if phase is not self._phase:
            self._story.moves.add((self._phase, phase))
        self._phase = phase
        self._story.marks.setdefault(phase, set()).add(self._marks(told["state"]))
        if told["state"] == model.State.FAILED.value:
            reasons = self._story.failures.setdefault(phase, set())
            reasons.add(errors.Reason(told["reason"]))

    def _marks(self, state: str) -> Marks:
        world = self._world
        return Marks(
            state=state,
            is_tainted=world.has_hold_taint,
            is_paused=cluster.PAUSED_VALUE in world.labels.values(),
            has_way_back="snapshot" in world.annotations.get(cluster.JOURNAL_ANNOTATION, ""),
            names_layout=cluster.APPLIED_LABEL in world.labels,
        )

    def gave_way(self) -> None:
        """Write down that a newer wish has ended the run."""
        self._story.gives_way.add(self._phase)


@contextlib.contextmanager
def _recorded(world: fakes.World, story: Story) -> Iterator[_Recorder]:
    recorder = _Recorder(world, story)
    try:
        yield recorder
    finally:
        recorder.look()
        world.on_call = lambda: None


def _play(
    world: fakes.World, layout: str, story: Story, *, wish_ends_at: int | None = None
) -> int:
    """Play one run; return how often the wish was asked about."""
    wish = fakes.FakeWish(world.clock, ends_at=wish_ends_at, replaced=True)
    with _recorded(world, story) as recorder:
        try:
            # An end that could not be published is for the next run.
            with contextlib.suppress(errors.ClusterError):
                scenes.reconciler(world).run(layout, wish)
        except errors.Superseded:
            recorder.look()
            recorder.gave_way()
    return wish.asked


def _calls(make: Make, layout: str) -> list[str]:
    world = make()
    scenes.run(world, layout)
    return world.log


def _with_every_call_failing(make: Make, layout: str, story: Story) -> None:
    for index, call in enumerate(_calls(make, layout)):
        error = errors.ConfigError("broken") if call == "host.save" else _broken(call)
        world = make()
        world.failing = {index: error}
        _play(world, layout, story)
        # What it left due is made good by the next try.
        world.failing = {}
        _play(world, layout, story)


def _broken(call: str) -> Exception:
    return scenes.BROKEN[call.partition(".")[0]]


def _with_the_wish_ending(make: Make, layout: str, story: Story) -> None:
    for question in itertools.count(1):
        if _play(make(), layout, story, wish_ends_at=question) < question:
            return


def _killed_everywhere(make: Make, layout: str, story: Story) -> None:
    """Kill it at every call; its successor carries on, or is wanted for something else."""
    for index in range(len(_calls(make, layout))):
        for wanted in (layout, _OTHER_LAYOUT):
            world = make()
            world.failing = {index: scenes.Killed()}  # type: ignore[dict-item]
            with contextlib.suppress(scenes.Killed):
                scenes.run(world, layout)
            world.failing = {}
            with _recorded(world, story):
                successor = scenes.reconciler(world)
                successor.recover(wanted)
            with _recorded(world, story):
                successor.run(wanted, fakes.FakeWish(world.clock, replaced=False))


def _rebooting_node(*, comes_down: bool) -> fakes.World:
    world = scenes.node()
    world.mode_waits = world.may_reboot = True
    if not comes_down:
        world.reboot_refusal = "a person is logged in"
    return world


def _rebooted(story: Story) -> None:
    """Reboot in the middle of a run, as the signal to end does, and go on afterwards."""
    world = _rebooting_node(comes_down=True)
    wish = fakes.FakeWish(world.clock, replaced=False)
    wish.ends_when = lambda: world.reboots > 0
    with _recorded(world, story), contextlib.suppress(errors.Superseded):
        scenes.reconciler(world).run("all-1g.5gb", wish)
    world.restart_machine()
    with _recorded(world, story):
        successor = scenes.reconciler(world)
        successor.recover("all-1g.5gb")
        successor.run("all-1g.5gb", fakes.FakeWish(world.clock, replaced=False))


def _refused(story: Story) -> None:
    """Play what no scene has: layouts that cannot be had, and what is right already."""
    for layout in ("no-such-layout", "too-much", "no-such-profile", "other-gpu"):
        _play(scenes.busy_node(), layout, story)
    _play(scenes.node(layout="all-1g.5gb"), "all-1g.5gb", story)
    guarded = scenes.busy_node()
    guarded.budgets["victim"] = "budget 'pdb-a' allows no disruption"
    _play(guarded, "one-slice-changed", story)
    silent = scenes.busy_node()
    silent.plugin_is_broken = True
    _play(silent, "one-slice-changed", story)
    _play(_rebooting_node(comes_down=False), "all-1g.5gb", story)


class _Queue:
    """Implements ``ports.Slots``: others have them all, and then the API has its say or not."""

    def __init__(self, *, is_forbidden: bool) -> None:
        self._denials = ["held by another node"] * 2
        self._is_forbidden = is_forbidden

    def take(self) -> str:
        if self._denials:
            return self._denials.pop()
        if self._is_forbidden:
            raise errors.ClusterError("no", reason=errors.Reason.FORBIDDEN, status=403)
        return ""

    def check(self) -> None:
        """Be sure of the slot."""

    def release(self) -> None:
        """Give back what is not ours alone."""


def _queued(story: Story) -> None:
    """Play a node that must wait for others: it gets its turn, is forbidden it, or gives way."""
    for is_forbidden, wish_ends_at in ((False, None), (True, None), (False, 1)):
        world = scenes.busy_node()
        world.slots = _Queue(is_forbidden=is_forbidden)
        _play(world, "one-slice-changed", story, wish_ends_at=wish_ends_at)


@functools.cache
def played() -> Story:
    """Return what runs do that nobody kills."""
    story = Story()
    for make, layout in scenes.SCENARIOS.values():
        _play(make(), layout, story)
    _refused(story)
    _queued(story)
    _rebooted(story)
    for name in ("first-layout", "one-slice-on-a-busy-node", "host-services", "reset"):
        _with_every_call_failing(*scenes.SCENARIOS[name], story)
    _with_the_wish_ending(*scenes.SCENARIOS["one-slice-on-a-busy-node"], story)
    return story


@functools.cache
def recovered() -> Story:
    """Return what the runs do that come after one that was killed."""
    story = Story()
    _killed_everywhere(*scenes.SCENARIOS["one-slice-on-a-busy-node"], story)
    return story
