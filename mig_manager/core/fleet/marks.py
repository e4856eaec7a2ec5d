"""The annotation that a rollout writes on a node: the layouts requested by it and before it."""

import contextlib
import dataclasses
import datetime as dt
import json

from mig_manager.core import timestamps
from mig_manager.core.files import json_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The annotation that a rollout writes on a node, for ``undo``."""

    layout: str  # requested by the rollout
    before: str | None  # requested before the rollout; None: nothing
    is_undone: bool = False
    failed_at: dt.datetime | None = None
    """Start of a run that failed for the same layout before this request."""
    started_at: dt.datetime | None = None
    """Start of the rollout, which identifies it; None: written before marks had it."""

    def to_json(self) -> str:
        """Return the annotation's value."""
        data = {"layout": self.layout, "before": self.before, "undone": self.is_undone}
        if self.failed_at is not None:
            data["failedAt"] = self.failed_at.isoformat()
        if self.started_at is not None:
            data["startedAt"] = self.started_at.isoformat()
        return json.dumps(data)


def parse(text: str | None) -> Mark | None:
    """Parse a rollout's annotation; None if it is missing or malformed."""
    with contextlib.suppress(ValueError), json_text.decoding("a rollout's mark"):
        data = json_text.parse_object(text or "")
        before = data["before"]
        return Mark(
            layout=json_text.string(data, "layout"),
            before=None if before is None else json_text.string(data, "before"),
            is_undone=data.get("undone") is True,
            failed_at=timestamps.parse(data.get("failedAt")),
            started_at=timestamps.parse(data.get("startedAt")),
        )
    return None
