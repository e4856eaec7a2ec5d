"""What other programs and people write to a node while an agent changes it.

Each write has the ends that it allows: data, which neither the planner nor the journal gives.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mig_manager.agent.pods import device_listing
from mig_manager.core.objects import well_known
from tests.pipeline import agent_loop
from tests.pipeline.recovery.played_changes import PlayedChange
from tests.pipeline.swept_changes import NodeChange, NodeEnd
from tests.rigs import layout_table
from tests.rigs.node import agents, nodes


class Disturbed(NamedTuple):
    """A change whose agent a write has disturbed."""

    change: NodeChange
    gpus_if_journal_unread: layout_table.Gpus | None
    """The GPUs at the agent's start; None if it had read the journal before the write."""


def _undisturbed_end(disturbed: Disturbed) -> Sequence[NodeEnd]:
    return (disturbed.change.end,)


class Write(NamedTuple):
    """A write of another program or a person."""

    name: str  # by what it is written to
    act: Callable[[PlayedChange], object]
    ends: Callable[[Disturbed], Sequence[NodeEnd]] = _undisturbed_end  # those that it allows
    is_request: bool = False  # whether the label requests something else with it


# -- what they do -----------------------------------------------------------------------------


def _request_another(play: PlayedChange) -> None:
    play.request(play.change.other.applied or "")
    play.let_pods_go()


def _request_impossible(play: PlayedChange) -> None:
    play.request("too-much")


def _request_nothing(play: PlayedChange) -> None:
    play.request(None)


def _write_deploy_label(play: PlayedChange) -> None:
    if well_known.PLUGIN_DEPLOY_LABEL in play.rig.node_object.labels:
        play.rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] = "true"


def _disable_monitor(play: PlayedChange, value: str | None) -> None:
    if nodes.EXPORTER in play.rig.node_object.labels:
        nodes.write_deploy_label(play.rig, nodes.EXPORTER, value)


def _cordon(play: PlayedChange) -> None:
    play.rig.node_object.is_unschedulable = play.rig.owner.is_cordoned = True


def _remove_taint(play: PlayedChange) -> None:
    play.rig.node_object.has_reconfiguring_taint = False


def _start_services(play: PlayedChange) -> None:
    host = play.rig.host
    host.services |= dict.fromkeys(host.services.keys() - play.rig.owner.stopped_services, True)


def _remove_journal(play: PlayedChange) -> None:
    play.rig.node_object.annotations.pop(well_known.JOURNAL_ANNOTATION, None)


