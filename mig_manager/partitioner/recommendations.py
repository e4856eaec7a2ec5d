"""Sum up over time what the recommendations of a term would have done."""

import collections
import dataclasses
import math
from collections.abc import Container

from mig_manager.core import messages
from mig_manager.core.partitioning.decision import decisions

_REPORT_EVERY_S = 3600.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Recommendations:
    """Recommended changes, and the pods that waited without them; seconds of one clock."""

    layouts: dict[str, str] = dataclasses.field(default_factory=dict)
    """By node: the layout last recommended."""
    waiting: dict[str, float] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod with a recommendation: until when its wait is counted."""
    changes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """By node, since the last report."""
    pods: set[str] = dataclasses.field(default_factory=set)
    """UIDs of the pods that waited since the last report."""
    waited_s: float = 0.0  # by all pods, since the last report
    last: str = ""  # the last recommendation, in words
    reported_s: float = -math.inf
    began_s: float = 0.0  # when the time of the next report began

    def add(self, change: decisions.NodeChange, summary: str, now_s: float) -> tuple[bool, int]:
        """Add a change; return whether it is new, and the number of its new pods."""
        if not self.pods:
            self.began_s = now_s
        new = [pod.uid for pod in change.pods if pod.uid not in self.waiting]
        self.waiting.update(dict.fromkeys(new, now_s))
        self.pods.update(new)
        if self.layouts.get(change.node) == change.layout:
            return False, len(new)
        self.layouts[change.node] = change.layout
        self.changes[change.node] += 1
        self.last = f"node {change.node}: {summary}"
        return True, len(new)

    def keep(self, nodes: Container[str], pending: Container[str], now_s: float) -> float:
        """Count the waits until now, forget what is gone; return the seconds that were added."""
        added_s = sum(now_s - since_s for since_s in self.waiting.values())
        self.waited_s += added_s
        self.waiting = dict.fromkeys((uid for uid in self.waiting if uid in pending), now_s)
        # An autoscaler creates nodes with new names.
        self.layouts = {name: layout for name, layout in self.layouts.items() if name in nodes}
        return added_s

    @property
    def is_unreported(self) -> bool:
        """Whether there is something to report, now or later."""
        return bool(self.pods)

    def report(self, now_s: float) -> str:
        """Return what is due: the first recommendation, then a sum every hour; else nothing."""
        if not self.pods or now_s - self.reported_s < _REPORT_EVERY_S:
            return ""
        pods = messages.count(len(self.pods), "pod")
        if math.isinf(self.reported_s):
            return messages.join(f"a change would make room for {pods}", self.last)
        number = self.changes.total()
        changes = messages.count(number, "new change")
        where = f" of {messages.list_names(sorted(self.changes))}" if number else ""
        minutes = round((now_s - self.began_s) / 60)
        waited = f"{pods} waited {self.waited_s / 3600:.1f} h in all without them"
        return messages.join(
            f"in {minutes} min, {changes}{where} were recommended", waited, f"last {self.last}"
        )

    def begin(self, now_s: float) -> None:
        """Begin the next report."""
        self.changes = collections.Counter()
        self.pods = set(self.waiting)
        self.waited_s = 0.0
        self.reported_s = self.began_s = now_s
