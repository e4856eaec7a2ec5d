"""``mig-manager partitioner --simulate``: decide about files, or replay their pods."""

import datetime as dt
import pathlib
from collections.abc import Callable, Iterator

from mig_manager.adapters import prometheus
from mig_manager.adapters.host import files
from mig_manager.cli.toolkit import console
from mig_manager.core import timing
from mig_manager.partitioner import partitioner_settings, simulation
from mig_manager.partitioner.replay import comparison, past_pods, replay_report

_MAX_BYTES = 1 << 30  # a file with the objects of a cluster
_DAY_S = 86400.0
_REPORT_EVERY_S = 10.0


def run(
    settings: partitioner_settings.PartitionerSettings,
    terminal: console.Console,
    clock: timing.Clock,
) -> int:
    """Print the answer about two files; return the exit status."""
    nodes, pods = (_read(path) for path in (settings.simulated_nodes, settings.simulated_pods))
    selected_nodes = simulation.nodes_of(nodes, settings.selects)
    items = simulation.items(pods, "Pod")
    now = dt.datetime.fromtimestamp(clock.unix_s(), tz=dt.UTC)
    report: simulation.DecisionReport | replay_report.ReplayReport
    if settings.is_replay:
        document = None
        if settings.base_layout and settings.config_file:
            document = terminal.layout_file(str(settings.config_file))
            document.layout(settings.base_layout)
        report = comparison.replay(
            selected_nodes,
            [pod for pod in map(past_pods.parse, items) if pod],
            past_pods.parse_prometheus(_answers(settings, clock.unix_s(), terminal.note)),
            comparison.Replayed(
                limits=settings.limits,
                scheduler=settings.scheduler,
                days=settings.replay_days,
                quiet_s=settings.quiet_s,
                longest_wait_s=settings.longest_wait_s,
                base_layout=settings.base_layout,
                document=document,
            ),
            _ReplayProgress(terminal.note, clock, settings.replay_limit_s).proceed,
        )
    else:
        report = simulation.simulate(selected_nodes, items, settings.limits, now=now)
    style = terminal.style(settings.colour)
    return terminal.answer(settings.output_format, report.to_data, lambda: report.text(style))


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
    settings: partitioner_settings.PartitionerSettings, now_s: float, note: Callable[[str], None]
) -> Iterator[str]:
    """Yield the answers of Prometheus: from files, or by queries."""
    for source in settings.prometheus:
        if not source.startswith(("http://", "https://")):
            yield _read(pathlib.Path(source))
            continue
        note(f"querying {source} about {settings.replay_days} days")
        yield from prometheus.query_range(
            source,
            past_pods.QUERY,
            begin_s=now_s - settings.replay_days * _DAY_S,
            end_s=now_s,
        )
