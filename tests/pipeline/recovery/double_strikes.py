"""Strike an agent on the node in memory, strike its successor, and judge where that ends.

A strike is a kill, or a write of another program, just before a call of a port or a step of the
driver. Strikes that meet the same node with the same journal in the same phase count once.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from mig_manager.agent import outcomes
from mig_manager.agent.pods import device_listing
from mig_manager.core.node import well_known
from tests import layout_table
from tests.node import agents, nodes
from tests.pipeline import lives
from tests.pipeline.recovery import played_changes
from tests.pipeline.recovery.played_changes import PlayedChange
from tests.pipeline.swept_changes import Change, NodeEnd

_NEXT = NodeEnd("success", "all-disabled", layout_table.gpus_with("all-disabled"))
"""How the request after a change ends."""


def _request_another(play: PlayedChange) -> None:
    play.request(play.change.other.applied or "")
    play.may_go |= {"affected", "spared", "newcomer"}


def _request_impossible(play: PlayedChange) -> None:
    play.request("too-much")


def _request_nothing(play: PlayedChange) -> None:
    play.request(None)


def _write_deploy_label(play: PlayedChange) -> None:
    if well_known.PLUGIN_DEPLOY_LABEL in play.rig.labels:
        play.rig.labels[well_known.PLUGIN_DEPLOY_LABEL] = "true"


def _disable_monitor(play: PlayedChange, value: str | None) -> None:
    for labels in (play.rig.labels, play.deploy_labels):
        if labels.pop(nodes.EXPORTER, None) and value:
            labels[nodes.EXPORTER] = value


def _cordon(play: PlayedChange) -> None:
    play.rig.is_unschedulable = play.is_cordoned = True


def _remove_taint(play: PlayedChange) -> None:
    play.rig.has_hold_taint = False


def _start_services(play: PlayedChange) -> None:
    play.rig.host.services |= dict.fromkeys(
        (name for name in play.rig.host.services if name != "off.service"), True
    )


def _remove_journal(play: PlayedChange) -> None:
    play.rig.annotations.pop(well_known.JOURNAL_ANNOTATION, None)


def _cut_journal(play: PlayedChange) -> None:
    text = play.rig.annotations.get(well_known.JOURNAL_ANNOTATION)
    if text is not None and text.endswith("}"):
        play.rig.annotations[well_known.JOURNAL_ANNOTATION] = text[: len(text) // 2]


def _start_pod(play: PlayedChange, *, is_spared: bool = False, is_late: bool = False) -> None:
    """Kubelet starts a pod that was bound before; it needs a plugin that serves the device.

    ``is_late``: Kubelet lists the device only a while after that.
    """
    rig = play.rig
    serving = [plugin for plugin in rig.plugins if plugin.is_ready]
    in_use = rig.kubelet.devices_in_use
    free = frozenset().union(*rig.schedulable.values()) - in_use
    existing = sorted(
        uuid
        for uuid, name in played_changes.names(rig.gpus).items()
        if uuid in free and (name in layout_table.devices_by_gpu(play.change.after)) is is_spared
    )
    if existing and serving and not serving[0].is_terminating and "newcomer" not in rig.pod_names:
        uid = rig.add_pod(
            "newcomer", devices=frozenset(existing[:1]), phase="Pending" if is_late else "Running"
        )
        if is_late:
            rig.kubelet.listed_from_s[uid] = rig.clock.now_s + 0.6 * device_listing.LISTED_WITHIN_S
        play.pods[uid] = "newcomer"
        is_spared &= "spared" not in play.change.evicted
        if play.change.custom is None and not is_spared:
            play.may_go.add("newcomer")


def _end_pod(play: PlayedChange) -> None:
    for uid, name in play.pods.items():
        if name in ("affected", "spared") and uid in play.rig.pods:
            play.rig.remove_pod(uid)
            play.may_go.add(name)
            return


def _miss_controller(play: PlayedChange) -> None:
    """Let no DaemonSet controller run for longer than an agent waits for a daemon to stop."""
    rig = play.rig
    rig.daemons.controller_away_until_s = (
        rig.clock.now_s + 1.5 * agents.TIMEOUTS["plugin_timeout_s"]
    )


def _restart_kubelet(play: PlayedChange) -> None:
    """Let kubelet list no pod for longer than an agent waits for that."""
    play.rig.kubelet.lists_from_s = play.rig.clock.now_s + 30


def _break_start_hook(play: PlayedChange) -> None:
    if play.rig.hooks.text:
        play.rig.hooks.broken_once.add("start")


def _change_file(play: PlayedChange) -> None:
    """Swap the names of two layouts."""
    layout, other = play.change.layout, play.change.other.applied or ""
    lines = agents.CONFIG.replace(f"  {layout}:\n", "  *:\n").replace(
        f"  {other}:\n", f"  {layout}:\n"
    )
    play.config.text = lines.replace("  *:\n", f"  {other}:\n")
    if play.change.custom is None:
        play.may_go |= {"affected", "spared", "newcomer"}


def _break_file(play: PlayedChange) -> None:
    play.config.text = "version: ["


_WITHOUT_PARENTHESES = str.maketrans("", "", "()")  # they mark what has no compute instance yet


def kill(play: PlayedChange) -> None:
    """End the agent's process."""
    play.is_dead = True
    instances = layout_table.devices_by_gpu(layout_table.layout_of(play.rig.gpus))
    play.remnants = frozenset(each.translate(_WITHOUT_PARENTHESES) for each in instances)
    journal = play.rig.annotations.get(well_known.JOURNAL_ANNOTATION) or ""
    play.was_about_to_evict |= "hasEvicted" in journal


