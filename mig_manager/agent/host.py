"""The services of the host that a change stops and starts again."""

import dataclasses
from collections.abc import Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import dependencies, record
from mig_manager.core import model, steps
from mig_manager.core.host import host_services
from mig_manager.core.node import clients

_log = structlog.get_logger()


class Machine:
    """The host of one node, as far as its owner lets us have it."""

    def __init__(self, world: dependencies.Dependencies) -> None:
        self._world = world

    def stop_services(
        self, names: Sequence[str], plan: steps.Plan, journal: record.Record
    ) -> None:
        """Stop the services that hold GPUs, where the plan takes something away from anybody.

        Args:
            names: The services, in the order in which they are stopped.
            plan: What is going to change.
            journal: Where it is written first which of them were running.

        Raises:
            ClusterError: The API refused or does not answer; then none was stopped.
            HostError: HOST_SERVICE_FAILED: one did not stop.
        """
        if self._world.services is None or not names or not clients.destroys_instances(plan):
            return
        had = journal.journal.host_services
        running = tuple(name for name in self._world.services.running(names) if name not in had)
        if not running:
            return
        journal.enter(
            model.Phase.PAUSE,
            f"stopping the host's {', '.join(running)}",
            take=dataclasses.replace(journal.journal, host_services=(*had, *running)),
        )
        for name in running:
            self._world.telemetry.still_working()
            self._world.services.stop(name)
            _log.info("host_service_stopped", service=name)

    def start_services(self, journal: record.Record) -> str:
        """Start what was stopped; what does not start stays in the journal.

        A journal is an annotation, and others may write annotations too. So only what the list of
        services names now is started, and what systemd stops along with it; anything else leaves
        the journal with a warning.

        Returns:
            What did not start and why, as a part of a sentence; empty when all did.
        """
        failed: list[str] = []
        for name in host_services.start_order(journal.journal.host_services):
            self._world.telemetry.still_working()
            try:
                self._start(name)
            except errors.MigManagerError as error:
                _log.warning("host_service_not_started", service=name, error=error.message)
                failed.append(error.message)
            else:
                journal.started(name)
        return "; ".join(failed)

    def bring_back(self, journal: record.Record) -> None:
        """Start the services after a change that succeeded.

        Raises:
            HostError: HOST_SERVICE_FAILED.
        """
        failed = self.start_services(journal)
        if failed:
            raise errors.HostError(failed, reason=errors.Reason.HOST_SERVICE_FAILED)

    def _start(self, name: str) -> None:
        services = self._world.services
        if services is None or not services.may_have_stopped(name, self._world.service_names()):
            _log.warning("host_service_refused", service=name)
            self._world.node.emit(
                reason="HostServiceRefused",
                message=f"{name} is in the journal of an interrupted run, and not among the host "
                "services that this agent may stop and start now: it was not started. If it is "
                "yours, start it on the node (systemctl start).",
                is_warning=True,
            )
            return
        if services.start(name):
            _log.info("host_service_started", service=name)
