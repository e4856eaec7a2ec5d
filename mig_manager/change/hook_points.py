"""The four points of one change at which the owner's hooks run, in the order of the peer.

    apply-start -> pre-apply-mode -> (MIG mode) -> pre-apply-config -> (instances) -> apply-exit

Each point comes once, the two in the middle only where something is changed that they stand
before. Whoever passes ``apply-start`` comes to ``apply-exit``, however the change ends.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping

from mig_manager import errors
from mig_manager.change import instrumentation
from mig_manager.core import ports, steps
from mig_manager.core.host import hooks

Check = Callable[[], object]


def _go_on() -> None:
    """Let a hook have its time."""


class HookPoints:
    """The points of one change.

    Args:
        programs: The hooks; None: there are none.
        variables: What they are told of this change, beside what they are always told.
        telemetry: Told that a hook is being run.
    """

    def __init__(
        self,
        programs: ports.Hooks | None = None,
        *,
        variables: Mapping[str, str] | None = None,
        telemetry: instrumentation.Telemetry | None = None,
    ) -> None:
        self._programs = programs
        self._variables = variables or {}
        self._telemetry = telemetry or instrumentation.Telemetry()
        self._table = hooks.Table()
        self._passed: set[hooks.Point] = set()
        self.has_run = False
        """Whether any hook has begun."""
        self._check: Check = _go_on

    @property
    def is_empty(self) -> bool:
        """Whether there are no hooks; only after ``load`` there may be some."""
        return self._table.is_empty

    def load(self) -> None:
        """Read the hooks; call before anything is touched.

        Raises:
            ConfigError: The file cannot be read or breaks the format.
        """
        if self._programs is not None:
            self._table = self._programs.read()

    def require(self, plan: steps.Plan) -> None:
        """See to it that every program is there that this change would run.

        Raises:
            HostError: HOOK_FAILED: one is not.
        """
        if self._programs is None:
            return
        for point in (hooks.Point.APPLY_START, *_points_of(plan), hooks.Point.APPLY_EXIT):
            for hook in self._table.at(point):
                why = self._programs.missing(hook)
                if why:
                    raise errors.HostError(
                        f"{why}; nothing was touched", reason=errors.Reason.HOOK_FAILED
                    )

    def start(self, check: Check) -> None:
        """Pass the first point.

        Args:
            check: Called while a hook runs; what it raises ends the hook and the change. Not
                called while hooks of the last point run.

        Raises:
            HostError: HOOK_FAILED; then there is no last point either.
            Superseded: The change ended early; the last point is due if ``has_run``.
        """
        self._check = check
        self._pass(hooks.Point.APPLY_START)

    def before(self, plan: steps.Plan) -> None:
        """Pass the points that stand before these steps, as far as they are not passed yet.

        Raises:
            HostError: HOOK_FAILED.
        """
        for point in _points_of(plan):
            self._pass(point)

    def staged(self, plan: steps.Plan) -> steps.Plan:
        """Return the part of a plan that comes first: the mode, where a point lies behind it.

        The rest is planned anew once that is done; without hooks there is no need for two parts.
        """
        point = hooks.Point.PRE_APPLY_CONFIG
        is_needed = bool(self._table.at(point)) and point not in self._passed
        if not is_needed or not any(gpu.changes_mode for gpu in plan.gpus):
            return plan
        return steps.Plan(gpus=tuple(_to_mode(gpu) for gpu in plan.gpus if gpu.changes_mode))

    def exit(self) -> None:
        """Pass the last point; done when it is passed already.

        Raises:
            HostError: HOOK_FAILED.
        """
        self._check = _go_on
        self._pass(hooks.Point.APPLY_EXIT)

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

    @contextlib.contextmanager
    def around(self, check: Check) -> Iterator[None]:
        """Pass the first point, and the last one when the context ends, however it does.

        Raises:
            HostError: HOOK_FAILED: on entering; on leaving, where nothing else failed.
        """
        try:
            self.start(check)
        except errors.Superseded:
            if self.has_run:
                self.exit_leniently()
            raise
        try:
            yield
        except errors.MigManagerError as error:
            said = self.exit_leniently()
            if said:
                error.add(said)
            raise
        except BaseException:
            self.exit_leniently()
            raise
        try:
            self.exit()
        except errors.MigManagerError as error:
            error.add("the layout is in force all the same")
            raise

    def _pass(self, point: hooks.Point) -> None:
        if self._programs is None or point in self._passed:
            return
        self._passed.add(point)
        for hook in self._table.at(point):
            # Those of the change win, as with the peer.
            self._look()
            environment = {**hook.envs, **self._programs.variables, **self._variables}
            self.has_run = True
            self._programs.run(point, hook, environment, check=self._look)

    def _look(self) -> None:
        self._telemetry.still_working()
        self._check()


def _points_of(plan: steps.Plan) -> Iterator[hooks.Point]:
    """Yield the points that stand before the steps of a plan."""
    if any(gpu.changes_mode for gpu in plan.gpus):
        yield hooks.Point.PRE_APPLY_MODE
    if any(_is_of_config(gpu) for gpu in plan.gpus):
        yield hooks.Point.PRE_APPLY_CONFIG


def _is_of_config(gpu: steps.GpuPlan) -> bool:
    """Tell whether instances are changed for their own sake and not for that of the mode."""
    if not gpu.changes_mode:
        return bool(gpu.steps)
    creates = steps.CreateGpuInstance | steps.CreateComputeInstance
    return any(isinstance(step, creates) for step in gpu.steps)


def _to_mode(gpu: steps.GpuPlan) -> steps.GpuPlan:
    """Return the plan of a GPU as far as the switch of its mode."""
    last = next(i for i, step in enumerate(gpu.steps) if isinstance(step, steps.SetMode))
    if last + 1 == len(gpu.steps):
        return gpu
    return dataclasses.replace(gpu, steps=gpu.steps[: last + 1], target=(), is_provisional=True)
