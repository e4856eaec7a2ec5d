"""Bring GPUs from one plan to its end: execute, prove, or return to where they came from.

Shared by the pipeline of the agent and by ``apply`` at a shell, so that neither can leave a
half-applied change behind.
"""

from collections.abc import Callable

import structlog

from mig_manager import errors, ports
from mig_manager.core import model, planner

_log = structlog.get_logger()

Observed = tuple[model.Gpu, ...]


def carry_out(
    gpus: ports.Gpus,
    first: model.Plan,
    *,
    before: Observed,
    replan: Callable[[Observed], model.Plan],
    on_undo: Callable[[], object] = lambda: None,
) -> tuple[Observed, tuple[model.Plan, ...]]:
    """Run a plan, and a second one where the driver tells its profiles only with MIG on.

    Args:
        gpus: The GPUs of this node.
        first: The plan; not empty.
        before: The observation that it was made from: the way back leads there.
        replan: The planner, asked again for the same wish; an empty answer is the proof.
        on_undo: Called before the way back is taken.

    Returns:
        The GPUs afterwards, and the plans that were run.

    Raises:
        HardwareError: A step failed, or the wish is not in force although none did
            (VERIFY_FAILED). The message says how the way back went; a mode that waits for a
            reset (RESET_REQUIRED) is left waiting.
        LayoutError: The second plan cannot be made.
    """
    try:
        return _execute(gpus, first, replan)
    except errors.MigManagerError as error:
        _log.warning("change_failed", reason=error.reason.value, error=error.message)
        on_undo()
        # Where only a reboot brings the mode, to call it off would make every reboot in vain.
        keep_pending = error.reason is errors.Reason.RESET_REQUIRED
        error.add(_undo(gpus, before, keep_pending=keep_pending))
        raise


def _execute(
    gpus: ports.Gpus,
    first: model.Plan,
    replan: Callable[[Observed], model.Plan],
) -> tuple[Observed, tuple[model.Plan, ...]]:
    gpus.execute(first)
    after = gpus.observe()
    rest = replan(after)
    if rest.is_empty:
        return after, (first,)
    if first.is_provisional and not rest.is_provisional:
        gpus.execute(rest)
        after = gpus.observe()
        if replan(after).is_empty:
            return after, (first, rest)
    unlike = {gpu_plan.gpu_uuid for gpu_plan in replan(after).gpus}
    raise errors.HardwareError(
        "the layout is not in force, although every step succeeded, on "
        + ", ".join(str(gpu) for gpu in after if gpu.uuid in unlike),
        reason=errors.Reason.VERIFY_FAILED,
    )


def _undo(gpus: ports.Gpus, before: Observed, *, keep_pending: bool) -> str:
    """Return to the snapshot; say how that went, because the first error is the reason."""
    try:
        way_back = planner.restore(gpus.observe(), before, keep_pending=keep_pending)
        if way_back.is_empty:
            return "only the new mode stays pending" if keep_pending else "nothing was changed"
        gpus.execute(way_back)
        if planner.restore(gpus.observe(), before, keep_pending=keep_pending).is_empty:
            return "the instances from before are back"
    except errors.MigManagerError as error:
        _log.warning("way_back_failed", reason=error.reason.value, error=error.message)
        return f"returning to the instances from before failed as well: {error.message}"
    return "the instances from before could not be restored in full"
