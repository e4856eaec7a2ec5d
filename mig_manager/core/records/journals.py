"""The journal of a change, for the run after a kill.

The journal is the agent's undo stack: each member is something to restore or to finish.
``patch_between`` returns what the Node gets with other entries. ``apply`` and ``boot`` keep the
same journal in a file.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypedDict

from mig_manager.core import model
from mig_manager.core.files import json_text
from mig_manager.core.node import node_object, well_known
from mig_manager.core.records import gpu_codec

JOURNAL_VERSION = 2  # 1 had neither boot id nor snapshot
_READABLE = range(JOURNAL_VERSION - 1, JOURNAL_VERSION + 2)
"""One version back and one ahead, for upgrade and downgrade: a new version may add members, and
must not change the meaning of existing ones."""

_MAX_GPUS = 64
_MAX_SERVICES = 256  # services of the host: a full list, and services that systemd stops with them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """A change of the label that names the device plugin's config."""

    before: str | None  # None: the node had no such label
    now: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The undo stack of a change, written before the change."""

    config: str
    annotation_hash: str = ""  # as in ``run_status.RunStatus``
    hold_taint: bool = False  # whether the node has ``well_known.HOLD_TAINT``
    paused_labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Deploy label -> its value before we paused it, in the order of the resume."""
    plugin_config: PluginConfig | None = None  # set back unless the run succeeds
    host_services: tuple[str, ...] = ()
    """Services of the machine that were stopped, in the order of the stop."""
    exit_hook: bool = False
    """Whether the ``apply-exit`` hooks must run, because ``apply-start`` hooks have."""
    rebooted_from: str = ""  # the boot in which this request rebooted the machine; empty: none
    draining: bool = False
    """Whether a drain for this layout evicts pods and has not ended; written before it does."""
    has_evicted: bool = False  # whether this run evicts pods; written before it does
    has_plugin: bool = False
    """Whether a device plugin served the node before the pause: one must run again, and the
    journal stays until its devices are verified."""
    has_dra_driver: bool = False  # whether NVIDIA's DRA driver served it before the pause
    applied: str = ""  # the layout before the change, whose label an undo restores
    boot_id: str = ""  # the boot in which it was written; empty in version 1
    snapshot: tuple[model.GpuSnapshot, ...] = ()
    """The GPUs before the change under way, for the rollback. Empty before the change and once it
    is verified or undone."""
    stale_files: bool = False
    """Whether device nodes and CDI specs may be outdated, even without a snapshot."""
    persistent_gpus: tuple[str, ...] = ()
    """UUIDs of GPUs whose persistence mode was switched off for a reset, until it is on again."""

    @property
    def request(self) -> tuple[str, str]:
        """Name of the layout, and hash of its annotation."""
        return self.config, self.annotation_hash

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to restore, and nothing to refresh."""
        return self.has_nothing_to_undo and not (self.stale_files or self.persistent_gpus)

    @property
    def has_only_persistence(self) -> bool:
        """Whether the change has ended, and only persistence mode is to be switched on again."""
        return bool(self.persistent_gpus) and self.has_nothing_to_undo and not self.stale_files

    @property
    def has_nothing_to_undo(self) -> bool:
        """Whether there is nothing to restore: no run was interrupted."""
        return not (
            self.blocks_workloads
            or self.plugin_config
            or self.snapshot
            or self.host_services
            or self.exit_hook
        )

    @property
    def has_at_most_snapshot(self) -> bool:
        """Whether only instances remain: after a success, instances of unreachable GPUs."""
        return dataclasses.replace(self, snapshot=()).has_nothing_to_undo

    @property
    def without_creations(self) -> "Journal":
        """The journal without the instances that its change created, which restore nothing."""
        snapshot = (dataclasses.replace(each, created=None) for each in self.snapshot)
        return dataclasses.replace(self, snapshot=tuple(snapshot))

    @property
    def blocks_workloads(self) -> bool:
        """Whether workloads cannot use the node, or its devices are not verified yet."""
        has_paused = self.has_plugin or self.has_dra_driver
        return self.keeps_pods_away or has_paused or bool(self.rebooted_from)

    @property
    def keeps_pods_away(self) -> bool:
        """Whether the node has our taint, or paused labels."""
        return self.hold_taint or bool(self.paused_labels)

    @property
    def remaining(self) -> "Journal":
        """The journal without the entries that a write to the Node restores."""
        return Journal(
            config=self.config,
            annotation_hash=self.annotation_hash,
            applied=self.applied if self.snapshot else "",
            boot_id=self.boot_id,
            snapshot=self.snapshot,
            host_services=self.host_services,
            exit_hook=self.exit_hook,
            stale_files=self.stale_files,
            persistent_gpus=self.persistent_gpus,
        )

    @property
    def remaining_with_proof(self) -> "Journal":
        """The remaining journal, if the next run must still verify the devices."""
        return dataclasses.replace(
            self.remaining, has_plugin=self.has_plugin, has_dra_driver=self.has_dra_driver
        )

    @property
    def remaining_with_taint(self) -> "Journal":
        """The remaining journal, if the node stays tainted for the next attempt of a drain."""
        proof = self.remaining_with_proof
        return dataclasses.replace(proof, hold_taint=self.hold_taint, draining=True)

    def at_start(self, request: tuple[str, str], *, boot_id: str, may_drain: bool) -> "Journal":
        """Return the journal at the start of a run for a request.

        A drain continues only for the request that began it, and only if evictions are allowed.
        """
        is_same_boot = self.boot_id == boot_id
        return dataclasses.replace(
            self,
            config=request[0],
            annotation_hash=request[1],
            boot_id=boot_id,
            # A reboot switches persistence mode off.
            persistent_gpus=self.persistent_gpus if is_same_boot else (),
            draining=self.draining and self.request == request and may_drain,
            has_evicted=self.has_evicted and self.request == request,
        )

    def to_json(self) -> str:
        """Return the annotation's value; older versions ignore members they do not know."""
        data: dict[str, Any] = {
            "version": JOURNAL_VERSION,
            "config": self.config,
            "annotationHash": self.annotation_hash,
            "holdTaint": self.hold_taint,
            "pausedLabels": dict(self.paused_labels),
            "hostServices": list(self.host_services),
            "exitHook": self.exit_hook,
            "rebootedFrom": self.rebooted_from,
            "draining": self.draining,
            "hasPlugin": self.has_plugin,
            "hasDraDriver": self.has_dra_driver,
            "applied": self.applied,
            "bootId": self.boot_id,
        }
        if self.snapshot:
            data["snapshot"] = gpu_codec.to_data(self.snapshot)
        if self.has_evicted:
            data["hasEvicted"] = True
        if self.stale_files:
            data["staleFiles"] = True
        if self.persistent_gpus:
            data["persistentGpus"] = list(self.persistent_gpus)
        if self.plugin_config:
            data["pluginConfig"] = dataclasses.asdict(self.plugin_config)
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> "Journal":
        """Parse a journal; ValueError if it is invalid, or of an unknown version."""
        data = json_text.parse_object(text)
        if data.get("version") not in _READABLE:
            raise ValueError("not a journal of a version this agent knows")
        paused = data.get("pausedLabels")
        # One invalid label would make the API server refuse the whole restore.
        if not isinstance(paused, dict) or not all(
            well_known.is_deploy_label(key) and _is_label_value(value)
            for key, value in paused.items()
        ):
            raise ValueError("pausedLabels is not a map of deploy labels")
        hold, name = data.get("holdTaint"), data.get("config")
        if not (isinstance(hold, bool) and isinstance(name, str)):
            raise ValueError("bad type of holdTaint or config")  # noqa: TRY004 - content
        if not _is_label_value(data.get("applied", "")):
            raise ValueError("applied is not a label's value")
        services = data.get("hostServices", [])
        if not isinstance(services, list) or not all(isinstance(each, str) for each in services):
            raise ValueError("hostServices is not a list of names")
        if len(services) > _MAX_SERVICES:
            raise ValueError(f"hostServices has {len(services)} names")
        return Journal(
            config=name,
            annotation_hash=str(data.get("annotationHash", "")),
            hold_taint=hold,
            paused_labels=paused,
            plugin_config=_plugin_config(data.get("pluginConfig")),
            host_services=tuple(services),
            exit_hook=data.get("exitHook") is True,
            rebooted_from=str(data.get("rebootedFrom", "")),
            draining=data.get("draining") is True,
            has_evicted=data.get("hasEvicted") is True,
            has_plugin=data.get("hasPlugin") is True,
            has_dra_driver=data.get("hasDraDriver") is True,
            applied=data.get("applied", ""),
            boot_id=str(data.get("bootId", "")),
            snapshot=gpu_codec.from_data(data.get("snapshot", [])),
            stale_files=data.get("staleFiles") is True,
            persistent_gpus=_uuids(data.get("persistentGpus", [])),
        )


