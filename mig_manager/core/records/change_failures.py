"""The changes to a layout that cost pods and failed: after a few, no more pods are evicted."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mig_manager import reasons
from mig_manager.core.files import json_text

_MAX_FAILED_CHANGES = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailedChanges:
    """The changes to a layout that failed after they had evicted pods."""

    content_hash: str  # hash of the layout
    boot_id: str
    reason: reasons.Reason  # reason of the last failure
    problem: str  # the last failure, as part of a sentence
    count: int = 1

    def are_enough(self, content_hash: str, boot_id: str) -> bool:
        """Return whether to evict no more pods; other content or a reboot may be the remedy."""
        is_same = (self.content_hash, self.boot_id) == (content_hash, boot_id)
        return is_same and self.count >= _MAX_FAILED_CHANGES

    def to_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "configHash": self.content_hash,
            "bootId": self.boot_id,
            "reason": self.reason.value,
            "problem": self.problem,
            "count": self.count,
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> "FailedChanges | None":
        """Parse plain data; see ``json_text.decoding`` for its exceptions.

        None if the reason is unknown: a newer version may have further ones.
        """
        if data["reason"] not in {reason.value for reason in reasons.Reason}:
            return None
        return FailedChanges(
            content_hash=json_text.string(data, "configHash"),
            boot_id=json_text.string(data, "bootId"),
            reason=reasons.Reason(data["reason"]),
            problem=json_text.string(data, "problem"),
            count=int(data["count"]),
        )
