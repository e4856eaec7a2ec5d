"""The host in a run: its services, the owner's hooks, and a reboot where that is allowed."""

import dataclasses
from collections.abc import Callable, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import record, settings
from mig_manager.change import hook_points
from mig_manager.core import host_files, model, ports, steps
from mig_manager.core.node import clients
from mig_manager.core.node import policy as policies

_REBOOT_CHECK_S = 1.0

_log = structlog.get_logger()


class HostServices:
    """The services of the host that use GPUs."""

    def __init__(self, deps: ports.Dependencies, written: record.Record) -> None:
        self._deps = deps
        self._record = written

    def require(self, names: Sequence[str], plan: steps.Plan) -> None:
        """Check that the init system answers, if the plan stops services, before pods are evicted.

        Raises:
            HostError: HOST_SERVICE_FAILED or NO_PERMISSION.
        """
        self._running(names, plan)

    def stop(self, names: Sequence[str], plan: steps.Plan) -> None:
        """Stop the running services, if the plan removes devices.

        Raises:
            ClusterError: The API refused or does not answer; then none was stopped.
            HostError: HOST_SERVICE_FAILED: one did not stop.
        """
        stopped = self._record.journal.host_services
        running = tuple(n for n in self._running(names, plan) if n not in stopped)
        if self._deps.services is None or not running:
            return
        self._record.enter(
            model.Phase.PAUSE,
            f"stopping the host's {', '.join(running)}",
            journal=dataclasses.replace(self._record.journal, host_services=(*stopped, *running)),
        )
        for name in running:
            self._deps.telemetry.still_working()
            self._deps.services.stop(name)
            _log.info("host_service_stopped", service=name)

    def _running(self, names: Sequence[str], plan: steps.Plan) -> tuple[str, ...]:
        """Return the services to stop for a plan."""
        if self._deps.services is None or not names or not clients.destroys_instances(plan):
            return ()
        return self._deps.services.running(names)

    def start(self) -> str:
        """Start the stopped services; one that does not start stays in the journal.

        A journal is an annotation, and other programs may write annotations too. So only services
        that the settings list now, and those that systemd stops along with them, are started.

        Returns:
            What did not start and why, as a part of a sentence; empty when all did.
        """
        failed: list[str] = []
        for name in host_files.start_order(self._record.journal.host_services):
            self._deps.telemetry.still_working()
            try:
                self._start(name)
            except errors.MigManagerError as error:
                _log.warning("host_service_not_started", service=name, error=error.message)
                failed.append(error.message)
                continue
            stopped = self._record.journal.host_services
            self._record.note_journal(host_services=tuple(one for one in stopped if one != name))
        return "; ".join(failed)

    def _start(self, name: str) -> None:
        services = self._deps.services
        if services is None or not services.may_have_stopped(name, self._deps.service_names()):
            _log.warning("host_service_refused", service=name)
            self._deps.node.emit(
                reason="HostServiceRefused",
                message=f"{name} is in the journal of an interrupted run, and not among the host "
                "services that this agent may stop and start now, so it was not started. If it is "
                "yours, start it on the node (systemctl start).",
                is_warning=True,
            )
            return
        if services.start(name):
            _log.info("host_service_started", service=name)


