"""The pipeline, for agent and command line alike; the only writer of the state.

    resolve -> observe -> plan -> cordon -> drain -> pause -> execute -> verify -> resume -> prove
    -> monitors

Each step that can fail for free comes before each step that costs somebody something. What a
step takes is in the journal before it is taken, and every exit gives it back and publishes one
terminal state with one reason. Until hardware is touched a newer wish may end the run; after
that the change is finished or rolled back first, and only its proof may be left to the next run.
"""

import contextlib
import dataclasses

import structlog

from mig_manager import change, daemons, drain, errors, monitors, ports, record
from mig_manager.core import clients, cluster, config, extras, model, planner
from mig_manager.core import pace as pacing
from mig_manager.core import policy as policies

_log = structlog.get_logger()

Outcome = record.Outcome


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything the pipeline reaches."""

    gpus: ports.Gpus
    node: ports.Node
    workloads: ports.Workloads
    allocations: ports.DeviceAllocations
    configs: ports.ConfigSource
    clock: ports.Clock
    telemetry: ports.Telemetry = dataclasses.field(default_factory=ports.Telemetry)
    extra_clients: ports.ConfigSource | None = None
    """The table of the owner's own daemons; None: there are none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the node's owner allows: how long to wait for others, and whom to send away."""

    drain_timeout_s: float = 300.0
    plugin_timeout_s: float = 300.0
    monitor_timeout_s: float = 60.0
    """For each monitor."""
    policy: policies.Policy = dataclasses.field(default_factory=policies.Policy)
    pace: pacing.Pace = dataclasses.field(default_factory=pacing.Pace)


class Reconciler:
    """Brings one node to one wish."""

    def __init__(self, world: World, limits: Limits) -> None:
        self._world = world
        self._limits = limits
        self._daemons = daemons.Daemons(
            world.node,
            world.workloads,
            world.allocations,
            world.clock,
            timeout_s=limits.plugin_timeout_s,
            pace=limits.pace,
        )

    def recover(self) -> None:
        """Give back what an interrupted run left taken; call before the first run.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        journal = daemons.recovered(self._world.node.read())
        if journal is None:
            return
        _log.warning("interrupted_run_found", config=journal.config)
        back = record.giving_back(journal)
        self._world.node.patch(
            dataclasses.replace(back, annotations={cluster.JOURNAL_ANNOTATION: None})
        )

    def rest(self) -> None:
        """See to it that a node without a wish does not say ``pending``; call without a run.

        A run that was killed could not say how it ended, and one that gave way to a newer wish
        left that to the next run, which never comes once the label is removed.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        view = self._world.node.read()
        if view.labels.get(cluster.STATE_LABEL) != model.State.PENDING.value:
            return
        ended = record.Record(
            self._world.node,
            self._world.clock,
            config="",
            attempt=1,
            telemetry=self._world.telemetry,
        )
        ended.finish(_failed(errors.Reason.INTERRUPTED, "the label was removed"))

    def run(self, name: str, wish: ports.Wish, *, attempt: int = 1) -> Outcome:
        """Bring the layout ``name`` into force.

        Args:
            name: The layout, as the label names it.
            wish: Ends the run early, while that is free.
            attempt: Counts the tries at one wish, from 1.

        Returns:
            The outcome that was published.

        Raises:
            ClusterError: The outcome could not be published; the journal is still there.
            Superseded: The run ended early; everything was given back.
        """
        run = _Run(self._world, self._limits, self._daemons, name=name, attempt=attempt)
        try:
            outcome = run.through(wish)
        except errors.Superseded as end:
            run.end_early(end)
            raise
        except errors.MigManagerError as error:
            outcome = _failed(error.reason, error.message)
        except Exception as error:  # noqa: BLE001 - a bug must not leave the node pending
            _log.exception("run_crashed")
            outcome = _failed(errors.Reason.INTERNAL, f"{type(error).__name__}: {error}")
        run.record.finish(outcome)
        return outcome


class _Run:
    """One pass through the pipeline."""

    def __init__(
        self,
        world: World,
        limits: Limits,
        staff: daemons.Daemons,
        *,
        name: str,
        attempt: int,
    ) -> None:
        self._world = world
        self._limits = limits
        self._daemons = staff
        self._name = name
        self.record = record.Record(
            world.node, world.clock, config=name, attempt=attempt, telemetry=world.telemetry
        )

    def through(self, wish: ports.Wish) -> Outcome:
        layout = self._resolve()
        table = self._extra_clients()
        gpus = self._observe()
        wanted = config.select(layout, gpus)
        plan = planner.plan(gpus, wanted)
        if plan.is_empty:
            return self._keep(gpus, wish)
        plan, drainage, holders = self._clear_the_way(gpus, wanted, table)
        drainage.run(holders, wish)
        paused = self._daemons.pause(plan, self.record, wish, table)
        # Without a plugin nobody is given a device any more: who slipped in before shows now.
        drainage.run(holders, wish)
        wish.check()
        gpus = self._change(plan, gpus, wanted, paused)
        paused = self._daemons.resume_plugin(
            paused, self.record, plugin_config=self._limits.policy.plugin_config(self._name)
        )
        self.record.enter(model.Phase.PROVE, "waiting for the new devices to be schedulable")
        self._daemons.prove(paused, gpus, wish)
        self._resume_monitors(paused, wish)
        by_force = f" Deleted by force: {', '.join(drainage.forced)}." if drainage.forced else ""
        return self._succeeded(errors.Reason.APPLIED, "is in force", more=by_force)

    def _keep(self, gpus: tuple[model.Gpu, ...], wish: ports.Wish) -> Outcome:
        """Change nothing; but an earlier run may have failed between change and proof."""
        plugin_config = self._limits.policy.plugin_config(self._name)
        if not self._daemons.has_config(plugin_config):
            paused = self._daemons.resume_plugin(
                self._daemons.find_plugins(), self.record, plugin_config=plugin_config
            )
            self.record.enter(model.Phase.PROVE, "waiting for the plugin's new config")
            self._daemons.prove(paused, gpus, wish)
        elif not self._daemons.is_proven(gpus):
            self.record.enter(model.Phase.PROVE, "waiting for the devices to be schedulable")
            self._daemons.prove(self._plugin_to_prove(gpus), gpus, wish)
        return self._succeeded(errors.Reason.ALREADY_APPLIED, "is already in force")

    def _resume_monitors(self, paused: daemons.Paused, wish: ports.Wish) -> None:
        monitors.Monitors(
            self._world.node,
            self._world.workloads,
            self._world.clock,
            timeout_s=self._limits.monitor_timeout_s,
            pace=self._limits.pace,
        ).resume(paused, self.record, wish)

    def _plugin_to_prove(self, gpus: tuple[model.Gpu, ...]) -> daemons.Paused:
        """Restart a plugin that offers something else, but not again at every retry."""
        if self.record.attempt > 1:
            return daemons.ANY_PLUGIN
        return self._daemons.restart_stale_plugin(gpus)

    def _resolve(self) -> config.Layout:
        source = self._world.configs
        layout = config.parse(source.read(), source=source.name).layout(self._name)
        self.record.note(config_hash=layout.content_hash)
        return layout

    def _extra_clients(self) -> tuple[extras.ExtraClient, ...]:
        source = self._world.extra_clients
        return extras.parse(source.read(), source=source.name) if source else ()

    def _observe(self) -> tuple[model.Gpu, ...]:
        gpus = self._world.gpus.observe()
        self.record.note(gpus=gpus)
        return gpus

    def _clear_the_way(
        self,
        gpus: tuple[model.Gpu, ...],
        wanted: dict[str, model.WantedGpu],
        table: tuple[extras.ExtraClient, ...],
    ) -> tuple[model.Plan, drain.Drain, drain.Holders]:
        """Plan around those who can stay, and close the node to newcomers."""
        holders = drain.survey(self._world.workloads, self._world.allocations)
        plan = planner.plan(gpus, wanted, busy=clients.busy_uuids(holders.assigned or ()))
        order = drain.Order(
            affected=clients.affected_ids(plan, gpus),
            policy=self._limits.policy,
            daemons=table,
            timeout_s=self._limits.drain_timeout_s,
            pace=self._limits.pace,
        )
        leaving = order.leaving(holders)
        # A cordon does not keep DaemonSets from replacing an evicted pod at once; a taint does.
        needs_hold = any(pod.owner_kind == "DaemonSet" for pod in leaving)
        view = self._world.node.read()
        self.record.enter(
            model.Phase.CORDON,
            f"applying {self._name}",
            take=dataclasses.replace(
                self.record.journal, cordoned=not view.is_unschedulable, hold_taint=needs_hold
            ),
            change=cluster.NodePatch(unschedulable=True, hold_taint=needs_hold or None),
        )
        if leaving:
            names = ", ".join(clients.told(pod, holders.assigned) for pod in leaving)
            what = "waiting for" if order.is_passive else "evicting"
            self._announce_drain("Draining", f"{what} {names}", is_warning=False)
        drainage = drain.Drain(
            self._world.workloads,
            self._world.allocations,
            self._world.clock,
            order=order,
            on_force=lambda names: self._announce_drain(
                "ForcedDrain", f"deleting by force {names}", is_warning=True
            ),
            telemetry=self._world.telemetry,
        )
        return plan, drainage, holders

    def _announce_drain(self, reason: str, message: str, *, is_warning: bool) -> None:
        self.record.enter(model.Phase.DRAIN, message)
        self._world.node.emit(
            reason=reason, message=f"{self._name}: {message}", is_warning=is_warning
        )

    def _change(
        self,
        plan: model.Plan,
        before: tuple[model.Gpu, ...],
        wanted: dict[str, model.WantedGpu],
        paused: daemons.Paused,
    ) -> tuple[model.Gpu, ...]:
        self.record.enter(model.Phase.EXECUTE, f"running {len(plan.steps)} steps on the GPUs")
        try:
            gpus, _ = change.carry_out(
                self._world.gpus,
                plan,
                before=before,
                replan=lambda after: planner.plan(after, wanted),
                on_undo=self._announce_undo,
            )
        except errors.MigManagerError:
            # An API that fails now must not hide the reason; the end gives everything back.
            with contextlib.suppress(errors.ClusterError):
                self._daemons.resume_plugin(paused, self.record)
            raise
        self.record.note(gpus=gpus)
        return gpus

    def _announce_undo(self) -> None:
        # Nobody's silence keeps the GPUs from being brought back.
        with contextlib.suppress(errors.ClusterError):
            self.record.enter(model.Phase.ROLL_BACK, "returning to the instances from before")

    def end_early(self, end: errors.Superseded) -> None:
        """Give everything back after a run that nobody wants any more."""
        _log.info("run_superseded", why=end.why)
        if end.is_replaced:
            self.record.abandon()
        else:
            self.record.finish(_failed(errors.Reason.INTERRUPTED, end.why))

    def _succeeded(self, reason: errors.Reason, what: str, *, more: str = "") -> Outcome:
        return Outcome(
            state=model.State.SUCCESS,
            reason=reason,
            message=f"Layout {self._name} {what}.{more}",
        )


def _failed(reason: errors.Reason, message: str) -> Outcome:
    text = message.rstrip(".") + "."
    if reason.remedy:
        text = f"{text} {reason.remedy}"
    return Outcome(state=model.State.FAILED, reason=reason, message=text)
