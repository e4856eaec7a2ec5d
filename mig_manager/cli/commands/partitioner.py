"""``mig-manager partitioner``."""

import pathlib
from collections.abc import Callable, Iterator

from mig_manager.cli.toolkit import console, layout_files
from mig_manager.core import timing
from mig_manager.core.settings import node_settings
from mig_manager.partitioner import partitioner_settings

ABOUT = """
One Deployment for the cluster. It watches pods that wait for nvidia.com/mig-* resources,
and requests layouts for nodes labelled mig-manager.io/partitioning=on-demand. It never
destroys an instance in use: the node's agent, which needs --custom-layouts, decides. By
default it only recommends, in Events and metrics.

$ mig-manager partitioner --kubeconfig ~/.kube/config
Report what it would do; change nothing.

$ mig-manager partitioner --mode act --reserve 1g.5gb=2 --max-unavailable 25%
Do it on a quarter of the opted-in nodes at a time, and keep two 1g.5gb on every node.

$ mig-manager partitioner --simulate nodes.json pods.json
Print what it would do, for files from 'kubectl get -o json'.

$ mig-manager partitioner --simulate nodes.json pods.json --replay
Replay the last week's pods with it, and without it on the present layouts.
"""
Settings = partitioner_settings.PartitionerSettings
_MAX_BYTES = 1 << 30  # a file with the objects of a cluster
_DAY_S = 86400.0
_REPORT_EVERY_S = 10.0


def run(settings: Settings, terminal: console.Console) -> int:
    """Run the partitioner until SIGTERM, or simulate it once; return the exit status."""
    if settings.simulated_nodes and settings.simulated_pods:
        from mig_manager.adapters import host

        return _simulate(settings, terminal, host.SystemClock())
    from mig_manager.partitioner import main

    is_json = settings.log_format is node_settings.LogFormat.JSON
    terminal.configure_log(settings.log_level, is_debug=settings.is_debug, is_json=is_json)
    return main.run(settings)


def _simulate(settings: Settings, terminal: console.Console, clock: timing.Clock) -> int:
    """Print the answer about two files; return the exit status."""
    import datetime as dt

    from mig_manager.partitioner import simulation
    from mig_manager.partitioner.replay import comparison, past_pods, replay_report

    nodes, pods = (_read(path) for path in (settings.simulated_nodes, settings.simulated_pods))
    selected_nodes = simulation.nodes_of(nodes, settings.selects)
    items = simulation.items(pods, "Pod")
    now = dt.datetime.fromtimestamp(clock.unix_s(), tz=dt.UTC)
    report: simulation.DecisionReport | replay_report.ReplayReport
    if settings.is_replay:
        document = None
        if settings.base_layout and settings.config_file:
            document = layout_files.read(terminal, str(settings.config_file))
            document.layout(settings.base_layout)
        report = comparison.replay(
            selected_nodes,
            [pod for pod in map(past_pods.parse, items) if pod],
            prometheus_pods=past_pods.parse_prometheus(
                _answers(settings, clock.unix_s(), terminal.note)
            ),
            settings=comparison.ReplaySettings(
                limits=settings.limits,
                scheduler=settings.scheduler,
                days=settings.replay_days,
                quiet_s=settings.quiet_s,
                longest_wait_s=settings.longest_wait_s,
                base_layout=settings.base_layout,
                document=document,
            ),
            proceed=_ReplayProgress(terminal.note, clock, settings.replay_limit_s).proceed,
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
    from mig_manager.adapters.host import files

    return files.SourceFile(str(path), max_bytes=_MAX_BYTES).read()


def _answers(settings: Settings, now_s: float, note: Callable[[str], None]) -> Iterator[str]:
    """Yield the answers of Prometheus: from files, or by queries."""
    from mig_manager.adapters import prometheus
    from mig_manager.partitioner.replay import past_pods

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
