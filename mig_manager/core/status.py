"""The JSON that the agent keeps on its node: the status for people, the journal for itself."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from mig_manager import errors
from mig_manager.core import cluster, model

JOURNAL_VERSION = 1

_LABEL_NAME = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
"""What the API takes as a label's value, and as its key after the slash."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One run as the status annotation tells it."""

    config: str
    config_hash: str
    """Hash of the layout's meaning; empty while the layout is not resolved."""
    state: model.State
    phase: model.Phase
    reason: errors.Reason | None
    message: str
    attempt: int
    started_at: str
    finished_at: str | None
    gpus: tuple[model.Gpu, ...] = ()
    """What is there now; empty when it could not be observed."""

    def to_json(self) -> str:
        """Return the annotation's value: one line, stable keys, no null members."""
        data = {
            "config": self.config,
            "configHash": self.config_hash,
            "state": self.state.value,
            "phase": self.phase.value,
            "reason": self.reason.value if self.reason else None,
            "message": self.message,
            "attempt": self.attempt,
            "startedAt": self.started_at,
            "finishedAt": self.finished_at,
            "gpus": [gpu_summary(gpu) for gpu in self.gpus] or None,
        }
        return json.dumps({key: value for key, value in data.items() if value not in (None, "")})


def gpu_summary(gpu: model.Gpu) -> dict[str, Any]:
    """Return one GPU in the form of the status annotation."""
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "mig": gpu.current_mode.value if gpu.current_mode else "unsupported",
        "devices": device_counts(gpu),
    }


def device_counts(gpu: model.Gpu) -> dict[str, int]:
    """Return how many compute instances of each profile a GPU has, biggest first."""
    profiles = sorted(
        (ci.profile for gi in gpu.gpu_instances for ci in gi.compute_instances),
        key=lambda profile: profile.sort_key,
    )
    counts: dict[str, int] = {}
    for profile in profiles:
        counts[str(profile)] = counts.get(str(profile), 0) + 1
    return counts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """A change of the label that names the device plugin's config."""

    before: str | None
    """None: the node had no such label."""
    now: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """What must be given back, written before it is taken."""

    config: str
    cordoned: bool = False
    """Whether the cordon is ours; a node that was cordoned before stays cordoned."""
    hold_taint: bool = False
    paused_labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Deploy label -> its value before we paused it, in the order of the resume."""
    plugin_config: PluginConfig | None = None
    """Set back unless the run succeeds."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been taken."""
        return not (self.cordoned or self.hold_taint or self.paused_labels or self.plugin_config)

    def to_json(self) -> str:
        """Return the annotation's value; versions that do not know a member ignore it."""
        data: dict[str, Any] = {
            "version": JOURNAL_VERSION,
            "config": self.config,
            "cordoned": self.cordoned,
            "holdTaint": self.hold_taint,
            "pausedLabels": dict(self.paused_labels),
        }
        if self.plugin_config:
            data["pluginConfig"] = dataclasses.asdict(self.plugin_config)
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> "Journal":
        """Read a journal.

        Raises:
            ValueError: It is not one of ours, or from a version we do not know.
        """
        try:
            data = json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(data, dict) or data.get("version") != JOURNAL_VERSION:
            raise ValueError("not a journal of a version this agent knows")
        paused = data.get("pausedLabels")
        if not isinstance(paused, dict) or not all(
            _is_deploy_label(key, value) for key, value in paused.items()
        ):
            raise ValueError("pausedLabels is not a map of deploy labels")
        cordoned, hold, name = data.get("cordoned"), data.get("holdTaint"), data.get("config")
        if not (isinstance(cordoned, bool) and isinstance(hold, bool) and isinstance(name, str)):
            raise ValueError("bad type of cordoned, holdTaint or config")  # noqa: TRY004 - content
        return Journal(
            config=name,
            cordoned=cordoned,
            hold_taint=hold,
            paused_labels=paused,
            plugin_config=_plugin_config(data.get("pluginConfig")),
        )


def _plugin_config(data: object) -> PluginConfig | None:
    if data is None:
        return None
    before, now = (data.get("before"), data.get("now")) if isinstance(data, dict) else ("", None)
    if not (_is_label_value(now) and (before is None or _is_label_value(before))):
        raise ValueError("pluginConfig is not a change of a label's value")
    return PluginConfig(before=before, now=str(now))


def _is_deploy_label(key: str, value: object) -> bool:
    """Tell whether the API would take it: one bad label would have it refuse the giving back."""
    return (
        key.startswith(cluster.DEPLOY_LABEL_PREFIX)
        and _LABEL_NAME.fullmatch(key.partition("/")[2]) is not None
        and _is_label_value(value)
    )


def _is_label_value(value: object) -> bool:
    return isinstance(value, str) and _LABEL_NAME.fullmatch(value) is not None