class RunHooks:
    """The hooks of one run.

    A run that passes ``apply-start`` must pass ``apply-exit``: the journal says so first, so that
    the next run does it after a crash.
    """

    def __init__(self, deps: ports.Dependencies, written: record.Record) -> None:
        self._has_programs = deps.hooks is not None
        self._record = written
        self._has_tried_exit = False
        self.points = hook_points.HookPoints(
            deps.hooks,
            variables={"MIG_PARTED_SELECTED_CONFIG": written.config},
            telemetry=deps.telemetry,
        )

    def start(self, plan: steps.Plan, request: ports.Cancellation) -> None:
        """Run the ``apply-start`` hooks, if every program that this change would run exists.

        Raises:
            ClusterError: The API refused or does not answer.
            HostError: HOOK_FAILED; then nothing was taken.
            Superseded: Another layout is requested; ``apply-exit`` must run if a hook was running.
        """
        self.points.require(plan)
        if self.points.is_empty:
            return
        self._record.enter(
            model.Phase.RESOLVE,
            "running the apply-start hooks",
            journal=dataclasses.replace(self._record.journal, exit_hook=True),
        )
        try:
            self.points.start(request.check)
        except errors.MigManagerError:
            self._record.note_journal(exit_hook=False)
            raise
        except errors.Superseded:
            if not self.points.has_run:
                self._record.note_journal(exit_hook=False)
            raise

    def exit(self) -> None:
        """Run the ``apply-exit`` hooks, if the journal lists them; it does until all succeed.

        Raises:
            ConfigError: The file cannot be read any more or is invalid.
            HostError: HOOK_FAILED.
        """
        if not self._record.journal.exit_hook or self._has_tried_exit:
            return
        self._has_tried_exit = True
        if not self._has_programs:
            _log.warning("hook_forgotten", point="apply-exit")
        if not self.points.is_loaded:
            self.points.load()
        self.points.exit()
        self._record.note_journal(exit_hook=False)

    def try_exit(self) -> str:
        """Run them after a failure; return what failed, as a part of a sentence."""
        try:
            self.exit()
        except errors.MigManagerError as error:
            return error.message
        return ""


class Reboot:
    """The reboot of one run, for a MIG mode that no reset activates: once for a request."""

    def __init__(
        self, deps: ports.Dependencies, limits: settings.Limits, written: record.Record
    ) -> None:
        self._deps = deps
        self._limits = limits
        self._record = written
        self.is_under_way = False
        """Whether the node is about to go down: what is taken stays taken."""

    def may_help(self, error: errors.MigManagerError, *, was_rebooted: bool) -> bool:
        """Check whether a reboot can help after an error, is allowed, and was not done before.

        It helps where a GPU's new MIG mode is pending, and where a process prevents a reset.
        ``was_rebooted`` is whether the status names a reboot for this request.
        """
        # The journal is newer than the status.
        before = self._record.journal.rebooted_from
        if before:
            was_rebooted = before != self._deps.boot_id
        drains = self._limits.policy.drain is not policies.Drain.NONE
        if was_rebooted or self._deps.reboot is None or not drains:
            return False
        if isinstance(error, errors.HostError):
            return error.reason.means_mode_waits or error.reason is errors.Reason.IN_USE
        try:
            return error.reason.means_mode_waits and any(
                gpu.has_pending_mode for gpu in self._deps.gpus.observe()
            )
        except errors.HardwareError:
            return False

    def request(
        self,
        error: errors.MigManagerError,
        drain: Callable[[], object],
        request: ports.Cancellation,
    ) -> str:
        """Drain the node, request a reboot, and wait for it.

        Returns:
            Why there is no reboot, as a part of a sentence.

        Raises:
            Superseded: The agent stops, as it does when the node goes down.
        """
        try:
            drain()
            name, why = self._record.config, error.message
            self._record.note(is_rebooted=True)
            self._record.enter(
                model.Phase.REBOOT,
                f"rebooting: {why}",
                journal=dataclasses.replace(
                    self._record.journal, rebooted_from=self._deps.boot_id or "unknown"
                ),
                state=model.State.REBOOTING,
            )
            self._deps.node.emit(reason="Rebooting", message=f"{name}: {why}", is_warning=True)
            if self._deps.reboot is not None:
                self._deps.reboot.request(f"MIG layout {name} needs it")
            self.is_under_way = True
            self._wait_for_stop(request)
        except errors.MigManagerError as refused:
            self._record.note(is_rebooted=False)
            return refused.message
        self.is_under_way = False
        return f"the machine is still up {self._limits.reboot_timeout_s:g} s after it was asked"

    def _wait_for_stop(self, request: ports.Cancellation) -> None:
        """Wait for the signal to stop; another layout does not end the wait.

        A run for that layout would work on a node that is going down.
        """
        clock = self._deps.clock
        deadline = clock.monotonic() + self._limits.reboot_timeout_s
        while (remaining_s := deadline - clock.monotonic()) > 0:
            try:
                request.wait(min(remaining_s, _REBOOT_CHECK_S))
            except errors.Superseded as end:
                if end.is_stopping:
                    raise
                clock.wait(min(remaining_s, _REBOOT_CHECK_S))
