"""The result of a replay, as tables for people and as plain data."""

import dataclasses
import datetime as dt
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager.core import messages, timestamps
from mig_manager.core.answers import partitioner_answers
from mig_manager.core.display import styles, tables
from mig_manager.partitioner import simulation
from mig_manager.partitioner.replay import simulated_cluster

PRESENT = "present layouts"
_WAITS = ("PLACED", "MEAN WAIT", "95 %")  # columns of every table
_MAX_ROWS = 8  # in the text, besides the first three
_MAX_GROUPS = 12
_SECOND_UNITS = ((3600.0, "h"), (60.0, "min"))


PodWait = tuple[float | None, float]
"""How long a pod waited (None: it was not placed), and from its creation to the end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How long a group of pods waited for a node; a pod without one waits until the end."""

    pods: int
    placed: int
    mean_s: float
    p95_s: float | None  # None: fewer than 95 % are placed

    @staticmethod
    def of(each: Sequence[PodWait]) -> "Waits":
        """Summarize the waits of pods."""
        ordered = sorted(math.inf if wait is None else wait for wait, _ in each)
        p95_s = ordered[math.ceil(0.95 * len(ordered)) - 1]
        return Waits(
            pods=len(each),
            placed=sum(wait is not None for wait, _ in each),
            mean_s=statistics.fmean(late_s if wait is None else wait for wait, late_s in each),
            p95_s=None if math.isinf(p95_s) else p95_s,
        )

    def to_data(self) -> partitioner_answers.ReplayedWaits:
        """Return plain data for JSON and YAML."""
        return {
            "pods": self.pods,
            "placed": self.placed,
            "mean_seconds": round(self.mean_s, 1),
            "p95_seconds": None if self.p95_s is None else round(self.p95_s, 1),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRow:
    """One way to serve the pods."""

    name: str
    waits: Waits
    by_profile: Mapping[str, Waits]
    by_namespace: Mapping[str, Waits]
    result: simulated_cluster.SimulationResult

    def to_data(self) -> partitioner_answers.ReplayRow:
        """Return plain data for JSON and YAML."""
        return {
            "name": self.name,
            "waits": self.waits.to_data(),
            "by_profile": {key: each.to_data() for key, each in self.by_profile.items()},
            "by_namespace": {key: each.to_data() for key, each in self.by_namespace.items()},
            "changes": self.result.changes,
            "refused": self.result.refused,
            "destroyed": self.result.destroyed,
            "tainted_seconds": round(self.result.tainted_s),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The pods of a time under the partitioner and under fixed layouts."""

    begin: dt.datetime
    end: dt.datetime
    is_complete: bool  # False: stopped early, or some layouts were not simulated
    nodes: int
    gpus: int
    left_out: int  # nodes without published GPUs
    is_opted_in: bool  # False: no node is, and all are replayed as if they were
    only_prometheus: int  # pods that the API has forgotten
    rows: tuple[ReplayRow, ...]
    """The partitioner, the present layouts, what happened, then best first."""
    unmet: tuple[tuple[str, str], ...]  # pods that no node can serve, with the reason

    def to_data(self) -> partitioner_answers.Replay:
        """Return plain data for JSON and YAML."""
        return {
            "kind": "Replay",
            "begin": timestamps.show(self.begin),
            "end": timestamps.show(self.end),
            "is_complete": self.is_complete,
            "nodes": self.nodes,
            "gpus": self.gpus,
            "left_out": self.left_out,
            "is_opted_in": self.is_opted_in,
            "forgotten": self.only_prometheus,
            "rows": [row.to_data() for row in self.rows],
            "unmet": [{"pod": pod, "message": message} for pod, message in self.unmet],
        }

    def text(self, style: styles.Style) -> str:
        """Return the report for people; lines fit the style's width."""
        decided, present, *others = self.rows
        shown = _table([decided, present, *others[: _MAX_ROWS + 1]])
        head = ("LAYOUTS", *_WAITS, "CHANGES", "REFUSED", "TAINTED")
        parts = [[style.wrap(self._scope())], tables.columns(head, shown, style=style)]
        for title, by_decision, by_present in (
            ("PROFILES", decided.by_profile, present.by_profile),
            ("NAMESPACE", decided.by_namespace, present.by_namespace),
        ):
            groups = _groups(by_decision, by_present)
            parts.append(tables.columns((title, *_WAITS, PRESENT.upper()), groups, style=style))
        blocks = ["\n".join(lines) for lines in parts]
        if self.unmet:
            unmet = self.unmet[:_MAX_GROUPS]
            blocks.append(simulation.pod_list("No node can serve", unmet, style))
        blocks.append(
            style.wrap(
                "Waits are from a pod's creation to its node; a pod without a node waits until "
                "the end. TAINTED is the time that nodes were tainted for changes. Only pods with "
                "MIG devices are replayed; every layout starts empty, with today's nodes. Pod "
                "affinity, preemption and the CPU of other pods are ignored."
            )
        )
        return "\n\n".join(blocks)

    def _scope(self) -> str:
        time = f"{timestamps.show(self.begin)} to {timestamps.show(self.end)}"
        pods = messages.count(self.rows[0].waits.pods, "pod")
        pods = f"{pods}, {self.only_prometheus} of them from Prometheus alone"
        nodes = f"{messages.count(self.nodes, 'node')} with {messages.count(self.gpus, 'GPU')}"
        sentences = [f"{time}: {pods}, on {nodes}"]
        if not self.is_opted_in:
            sentences.append("No node is opted in: all are replayed as if they were")
        if self.left_out:
            left_out = messages.count(self.left_out, "node")
            sentences.append(f"Left out: {left_out} whose GPUs no agent publishes")
        if not self.is_complete:
            sentences.append("The time limit ended the replay early; --replay-limit-s allows more")
        return " ".join(map(messages.with_full_stop, sentences))


def _table(rows: Iterable[ReplayRow]) -> Iterator[Sequence[str]]:
    for row in rows:
        waits, result = row.waits, row.result
        costs = ("", "", "")
        if result.decisions:
            costs = (str(result.changes), str(result.refused), _span(result.tainted_s))
        placed = f"{waits.placed} of {waits.pods}"
        yield row.name, placed, _span(waits.mean_s), _span(waits.p95_s), *costs


def _groups(
    by_decision: Mapping[str, Waits], by_present: Mapping[str, Waits]
) -> Iterator[Sequence[str]]:
    """Yield the waits by group, the largest group first, beside the waits with present layouts."""
    ordered = sorted(by_decision, key=lambda key: (-by_decision[key].pods, key))
    for key in ordered[:_MAX_GROUPS]:
        waits, other = by_decision[key], by_present[key]
        placed = f"{waits.placed} of {waits.pods}"
        present = f"{other.placed} placed, mean {_span(other.mean_s)}"
        yield key, placed, _span(waits.mean_s), _span(waits.p95_s), present
    if len(ordered) > _MAX_GROUPS:
        yield f"and {len(ordered) - _MAX_GROUPS} more", "", "", "", ""


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for size, unit in _SECOND_UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