class Entries(TypedDict, total=False):
    """New values of a journal's entries; entries that it lacks stay."""

    config: str
    hold_taint: bool
    plugin_config: PluginConfig | None
    host_services: tuple[str, ...]
    exit_hook: bool
    rebooted_from: str
    draining: bool
    has_evicted: bool
    applied: str
    snapshot: tuple[model.GpuSnapshot, ...]
    stale_files: bool
    persistent_gpus: tuple[str, ...]


NONE = Journal(config="")  # nothing to restore


def parse_or_none(text: str | None) -> Journal | None:
    """Parse a journal; None if it is missing, invalid or of an unknown version."""
    try:
        return Journal.from_json(text) if text else None
    except ValueError:
        return None


def patch_between(
    before: Journal, after: Journal, view: node_object.NodeView
) -> node_object.NodePatch:
    """Return the patch of the Node that belongs to a change of the journal's entries.

    A new entry is acted on, and a kept one again if its label has its former value back. A removed
    entry is undone, except for a label that another program wrote since.
    """
    own_entries = without_foreign_labels(before, view)
    labels: dict[str, str | None] = {
        key: value
        for key, value in own_entries.paused_labels.items()
        if key not in after.paused_labels
    }
    for key, value in after.paused_labels.items():
        if key not in before.paused_labels or view.labels.get(key) == value:
            labels[key] = well_known.PAUSED_VALUE
    now = view.labels.get(well_known.PLUGIN_CONFIG_LABEL)
    config = after.plugin_config
    if config and (config != before.plugin_config or now == config.before):
        labels[well_known.PLUGIN_CONFIG_LABEL] = config.now
    elif own_entries.plugin_config and not config:
        labels[well_known.PLUGIN_CONFIG_LABEL] = own_entries.plugin_config.before
    if after.snapshot and after.snapshot != before.snapshot:
        labels[well_known.APPLIED_LABEL] = None
    elif before.applied and not after.applied:
        labels[well_known.APPLIED_LABEL] = before.applied
    has_taint = after.hold_taint if before.hold_taint or after.hold_taint else None
    return node_object.NodePatch(labels=labels, hold_taint=has_taint)


