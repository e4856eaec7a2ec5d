"""The pipeline: from the requested layout to an outcome.

    resolve -> observe -> plan -> close -> drain -> pause -> execute -> verify -> resume -> prove
    -> monitors

The hooks run before the node is closed, within the execution, and before the resume.

A step that can fail without disturbing a pod comes before each step that disturbs one. What a step
takes is in the journal first, and every end of a run restores it and publishes one final state
with one reason. Until GPUs are touched a newer request ends the run; after that the change is
finished or rolled back first, and only its verification may be left to the next run.
"""

import contextlib
import dataclasses

import structlog

from mig_manager import errors
from mig_manager.agent import drift, host, on_demand, planning, record, recovery, settings
from mig_manager.agent.pods import drain, gpu_clients, survey
from mig_manager.change import transaction
from mig_manager.core import messages, model, ports, steps, timing
from mig_manager.core.layout import config, layouts
from mig_manager.core.node import clients, cluster, gpu_use, resources
from mig_manager.core.planner import planner

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What earlier runs know."""

    rebooted: tuple[str, str] | None = None
    """Name and content hash of the layout that the machine was rebooted for."""
    gpus: model.ObservedGpus = model.NO_GPUS
    """The GPUs as last observed; none: not yet."""


class Run:
    """One pass through the pipeline."""

    def __init__(
        self,
        deps: ports.Dependencies,
        limits: settings.Limits,
        node_clients: gpu_clients.GpuClients,
        written: record.Record,
        *,
        history: History | None = None,
        may_evict: bool = True,
    ) -> None:
        self._deps = deps
        self._limits = limits
        self._clients = node_clients
        self._record = written
        self._history = history or History()
        self._may_evict = may_evict
        self._on_demand = on_demand.OnDemand(deps, written.custom)
        self._plugin_config = limits.policy.plugin_config(written.config)
        self._planning = planning.Planning(deps, limits, written)
        self._services = host.HostServices(deps, written)
        self._hooks = host.RunHooks(deps, written)
        self.reboot = host.Reboot(deps, limits, written)

    def run(self, request: ports.Cancellation) -> record.Outcome:
        """Apply the layout, or roll back; return the outcome, which is still to be published.

        Raises:
            Superseded: Another layout is requested, or the agent stops.
        """
        try:
            self._planning.wait_for_slot(request)
            with self._locked(request), contextlib.ExitStack() as stack:
                stack.callback(self._deps.standby.dismiss)
                try:
                    return self._pipeline(request)
                except errors.Superseded as end:
                    end.add(self.roll_back())
                    raise
                except errors.MigManagerError as error:
                    if isinstance(error, errors.DrainError):
                        self._record.note_journal(draining=error.keeps_closed)
                    self._record.is_final = self._may_evict and self._on_demand.is_final(error)
                    return self._record.failed(error.reason, error.message, self.roll_back())
                except Exception as error:  # noqa: BLE001 - a bug must not leave the node pending
                    _log.exception("run_crashed")
                    problem = f"{type(error).__name__}: {error}"
                    return self._record.failed(errors.Reason.INTERNAL, problem, self.roll_back())
        except (errors.ClusterError, errors.LockedError) as error:
            return self._record.failed(error.reason, error.message)

    def _pipeline(self, request: ports.Cancellation) -> record.Outcome:
        """Go through the steps; see the top of this module."""
        try:
            layout = self._resolve()
        except (errors.ConfigError, errors.LayoutError) as error:
            kept = self._planning.observe_kept(error)
            return self._verify_unchanged(None, kept, request)
        extra_clients = self._planning.extra_clients()
        service_names = self._deps.service_names()
        self._hooks.points.load()
        gpus = self._observe()
        older = self._outside(layout, gpus)
        plan = self._planning.plan(layout, gpus, restoring=older)
        if plan.is_empty:
            return self._verify_unchanged(layout, gpus, request)
        order = self._order(plan, gpus, extra_clients)
        usage = self._survey(layout, gpus, order, request)
        plan = self._planning.plan(layout, gpus, restoring=older, busy=usage.device_ids)
        order = self._order(plan, gpus, extra_clients)
        affected = order.affected_pods(usage)
        if self._may_evict:
            self._on_demand.require_unused(affected)
        if self._clients.await_driver(affected, usage.pods, gpus, self._record, request):
            usage = self._survey(layout, gpus, order, request)
            plan = self._planning.plan(layout, gpus, restoring=older, busy=usage.device_ids)
            order = self._order(plan, gpus, extra_clients)
        wait = self._idle_wait(request)
        survey.require_idle(self._deps, plan, order, usage, services=service_names, wait=wait)
        self._services.require(service_names, plan)
        self._hooks.start(plan, request)
        applied_before = self._close(usage.named(order.affected_pods(usage)))
        drainage = self._drain(order, usage, request)
        paused = self._clients.pause(
            plan,
            self._record,
            request,
            extra_clients,
            # Without a plugin no pod gets a device any more: drain those that got one meanwhile.
            drain_late=lambda: self._on_demand.drain(drainage, usage, request),
        )
        if paused.advertisers.has_dra_driver:
            # It hands out devices until it is paused, and a pod that has one cannot end now.
            self._on_demand.require_done(drainage, usage)
        request.check()
        self._services.stop(service_names, plan)
        gpus = self._execute(
            layout, plan, gpus, request, restoring=older, applied=applied_before, paused=paused
        )
        paused = self._resume(paused)
        self._prove(paused, gpus, request)
        self._clients.resume_monitors(paused, self._record, request)
        more = (
            [f" Deleted by force: {messages.listed(drainage.forced)}."] if drainage.forced else []
        )
        more += [
            f" Note: {messages.ended(warning)}"
            for warning in planner.vgpu_host_warnings(gpus, plan)
        ]
        return self._record.succeeded(
            errors.Reason.APPLIED, "is active", gpus=gpus, more="".join(more)
        )

    def roll_back(self) -> str:
        """Undo an unfinished change; return how it went, as a part of a sentence."""
        if self.reboot.is_under_way:
            return ""
        result = ""
        if not self._record.has_rolled_back:
            change = self._transaction(recovery.RunJournal(self._record))
            result = recovery.run(self._deps, change, self._clients, self._record)
        services = self._services.start()
        return messages.joined(result, services, self._hooks.try_exit())

    def undo(self) -> str:
        """Undo what an interrupted run left; return how it went, as a part of a sentence."""
        is_stale = self._record.journal.stale_files
        result = self.roll_back()
        if is_stale:
            try:
                self._transaction(recovery.RunJournal(self._record)).refresh()
            except errors.HostError as error:
                result = messages.joined(result, error.message)
        return result

    def _locked(self, request: ports.Cancellation) -> contextlib.AbstractContextManager[None]:
        if self._deps.lock is None:
            return contextlib.nullcontext()
        return transaction.locked(
            self._deps.lock,
            f"applying layout {self._record.config}",
            clock=self._deps.clock,
            wait=timing.Wait(
                timeout_s=self._limits.lock_timeout_s,
                wait=request.wait,
                backoff=self._limits.backoff,
            ),
        )

    def _resolve(self) -> layouts.Layout:
        """Read the layout, and publish early where it is expected to change the GPUs."""
        layout = self._planning.resolve()
        self._may_evict &= not self._planning.is_verified()
        if (
            self._may_evict
            and self._record.attempt == 1
            and self._planning.expects_change(layout, self._history.gpus)
        ):
            self._record.enter(model.Phase.RESOLVE, "looking at the GPUs")
        self._deps.standby.prepare()
        return layout

    def _observe(self) -> model.ObservedGpus:
        gpus = self._planning.observe()
        recovery.restore_persistence(self._deps, self._record, gpus)
        return gpus

    def _outside(
        self, layout: layouts.Layout, gpus: model.ObservedGpus
    ) -> tuple[model.GpuSnapshot, ...]:
        """Return what GPUs outside the layout had before an interrupted change of them."""
        with layouts.located(layout, gpus):
            selected = config.select(layout, gpus)
        self._planning.warn(layout, gpus)
        others = tuple(gpu for gpu in self._record.journal.snapshot if gpu.uuid not in selected)
        return others if others and recovery.is_possible(self._deps, gpus, others) else ()

    def _survey(
        self,
        layout: layouts.Layout,
        gpus: model.ObservedGpus,
        order: drain.Order,
        request: ports.Cancellation,
    ) -> gpu_use.Usage:
        """Return the usage of devices, if nothing on the node rules the change out."""
        self._deps.standby.expect_change()
        usage = survey.decided_usage(self._deps, gpus, order, request)
        if not self._limits.allows_foreign_managers:
            has_mode = any(map(clients.is_vgpu_plugin, usage.pods))
            annotations = self._deps.node.read().annotations if has_mode else {}
            others = clients.other_managers(usage.pods, self._deps.own_pod_uid, annotations)
            if others:
                raise errors.MigManagerError(
                    f"another program manages MIG on this node: {', '.join(others)}",
                    reason=errors.Reason.FOREIGN_MANAGER,
                )
        self._clients.require_none_stuck(usage.pods)
        self._clients.advertising.require_served(
            resources.gpu_layouts(gpus, config.select(layout, gpus)),
            usage.pods,
            plugin_config=self._plugin_config,
        )
        return usage

    def _order(
        self,
        plan: steps.Plan,
        gpus: model.ObservedGpus,
        extra_clients: tuple[clients.ExtraClient, ...],
    ) -> drain.Order:
        return drain.order(
            self._limits,
            plan,
            gpus,
            may_evict=self._may_evict and not self._on_demand.is_active,
            extra_clients=extra_clients,
            has_begun=self._record.journal.draining,
        )

    def _close(self, affected: str) -> str:
        """Taint the node; return the layout that its label named as applied."""
        if affected and not self._may_evict:
            raise errors.MigManagerError(
                drift.drift_message(self._record.title, affected), reason=errors.Reason.DRIFTED
            )
        if self._deps.slots is not None and not self._record.journal.blocks_workloads:
            self._deps.slots.check()
        applied = ""

        def close(view: cluster.NodeView) -> record.Step:
            nonlocal applied
            applied = view.labels.get(cluster.APPLIED_LABEL, "")
            return record.Step(
                message=f"applying {self._record.title}",
                journal=dataclasses.replace(self._record.journal, hold_taint=True),
                change=cluster.NodePatch(hold_taint=True),
            )

        self._record.take(model.Phase.CORDON, close)
        return applied

    def _drain(
        self, order: drain.Order, usage: gpu_use.Usage, request: ports.Cancellation
    ) -> drain.Drain:
        affected = order.affected_pods(usage)
        if affected:
            names = usage.named(affected)
            pods = "1 pod" if len(affected) == 1 else f"{len(affected)} pods"
            self._announce("Draining", f"{pods} to evict: {names}", is_warning=False)
        drainage = self._new_drain(order)
        self._on_demand.drain(drainage, usage, request)
        self._record.note_journal(draining=False)
        return drainage

    def _new_drain(self, order: drain.Order) -> drain.Drain:
        return drain.Drain(
            self._deps.workloads,
            self._deps.allocations,
            self._deps.clock,
            order=order,
            # Written before the first eviction of the round.
            on_round=lambda message: self._record.enter(
                model.Phase.DRAIN,
                message,
                journal=dataclasses.replace(self._record.journal, draining=True),
            ),
            on_force=lambda names: self._announce(
                "ForcedDrain", f"deleting by force {names}", is_warning=True
            ),
            telemetry=self._deps.telemetry,
        )

    def _announce(self, reason: str, message: str, *, is_warning: bool) -> None:
        self._record.enter(model.Phase.DRAIN, message)
        text = f"{self._record.title}: {message}"
        self._deps.node.emit(reason=reason, message=text, is_warning=is_warning)

    def _execute(  # noqa: PLR0913 - what the steps before returned
        self,
        layout: layouts.Layout,
        plan: steps.Plan,
        gpus: model.ObservedGpus,
        request: ports.Cancellation,
        *,
        restoring: tuple[model.GpuSnapshot, ...],
        applied: str,
        paused: gpu_clients.Paused,
    ) -> model.ObservedGpus:
        """Execute and verify the plan, or roll back; reboot where only that helps."""
        older, applied = recovery.rollback_target(self._deps, self._record.journal, gpus, applied)
        change = self._transaction(
            recovery.RunJournal(self._record, layout, applied), self._idle_wait(request)
        )
        try:
            after, _ = change.run(
                plan,
                seen=gpus,
                older=older,
                # A GPU that was lost meanwhile is not verified, unless the layout names it.
                replan=lambda now: self._planning.plan(layout, now, restoring=restoring),
                points=self._hooks.points,
            )
        except errors.MigManagerError as error:
            if not self.reboot.may_help(error, was_rebooted=self._record.is_rebooted):
                self._resume_after_failure(paused, error)
                raise
            why = self.reboot.request(
                error, lambda: self._drain_whole_node(paused, request), request
            )
            self._resume_after_failure(paused, error)
            raise errors.MigManagerError(
                f"{error.message}; no reboot: {why}", reason=errors.Reason.REBOOT_REQUIRED
            ) from error
        return after

    def _idle_wait(self, request: ports.Cancellation) -> timing.Wait:
        return timing.Wait(
            timeout_s=0.0 if self._on_demand.is_active else self._limits.in_use_timeout_s,
            wait=request.wait,
            on_wait=lambda error: _log.info("gpus_in_use", error=error.message),
        )

    def _drain_whole_node(self, paused: gpu_clients.Paused, request: ports.Cancellation) -> None:
        """Evict every pod with a GPU, whatever the policy is otherwise."""
        self._on_demand.require_reboot_allowed()
        order = drain.whole_node(self._limits)
        usage = survey.usage_now(self._deps.workloads, self._deps.allocations)
        affected = order.affected_pods(usage)
        if affected and not self._may_evict:
            names = messages.listed([pod.key for pod in affected])
            raise errors.DrainError(f"pods use the GPUs, and no change was requested: {names}")
        claiming = [pod.key for pod in affected if pod.may_claim]
        if claiming and paused.advertisers.has_dra_driver:
            raise errors.DrainError(
                "while the DRA driver is paused, these pods with ResourceClaims cannot end: "
                f"{messages.listed(claiming)}; drain the node and reboot it"
            )
        self._new_drain(order).run(usage, request)

    def _resume_after_failure(
        self, paused: gpu_clients.Paused, error: errors.MigManagerError
    ) -> None:
        """Resume host services and device plugin, and keep the reason of the failure."""
        for failed in (self._services.start(), self._hooks.try_exit()):
            if failed:
                error.add(failed)
        # The end of the run restores what an API that fails now does not.
        with contextlib.suppress(errors.ClusterError):
            self._clients.resume_plugin(paused, self._record)

    def _resume(self, paused: gpu_clients.Paused) -> gpu_clients.Paused:
        """Start the host services again, run the exit hooks, and restart the device plugin."""
        failed = self._services.start()
        if failed:
            raise errors.HostError(failed, reason=errors.Reason.HOST_SERVICE_FAILED)
        self._hooks.exit()
        return self._clients.resume_plugin(paused, self._record, plugin_config=self._plugin_config)

    def _prove(
        self,
        paused: gpu_clients.Paused,
        gpus: model.ObservedGpus,
        request: ports.Cancellation,
        message: str = "waiting for the new devices to be schedulable",
    ) -> None:
        self._record.enter(model.Phase.PROVE, message)
        self._clients.advertising.wait_schedulable(paused.advertisers, gpus, self._record, request)

    def _verify_unchanged(
        self, layout: layouts.Layout | None, gpus: model.ObservedGpus, request: ports.Cancellation
    ) -> record.Outcome:
        """Finish what an interrupted run left between change and verification, if anything."""
        journal = recovery.RunJournal(self._record, layout)
        interrupted, unrestored = self._record.journal, journal.unrestored(gpus)
        unverified = tuple(gpu for gpu in interrupted.snapshot if gpu not in unrestored)
        is_stale = interrupted.stale_files or bool(unverified)
        self._record.note_journal(snapshot=unrestored, applied="", stale_files=is_stale)
        if not dataclasses.replace(interrupted, snapshot=unverified).is_restored:
            paused = self._clients.find_plugin(interrupted, gpus)
            self._transaction(journal).refresh()
            paused = self._resume(paused)
            self._prove(paused, gpus, request)
            self._clients.resume_monitors(paused, self._record, request)
            return self._record.succeeded(errors.Reason.APPLIED, "is active", gpus=gpus)
        if is_stale:
            self._transaction(journal).refresh()
        if not self._clients.has_config(self._plugin_config):
            paused = self._clients.resume_plugin(
                self._clients.find_plugin(self._record.journal, gpus),
                self._record,
                plugin_config=self._plugin_config,
            )
            self._prove(paused, gpus, request, "waiting for the plugin's new config")
        elif not self._clients.advertising.is_schedulable(gpus):
            self._record.enter(model.Phase.PROVE, "waiting for the devices to be schedulable")
            # Restarted once, and not at every retry.
            is_retry = self._record.attempt > 1
            stale = self._clients.advertising.find_stale(gpus, is_restarted=not is_retry)
            self._clients.advertising.wait_schedulable(stale, gpus, self._record, request)
        reason = errors.Reason.ALREADY_APPLIED
        return self._record.succeeded(reason, "is already active", gpus=gpus)

    def _transaction(
        self, journal: recovery.RunJournal, idle_wait: timing.Wait | None = None
    ) -> transaction.Transaction:
        return transaction.Transaction(
            gpus=self._deps.gpus,
            journal=journal,
            clock=self._deps.clock,
            reset=self._deps.reset.reset if self._deps.reset else None,
            device_files=self._deps.device_files,
            idle_wait=idle_wait or timing.Wait(),
        )