WRITES: Mapping[str, Callable[[PlayedChange], None]] = {
    "label, another layout": _request_another,
    "label, impossible layout": _request_impossible,
    "label, none": _request_nothing,
    "deploy label of the plugin": _write_deploy_label,
    "deploy label of a monitor": functools.partial(_disable_monitor, value="false"),
    "deploy label of a monitor removed": functools.partial(_disable_monitor, value=None),
    "cordon": _cordon,
    "Node registered again": lambda play: lives.register_again(play.rig),
    "taint removed": _remove_taint,
    "journal removed": _remove_journal,
    "journal cut short": _cut_journal,
    "pod starts where its device goes": _start_pod,
    "pod starts where its device stays": functools.partial(_start_pod, is_spared=True),
    "pod is bound where its device stays": functools.partial(
        _start_pod, is_spared=True, is_late=True
    ),
    "pod ends": _end_pod,
    "file, another layout": _change_file,
    "file broken": _break_file,
    "DaemonSet controller away": _miss_controller,
    "kubelet restarts": _restart_kubelet,
    "services of the host started": _start_services,
    "start hook broken once": _break_start_hook,
}
"""What another program or a person does to the node, by what it is written to."""


def ends(
    change: Change, write: str, *, unread: layout_table.Gpus | None = None
) -> Sequence[NodeEnd]:
    """Return how a change may end during which another program writes once.

    Args:
        change: What is requested.
        write: The name of the write.
        unread: The GPUs at the start of an agent that has not read the journal yet.
    """
    keeps_file = change.custom is not None or change.is_refused
    failed = NodeEnd("failed", change.was, change.before)
    unnamed = (NodeEnd("failed", None, change.before), NodeEnd("failed", None, change.after))
    allowed: Sequence[NodeEnd] = (change.end,)
    match write:
        case "label, another layout":
            allowed = (change.other,)
        case "label, impossible layout":
            # Once instances were created they stay, under a name only if they were verified.
            allowed = failed, *unnamed, NodeEnd("failed", change.layout, change.after)
        case "label, none":
            untouched = NodeEnd("success" if change.was else None, change.was, change.before)
            allowed = change.end, failed, *unnamed, untouched
        case "file, another layout" if not keeps_file:
            allowed = (change.other._replace(applied=change.layout),)
        case "file broken" if not keeps_file:
            # What is active when the file breaks stays, with success if it was verified before.
            allowed = change.end, failed, unnamed[1]
        case (
            "pod starts where its device goes"
            | "pod starts where its device stays"
            | "pod is bound where its device stays"
        ) if change.custom:
            # On demand no pod is evicted, nor one whose device is not known yet.
            allowed = change.end, failed
        case "Node registered again" if change.is_refused:
            allowed = failed, *unnamed
        case "journal removed" | "journal cut short" if change.is_refused and unread:
            # Nothing else says what the GPUs had: they stay as they are, under no layout's name.
            allowed = change.end, NodeEnd("failed", None, unread)
    return allowed


# -- all of it --------------------------------------------------------------------------------


class Exploration(NamedTuple):
    counts: Mapping[str, int]
    problems: Sequence[str]


