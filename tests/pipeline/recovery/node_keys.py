"""What tells nodes in memory apart: strikes that lead to the same node count once."""

import dataclasses
from collections.abc import Hashable, Mapping
from collections.abc import Set as AbstractSet

from mig_manager.core.objects import well_known
from tests.rigs import layout_table
from tests.rigs.node import cluster_parts, node_rig, parts

_NOT_COMPARED: Mapping[type, frozenset[str]] = {
    node_rig.NodeRig: frozenset(
        {
            # ``key_of`` has what matters of them, without times and serial numbers.
            *("gpus", "pods", "verified_layout_file"),
            "host_copy_file",  # it follows from the rest, with times
            "log",  # what happened, which no agent reads
            "owner",  # no agent reads it
            # They are the rig's own, or strike by themselves.
            *("clock", "failures", "lost_answers", "callbacks"),
        }
    ),
    cluster_parts.NodeObject: frozenset(
        {
            "annotations",  # ``key_of`` has what matters of them
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
            *("devices_by_pod", "claims"),  # ``key_of`` has them by names of pods
            *("hidden", "reported_devices"),  # they repeat what is schedulable
        }
    ),
    # Their numbers are those of the driver's starts: ``key_of`` has only the devices.
    parts.DraDriver: frozenset({"slices"}),
    parts.Daemons: frozenset({"controller_away_until_s"}),
    parts.Driver: frozenset({"next_step", "executed_steps"}),
    parts.Host: frozenset({"refreshes"}),
    parts.Hooks: frozenset({"commands", "environment"}),
}
"""The fields of the node and its parts that make no difference to a strike, or only by time."""


def key_of(rig: node_rig.NodeRig) -> Hashable:
    """Return what the next agent and the pods meet on a node.

    Every field of the node and of its parts is compared, but those in ``_NOT_COMPARED``.
    """
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
        *(rig.node_object.status.get(name) for name in ("config", "configHash", "state", "phase")),
        rig.node_object.annotations.get(well_known.JOURNAL_ANNOTATION),
        layout_table.devices_in_words(rig.gpus),
        tuple(gpu.recovers_by_reset for gpu in rig.gpus),
        tuple(uuid for gpu in rig.gpus for uuid in gpu.mig_uuids),
        tuple(pods),
        frozenset(listed),
        None if slices is None else tuple(_as_key(each.uuids) for each in slices),
        rig.clock.now_s < rig.daemons.controller_away_until_s,
        rig.kubelet.hidden is rig.kubelet.schedulable,
        rig.kubelet.all_listed_from_s > rig.clock.now_s,
        len(rig.verified_layout_file.saved),
    )


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
