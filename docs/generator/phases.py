"""The phases of a run as the pipeline really goes through them: played, and written down.

Nothing here says which phase follows which. The real pipeline runs on the tests' node in memory:
undisturbed, with every call to a dependency failing once, superseded at every check, and killed at
every call. The phases are those of its status annotation.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator

from mig_manager import errors, reasons
from mig_manager.core.fleet import slots
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from tests.pipeline import swept_changes
from tests.rigs.node import agents, call_errors, fakes, moments, node_rig, nodes, strikes

Move = tuple[run_status.Phase, run_status.Phase]

_OTHER_LAYOUT = "all-disabled"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Marks:
    """What a node shows of a run, beside the phase."""

    state: str
    is_tainted: bool
    is_paused: bool  # whether GPU clients are paused by label
    has_snapshot: bool  # whether the journal has the instances from before
    names_layout: bool  # whether the node names a layout as applied


@dataclasses.dataclass(slots=True)
class Story:
    """What was seen of any number of runs."""

    moves: set[Move] = dataclasses.field(default_factory=set)  # from phase to phase
    failures: dict[run_status.Phase, set[reasons.Reason]] = dataclasses.field(default_factory=dict)
    """Reasons of the runs that ended badly, by the phase they ended in."""
    superseded_in: set[run_status.Phase] = dataclasses.field(default_factory=set)
    """Phases in which a newer request ends a run."""
    marks: dict[run_status.Phase, set[Marks]] = dataclasses.field(default_factory=dict)


class _Recorder:
    """Records the runs of one node by its status annotation."""

    def __init__(self, rig: node_rig.NodeRig, story: Story) -> None:
        self._rig = rig
        self._story = story
        self._last_text = rig.node_object.annotations.get(well_known.STATUS_ANNOTATION)
        self._phase = run_status.Phase.RESOLVE
        rig.callbacks.add(moments.Call, self.record)

    def record(self) -> None:
        """Record what was published since the last call."""
        text = self._rig.node_object.annotations.get(well_known.STATUS_ANNOTATION)
        if text is None or text == self._last_text:
            return
        self._last_text = text
        status = json.loads(text)
        phase = run_status.Phase(status["phase"])
        if phase is not self._phase:
            self._story.moves.add((self._phase, phase))
        self._phase = phase
        self._story.marks.setdefault(phase, set()).add(self._marks(status["state"]))
        if status["state"] == run_status.State.FAILED.value:
            failures = self._story.failures.setdefault(phase, set())
            failures.add(reasons.Reason(status["reason"]))

    def _marks(self, state: str) -> Marks:
        rig = self._rig
        return Marks(
            state=state,
            is_tainted=rig.node_object.has_reconfiguring_taint,
            is_paused=well_known.PAUSED_VALUE in rig.node_object.labels.values(),
            has_snapshot="snapshot"
            in rig.node_object.annotations.get(well_known.JOURNAL_ANNOTATION, ""),
            names_layout=well_known.APPLIED_LABEL in rig.node_object.labels,
        )

    def note_superseded(self) -> None:
        """Write down that a newer request has ended the run."""
        self._story.superseded_in.add(self._phase)


@contextlib.contextmanager
def _record(rig: node_rig.NodeRig, story: Story) -> Iterator[_Recorder]:
    recorder = _Recorder(rig, story)
    try:
        yield recorder
    finally:
        recorder.record()
        rig.callbacks.clear()


def _play(
    rig: node_rig.NodeRig, layout: str, story: Story, *, superseded_at: int | None = None
) -> int:
    """Play one run; return how often it checked for a newer request."""
    cancel = fakes.FakeCancellation(rig.clock, ends_at=superseded_at, is_replaced=True)
    with _record(rig, story) as recorder:
        try:
            # An end that could not be published is for the next run.
            with contextlib.suppress(errors.ClusterError):
                agents.new_agent(rig).run(layout, cancel)
        except errors.Superseded:
            recorder.record()
            recorder.note_superseded()
    return cancel.checks


def _with_every_call_failing(change: swept_changes.NodeChange, story: Story) -> None:
    for index, call in enumerate(change.calls()):
        rig = change.make()
        rig.failures.add(index, call_errors.broken(call))
        _play(rig, change.layout, story)
        # The next run undoes what this one could not.
        # ``story_after_kills`` has those without an outcome.
        rig.failures.clear()
        if rig.node_object.labels[well_known.STATE_LABEL] != run_status.State.PENDING.value:
            _play(rig, change.layout, story)


def _superseded_at_every_check(change: swept_changes.NodeChange, story: Story) -> None:
    for question in itertools.count(1):
        if _play(change.make(), change.layout, story, superseded_at=question) < question:
            return


def _killed_everywhere(change: swept_changes.NodeChange, story: Story) -> None:
    """Kill it at every call; its successor resumes, or another layout is requested."""
    for index in range(len(change.calls())):
        for requested in (change.layout, _OTHER_LAYOUT):
            rig = change.make()
            rig.failures.add(index, strikes.Killed())
            with contextlib.suppress(strikes.Killed):
                change.run(rig)
            rig.failures.clear()
            with _record(rig, story):
                successor = agents.new_agent(rig)
                successor.recover(requested)
            with _record(rig, story):
                successor.run(requested, fakes.FakeCancellation(rig.clock, is_replaced=False))


def _reboot(story: Story) -> None:
    """Reboot in the middle of a run, as the signal to end does, and go on afterwards."""
    rig = nodes.rebooting_node()
    cancel = fakes.FakeCancellation(rig.clock, ends_when=lambda: rig.host.reboots > 0)
    with _record(rig, story), contextlib.suppress(errors.Superseded):
        agents.new_agent(rig).run("all-1g.5gb", cancel)
    rig.reboot()
    with _record(rig, story):
        successor = agents.new_agent(rig)
        successor.recover("all-1g.5gb")
        successor.run("all-1g.5gb", fakes.FakeCancellation(rig.clock, is_replaced=False))


def _refuse(story: Story) -> None:
    """Play what no scene has: layouts that cannot be had, and what is right already."""
    for layout in ("no-such-layout", "too-much", "no-such-profile", "other-gpu"):
        _play(nodes.busy_node(), layout, story)
    _play(nodes.node(layout="all-1g.5gb"), "all-1g.5gb", story)
    guarded = nodes.busy_node()
    guarded.disruptions.refusals["affected"] = "budget 'pdb-a' allows no disruption"
    _play(guarded, "one-slice-changed", story)
    silent = nodes.busy_node()
    silent.plugin.is_broken = True
    _play(silent, "one-slice-changed", story)
    staying = nodes.rebooting_node()
    staying.failures.add("reboot.request", call_errors.broken("reboot.request"))
    _play(staying, "all-1g.5gb", story)


def _queue(story: Story) -> None:
    """Play a node that waits for a slot: it gets one, is forbidden it, or is superseded."""
    denial = slots.Denial(limit=1, changing=("other",))
    forbidden = errors.ClusterError("no", reason=reasons.Reason.FORBIDDEN, status=403)
    for next_errors, superseded_at in (([], None), ([forbidden], None), ([], 1)):
        rig = nodes.limited_node()
        rig.slots.denials, rig.slots.next_errors = [denial] * 2, next_errors
        _play(rig, "one-slice-changed", story, superseded_at=superseded_at)


@functools.cache
def story_without_kills() -> Story:
    """Return what runs do that are not killed."""
    story = Story()
    for change in swept_changes.CHANGES.values():
        if change.custom is None:
            _play(change.make(), change.layout, story)
    _refuse(story)
    _queue(story)
    _reboot(story)
    for name in ("first layout", "one slice", "services", "first layout, reset"):
        _with_every_call_failing(swept_changes.CHANGES[name], story)
    _superseded_at_every_check(swept_changes.CHANGES["one slice"], story)
    return story


@functools.cache
def story_after_kills() -> Story:
    """Return what the runs do that come after one that was killed."""
    story = Story()
    _killed_everywhere(swept_changes.CHANGES["one slice"], story)
    return story
