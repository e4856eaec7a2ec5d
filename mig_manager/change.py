"""Bring GPUs from one plan to its end: execute, prove, or return to where they came from.

Shared by the pipeline of the agent and by ``apply`` at a shell, so that neither can leave a
half-applied change behind.
"""

import dataclasses
from collections.abc import Callable, Sequence

import structlog

from mig_manager import errors, hookpoints, ports
from mig_manager.core import model, planner, steps

_WAY_BACK_TRIES = 3
_WAY_BACK_PAUSE_S = 1.0

_log = structlog.get_logger()

Observed = model.ObservedGpus
Snapshot = Sequence[model.GpuSnapshot]
Pause = Callable[[float], None]
Reset = Callable[[Sequence[model.Gpu]], None]
_MOST_ROUNDS = 3
"""One for the mode, one for the instances where profiles are known only then, one to spare."""


def _at_once(_seconds: float) -> None:
    """Do not wait between two tries."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Undo:
    """What goes with a way back."""

    on_begin: Callable[[], object] = lambda: None
    """Called before it is taken."""
    on_end: Callable[[], object] = lambda: None
    """Called once the GPUs are as they were."""
    pause: Pause = _at_once
    """Waits between two tries; seconds."""


def carry_out(  # noqa: PLR0913 - each is named where it is called
    gpus: ports.Gpus,
    first: model.Plan,
    *,
    seen: Observed,
    before: Snapshot,
    replan: Callable[[Observed], model.Plan],
    undo: Undo | None = None,
    reset: Reset | None = None,
    points: hookpoints.HookPoints | None = None,
) -> tuple[Observed, tuple[model.Plan, ...]]:
    """Run a plan, and a second one where the driver tells its profiles only with MIG on.

    Args:
        gpus: The GPUs of this node.
        first: The plan; not empty.
        seen: The GPUs as the plan was made for them. Those that it leaves alone are not looked
            at again: what somebody else makes of them is found as drift.
        before: What the GPUs had before anything was changed: the way back leads there.
        replan: The planner, asked again for the same wish; an empty answer is the proof.
        undo: Who hears of the way back, if it must be taken.
        reset: Resets GPUs whose new mode waits for that; None: nobody does.
        points: Where the owner's hooks run before the steps; None: there are none.

    Returns:
        The GPUs afterwards, and the plans that were run.

    Raises:
        HardwareError: A step failed, or the wish is not in force although none did
            (VERIFY_FAILED). The message says how the way back went; a mode that waits for a
            reset (RESET_REQUIRED) is left waiting.
        HostError: A reset was refused, and the mode is left waiting; or a hook failed.
        LayoutError: The second plan cannot be made.
        Superseded: The change ended early while a hook ran.
    """
    undo = undo or Undo()
    try:
        return _execute(gpus, first, seen, replan, reset, points or hookpoints.HookPoints())
    except errors.Superseded as end:
        _log.info("change_ended_early", why=end.why)
        _take_back(gpus, before, undo, reset, keep_pending=False)
        raise
    except errors.MigManagerError as error:
        _log.warning("change_failed", reason=error.reason.value, error=error.message)
        # Where only a reboot brings the mode, to call it off would make every reboot in vain.
        keep_pending = error.reason.means_mode_waits
        error.add(_take_back(gpus, before, undo, reset, keep_pending=keep_pending))
        raise


def _take_back(
    gpus: ports.Gpus, before: Snapshot, undo: Undo, reset: Reset | None, *, keep_pending: bool
) -> str:
    """Go back, and tell who wants to hear of it; return how it went."""
    undo.on_begin()
    is_back, said = go_back(gpus, before, keep_pending=keep_pending, pause=undo.pause, reset=reset)
    if is_back:
        undo.on_end()
    return said


def go_back(
    gpus: ports.Gpus,
    before: Snapshot,
    *,
    keep_pending: bool = False,
    pause: Pause = _at_once,
    reset: Reset | None = None,
) -> tuple[bool, str]:
    """Return to a snapshot, in several tries where a failure can pass.

    Args:
        gpus: The GPUs of this node.
        before: What they had.
        keep_pending: Whether a mode that waits for a reset may go on waiting.
        pause: Waits between two tries; seconds.
        reset: Resets GPUs whose former mode waits for that; None: nobody does.

    Returns:
        Whether the GPUs are as they were, and how it went, as a part of a sentence.
    """
    import tenacity  # noqa: PLC0415 - a fifth of what a command imports, and seldom needed

    way = _WayBack(gpus, before, keep_pending=keep_pending, reset=reset)
    trying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(_WAY_BACK_TRIES),
        wait=tenacity.wait_exponential(multiplier=_WAY_BACK_PAUSE_S),
        retry=tenacity.retry_if_exception(_can_pass),
        sleep=pause,
        reraise=True,
    )
    try:
        return True, trying(way.take)
    except errors.MigManagerError as error:
        _log.warning("way_back_failed", reason=error.reason.value, error=error.message)
        failed = f"returning to the instances from before failed as well: {error.message}"
        # A driver that has just hung would hang on the question what is left, too.
        left = "" if error.reason is errors.Reason.NVML_TIMEOUT else way.left()
        return False, f"{failed}{left}"


class _WayBack:
    """From what there is to what there was."""

    def __init__(
        self, gpus: ports.Gpus, before: Snapshot, *, keep_pending: bool, reset: Reset | None
    ) -> None:
        self._reset = reset
        self._gpus = gpus
        self._before = before
        self._keep_pending = keep_pending
        self._is_begun = False

    def take(self) -> str:
        """Go it, prove it, and say how it went.

        Raises:
            MigManagerError: Something is still due.
        """
        now = self._gpus.observe()
        plan = self._plan(now)
        if plan.is_empty and not self._is_begun:
            return (
                "only the new mode stays pending" if self._keep_pending else "nothing was changed"
            )
        if not plan.is_empty:
            self._is_begun = True
            now, was_reset = _run(self._gpus, plan, now, self._reset)
            plan = self._plan(now)
            if was_reset and not plan.is_empty:
                plan = self._plan(now.updated(self._gpus.execute(plan, now)))
        if plan.is_empty:
            return "the instances from before are back"
        raise errors.HardwareError(
            "the steps succeeded and did not bring them back", reason=errors.Reason.VERIFY_FAILED
        )

    def left(self) -> str:
        """Say what is still due, to the last instance; empty where nobody can tell."""
        try:
            plan = self._plan(self._gpus.observe())
        except errors.MigManagerError:
            return ""
        due = [
            f"GPU {gpu.gpu_index}: {', '.join(map(steps.described, gpu.steps))}"
            for gpu in plan.gpus
            if gpu.steps
        ]
        return f"; still due: {'; '.join(due)}" if due else ""

    def _plan(self, now: Observed) -> model.Plan:
        return planner.restore(now, self._before, keep_pending=self._keep_pending)


def _can_pass(error: BaseException) -> bool:
    # A driver that hangs costs a whole deadline at each try: that is left to a later run.
    return (
        isinstance(error, errors.MigManagerError)
        and error.reason.is_transient
        and error.reason is not errors.Reason.NVML_TIMEOUT
    )


def _execute(
    gpus: ports.Gpus,
    first: model.Plan,
    seen: Observed,
    replan: Callable[[Observed], model.Plan],
    reset: Reset | None,
    points: hookpoints.HookPoints,
) -> tuple[Observed, tuple[model.Plan, ...]]:
    plan, after = points.staged(first), seen
    plans: list[model.Plan] = []
    while True:
        points.before(plan)
        after, was_reset = _run(gpus, plan, after, reset)
        plans.append(plan)
        rest = replan(after)
        if rest.is_empty:
            return after, tuple(plans)
        is_more_known = plan.is_provisional and not rest.is_provisional
        is_staged = len(plans) == 1 and plan is not first
        if not (was_reset or is_more_known or is_staged) or len(plans) == _MOST_ROUNDS:
            break
        plan = rest
    unlike = {gpu_plan.gpu_uuid for gpu_plan in rest.gpus}
    raise errors.HardwareError(
        "the layout is not in force, although every step succeeded, on "
        + ", ".join(str(gpu) for gpu in after if gpu.uuid in unlike),
        reason=errors.Reason.VERIFY_FAILED,
    )


def _run(
    gpus: ports.Gpus, plan: model.Plan, seen: Observed, reset: Reset | None
) -> tuple[Observed, bool]:
    """Execute a plan; where a mode then waits for a reset, reset those GPUs and no other.

    A mode that the driver reports as in use waits as well: ``nvidia-persistenced`` and the
    kernel's persistence mode keep an Ampere GPU open and let go only for a reset by nvidia-smi
    (gpu-operator#118). The reset names every other process in its way and touches none.

    Returns:
        The GPUs afterwards, and whether the rest of the plan is still due, which is so where a
        mode had to wait.
    """
    try:
        return seen.updated(gpus.execute(plan, seen)), False
    except errors.HardwareError as error:
        is_in_use = error.reason is errors.Reason.IN_USE
        if reset is None or not (is_in_use or error.reason is errors.Reason.RESET_REQUIRED):
            raise
        ours = {gpu_plan.gpu_uuid for gpu_plan in plan.gpus if gpu_plan.changes_mode}
        waiting = tuple(gpu for gpu in gpus.observe() if gpu.uuid in ours and gpu.waits_for_mode)
        if is_in_use and not waiting:
            raise
        _log.info("reset_due", gpus=[gpu.uuid for gpu in waiting])
        try:
            if waiting:
                reset(waiting)
        except errors.HostError as refused:
            if not is_in_use:
                raise
            error.add(f"no reset either: {refused.message}")
            raise error from refused
        return gpus.observe(), True
