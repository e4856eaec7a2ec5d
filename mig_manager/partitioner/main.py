"""Compose the partitioner, and run it until a signal stops it."""

import contextlib
import secrets
import socket

import structlog

from mig_manager.adapters import host
from mig_manager.adapters.host import files, web_server
from mig_manager.adapters.kubernetes import api, leader, partitioner_cluster, watch
from mig_manager.core import liveness, timing
from mig_manager.core.layout import layout_documents, layout_parser
from mig_manager.partitioner import demand_signal, loop, metrics, partitioner_settings, term

_STUCK_AFTER_S = 300.0

_log = structlog.get_logger()


class Replica:
    """One assembled replica."""

    def __init__(
        self,
        settings: partitioner_settings.PartitionerSettings,
        kube: api.KubeApi,
        *,
        identity: str,
        clock: timing.Clock,
        watch_times: watch.WatchTimes | None = None,
    ) -> None:
        """Assemble the service; ``identity`` must be unique among replicas."""
        self.settings = settings
        self.signal = demand_signal.DemandSignal(
            quiet_s=settings.quiet_s, max_s=settings.longest_wait_s, clock=clock
        )
        self.cluster = partitioner_cluster.PartitionerCluster(
            kube,
            clock=clock,
            reporter=identity,
            listener=self.signal,
            times=watch_times,
        )
        self.leader = leader.Leader(
            kube,
            namespace=settings.lease_namespace,
            name=settings.lease_name,
            identity=identity,
            duration_s=settings.lease_duration_s,
            clock=clock,
        )
        self.metrics = metrics.PartitionerMetrics(
            contact_age_s=lambda: self.cluster.last_contact_s
        )
        self.loop = loop.Partitioner(
            term.Parts(
                cluster=self.cluster,
                leader=self.leader,
                settings=settings,
                clock=clock,
                signal=self.signal,
                telemetry=self.metrics,
                document=_document(settings),
            )
        )

    def serve(self) -> None:
        """Watch the cluster, and decide while this replica leads, until ``stop``."""
        health = liveness.Health(
            self.loop.pulse,
            stuck_after_s=_STUCK_AFTER_S,
            contact_age_s=lambda: self.cluster.last_contact_s,
        )
        with contextlib.ExitStack() as stack:
            if self.settings.health_port:
                pages = web_server.served(
                    health,
                    self.metrics.registry.exposition,
                    address=self.settings.health_address,
                    port=self.settings.health_port,
                )
                stack.enter_context(pages)
            self.cluster.start()
            stack.callback(self.cluster.close)
            _log.info("partitioner_started", mode=self.settings.mode.value)
            self.loop.run()
        _log.info("partitioner_stopped")

    def stop(self) -> None:
        """End ``serve`` soon; call from another thread."""
        self.signal.end()


def run(settings: partitioner_settings.PartitionerSettings) -> int:
    """Run one replica until a signal ends it.

    Raises:
        MigManagerError: It cannot start, for example without API credentials.
    """
    kube = api.KubeApi.connect(
        kubeconfig=str(settings.kubeconfig) if settings.kubeconfig else None,
        request_timeout_s=leader.REQUEST_TIMEOUT_S,
    )
    # A restarted container in the same pod needs a new identity: its predecessor may still run.
    identity = f"{settings.pod_name or socket.gethostname()}_{secrets.token_hex(4)}"
    with contextlib.closing(kube):
        service = Replica(settings, kube, identity=identity, clock=host.SystemClock())
        host.end_on_signals(service.stop)
        service.serve()
    return 0


def _document(
    settings: partitioner_settings.PartitionerSettings,
) -> layout_documents.Document | None:
    if settings.config_file is None or settings.base_layout is None:
        return None
    file = files.SourceFile(settings.config_file)
    document = layout_parser.parse(file.read(), source=file.name)
    document.layout(settings.base_layout)
    return document
