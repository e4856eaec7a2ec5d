"""The owner's hooks in a run of the agent, and what the journal knows of them.

Whoever passes ``apply-start`` owes ``apply-exit``: that is written down before, so that whoever
comes after an agent that was killed pays it.
"""

import dataclasses

import structlog

from mig_manager import errors
from mig_manager.agent import record
from mig_manager.change import hook_points, instrumentation
from mig_manager.core import model, ports, steps
from mig_manager.core.layout import config, selection
from mig_manager.core.node import cluster

_log = structlog.get_logger()


class RunHooks:
    """The hooks of one run.

    Args:
        programs: The hooks; None: there are none.
        written: What is published of the run, and its journal.
        name: The layout.
        telemetry: Told that a hook is being run.
    """

    def __init__(
        self,
        programs: ports.Hooks | None,
        written: record.Record,
        *,
        name: str,
        telemetry: instrumentation.Telemetry,
    ) -> None:
        self._has_programs = programs is not None
        self._record = written
        self._is_loaded = False
        self._has_tried_exit = False
        self.points = hook_points.HookPoints(
            programs, variables={"MIG_PARTED_SELECTED_CONFIG": name}, telemetry=telemetry
        )

    def load(self) -> None:
        """Read the hooks; call before anything is touched.

        Raises:
            ConfigError: The file cannot be read or breaks the format.
        """
        self.points.load()
        self._is_loaded = True

    def start(self, plan: steps.Plan, wish: ports.Cancellation) -> None:
        """Pass the first point, if all programs are there that this change would run.

        Raises:
            ClusterError: The API refused or does not answer.
            HostError: HOOK_FAILED; then nothing was taken.
            Superseded: The run ended early; the last point is due where a hook was ended.
        """
        self.points.check = wish.check
        self.points.require(plan)
        if self.points.is_empty:
            return
        self._record.enter(
            model.Phase.RESOLVE,
            "running the apply-start hooks",
            take=dataclasses.replace(self._record.journal, exit_hook=True),
        )
        try:
            self.points.start()
        except errors.MigManagerError:
            self._record.exit_passed()
            raise
        except errors.Superseded:
            if not self.points.has_run:
                self._record.exit_passed()
            raise

    def exit(self) -> None:
        """Pass the last point, if that is due; it stays due when that fails.

        Raises:
            ConfigError: The file cannot be read any more or breaks the format.
            HostError: HOOK_FAILED.
        """
        if not self._record.journal.exit_hook or self._has_tried_exit:
            return
        self._has_tried_exit = True
        if not self._has_programs:
            _log.warning("hook_forgotten", point="apply-exit")
        if not self._is_loaded:
            self.load()
        self.points.exit()
        self._record.exit_passed()

    def exit_leniently(self) -> str:
        """Do the same after a failure, whose reason must not be hidden.

        Returns:
            What failed, as a part of a sentence; empty when nothing did.
        """
        try:
            self.exit()
        except errors.MigManagerError as error:
            return error.message
        return ""


class RunJournal:
    """Implements ``change.Journal``.

    Args:
        written: The record of the run.
    """

    def __init__(self, written: record.Record) -> None:
        self._record = written
        self.applied = ""
        """The layout that was verified before the change: its label returns with a rollback."""
        self.has_rolled_back = False
        """Whether a rollback was tried."""
        self.layout: config.Layout | None = None
        """The layout of the run; None: it is not resolved."""

    def begin(self, before: tuple[model.GpuSnapshot, ...], plan: steps.Plan) -> None:
        """Write what a rollback restores; from now on the node names no layout as applied.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        self._record.enter(
            model.Phase.EXECUTE,
            f"running {len(plan.steps)} steps on the GPUs",
            take=dataclasses.replace(self._record.journal, snapshot=before, applied=self.applied),
            change=cluster.NodePatch(labels={cluster.APPLIED_LABEL: None}),
        )

    def rolling_back(self) -> None:
        """Publish the phase, once; an API that does not answer does not hold up the rollback."""
        if self.has_rolled_back:
            return
        self.has_rolled_back = True
        self._record.announce(model.Phase.ROLL_BACK, "restoring the instances from before")

    def undone(self, due: tuple[model.GpuSnapshot, ...] = ()) -> None:
        """Remember that there is nothing to roll back but what is due on unreachable GPUs."""
        self._record.undone(due)

    def done(self, gpus: model.ObservedGpus) -> None:
        """Remember that there is nothing to roll back any more, and what there is now."""
        self._record.note(gpus=gpus)
        self._record.proven(self.due_elsewhere(gpus))

    def due_elsewhere(self, gpus: model.ObservedGpus) -> tuple[model.GpuSnapshot, ...]:
        """Return what is due on unreachable GPUs that the layout is not about."""
        due = self._record.journal.snapshot
        return (
            selection.unrestored_elsewhere(self.layout, gpus, due) if self.layout and due else ()
        )