def play_all(change: Change, *, step: int = 1) -> Exploration:
    """Kill the agent at each moment, and kill or disturb its successor at each of its moments.

    Args:
        change: What is requested.
        step: Strike at every n-th moment only: the same sample every time.
    """
    explorer = _Explorer(change, step)
    start = PlayedChange.of(change)
    once = explorer.kill_everywhere([start])
    twice = explorer.kill_everywhere(once)
    for play in (start, *once, *twice):
        explorer.rest(play.fork(), (change.end,))
    for play in (start, *once):
        for name, write in WRITES.items():
            explorer.disturb(play, name, write, itertools.count(step // 2, step))
    nodes = {"nodes after a kill": len(once), "nodes after two kills": len(twice)}
    return explorer.result({"moments": moments(change)} | nodes)


def moments(change: Change) -> int:
    """Return at how many moments an agent that nothing disturbs can be struck."""
    play = PlayedChange.of(change)
    play.serve(_nothing_happens)
    return play.moment


def play_sample(change: Change, *, step: int, every: int) -> Exploration:
    """Kill the agent at every n-th moment, and let it rest or be disturbed before the next one.

    Args:
        change: What is requested.
        step: Kill at every n-th moment.
        every: Write at every n-th moment of an agent, and to every n-th node after a kill, or to
            every third if that requests something else; the writes alternate.
    """
    explorer = _Explorer(change, step)
    start = PlayedChange.of(change)
    once = explorer.kill_everywhere([start])
    for play in (start, *once):
        explorer.rest(play.fork(), (change.end,))
    for number, (name, write) in enumerate(WRITES.items()):
        explorer.disturb(start, name, write, itertools.count(1 + number % every, every))
        nth = 3 if name.startswith("label, ") else every
        for play in once[number % nth :: nth]:
            explorer.disturb(play, name, write, (0,))
    return explorer.result({"nodes after a kill": len(once)})


class _Explorer:
    """Plays a change over and over, and counts."""

    def __init__(self, change: Change, step: int) -> None:
        self._change = change
        self._step = step
        self._visited: set[Hashable] = set()
        self._judged_keys: set[Hashable] = set()
        self.strikes: collections.Counter[str] = collections.Counter(kills=0, writes=0)
        self.tried = self.struck = self.judged = self.converged = 0
        self.problems: list[str] = []

    def kill_everywhere(self, plays: Sequence[PlayedChange]) -> Sequence[PlayedChange]:
        """Kill an agent of each play at each moment; return one play for each different node."""
        nodes = []
        for play in plays:
            for number in itertools.count(max(1, self._step // 2), self._step):
                forked = play.fork()
                outcome = forked.serve(_Strike(number, kill))
                if not forked.is_dead:
                    break
                self.tried += 1
                self.struck += outcome is None
                self.strikes["kills"] += 1
                self.problems += forked.misnaming_problems()
                if forked.key not in self._visited:
                    self._visited.add(forked.key)
                    forked.path = (*play.path, f"killed at {number}")
                    nodes.append(forked)
        return nodes

    def disturb(
        self,
        play: PlayedChange,
        name: str,
        write: Callable[[PlayedChange], object],
        moments: Iterable[int],
    ) -> None:
        """Have another program write at moments of an agent, and judge how each run ends."""
        for number in moments:
            forked, strike = play.fork(), _Strike(number, functools.partial(self._write, write))
            forked.path = (*play.path, f"{name} at {number}")
            outcome = forked.serve(strike)
            if not strike.has_come:
                return
            if strike.has_struck and not forked.is_dead:
                self.tried += 1
                self.struck += 1
                self.strikes["writes"] += 1
                # The journal is read when the agent starts, and again under the lock.
                unread = None if number > 2 else layout_table.layout_of(play.rig.gpus)
                self._judge(forked, outcome, ends(self._change, name, unread=unread))

    def result(self, counts: Mapping[str, int]) -> Exploration:
        """Return all counts, and what was not as it must be."""
        numbers = {
            "tried": self.tried,
            "struck": self.struck,
            **counts,
            "judged": self.judged,
            "converged": self.converged,
        }
        return Exploration(numbers | self.strikes, self.problems)

    def _write(self, write: Callable[[PlayedChange], object], play: PlayedChange) -> None:
        """Write, and go on only where no other strike has met the same node at the same call."""
        write(play)
        key = write, "".join(play.rig.log[-1:]), play.key, play.request_key
        play.is_dead = key in self._visited
        self._visited.add(key)

    def rest(self, play: PlayedChange, allowed: Sequence[NodeEnd]) -> int:
        """Let an agent serve undisturbed, and judge its end; return how many moments it had."""
        self._judge(play, play.serve(_nothing_happens), allowed)
        return play.moment

    def _judge(
        self, play: PlayedChange, outcome: outcomes.Outcome | None, allowed: Sequence[NodeEnd]
    ) -> None:
        problems = play.judge(outcome, allowed)
        self.problems += (f"{', '.join(play.path)}: {problem}" for problem in problems)
        self.judged += 1
        self.converged += not problems
        if problems or play.key in self._judged_keys:
            return
        self._judged_keys.add(play.key)
        # The next request works, despite what was written before.
        following = play.fork()
        following.config.text = agents.CONFIG
        following.request(_NEXT.applied or "")
        following.may_go |= {"affected", "spared", "newcomer"}
        outcome = following.serve(_nothing_happens)
        self.problems += (
            f"{', '.join(play.path)}, then the next request: {problem}"
            for problem in following.judge(outcome, (_NEXT,))
        )


class _Strike:
    """Strikes an agent at one of its moments."""

    def __init__(self, moment: int, what: Callable[[PlayedChange], object]) -> None:
        self._moment = moment
        self._what = what
        self.has_come = False
        self.has_struck = False
        """Whether it made a difference."""

    def __call__(self, play: PlayedChange) -> None:
        if play.moment != self._moment or self.has_come:
            return
        self.has_come = True
        before = play.key, play.request_key
        self._what(play)
        self.has_struck = (play.key, play.request_key) != before
        # A run without a strike was judged before.
        play.is_dead |= not self.has_struck


def _nothing_happens(_play: PlayedChange) -> None: ...
