"""The pipeline, for one wish; everything that a node is told of it goes through its record.

    resolve -> observe -> plan -> cordon -> drain -> pause -> execute -> verify -> resume -> prove
    -> monitors

The owner's hooks run before the cordon, within the execution, and before the resume.

Each step that can fail for free comes before each step that costs somebody something. What a
step takes is in the journal before it is taken, and every exit gives it back and publishes one
terminal state with one reason. Until hardware is touched a newer wish may end the run; after
that the change is finished or rolled back first, and only its proof may be left to the next run.
"""

import contextlib
import dataclasses
from collections.abc import Collection

import structlog

from mig_manager import errors
from mig_manager.agent import (
    clearing,
    dependencies,
    gpu_clients,
    hooks,
    host,
    monitors,
    outcomes,
    planning,
    rebooting,
    record,
    rollback,
)
from mig_manager.change import bootlayout, node_lock, transaction
from mig_manager.core import model, ports, steps
from mig_manager.core.layout import config, selection
from mig_manager.core.node import clients, mig_strategy

_log = structlog.get_logger()


class Run:
    """One pass through the pipeline."""

    def __init__(
        self,
        world: dependencies.Dependencies,
        limits: dependencies.Limits,
        staff: gpu_clients.Daemons,
        *,
        name: str,
        written: record.Record,
    ) -> None:
        """Prepare a run.

        Args:
            world: What it reaches.
            limits: What it may do.
            staff: The node's daemons.
            name: The layout, as the label names it.
            written: What is published of it, and what it has taken already.
        """
        self._world = world
        self._limits = limits
        self._daemons = staff
        self._journal = hooks.RunJournal(written)
        self._transaction = transaction.Transaction(
            gpus=world.gpus,
            journal=self._journal,
            clock=world.clock,
            reset=world.reset.reset if world.reset else None,
            device_files=world.device_files,
        )
        self._way_back = rollback.WayBack(
            self._transaction,
            world.workloads,
            world.allocations,
            staff=staff,
            telemetry=world.telemetry,
        )
        self._paused = gpu_clients.ANY_PLUGIN
        """What the pause before the change found."""
        self._machine = host.Machine(world)
        self._hooks = hooks.RunHooks(world.hooks, written, name=name, telemetry=world.telemetry)
        self._hash = ""
        self._proven: model.ObservedGpus = model.NO_GPUS
        self._clearing = clearing.Clearing(world, limits, written, name=name)
        self._planning = planning.Planning(world, limits, written, name=name)
        self._reboot = rebooting.Rebooting(world, limits, written, self._clearing, name=name)
        self._seen: tuple[model.ObservedGpus, steps.Plan] | None = None
        self.name = name
        self.record = written
        self.fulfilled: tuple[str, str] | None = None
        """Name and hash of a layout for which nobody need leave: its wish is an old one."""
        self.rebooted: tuple[str, str] | None = None
        """Name and hash of a layout for which the machine was rebooted already."""
        self.remembered: model.ObservedGpus = model.NO_GPUS
        """The GPUs as an earlier run saw them last; none: there was no such run."""

    def spare_everybody(self) -> None:
        """Let it be rather than make a pod leave."""
        self._clearing.spares = True

    def attempt(self, wish: ports.Cancellation) -> outcomes.Outcome:
        """Bring the layout into force, or the GPUs back to where they were.

        Returns:
            The outcome, to be published; what was taken is still to be given back.

        Raises:
            Superseded: The run ended early.
        """
        try:
            self._wait_for_slot(wish)
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._turn(wish))
                stack.callback(self._world.standby.dismiss)
                return self._guarded(wish)
        except (errors.ClusterError, errors.LockedError) as error:
            return self._failed(error.reason, error.message)

    def _wait_for_slot(self, wish: ports.Cancellation) -> None:
        """Take a slot where the owner has a budget; before the node's lock, for it may be long."""
        if self._world.slots is None:
            return
        from mig_manager.agent import clearing  # noqa: PLC0415 - only where there is a budget

        entrance = clearing.Admission(self._world.slots, self.record, self._world.clock)
        if self.record.journal.blocks_workloads:
            entrance.take_again()
        elif self._planning.is_anything_due():
            entrance.wait(wish)

    def _guarded(self, wish: ports.Cancellation) -> outcomes.Outcome:
        try:
            return self._rebooted_if_need_be(wish)
        except errors.Superseded as end:
            end.add(self.settle())
            raise
        except errors.MigManagerError as error:
            if isinstance(error, errors.DrainError):
                self.record.draining(is_so=error.keeps_closed)
            said = self.settle()
            return self._failed(error.reason, error.message, said)
        except Exception as error:  # noqa: BLE001 - a bug must not leave the node pending
            _log.exception("run_crashed")
            said = self.settle()
            return self._failed(errors.Reason.INTERNAL, f"{type(error).__name__}: {error}", said)

    def _rebooted_if_need_be(self, wish: ports.Cancellation) -> outcomes.Outcome:
        try:
            return self._through(wish)
        except errors.MigManagerError as error:
            if not self._may_reboot(error):
                raise
            why = self._reboot.request(error, wish)
            self._resume_leniently(error)
            said = self.settle()
            return self._failed(
                errors.Reason.REBOOT_REQUIRED, f"{error.message}; no reboot: {why}", said
            )

    def _may_reboot(self, error: errors.MigManagerError) -> bool:
        return self._reboot.may_help(error, is_had=self.rebooted == (self.name, self._hash))

    def settle(self) -> str:
        """Bring back GPUs that a change under way has left in between, and what goes with them.

        Returns:
            How it went, as a part of a sentence; empty when there was nothing to do.
        """
        if self._reboot.is_under_way:
            return ""
        said = "" if self._journal.has_rolled_back else self._way_back.take(self.record)
        services = self._machine.start_services(self.record)
        return "; ".join(filter(None, (said, services, self._hooks.exit_leniently())))

    def keep_for_next_boot(self) -> None:
        """Save the layout that was proven, for whoever sets up the GPUs after a reboot."""
        if self._world.proven is None or not self._proven:
            return
        try:
            bootlayout.save(
                self._world.proven,
                self._proven,
                config=self.name,
                config_hash=self._hash,
                boot_id=self._world.boot_id,
            )
        except errors.ConfigError as error:
            _log.warning("proven_layout_not_saved", error=error.message)

    def end_early(self, end: errors.Superseded) -> None:
        """Give everything back after a run that nobody wants any more.

        Raises:
            ClusterError: The API refused or does not answer; the journal is still there.
        """
        _log.info("run_superseded", why=end.why)
        if self._reboot.is_under_way:
            return
        if end.is_replaced:
            self.record.abandon()
        else:
            self.record.finish(self._failed(errors.Reason.INTERRUPTED, end.why))

    def look(self) -> outcomes.Sight:
        """Compare the GPUs with the layout, and change nothing."""
        gpus: model.ObservedGpus = model.NO_GPUS
        try:
            layout = self._planning.resolve()
            gpus = self._planning.observe()
            plan = self._planning.alone(layout, gpus)
        except errors.MigManagerError as error:
            _log.info("look_failed", reason=error.reason.value, error=error.message)
            return outcomes.blind(error, gpus)
        self._seen = gpus, plan
        return outcomes.sight(gpus, plan)

    def in_the_way(self) -> tuple[str, ...]:
        """Return the pods that would have to leave for what ``look`` saw to be put right.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        if self._seen is None:
            return ()
        gpus, plan = self._seen
        return self._clearing.in_the_way(plan, gpus)

    def _turn(self, wish: ports.Cancellation) -> contextlib.AbstractContextManager[None]:
        if self._world.exclusion is None:
            return contextlib.nullcontext()
        return node_lock.held(
            self._world.exclusion,
            f"applying layout {self.name}",
            clock=self._world.clock,
            wait=wish.wait,
            timeout_s=self._limits.lock_timeout_s,
            pace=self._limits.pace,
        )

    def _begin(self) -> config.Layout:
        """Resolve the wish, and say so where a change is to come."""
        layout = self._planning.resolve()
        self._hash = layout.content_hash
        self._journal.layout = layout
        if self.fulfilled == (self.name, self._hash):
            self._clearing.spares = True
        may_foresee = not self._clearing.spares and self.record.attempt == 1
        if may_foresee and self._planning.foresees_change(layout, self.remembered):
            self.record.enter(model.Phase.RESOLVE, "looking at the GPUs")
        self._world.standby.prepare()
        if self.rebooted == (self.name, self._hash) or self.record.journal.rebooted_from:
            self.record.rebooted()
        return layout

    def _through(self, wish: ports.Cancellation) -> outcomes.Outcome:
        layout = self._begin()
        table = self._planning.extra_clients()
        services = self._world.service_names()
        self._hooks.load()
        gpus = self._planning.observe()
        wanted = config.select(layout, gpus)
        self._planning.warn(layout, gpus)
        self._planning.take_along(self._left_elsewhere(gpus, wanted))
        with selection.located(layout, gpus):
            plan = self._planning.plan(gpus, wanted)
        if plan.is_empty:
            return self._keep(gpus, wish)
        # While others are made to let go.
        self._world.standby.expect_change()
        holders = self._clearing.survey()
        self._daemons.require_no_stuck(holders.pods)
        self._daemons.require_served(
            mig_strategy.of_node(gpus, wanted),
            holders.pods,
            plugin_config=self._limits.policy.plugin_config(self.name),
        )
        plan = self._planning.plan(gpus, wanted, busy=clients.busy_uuids(holders.assigned or ()))
        self._hooks.start(plan, wish)
        drainage = self._clearing.close(plan, gpus, holders, table)
        drainage.run(holders, wish)
        self.record.draining(is_so=False)
        self._paused = paused = self._daemons.pause(plan, self.record, wish, table)
        # Without a plugin nobody is given a device any more: who slipped in before shows now.
        drainage.run(holders, wish)
        wish.check()
        self._machine.stop_services(services, plan, self.record)
        gpus = self._change(plan, gpus, layout, wish)
        self._bring_back(paused, gpus, wish)
        by_force = f" Deleted by force: {', '.join(drainage.forced)}." if drainage.forced else ""
        return outcomes.succeeded(
            self.name, errors.Reason.APPLIED, "is in force", gpus=gpus, more=by_force
        )

    def _bring_back(
        self, paused: gpu_clients.Paused, gpus: model.ObservedGpus, wish: ports.Cancellation
    ) -> None:
        """Have the daemons come back to GPUs that are as they shall be, and prove it."""
        self._machine.bring_back(self.record)
        self._hooks.exit()
        plugin_config = self._limits.policy.plugin_config(self.name)
        paused = self._daemons.resume_plugin(paused, self.record, plugin_config=plugin_config)
        self.record.enter(model.Phase.PROVE, "waiting for the new devices to be schedulable")
        self._daemons.prove(paused, gpus, wish)
        self._proven = gpus
        self._resume_monitors(paused, wish)

    def _keep(self, gpus: model.ObservedGpus, wish: ports.Cancellation) -> outcomes.Outcome:
        """Change nothing; but an earlier run may have ended between change and proof."""
        left, due = self.record.journal, self._journal.due_elsewhere(gpus)
        self.record.proven(due)
        unverified = tuple(gpu for gpu in left.snapshot if gpu not in due)
        if not dataclasses.replace(left, snapshot=unverified).is_empty:
            paused = self._daemons.still_paused(left)
            self._transaction.refresh()
            self._bring_back(paused, gpus, wish)
            return outcomes.succeeded(self.name, errors.Reason.APPLIED, "is in force", gpus=gpus)
        if self.record.attempt > 1:
            # An earlier try may have failed at the files alone.
            self._transaction.refresh()
        self._proven = gpus
        plugin_config = self._limits.policy.plugin_config(self.name)
        if not self._daemons.has_config(plugin_config):
            paused = self._daemons.resume_plugin(
                self._daemons.find_plugins(), self.record, plugin_config=plugin_config
            )
            self.record.enter(model.Phase.PROVE, "waiting for the plugin's new config")
            self._daemons.prove(paused, gpus, wish)
        elif not self._daemons.is_proven(gpus):
            self.record.enter(model.Phase.PROVE, "waiting for the devices to be schedulable")
            self._daemons.prove(self._plugin_to_prove(gpus), gpus, wish)
        return outcomes.succeeded(
            self.name, errors.Reason.ALREADY_APPLIED, "is already in force", gpus=gpus
        )

    def _resume_monitors(self, paused: gpu_clients.Paused, wish: ports.Cancellation) -> None:
        monitors.Monitors(
            self._world.node,
            self._world.workloads,
            self._world.clock,
            timeout_s=self._limits.monitor_timeout_s,
            pace=self._limits.pace,
        ).resume(paused, self.record, wish)

    def _plugin_to_prove(self, gpus: model.ObservedGpus) -> gpu_clients.Paused:
        """Restart a plugin that offers something else, but not again at every retry."""
        if self.record.attempt > 1:
            return gpu_clients.ANY_PLUGIN
        return self._daemons.restart_stale_plugin(gpus)

    def _left_elsewhere(
        self, gpus: model.ObservedGpus, wanted: Collection[str]
    ) -> tuple[model.GpuSnapshot, ...]:
        others = tuple(gpu for gpu in self.record.journal.snapshot if gpu.uuid not in wanted)
        return others if others and self._way_back.is_open(gpus, others) else ()

    def _change(
        self,
        plan: steps.Plan,
        before: model.ObservedGpus,
        layout: config.Layout,
        wish: ports.Cancellation,
    ) -> model.ObservedGpus:
        waiting = dataclasses.replace(
            self._transaction,
            patience=transaction.Patience(
                timeout_s=self._limits.in_use_timeout_s,
                wait=wish.wait,
                on_wait=lambda error: _log.info("gpus_in_use", error=error.message),
            ),
        )
        older = self._older(before)
        try:
            gpus, _ = waiting.run(
                plan,
                seen=before,
                older=older,
                # A GPU that was lost meanwhile is due no more, unless the layout names it.
                replan=lambda after: self._planning.plan(after, config.select(layout, after)),
                points=self._hooks.points,
            )
        except errors.MigManagerError as error:
            if not self._may_reboot(error):
                self._resume_leniently(error)
            raise
        return gpus

    def _resume_leniently(self, error: errors.MigManagerError) -> None:
        """Resume services and device plugin after a failure, whose reason must not be hidden."""
        for failed in (
            self._machine.start_services(self.record),
            self._hooks.exit_leniently(),
        ):
            if failed:
                error.add(failed)
        # An API that fails now must not hide the reason; the end gives everything back.
        with contextlib.suppress(errors.ClusterError):
            self._daemons.resume_plugin(self._paused, self.record)

    def _older(self, gpus: model.ObservedGpus) -> tuple[model.GpuSnapshot, ...]:
        """Return what an interrupted change found, if the way back there is open."""
        left = self.record.journal
        # An older run may have undone its change and not have come to say so.
        self._journal.applied = self._clearing.applied_before or left.applied
        if not left.snapshot:
            return ()
        is_open = self._way_back.is_open(gpus, left.snapshot)
        self._journal.applied = left.applied if is_open else ""
        return left.snapshot if is_open else gpus.missing(left.snapshot)

    def _failed(self, reason: errors.Reason, message: str, said: str = "") -> outcomes.Outcome:
        lost = () if reason is errors.Reason.GPU_UNREACHABLE else self.record.gpus.unreachable
        parts = (message, said, *(gpu.sentence for gpu in lost if gpu.message not in message))
        return outcomes.failed(
            reason,
            "; ".join(filter(None, parts)),
            is_unfinished=not self.record.journal.remaining.is_empty,
            # Evicted pods must not start here again before the others have left.
            keeps_closed=self.record.journal.draining and reason.is_transient,
        )
