"""Compare the GPUs with the layout of the last run, and change nothing."""

import dataclasses

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts
from mig_manager.agent.phases import resolving
from mig_manager.core import model, steps

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The GPUs compared with a layout."""

    gpus: model.ObservedGpus
    plan: steps.Plan | None  # the changes that the layout needs; None: it could not be planned
    error: reasons.Reason | None = None
    message: str = ""  # message of the error
    is_unchanged: bool | None = None
    """Without a plan: whether the GPUs have the instances that they were verified with; None:
    unknown, or no GPU was observed."""
    is_file_unusable: bool = False
    """Whether the file is unusable or lacks the layout, which was verified before."""
    missing: tuple[str, ...] = ()
    """Names of the GPUs that the driver listed when the layout was verified, and no longer."""

    @property
    def is_active(self) -> bool | None:
        """Whether the layout is active; None: unknown."""
        if self.missing:
            return False
        # Without a plan, every difference from the verified GPUs is a drift.
        return self.is_unchanged if self.plan is None else self.plan.is_empty


def compare_gpus(attempt: attempts.Attempt) -> Observation:
    """Observe the GPUs, and plan the layout of a run without executing anything.

    Raises:
        LockedError: Another manager changes the GPUs.
    """
    try:
        with attempt.hold_lock(f"checking layout {attempt.request.layout}", changes_gpus=False):
            try:
                target = resolving.resolve(attempt)
            except (errors.ConfigError, errors.LayoutError):
                # A file that cannot be used hides neither a change nor a fault of the GPUs.
                resolving.observe_and_record(attempt)
                raise
            gpus = resolving.observed_for(attempt, target)
            plan = target.plan(gpus)
    except errors.LockedError:
        raise
    except errors.MigManagerError as error:
        _log.info("drift_check_failed", reason=error.reason.value, error=error.message)
        gpus = attempt.status.gpus
        record = attempt.record
        verified, applied = record.verified, record.verified_fingerprints
        is_file_unusable = verified is not None and resolving.is_about_file(attempt, error)
        if verified:
            attempt.recorder.set_status(
                content_hash=verified.content_hash,
                is_from_owner=verified.is_from_owner,
                file_problem=error.message if is_file_unusable else "",
            )
        return Observation(
            gpus=gpus,
            plan=None,
            error=error.reason,
            message=error.message,
            is_unchanged=not applied.differs(gpus) if gpus and applied else None,
            is_file_unusable=is_file_unusable,
            missing=record.absent_gpus(gpus, attempt.deps.boot_id),
        )
    return Observation(
        gpus=gpus,
        plan=plan,
        missing=attempt.record.absent_gpus(gpus, attempt.deps.boot_id),
    )
