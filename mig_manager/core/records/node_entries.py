"""The journal's entries about the Node object: what a write to the Node restores."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from mig_manager.core.files import json_text
from mig_manager.core.objects import node_object, well_known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """A change of the label that names the device plugin's config."""

    before: str | None  # None: the node had no such label
    now: str


class RunEnd(enum.Enum):
    """How a run ends, which decides the entries of the Node that stay for the next run."""

    RESTORED = "restored"  # none: an outcome is published, or the run is undone
    INTERRUPTED = "interrupted"
    """The advertisers that are to be verified: the next agent must know that a plugin
    without a new pod still exists."""
    DRAIN_RETRIED = "drain retried"  # these, and the taint: evicted pods must not come back


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeEntries:
    """What a change has set on the Node, and which advertisers a run must verify again."""

    has_reconfiguring_taint: bool = False
    """Whether the node has ``well_known.RECONFIGURING_TAINT``."""
    paused_labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Deploy label -> its value before we paused it, in the order of the resume."""
    plugin_config: PluginConfig | None = None  # set back unless the run succeeds
    advertisers: frozenset[str] = frozenset()
    """Deploy labels of device plugin and DRA driver, if these served the node before the pause.
    They must serve it again, and the journal stays until their devices are verified."""
    rebooted_from: str = ""  # the boot in which this request rebooted the machine; empty: none

    @property
    def blocks_workloads(self) -> bool:
        """Whether workloads cannot use the node, or its devices are not verified yet."""
        return dataclasses.replace(self, plugin_config=None) != NodeEntries()

    @property
    def is_tainted_or_paused(self) -> bool:
        """Whether the node has our taint, or paused labels."""
        return self.has_reconfiguring_taint or bool(self.paused_labels)

    def remaining(self, end: RunEnd) -> "NodeEntries":
        """Return the entries that stay at the end of a run."""
        unverified = NodeEntries(advertisers=self.advertisers)
        match end:
            case RunEnd.RESTORED:
                return NodeEntries()
            case RunEnd.INTERRUPTED:
                return unverified
            case RunEnd.DRAIN_RETRIED:
                return dataclasses.replace(
                    unverified, has_reconfiguring_taint=self.has_reconfiguring_taint
                )

    def to_data(self) -> dict[str, Any]:
        """Return the members of the journal's JSON."""
        data: dict[str, Any] = {
            "holdTaint": self.has_reconfiguring_taint,
            "pausedLabels": dict(self.paused_labels),
            "advertisers": sorted(self.advertisers),
            "rebootedFrom": self.rebooted_from,
        }
        if self.plugin_config:
            data["pluginConfig"] = dataclasses.asdict(self.plugin_config)
        return data

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> "NodeEntries":
        """Parse the members of the journal's JSON; ValueError if one is invalid."""
        hold, paused = data.get("holdTaint"), data.get("pausedLabels")
        if not isinstance(hold, bool):
            raise ValueError("bad type of holdTaint")  # noqa: TRY004 - content
        # One invalid label would make the API server refuse the whole restore.
        if not isinstance(paused, dict) or not all(
            well_known.is_deploy_label(key) and is_label_value(value)
            for key, value in paused.items()
        ):
            raise ValueError("pausedLabels is not a map of deploy labels")
        advertisers = json_text.string_list(data, "advertisers")
        if not all(map(well_known.is_deploy_label, advertisers)):
            raise ValueError("advertisers is not a list of deploy labels")
        return NodeEntries(
            has_reconfiguring_taint=hold,
            paused_labels=paused,
            plugin_config=_plugin_config(data.get("pluginConfig")),
            advertisers=frozenset(advertisers),
            rebooted_from=json_text.string(data, "rebootedFrom", ""),
        )


def patch_between(
    before: NodeEntries, after: NodeEntries, view: node_object.NodeView
) -> node_object.NodePatch:
    """Return the patch of the Node that belongs to a change of its entries.

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
    plugin_config = after.plugin_config
    if plugin_config and (plugin_config != before.plugin_config or now == plugin_config.before):
        labels[well_known.PLUGIN_CONFIG_LABEL] = plugin_config.now
    elif own_entries.plugin_config and not plugin_config:
        labels[well_known.PLUGIN_CONFIG_LABEL] = own_entries.plugin_config.before
    has_taint = (
        after.has_reconfiguring_taint
        if before.has_reconfiguring_taint or after.has_reconfiguring_taint
        else None
    )
    return node_object.NodePatch(labels=labels, reconfiguring_taint=has_taint)


def without_foreign_labels(entries: NodeEntries, view: node_object.NodeView) -> NodeEntries:
    """Return the entries without the labels that another program wrote since."""
    paused = {
        key: value
        for key, value in entries.paused_labels.items()
        if view.labels.get(key) == well_known.PAUSED_VALUE
    }
    plugin = entries.plugin_config
    if plugin and view.labels.get(well_known.PLUGIN_CONFIG_LABEL) != plugin.now:
        plugin = None
    return dataclasses.replace(entries, paused_labels=paused, plugin_config=plugin)


def is_label_value(value: object) -> bool:
    """Return whether a value from JSON is valid for a label."""
    return isinstance(value, str) and (
        not value or well_known.LABEL_VALUE.fullmatch(value) is not None
    )


def _plugin_config(data: object) -> PluginConfig | None:
    if data is None:
        return None
    before, now = (data.get("before"), data.get("now")) if isinstance(data, dict) else ("", None)
    if not (is_label_value(now) and (before is None or is_label_value(before))):
        raise ValueError("pluginConfig is not a change of a label's value")
    return PluginConfig(before=before, now=str(now))
