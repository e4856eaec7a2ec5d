"""The journal of a change, for the run after a kill.

The journal is an undo stack. Its entries are in records by what undoes them: a write to the Node
(``NodeEntries``), a program on the host (``HostEntries``), or a change of the GPUs
(``GpuEntries``). ``apply`` and ``boot`` keep the same journal in a file, with entries of the GPUs
only.
"""

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any, TypedDict

from mig_manager.core import model
from mig_manager.core.files import json_text
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import node_entries, run_status, snapshot_codec

JOURNAL_VERSION = 1
_READABLE = (JOURNAL_VERSION, JOURNAL_VERSION + 1)
"""One version ahead, for a downgrade: a new version may add members, and must not change the
meaning of existing ones."""

_MAX_GPUS = 64
_MAX_SERVICES = 256  # services of the host: a full list, and services that systemd stops with them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostEntries:
    """Changes of the host to undo: stopped services, and the hook of a change."""

    stopped_services: tuple[str, ...] = ()
    """Services of the machine that were stopped, in the order of the stop."""
    must_run_exit_hooks: bool = False
    """Whether the ``apply-exit`` hooks must run, because ``apply-start`` hooks have begun."""

    def to_data(self) -> dict[str, Any]:
        """Return the members of the journal's JSON."""
        return {"hostServices": list(self.stopped_services), "exitHook": self.must_run_exit_hooks}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> "HostEntries":
        """Parse the members of the journal's JSON; ValueError if one is invalid."""
        services = json_text.string_list(data, "hostServices")
        if len(services) > _MAX_SERVICES:
            raise ValueError(f"hostServices has {len(services)} names")
        return HostEntries(
            stopped_services=tuple(services), must_run_exit_hooks=data.get("exitHook") is True
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuEntries:
    """Changes of the GPUs to undo or to finish."""

    snapshots: model.Snapshots = ()
    """The GPUs before the change, for a rollback. Empty before the change. Once it is verified or
    undone, only GPUs that were unreachable then remain, to be restored when they are back."""
    is_verified: bool = False  # whether the change of the snapshots was verified
    has_stale_files: bool = False
    """Whether device nodes and CDI specs may be stale, even without snapshots."""
    persistent_gpus: tuple[str, ...] = ()
    """UUIDs of GPUs whose persistence mode was switched off for a reset, until it is on again."""

    def with_snapshots(self, snapshots: model.Snapshots) -> "GpuEntries":
        """Return the entries with the snapshots of a change that is not verified."""
        return dataclasses.replace(self, snapshots=snapshots, is_verified=False)

    def are_unreachable(self, gpus: model.ObservedGpus) -> bool:
        """Return whether all GPUs of the snapshots are unreachable: none can be restored now."""
        return gpus.unreachable_snapshots(self.snapshots) == self.snapshots

    def to_data(self) -> dict[str, Any]:
        """Return the members of the journal's JSON."""
        data: dict[str, Any] = {}
        if self.snapshots:
            data["snapshot"] = snapshot_codec.to_data(self.snapshots)
        if self.snapshots and self.is_verified:
            data["verified"] = True
        if self.has_stale_files:
            data["staleFiles"] = True
        if self.persistent_gpus:
            data["persistentGpus"] = list(self.persistent_gpus)
        return data

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> "GpuEntries":
        """Parse the members of the journal's JSON; ValueError if one is invalid."""
        uuids = json_text.string_list(data, "persistentGpus")
        if len(uuids) > _MAX_GPUS:
            raise ValueError(f"persistentGpus has {len(uuids)} UUIDs")
        return GpuEntries(
            snapshots=snapshot_codec.from_data(data.get("snapshot", [])),
            is_verified=data.get("verified") is True,
            has_stale_files=data.get("staleFiles") is True,
            # Only UUIDs of observed GPUs have an effect, so other texts are harmless.
            persistent_gpus=tuple(uuids),
        )


class Remainder(enum.Enum):
    """What remains to be done for the changes of a journal."""

    NOTHING = "nothing"
    PERSISTENCE = "persistence mode is to be switched on again"
    LATER = "device files are stale, or a verified change has not restored an unreachable GPU"
    """The next run does that, whatever it applies. No change is under way."""
    CHANGE = "node, host or GPUs must be restored: a run is under way, or was interrupted"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The undo stack of a change, written before the change.

    The first fields describe the change; alone they keep no journal.
    """

    layout: str
    annotation_hash: str = ""  # as in ``run_status.RunStatus``
    boot_id: str = ""  # the boot in which it was written
    applied_before: str = ""  # the layout before the change, whose label an undo restores
    is_draining: bool = False
    """Whether a drain for this layout evicts pods and has not ended. It stays after a failed run
    whose next attempt continues the drain, and ends before the GPUs are changed."""
    has_evicted: bool = False
    """Whether this run evicts pods, or continues such a drain. It stays until the run ends: a
    failure after the drain counts as one that cost pods."""
    node: node_entries.NodeEntries = dataclasses.field(default_factory=node_entries.NodeEntries)
    host: HostEntries = dataclasses.field(default_factory=HostEntries)
    gpus: GpuEntries = dataclasses.field(default_factory=GpuEntries)

    @property
    def key(self) -> run_status.RequestKey:
        """Which request the run is for."""
        return run_status.RequestKey(self.layout, self.annotation_hash)

    @property
    def remainder(self) -> Remainder:
        """What remains to be done; of several, the greatest."""
        gpus = self.gpus
        is_restored = self.node == node_entries.NodeEntries() and self.host == HostEntries()
        if not is_restored or (gpus.snapshots and not gpus.is_verified):
            return Remainder.CHANGE
        if gpus.snapshots or gpus.has_stale_files:
            return Remainder.LATER
        return Remainder.PERSISTENCE if gpus.persistent_gpus else Remainder.NOTHING

    @property
    def without_creations(self) -> "Journal":
        """The journal without the instances that its change created, which restore nothing."""
        snapshots = tuple(dataclasses.replace(each, created=None) for each in self.gpus.snapshots)
        return dataclasses.replace(self, gpus=self.gpus.with_snapshots(snapshots))

    def remaining(self, end: node_entries.RunEnd) -> "Journal":
        """Return what stays at the end of a run: always the entries of the host and the GPUs."""
        return dataclasses.replace(
            self,
            applied_before=self.applied_before if self.gpus.snapshots else "",
            is_draining=end is node_entries.RunEnd.DRAIN_RETRIED,
            has_evicted=False,
            node=self.node.remaining(end),
        )

    def at_start(self, key: run_status.RequestKey, *, boot_id: str, may_drain: bool) -> "Journal":
        """Return the journal at the start of a run for a request.

        A drain continues only for the request that began it, and only if evictions are allowed.
        """
        is_same_request = self.key == key
        # A reboot switches persistence mode off.
        persistent_gpus = self.gpus.persistent_gpus if self.boot_id == boot_id else ()
        return dataclasses.replace(
            self,
            layout=key.layout,
            annotation_hash=key.annotation_hash,
            boot_id=boot_id,
            is_draining=self.is_draining and is_same_request and may_drain,
            has_evicted=self.has_evicted and is_same_request,
            gpus=dataclasses.replace(self.gpus, persistent_gpus=persistent_gpus),
        )

    def to_json(self) -> str:
        """Return the annotation's value."""
        data: dict[str, Any] = {
            "version": JOURNAL_VERSION,
            "config": self.layout,
            "annotationHash": self.annotation_hash,
            "bootId": self.boot_id,
            "applied": self.applied_before,
            "draining": self.is_draining,
            "hasEvicted": self.has_evicted,
            **self.node.to_data(),
            **self.host.to_data(),
            **self.gpus.to_data(),
        }
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> "Journal":
        """Parse a journal; ValueError if it is invalid, or of an unknown version."""
        data = json_text.parse_object(text)
        if data.get("version") not in _READABLE:
            raise ValueError("not a journal of a version this agent knows")
        applied = data.get("applied", "")
        if not node_entries.is_label_value(applied):
            raise ValueError("applied is not a label's value")
        return Journal(
            layout=json_text.string(data, "config"),
            annotation_hash=json_text.string(data, "annotationHash", ""),
            boot_id=json_text.string(data, "bootId", ""),
            applied_before=applied,
            is_draining=data.get("draining") is True,
            has_evicted=data.get("hasEvicted") is True,
            node=node_entries.NodeEntries.from_data(data),
            host=HostEntries.from_data(data),
            gpus=GpuEntries.from_data(data),
        )


class Fields(TypedDict, total=False):
    """New values of a journal's fields; fields that it lacks stay."""

    layout: str
    applied_before: str
    is_draining: bool
    has_evicted: bool
    node: node_entries.NodeEntries
    host: HostEntries
    gpus: GpuEntries


NONE = Journal(layout="")  # nothing to restore


def parse_or_none(text: str | None) -> Journal | None:
    """Parse a journal; None if it is missing, invalid or of an unknown version."""
    try:
        return Journal.from_json(text) if text else None
    except ValueError:
        return None


def patch_between(
    before: Journal, after: Journal, view: node_object.NodeView
) -> node_object.NodePatch:
    """Return the patch of the Node that belongs to a change of the journal's entries."""
    labels: dict[str, str | None] = {}
    if after.gpus.snapshots and after.gpus.snapshots != before.gpus.snapshots:
        labels[well_known.APPLIED_LABEL] = None
    elif before.applied_before and not after.applied_before:
        labels[well_known.APPLIED_LABEL] = before.applied_before
    patch = node_entries.patch_between(before.node, after.node, view)
    return patch.merge(node_object.NodePatch(labels=labels))


def unlisted_pauses(view: node_object.NodeView) -> tuple[str, ...]:
    """Return the deploy labels with our paused value that the Node's journal does not list."""
    journal = parse_or_none(view.annotations.get(well_known.JOURNAL_ANNOTATION)) or NONE
    return tuple(
        key
        for key, value in view.labels.items()
        if well_known.is_deploy_label(key)
        and value == well_known.PAUSED_VALUE
        and key not in journal.node.paused_labels
    )
