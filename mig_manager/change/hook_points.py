"""The four points of one change at which the owner's hooks run, in the order of mig-parted.

    apply-start -> pre-apply-mode -> (MIG mode) -> pre-apply-config -> (instances) -> apply-exit

Each point comes once; the middle two only before a change of mode or of instances. A change that
begins ``apply-start`` passes ``apply-exit``, even if a hook fails. (mig-parted skips it if one of
``apply-start`` does: ``ApplyMigConfigWithHooks`` of cmd/nvidia-mig-parted/apply.) After a kill,
the agent's next run passes it; a command does not.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

from mig_manager import errors, reasons
from mig_manager.core import ports, steps
from mig_manager.core.files import hook_files

Check = Callable[[], object]  # called during hooks and waits; its exceptions end them


def no_check() -> None:
    """Let a change go on."""


class HookPoints:
    """The points of one change."""

    def __init__(
        self,
        programs: ports.Hooks | None = None,
        *,
        variables: Mapping[str, str] | None = None,
        telemetry: ports.Telemetry | None = None,
    ) -> None:
        self._programs = programs
        self._variables = variables or {}
        self._telemetry = telemetry or ports.Telemetry()
        self._passed: set[hook_files.Point] = set()
        self._check: Check = no_check
        self.has_run = False

    @property
    def has_passed_exit(self) -> bool:
        """Whether the hooks of ``apply-exit`` were run, and may have failed."""
        return hook_files.Point.APPLY_EXIT in self._passed

    def load(self) -> None:
        """Read the hooks file, if no call has read it yet.

        Raises:
            ConfigError: The file cannot be read or is invalid.
        """
        _ = self._table

    @property
    def has_hooks(self) -> bool:
        """Whether the file has hooks at any point; the first call reads it."""
        return bool(self._table)

    @functools.cached_property
    def _table(self) -> hook_files.Table:
        return self._programs.read() if self._programs is not None else {}

    def require(self, plan: steps.Plan) -> None:
        """Check that the programs of all hooks of this change exist.

        Raises:
            HostError: HOOK_FAILED: a program is missing.
        """
        if self._programs is None:
            return
        start, end = hook_files.Point.APPLY_START, hook_files.Point.APPLY_EXIT
        for point in (start, *_points_of(plan), end):
            for hook in self._table.get(point, ()):
                if why := self._programs.missing(hook):
                    raise errors.HostError(
                        f"{why}; nothing was touched", reason=reasons.Reason.HOOK_FAILED
                    )

    def start(self, check: Check) -> None:
        """Run the hooks of ``apply-start``.

        ``check`` is called while a hook runs; its exceptions end the hook and the change.

        Raises:
            HostError: HOOK_FAILED. ``apply-exit`` must run all the same: hooks before this one may
                have stopped services.
            Superseded: ``check`` raised it; likewise.
        """
        self._check = check
        self._run_once(hook_files.Point.APPLY_START)

    def before(self, plan: steps.Plan) -> None:
        """Run the hooks that precede these steps, unless they have run.

        Raises:
            HostError: HOOK_FAILED.
        """
        for point in _points_of(plan):
            self._run_once(point)

    def first_part(self, plan: steps.Plan) -> steps.Plan | None:
        """Return the part of a plan that changes the mode, if hooks run after it; else None."""
        point = hook_files.Point.PRE_APPLY_CONFIG
        is_needed = point in self._table and point not in self._passed
        if not is_needed or not any(gpu.takes_whole_gpu for gpu in plan.gpus):
            return None
        return steps.Plan(gpus=tuple(_to_mode(gpu) for gpu in plan.gpus if gpu.takes_whole_gpu))

    def exit(self) -> None:
        """Run the hooks of ``apply-exit``, once.

        Raises:
            ConfigError: As ``load``, if that was not called.
            HostError: HOOK_FAILED.
        """
        self._check = no_check
        self._run_once(hook_files.Point.APPLY_EXIT)

    @contextlib.contextmanager
    def with_exit(self) -> Iterator[None]:
        """Run the ``apply-exit`` hooks when the context ends.

        Raises:
            HostError: HOOK_FAILED, if nothing else failed.
        """
        try:
            yield
        except BaseException as error:
            try:
                self.exit()
            except errors.MigManagerError as failure:
                if isinstance(error, errors.MigManagerError):
                    error.add(failure.message)
            raise
        try:
            self.exit()
        except errors.MigManagerError as error:
            error.add("the layout is active all the same")
            raise

    def _run_once(self, point: hook_files.Point) -> None:
        if self._programs is None or point in self._passed:
            return
        # Read first: if the file cannot be read, a later call runs the point.
        hooks = self._table.get(point, ())
        self._passed.add(point)
        for hook in hooks:
            self._report_and_check()
            # Variables of the change override the hook's, as in mig-parted.
            environment = {**hook.envs, **self._programs.variables, **self._variables}
            self.has_run = True
            self._programs.run(point, hook, environment, check=self._report_and_check)

    def _report_and_check(self) -> None:
        self._telemetry.still_working()
        self._check()


def _points_of(plan: steps.Plan) -> Iterator[hook_files.Point]:
    if any(gpu.takes_whole_gpu for gpu in plan.gpus):
        yield hook_files.Point.PRE_APPLY_MODE
    creates = steps.CreateGpuInstance | steps.CreateComputeInstance
    # Instances that are only destroyed for a new mode do not count.
    if any(
        isinstance(s, creates) or not gpu.takes_whole_gpu for gpu in plan.gpus for s in gpu.steps
    ):
        yield hook_files.Point.PRE_APPLY_CONFIG


def _to_mode(gpu: steps.GpuPlan) -> steps.GpuPlan:
    """Cut a GPU's steps after the change of its mode, or its reset."""
    idle = steps.SetMode | steps.Reset
    last = next(i for i, step in enumerate(gpu.steps) if isinstance(step, idle))
    if last + 1 == len(gpu.steps):
        return gpu
    return dataclasses.replace(gpu, steps=gpu.steps[: last + 1], target=(), is_provisional=True)
