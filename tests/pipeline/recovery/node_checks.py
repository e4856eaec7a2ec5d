"""What must hold of a node between strikes, and once its last agent rests."""

from collections.abc import Iterator, Sequence

from mig_manager.agent import outcomes
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from tests.pipeline import claimed_devices
from tests.pipeline.recovery.played_changes import MAX_PAUSES, PlayedChange
from tests.pipeline.swept_changes import NodeEnd
from tests.rigs import layout_table
from tests.rigs.node import agents, ends


def problems_at_rest(
    play: PlayedChange, outcome: outcomes.Outcome | None, node_ends: Sequence[NodeEnd]
) -> list[str]:
    """Return what is not as it must be once the agent rests.

    Args:
        play: The node and its request.
        outcome: That of the agent's last run.
        node_ends: How the node may end.
    """
    rig = play.rig
    if not play.is_over:
        if play.request_key[0] is None and rig.driver.lost:
            return []  # No repair follows, and the instances wait for this GPU.
        return [f"no end after {MAX_PAUSES} pauses"]
    labels, gpus = rig.node_object.labels, layout_table.devices_in_words(rig.gpus)
    problems = [*play.problems]
    state, applied = labels.get(well_known.STATE_LABEL), labels.get(well_known.APPLIED_LABEL)
    if not any(_is_end(play, NodeEnd(state, applied, gpus), each) for each in node_ends):
        problems.append(f"ended {state} {applied} {gpus}: {rig.node_object.status.get('message')}")
    expected_states = {outcome.state.value} if outcome and play.request_key[0] else set()
    if len({state, rig.node_object.status.get("state"), *expected_states}) != 1:
        problems.append(
            f"label {state}, status {rig.node_object.status.get('state')}, not {expected_states}"
        )
    ready = (rig.node_object.ready_condition or {}).get("status")
    if play.request_key[0] and ready != str(state == run_status.State.SUCCESS.value):
        problems.append(f"ended {state} with the condition {rig.node_object.ready_condition}")
    problems += _not_restored(play)
    if play.is_as_begun and any(gpu.recovers_by_reset for gpu in rig.gpus):
        problems.append(f"not repaired: {rig.node_object.recovery_condition}")
    problems += _evicted_pods(play)
    if rig.dra_driver.is_installed:
        serving = rig.pods.dra_drivers
        devices = claimed_devices.published_uuids(rig)
    else:
        serving = rig.pods.plugins
        devices = frozenset().union(*rig.kubelet.schedulable.values())
    if len(serving) != 1 or devices != layout_table.device_names(rig.gpus).keys():
        problems.append(f"{len(serving)} plugins or drivers offer {sorted(devices)}")
    return problems


def _is_end(play: PlayedChange, end: NodeEnd, expected: NodeEnd) -> bool:
    """Return whether a node is as expected.

    What a killed agent created stays where it is if the changed file has it too: then it may
    stand, and have others stand, elsewhere.
    """
    is_changed = play.config.text != agents.LAYOUTS_TEXT
    kept = layout_table.devices_by_gpu(end.gpus) & play.remnants if is_changed else set()
    if kept <= layout_table.devices_by_gpu(expected.gpus):
        return end == expected
    return end._replace(gpus=()) == expected._replace(gpus=()) and (
        [*map(layout_table.counts, end.gpus)] == [*map(layout_table.counts, expected.gpus)]
    )


def _not_restored(play: PlayedChange) -> Iterator[str]:
    rig = play.rig
    yield from ends.unrestored_on(rig)
    if "MonitorNotReady" in rig.node_object.events and not rig.daemons.controller_away_until_s:
        yield "a monitor is awaited that does not start"


def misnaming_problems(play: PlayedChange) -> Iterator[str]:
    """Yield a problem if the label names a layout that is not active."""
    change, gpus = play.change, layout_table.devices_in_words(play.rig.gpus)
    layouts = {change.was: change.before, change.layout: change.after, None: gpus}
    applied = play.rig.node_object.labels.get(well_known.APPLIED_LABEL)
    if layouts[applied] != gpus:
        yield f"killed with {gpus} as {applied}"


def _evicted_pods(play: PlayedChange) -> Iterator[str]:
    may_go = play.change.evicted | play.may_go
    for uid, name in play.pods.items():
        if uid not in play.rig.pods and name not in may_go:
            yield f"{name} was evicted"