def _cut_journal(play: PlayedChange) -> None:
    text = play.rig.node_object.annotations.get(well_known.JOURNAL_ANNOTATION)
    if text is not None and text.endswith("}"):
        play.rig.node_object.annotations[well_known.JOURNAL_ANNOTATION] = text[: len(text) // 2]


def _start_pod(play: PlayedChange, *, is_spared: bool = False, is_late: bool = False) -> None:
    """Kubelet starts a pod that was bound before; it needs a plugin that serves the device.

    ``is_late``: Kubelet lists the device only a while after that.
    """
    rig = play.rig
    serving = [plugin for plugin in rig.pods.plugins if plugin.is_ready]
    in_use = rig.kubelet.devices_in_use
    free = frozenset().union(*rig.kubelet.schedulable.values()) - in_use
    existing = sorted(
        uuid
        for uuid, name in layout_table.device_names(rig.gpus).items()
        if uuid in free and (name in layout_table.devices_by_gpu(play.change.after)) is is_spared
    )
    if existing and serving and not serving[0].is_terminating and "newcomer" not in rig.pods.names:
        uid = rig.pods.add(
            "newcomer", devices=frozenset(existing[:1]), phase="Pending" if is_late else "Running"
        )
        if is_late:
            rig.kubelet.pod_listed_from_s[uid] = (
                rig.clock.now_s + 0.6 * device_listing.LISTED_WITHIN_S
            )
        play.pods[uid] = "newcomer"
        is_spared &= "spared" not in play.change.evicted
        if play.change.custom is None and not is_spared:
            play.may_go.add("newcomer")


def _end_pod(play: PlayedChange) -> None:
    for uid, name in play.pods.items():
        if name in ("affected", "spared") and uid in play.rig.pods:
            play.rig.pods.remove(uid)
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
    play.rig.kubelet.all_listed_from_s = play.rig.clock.now_s + 30


def _break_start_hook(play: PlayedChange) -> None:
    if play.rig.hooks.text:
        play.rig.hooks.broken_once.add("start")


def _change_file(play: PlayedChange) -> None:
    """Swap the names of two layouts."""
    layout, other = play.change.layout, play.change.other.applied or ""
    lines = agents.LAYOUTS_TEXT.replace(f"  {layout}:\n", "  *:\n").replace(
        f"  {other}:\n", f"  {layout}:\n"
    )
    play.config.text = lines.replace("  *:\n", f"  {other}:\n")
    if play.change.custom is None:
        play.let_pods_go()


def _break_file(play: PlayedChange) -> None:
    play.config.text = "version: ["


# -- how the change may end -------------------------------------------------------------------


def _failed_end(change: NodeChange) -> NodeEnd:
    return NodeEnd("failed", change.was, change.before)


def _unnamed_ends(change: NodeChange) -> Sequence[NodeEnd]:
    return NodeEnd("failed", None, change.before), NodeEnd("failed", None, change.after)


def _after_another(disturbed: Disturbed) -> Sequence[NodeEnd]:
    return (disturbed.change.other,)


def _after_impossible(disturbed: Disturbed) -> Sequence[NodeEnd]:
    change = disturbed.change
    # Once instances were created they stay, under a name only if they were verified.
    verified = NodeEnd("failed", change.layout, change.after)
    return _failed_end(change), *_unnamed_ends(change), verified


def _after_nothing(disturbed: Disturbed) -> Sequence[NodeEnd]:
    change = disturbed.change
    untouched = NodeEnd("success" if change.was else None, change.was, change.before)
    return change.end, _failed_end(change), *_unnamed_ends(change), untouched


def _after_changed_file(disturbed: Disturbed) -> Sequence[NodeEnd]:
    change = disturbed.change
    if change.custom is not None or change.is_refused:
        return (change.end,)
    return (change.other._replace(applied=change.layout),)


def _after_broken_file(disturbed: Disturbed) -> Sequence[NodeEnd]:
    change = disturbed.change
    if change.custom is not None or change.is_refused:
        return (change.end,)
    # What is active when the file breaks stays, with success if it was verified before.
    return change.end, _failed_end(change), NodeEnd("failed", None, change.after)


def _after_pod_start(disturbed: Disturbed) -> Sequence[NodeEnd]:
    change = disturbed.change
    # On demand no pod is evicted, nor one whose device is not known yet.
    return (change.end, _failed_end(change)) if change.custom else (change.end,)


def _after_registration(disturbed: Disturbed) -> Sequence[NodeEnd]:
    change = disturbed.change
    return (_failed_end(change), *_unnamed_ends(change)) if change.is_refused else (change.end,)


def _after_lost_journal(disturbed: Disturbed) -> Sequence[NodeEnd]:
    change = disturbed.change
    if not change.is_refused or disturbed.gpus_if_journal_unread is None:
        return (change.end,)
    # Nothing else says what the GPUs had: they stay as they are, under no layout's name.
    return change.end, NodeEnd("failed", None, disturbed.gpus_if_journal_unread)


WRITES: Sequence[Write] = (
    Write("label, another layout", _request_another, _after_another, is_request=True),
    Write("label, impossible layout", _request_impossible, _after_impossible, is_request=True),
    Write("label, none", _request_nothing, _after_nothing, is_request=True),
    Write("deploy label of the plugin", _write_deploy_label),
    Write("deploy label of a monitor", functools.partial(_disable_monitor, value="false")),
    Write("deploy label of a monitor removed", functools.partial(_disable_monitor, value=None)),
    Write("cordon", _cordon),
    Write(
        "Node registered again",
        lambda play: agent_loop.register_again(play.rig),
        _after_registration,
    ),
    Write("taint removed", _remove_taint),
    Write("journal removed", _remove_journal, _after_lost_journal),
    Write("journal cut short", _cut_journal, _after_lost_journal),
    Write("pod starts where its device goes", _start_pod, _after_pod_start),
    Write(
        "pod starts where its device stays",
        functools.partial(_start_pod, is_spared=True),
        _after_pod_start,
    ),
    Write(
        "pod is bound where its device stays",
        functools.partial(_start_pod, is_spared=True, is_late=True),
        _after_pod_start,
    ),
    Write("pod ends", _end_pod),
    Write("file, another layout", _change_file, _after_changed_file),
    Write("file broken", _break_file, _after_broken_file),
    Write("DaemonSet controller away", _miss_controller),
    Write("kubelet restarts", _restart_kubelet),
    Write("services of the host started", _start_services),
    Write("start hook broken once", _break_start_hook),
)
