"""The Node condition ``MigReady``: whether the node has the layout that its label requests.

For controllers that read conditions instead of labels, such as the Node Readiness Controller. The
state label remains the contract of a run; the condition follows it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mig_manager import reasons
from mig_manager.core import messages
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The value of a condition of the Node."""

    type: str = well_known.READY_CONDITION
    is_true: bool | None  # None: unknown
    reason: str  # in CamelCase, for programs
    message: str
    is_default: bool = False
    """Whether a node without the condition means the same: a healthy node costs no request."""

    def entry(self, present: Mapping[str, Any] | None, now: str) -> dict[str, str] | None:
        """Return the entry of ``status.conditions`` to write at the time ``now``.

        Args:
            present: The node's current entry, if any.
            now: The time of the write. An unchanged status keeps its ``lastTransitionTime``.

        Returns:
            The entry; None if the current one has the same values.
        """
        if not present and self.is_default:
            return None
        old = present or {}
        facts = {
            "status": "Unknown" if self.is_true is None else str(self.is_true),
            "reason": self.reason,
            "message": self.message,
        }
        if all(old.get(key) == value for key, value in facts.items()):
            return None
        since = old.get("lastTransitionTime") if old.get("status") == facts["status"] else None
        return {
            "type": self.type,
            **facts,
            "lastHeartbeatTime": now,
            "lastTransitionTime": str(since or now),
        }


NO_LAYOUT_REQUESTED = Condition(
    is_true=True,
    reason="NoLayoutRequested",
    message=f"The label {well_known.CONFIG_LABEL} is not set.",
)
"""Ready, because only a requested layout that is missing makes a node unready."""


def unknown(layout: str, reason: reasons.Reason, why: str) -> Condition:
    """Return the condition for an active layout while no GPU can be observed."""
    message = (
        f"Whether layout {layout} is still active is unknown, because no GPU can be observed: "
        f"{messages.with_full_stop(why)} {reason.remedy}"
    )
    return Condition(
        is_true=None,
        reason=reason.value,
        message=messages.fit(message, messages.MAX_BYTES),
    )


def condition(status: run_status.RunStatus) -> Condition:
    """Return the condition that shows a status.

    It omits the phase: each change of a condition costs a request, and the status annotation has
    the phase.
    """
    match status.state:
        case run_status.State.SUCCESS:
            # Same text whether or not this run changed anything: equal conditions are not written.
            unreachable = "".join(
                f" {messages.with_full_stop(gpu.sentence)}" for gpu in status.gpus.unreachable
            )
            if status.file_problem:
                problem = messages.with_full_stop(status.file_problem)
                unreachable += f" The layout file cannot be used: {problem}"
            message = f"Layout {status.layout} is active and verified.{unreachable}"
            return Condition(is_true=True, reason="LayoutVerified", message=message)
        case run_status.State.FAILED:
            reason = status.reason.value if status.reason else "Failed"
            return Condition(is_true=False, reason=reason, message=status.message)
        case run_status.State.REBOOTING:
            message = f"The node reboots for layout {status.layout}."
            return Condition(is_true=False, reason="Rebooting", message=message)
        case run_status.State.PENDING:
            message = (
                f"Layout {status.layout} is being applied."
                if status.layout
                else "An interrupted change is being undone."
            )
            return Condition(is_true=False, reason="Pending", message=message)
