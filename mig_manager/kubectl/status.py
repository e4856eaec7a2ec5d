"""``kubectl mig status``: the layouts and slices of nodes."""

import collections
import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core import bar, data, messages, model, picture
from mig_manager.core.fleet import node_report
from mig_manager.core.node import resources
from mig_manager.kubectl import layout, selection

_TONES: Mapping[node_report.Standing, bar.Tone] = {
    node_report.Standing.IN_FORCE: bar.Tone.GOOD,
    node_report.Standing.CHANGING: bar.Tone.WARN,
    node_report.Standing.BEHIND: bar.Tone.WARN,
    node_report.Standing.NO_WISH: bar.Tone.FAINT,
}
_HEAD = ("NODE", "STATE", "REASON", "AGE", "WISHED", "APPLIED", "SLICES")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How nodes stand."""

    reports: tuple[node_report.Report, ...]
    pods: selection.Pods
    """Not asked for, and so without a word of why, where only a table is shown."""
    now: dt.datetime

    @property
    def is_good(self) -> bool:
        """Whether every node has what is wished for it."""
        return all(report.standing.is_good for report in self.reports)

    def kinds(self, report: node_report.Report) -> tuple[resources.Kind, ...] | None:
        """Return who asks for which devices of a node; None when that is not known."""
        found = self.pods.of(report.node.view.name)
        if found is None or report.gpus is None:
            return None
        return resources.kinds(report.gpus, found, strategy=report.node.strategy)

    def claiming(self, report: node_report.Report) -> tuple[str, ...]:
        """Return the pods whose devices, if any, are given by ResourceClaims."""
        found = self.pods.of(report.node.view.name) or ()
        return tuple(pod.key for pod in found if pod.has_claims and not pod.is_finished)

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        return {
            "is_good": self.is_good,
            "pods_not_known": self.pods.why_not or None,
            "nodes": [self._node(report) for report in self.reports],
        }

    def _node(self, report: node_report.Report) -> dict[str, object]:
        told, kinds = report.told, self.kinds(report)
        return {
            "node": report.node.view.name,
            "standing": report.standing.value,
            "is_good": report.standing.is_good,
            "is_ready": report.node.is_ready,
            "wished": report.node.wish or None,
            "applied": report.node.applied or None,
            "state": told.state.value if told else None,
            "phase": told.phase if told else None,
            "reason": told.reason if told else None,
            "message": told.message if told else None,
            "attempt": told.attempt if told else None,
            "started_at": _iso(told.started_at) if told else None,
            "finished_at": _iso(told.finished_at) if told else None,
            "retry_at": _iso(told.retry_at) if told else None,
            "notes": list(report.notes),
            "gpus": None
            if report.gpus is None
            else [layout.without_ids(data.gpu(gpu)) for gpu in report.gpus],
            "unreachable_gpus": None
            if report.gpus is None
            else [data.unreachable(gpu) for gpu in report.gpus.unreachable],
            "asked_for": None
            if kinds is None
            else [
                {"resource": kind.resource, "devices": kind.count, "pods": dict(kind.pods)}
                for kind in kinds
            ],
            "pods_with_claims": list(self.claiming(report)),
        }


def _iso(when: dt.datetime | None) -> str | None:
    return when.isoformat() if when else None


def pictures(status: Status, *, style: bar.Style) -> str:
    """Draw every node."""
    return "\n\n".join(_picture(status, report, style) for report in status.reports)


def table(status: Status, *, style: bar.Style) -> str:
    """Return a line for each node, and below what there is to say of those that are not well."""
    rows = [_row(report, status.now) for report in status.reports]
    tones = {(number, 1): _tone(report.standing) for number, report in enumerate(status.reports)}
    lines = layout.columns(_HEAD, rows, tones=tones, style=style)
    told = [_said(report) for report in status.reports]
    said = [layout.wrapped(text) for text in told if text]
    return "\n".join([*lines, "", *said] if said else lines)


def _said(report: node_report.Report) -> str:
    parts = list(report.notes)
    if report.told and not report.standing.is_good and report.told.message:
        parts.insert(0, report.told.message)
    return f"{report.node.view.name}: {'; '.join(parts)}" if parts else ""


def _row(report: node_report.Report, now: dt.datetime) -> Sequence[str]:
    told = report.told
    return (
        report.node.view.name,
        report.standing.value + ("" if report.node.is_ready else ",not-ready"),
        (told.reason or told.phase) if told else "-",
        messages.age(told.at, now) if told else "-",
        report.node.wish or "-",
        report.node.applied or "-",
        "-" if report.gpus is None else slices(report.gpus),
    )


def slices(gpus: Iterable[model.Gpu]) -> str:
    """Return what GPUs are divided into, all together, in a few words."""
    counts: collections.Counter[model.Profile] = collections.Counter()
    whole = empty = 0
    for gpu in gpus:
        found = [ci.profile for gi in gpu.gpu_instances for ci in gi.compute_instances]
        counts.update(found)
        if gpu.current_mode is not model.MigMode.ENABLED:
            whole += 1
        elif not found:
            empty += 1
    parts = [picture.counted(counts)] if counts else []
    parts += [f"{whole}x whole GPU"] if whole else []
    parts += [f"{empty}x empty GPU"] if empty else []
    return ", ".join(parts) or "none"


def _tone(value: node_report.Standing) -> bar.Tone:
    return _TONES.get(value, bar.Tone.BAD)


def headline(report: node_report.Report, now: dt.datetime, style: bar.Style) -> str:
    """Return how a node stands, in one line."""
    told = report.told
    name = style.paint(report.node.view.name, bar.Tone.STRONG)
    state = style.paint(report.standing.value, _tone(report.standing))
    rest = [f"wished {report.node.wish or 'nothing'}"]
    if report.node.applied and report.node.applied != report.node.wish:
        rest.append(f"applied {report.node.applied}")
    if told and told.reason:
        rest.append(told.reason)
    elif told:
        rest.append(f"phase {told.phase}")
    if told and told.at:
        rest.append(f"since {messages.format_time(told.at)}, {messages.age(told.at, now)} ago")
    if told and told.attempt > 1:
        rest.append(f"attempt {told.attempt}")
    return style.plain(f"{name} · {state} · {' · '.join(rest)}")


def _picture(status: Status, report: node_report.Report, style: bar.Style) -> str:
    lines = [headline(report, status.now, style)]
    if report.told and report.told.message:
        lines.append(layout.wrapped(report.told.message, indent="  "))
    lines += [layout.wrapped(note, indent="  ! ") for note in report.notes]
    if report.gpus is not None:
        drawn = picture.draw_gpus(report.gpus, style=style) or "This node has no NVIDIA GPU."
        lines += ["", drawn, "", *_who(status, report)]
    return "\n".join(lines).rstrip()


def _who(status: Status, report: node_report.Report) -> Iterable[str]:
    kinds = status.kinds(report)
    if kinds is None:
        yield layout.wrapped(f"Who holds what is not known: {status.pods.why_not}")
        return
    wide = max((len(layout.kind_name(kind.resource)) for kind in kinds), default=0)
    for kind in kinds:
        name = layout.kind_name(kind.resource).ljust(wide)
        yield layout.wrapped(f"{name}  {layout.held(kind)}", indent="  ")
    claiming = status.claiming(report)
    if claiming:
        names = layout.pods(dict.fromkeys(claiming, 1))
        yield layout.wrapped(f"Pods with ResourceClaims, for these GPUs or others: {names}")
    if any(0 < kind.asked < kind.count for kind in kinds):
        yield layout.wrapped(layout.WHO_KNOWS)