def without_foreign_labels(journal: Journal, view: node_object.NodeView) -> Journal:
    """Return the journal without the labels that another program wrote since."""
    paused = {
        key: value
        for key, value in journal.paused_labels.items()
        if view.labels.get(key) == well_known.PAUSED_VALUE
    }
    plugin = journal.plugin_config
    if plugin and view.labels.get(well_known.PLUGIN_CONFIG_LABEL) != plugin.now:
        plugin = None
    return dataclasses.replace(journal, paused_labels=paused, plugin_config=plugin)


def unlisted_pauses(view: node_object.NodeView) -> tuple[str, ...]:
    """Return the deploy labels with our paused value that the Node's journal does not list."""
    journal = parse_or_none(view.annotations.get(well_known.JOURNAL_ANNOTATION)) or NONE
    return tuple(
        key
        for key, value in view.labels.items()
        if well_known.is_deploy_label(key)
        and value == well_known.PAUSED_VALUE
        and key not in journal.paused_labels
    )


def _uuids(data: object) -> tuple[str, ...]:
    """Parse the list; only UUIDs of observed GPUs have an effect, so other texts are harmless."""
    if not isinstance(data, list) or len(data) > _MAX_GPUS:
        raise ValueError("persistentGpus is not a list of GPUs")
    return tuple(map(str, data))


def _plugin_config(data: object) -> PluginConfig | None:
    if data is None:
        return None
    before, now = (data.get("before"), data.get("now")) if isinstance(data, dict) else ("", None)
    if not (_is_label_value(now) and (before is None or _is_label_value(before))):
        raise ValueError("pluginConfig is not a change of a label's value")
    return PluginConfig(before=before, now=str(now))


def _is_label_value(value: object) -> bool:
    return isinstance(value, str) and (
        not value or well_known.LABEL_VALUE.fullmatch(value) is not None
    )
