"""``mig-manager partitioner --simulate``: decide about files, or replay their pods."""

import datetime as dt
import pathlib
from collections.abc import Callable, Iterator

from mig_manager.adapters import prometheus
from mig_manager.adapters.host import files
from mig_manager.cli.toolkit import console
from mig_manager.core import timing
from mig_manager.core.partitioning import past_pods
from mig_manager.partitioner import replay, replay_report, settings, simulation

_MAX_BYTES = 1 << 30  # of a file with the objects of a cluster
_DAY_S = 86400.0
_REPORT_EVERY_S = 10.0


def run(
    chosen: settings.PartitionerSettings, terminal: console.Console, clock: timing.Clock
) -> int:
    """Print the answer about two files; return the exit status."""
    nodes, pods = (_read(path) for path in (chosen.simulated_nodes, chosen.simulated_pods))
    known = simulation.nodes_of(nodes, chosen.selects)
    items = simulation.items(pods, "Pod")
    now = dt.datetime.fromtimestamp(clock.unix_s(), tz=dt.UTC)
    report: simulation.DecisionReport | replay_report.ReplayReport
    if chosen.is_replay:
        document = None
        if chosen.base_layout and chosen.config_file:
            document = terminal.layout_file(str(chosen.config_file))
            document.layout(chosen.base_layout)
        report = replay.replay(
            known,
            [pod for pod in map(past_pods.parse, items) if pod],
            past_pods.parse_prometheus(_answers(chosen, clock.unix_s(), terminal.note)),
            replay.Replayed(
                limits=chosen.limits,
                scheduler=chosen.scheduler,
                days=chosen.replay_days,
                quiet_s=chosen.quiet_s,
                longest_wait_s=chosen.longest_wait_s,
                base_layout=chosen.base_layout,
                document=document,
            ),
            _ReplayProgress(terminal.note, clock, chosen.replay_limit_s).proceed,
        )
    else:
        report = simulation.simulate(known, items, chosen.limits, now=now)
    style = terminal.style(chosen.colour)
    return terminal.answer(chosen.output_format, report.to_data, lambda: report.text(style))


class _ReplayProgress:
    """Reports progress every few seconds, and ends a replay at its limit."""

    def __init__(self, note: Callable[[str], None], clock: timing.Clock, limit_s: float) -> None:
        self._note = note
        self._clock = clock
        self._report_s = clock.monotonic() + _REPORT_EVERY_S
        self._end_s = clock.monotonic() + limit_s

    def proceed(self, name: str, share: float) -> bool:
        now_s = self._clock.monotonic()
        if now_s >= self._report_s:
            self._report_s = now_s + _REPORT_EVERY_S
            self._note(f"replaying: {name}, {share:.0%}")
        return now_s < self._end_s


def _read(path: pathlib.Path | None) -> str:
    return files.ConfigFile(str(path), max_bytes=_MAX_BYTES).read()


def _answers(
    chosen: settings.PartitionerSettings, now_s: float, note: Callable[[str], None]
) -> Iterator[str]:
    """Yield the answers of Prometheus: from files, or by queries."""
    for source in chosen.prometheus:
        if not source.startswith(("http://", "https://")):
            yield _read(pathlib.Path(source))
            continue
        note(f"querying {source} about {chosen.replay_days} days")
        yield from prometheus.query_range(
            source,
            past_pods.QUERY,
            begin_s=now_s - chosen.replay_days * _DAY_S,
            end_s=now_s,
        )
