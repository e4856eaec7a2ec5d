"""The agent: wait for a wish, reconcile, back off; end in good order on a signal."""

import contextlib
import functools
import itertools
import secrets
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Protocol, TypeVar

import structlog
import tenacity

from mig_manager import errors, health, mailbox, ports, reconcile, record, settings
from mig_manager.adapters import clock, files, gpu_child, podresources
from mig_manager.adapters.kube import advertise, api, node, nodewatch, pods
from mig_manager.core import cluster
from mig_manager.core import pace as pacing

_Result = TypeVar("_Result")

_log = structlog.get_logger()


class Pipeline(Protocol):
    """What the loop needs of ``reconcile.Reconciler``."""

    def recover(self) -> None:
        """See ``reconcile.Reconciler.recover``."""

    def rest(self) -> None:
        """See ``reconcile.Reconciler.rest``."""

    def run(self, name: str, wish: ports.Wish, *, attempt: int = 1) -> record.Outcome:
        """See ``reconcile.Reconciler.run``."""


class Agent:
    """Serves the wishes of one node, one at a time."""

    def __init__(
        self,
        pipeline: Pipeline,
        box: mailbox.Mailbox,
        *,
        retry_initial_s: float,
        retry_max_s: float,
        telemetry: ports.Telemetry | None = None,
        pulse: health.Pulse | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._box = box
        self._telemetry = telemetry or ports.Telemetry()
        self._pulse = pulse or health.Pulse()
        self._backoff = tenacity.wait_exponential_jitter(
            multiplier=retry_initial_s, max=retry_max_s, jitter=retry_initial_s
        )
        self._is_recovered = False

    @property
    def is_recovered(self) -> bool:
        """Whether what an interrupted run left taken has been given back."""
        return self._is_recovered

    def serve(self) -> None:
        """Serve wishes until the mailbox stops."""
        seen = 0
        while (wish := self._resting(functools.partial(self._box.next, seen))) is not None:
            seen = wish.generation
            try:
                self._fulfil(wish)
            except errors.Superseded as end:
                _log.info("wish_ended", config=wish.name, why=end.why)
            finally:
                structlog.contextvars.unbind_contextvars("attempt_id")

    def _fulfil(self, wish: mailbox.LabelWish) -> None:
        """Try one wish until it is in force, cannot be, or is no longer wanted."""
        retrying = tenacity.Retrying(
            wait=self._backoff,
            retry=tenacity.retry_if_result(bool),
            stop=tenacity.stop_never,
            sleep=lambda seconds: self._resting(functools.partial(wish.wait, seconds)),
            before_sleep=self._announce_retry,
        )
        attempts = itertools.count(1)
        retrying(lambda: self._try(wish, next(attempts)))

    def _try(self, wish: mailbox.LabelWish, attempt: int) -> bool:
        """Run the pipeline once; tell whether to try again."""
        structlog.contextvars.bind_contextvars(attempt_id=secrets.token_hex(4))
        self._telemetry.attempt_began(attempt)
        try:
            if not self._is_recovered:
                self._pipeline.recover()
                self._is_recovered = True
            if wish.name is None:
                self._pipeline.rest()
                return False
            watched = _Watched(wish, self._pulse)
            return self._pipeline.run(wish.name, watched, attempt=attempt).should_retry
        except errors.ClusterError as error:
            # The run could not say how it ended; its journal tells the next try.
            self._is_recovered = False
            _log.warning("api_unreachable", reason=error.reason.value, error=error.message)
            self._telemetry.outcome_lost(error.reason)
            return True

    def _announce_retry(self, state: tenacity.RetryCallState) -> None:
        delay_s = state.upcoming_sleep
        _log.info("retry_scheduled", attempt=state.attempt_number, delay_s=round(delay_s, 2))
        self._telemetry.retry_scheduled(delay_s)

    def _resting(self, wait: Callable[[], _Result]) -> _Result:
        """Wait for something that may never come."""
        self._pulse.rest()
        try:
            return wait()
        finally:
            self._pulse.beat()


class _Watched:
    """A wish whose every question is a sign of life; implements ``ports.Wish``."""

    def __init__(self, wish: ports.Wish, pulse: health.Pulse) -> None:
        self._wish = wish
        self._pulse = pulse

    def check(self) -> None:
        self._pulse.beat()
        self._wish.check()

    def wait(self, seconds: float) -> None:
        self._pulse.beat()
        self._wish.wait(seconds)


def run(wanted: settings.AgentSettings) -> int:
    """Run the agent until SIGTERM or SIGINT.

    Returns:
        The exit status: 0 after a signal.

    Raises:
        MigManagerError: It cannot start, for example without credentials for the API.
    """
    box = mailbox.Mailbox()
    stop = threading.Event()
    kube = api.KubeApi.connect(kubeconfig=str(wanted.kubeconfig) if wanted.kubeconfig else None)
    watch = nodewatch.NodeWatch(
        kube,
        name=wanted.node_name,
        on_node=lambda view: box.put_label(view.labels.get(cluster.CONFIG_LABEL) or None),
        stop=stop,
    )
    pulse = health.Pulse()
    telemetry, exposition = _listener(wanted, watch, pulse)
    agent = Agent(
        reconcile.Reconciler(_world(wanted, kube, telemetry), _limits(wanted)),
        box,
        retry_initial_s=wanted.retry_initial_s,
        retry_max_s=wanted.retry_max_s,
        telemetry=telemetry,
        pulse=pulse,
    )
    checks = health.Health(
        pulse,
        stuck_after_s=wanted.gpu_timeout_s + health.STUCK_MARGIN_S,
        contact_age_s=lambda: watch.last_contact_s,
        is_recovered=lambda: agent.is_recovered,
    )
    watched = filter(None, (wanted.config_file, wanted.extra_clients_file))
    file_watches = [files.ConfigWatch(path, box.put_file_change) for path in watched]
    _on_signals(box, stop)
    watcher = threading.Thread(target=watch.run, name="node-watch", daemon=True)
    watcher.start()
    for file_watch in file_watches:
        file_watch.start()
    _log.info("agent_started", node=wanted.node_name, config_file=str(wanted.config_file))
    try:
        with _served(wanted, checks, exposition):
            agent.serve()
    finally:
        stop.set()
        for file_watch in file_watches:
            file_watch.stop()
        watcher.join(timeout=5.0)
        kube.close()
    _log.info("agent_stopped", node=wanted.node_name)
    return 0


def _listener(
    wanted: settings.AgentSettings, watch: nodewatch.NodeWatch, pulse: health.Pulse
) -> tuple[ports.Telemetry, Callable[[], bytes]]:
    """Return who hears what happens, and what it has to tell; nobody where nobody asks."""
    if not wanted.health_port:
        return ports.Telemetry(), bytes
    from mig_manager import metrics  # noqa: PLC0415 - its library costs memory on every node

    heard = metrics.Metrics(contact_age_s=lambda: watch.last_contact_s, on_progress=pulse.beat)
    return heard, heard.exposition


def _served(
    wanted: settings.AgentSettings, checks: health.Health, exposition: Callable[[], bytes]
) -> contextlib.AbstractContextManager[int]:
    if not wanted.health_port:
        return contextlib.nullcontext(0)
    return health.served(
        checks, exposition, address=wanted.health_address, port=wanted.health_port
    )


def _world(
    wanted: settings.AgentSettings, kube: api.KubeApi, telemetry: ports.Telemetry
) -> reconcile.World:
    system = clock.SystemClock()
    return reconcile.World(
        gpus=_gpus(wanted, kube, telemetry),
        node=node.KubeNode(kube, name=wanted.node_name, clock=system),
        workloads=pods.KubeWorkloads(kube, node_name=wanted.node_name),
        allocations=podresources.PodResources(str(wanted.pod_resources_socket)),
        configs=files.ConfigFile(wanted.config_file),
        extra_clients=files.ConfigFile(wanted.extra_clients_file)
        if wanted.extra_clients_file
        else None,
        clock=system,
        telemetry=telemetry,
    )


def _gpus(
    wanted: settings.AgentSettings, kube: api.KubeApi, telemetry: ports.Telemetry
) -> ports.Gpus:
    state = wanted.gpus.simulate_state
    command = gpu_child.worker_command(
        library_path=wanted.gpus.library_path,
        driver_roots=() if state else wanted.driver_roots,
        simulate_state=str(state) if state else None,
        in_use_timeout_s=wanted.in_use_timeout_s,
    )
    gpus = gpu_child.ChildGpus(
        command=command, timeout_s=wanted.gpu_timeout_s, telemetry=telemetry
    )
    if not wanted.advertises_simulated:
        return gpus
    offer = advertise.NodeResources(kube, name=wanted.node_name)
    advertising = advertise.AdvertisingGpus(gpus, offer)
    advertising.start()
    return advertising


def _limits(wanted: settings.AgentSettings) -> reconcile.Limits:
    return reconcile.Limits(
        drain_timeout_s=wanted.drain_timeout_s,
        plugin_timeout_s=wanted.plugin_timeout_s,
        monitor_timeout_s=wanted.monitor_timeout_s,
        policy=wanted.policy,
        pace=pacing.Pace(max_s=wanted.poll_interval_s),
    )


def _on_signals(box: mailbox.Mailbox, stop: threading.Event) -> None:
    def end(_number: int, _frame: FrameType | None) -> None:
        # A handler runs between two bytecodes of the main thread, which may hold the mailbox's
        # lock; another thread can wait for it.
        threading.Thread(target=box.stop, name="stop").start()
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
