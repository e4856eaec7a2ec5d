"""Resolve the requested layout, observe the GPUs, and plan the steps; change nothing."""

import dataclasses

import structlog

from mig_manager import errors
from mig_manager.agent import jobs, served_layouts
from mig_manager.core import messages, model, steps, yaml_tree
from mig_manager.core.layout import layouts
from mig_manager.core.planner import planner
from mig_manager.core.records import requests

_ABOUT_FILE = frozenset({errors.Reason.INVALID_CONFIG, errors.Reason.UNKNOWN_CONFIG})

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The requested layout."""

    layout: layouts.Layout
    warnings: tuple[yaml_tree.Diagnostic, ...] = ()
    """Problems that lenient parsing accepts."""
    is_from_owner: bool = False  # whether the owner wrote it
    was_rebooted: bool = False  # whether the machine was rebooted for it
    observed: model.ObservedGpus | None = None
    """The GPUs, if the layout was generated from them just now."""
    repairs: frozenset[str] = frozenset()  # UUIDs of the GPUs to repair
    before_repair: tuple[model.GpuSnapshot, ...] = ()
    """Those GPUs as they were, also before an interrupted attempt."""

    def with_snapshots(self, gpus: model.ObservedGpus) -> "Resolved":
        """Return it with the GPUs to repair as they are now, unless it knows them already."""
        unknown = self.repairs - {gpu.uuid for gpu in self.before_repair}
        now = (gpu.snapshot for gpu in gpus if gpu.uuid in unknown)
        return dataclasses.replace(self, before_repair=(*self.before_repair, *now))

    def plan(
        self,
        gpus: model.ObservedGpus,
        *,
        restoring: tuple[model.GpuSnapshot, ...] = (),
        busy: frozenset[str] = frozenset(),
    ) -> steps.Plan:
        """Plan the layout; as long as GPUs are to be repaired, their repair alone.

        ``restoring`` has the instances of GPUs outside the layout from before an interrupted
        change. Devices with ``busy`` UUIDs are destroyed last.

        Raises:
            LayoutError: The layout is impossible on these GPUs; has the location in the file.
        """
        repair = planner.repair(gpus, self.with_snapshots(gpus).before_repair)
        if not repair.is_empty:
            return repair
        with layouts.located(self.layout, gpus):
            plan = planner.plan(gpus, layouts.select(self.layout, gpus), busy=busy)
            return planner.combined(plan, planner.restore(gpus, restoring))

    def expects_change(self, gpus: model.ObservedGpus) -> bool:
        """Check whether the layout changes the GPUs as an earlier run observed them.

        An observation takes a moment, and the label's author should see a reaction at once. No
        decision depends on this: planning uses a new observation.
        """
        try:
            return bool(gpus) and not self.plan(gpus).is_empty
        except errors.MigManagerError:
            return False


def resolve(job: jobs.Job) -> Resolved:
    """Return the requested layout.

    Raises:
        ConfigError: The file or annotation cannot be read or is invalid.
        HardwareError: The layout must be generated, and no GPU can be observed.
        LayoutError: The layout or the annotation does not exist.
    """
    request = job.request
    if request.custom:
        layout, warnings = request.custom.layout(is_lenient=job.limits.is_lenient)
        resolved = Resolved(layout=layout, warnings=warnings, is_from_owner=True)
    else:
        resolved = _resolve_named(job)
    layout, rebooted = resolved.layout, job.journal.record.rebooted_hash
    is_same = not resolved.is_from_owner or rebooted in ("", layout.content_hash)
    was_rebooted = bool(job.journal.entries.rebooted_from) or (rebooted is not None and is_same)
    job.status.note(
        config_hash=layout.content_hash, origin=layout.origin, is_rebooted=was_rebooted
    )
    before = job.journal.entries.snapshot
    return dataclasses.replace(
        resolved,
        was_rebooted=was_rebooted,
        repairs=request.repairs,
        before_repair=tuple(gpu for gpu in before if gpu.uuid in request.repairs),
    )


def _resolve_named(job: jobs.Job) -> Resolved:
    """Return the layout of the file, or a generated one; report whether the file has it."""
    name, is_usable = job.request.config, False
    gpus: model.ObservedGpus | None = None

    def observe_and_note() -> model.ObservedGpus:
        nonlocal gpus
        gpus = observe(job)
        return gpus

    try:
        layout, warnings = served_layouts.find(
            name, job.deps.configs, job.limits, observe_and_note
        )
        is_from_owner = not (layout.is_generated or job.limits.has_default_layouts)
        verified = job.journal.record.verified
        is_other = verified is not None and verified.config_hash != layout.content_hash
        if verified and verified.is_from_owner and is_other and not is_from_owner:
            raise errors.LayoutError(
                f"{job.deps.configs.name} no longer has layout '{name}', which was applied; "
                "a generated layout of that name is not applied without a new request",
                reason=errors.Reason.UNKNOWN_CONFIG,
            )
        is_usable = True
    finally:
        job.deps.telemetry.config_read(is_usable=is_usable)
    return Resolved(layout=layout, warnings=warnings, is_from_owner=is_from_owner, observed=gpus)


def is_about_file(job: jobs.Job, error: errors.MigManagerError) -> bool:
    """Check whether an error is that the file is unusable or lacks the layout."""
    return error.reason in _ABOUT_FILE and job.request.custom is None


def keep_verified(job: jobs.Job, error: errors.MigManagerError) -> tuple[model.ObservedGpus, bool]:
    """Return the GPUs if they have the verified layout, although the file now lacks it.

    Otherwise a typo in the file would fail every node, although their layouts are active.

    Returns:
        The GPUs, and whether the owner wrote the layout.

    Raises:
        MigManagerError: ``error``, unless it is about the file and the layout is active.
    """
    verified = job.journal.record.verified
    if not (
        is_about_file(job, error)
        and job.journal.entries.is_restored
        and verified
        and verified.gpus
    ):
        raise error
    gpus = observe(job)
    if requests.fingerprint(gpus) != verified.gpus:
        raise error
    job.status.note(config_hash=verified.config_hash, config_problem=error.message)
    _log.warning("config_not_used", reason=error.reason.value, error=error.message)
    message = f"{messages.with_full_stop(error.message)} {error.reason.remedy}"
    job.deps.node.emit(reason=error.reason.value, message=message, is_warning=True)
    return gpus, verified.is_from_owner


def observe_once(job: jobs.Job, resolved: Resolved) -> model.ObservedGpus:
    """Return the GPUs observed for the layout, or observe them.

    Raises:
        HardwareError: No GPU can be observed.
    """
    return observe(job) if resolved.observed is None else resolved.observed


def observe(job: jobs.Job) -> model.ObservedGpus:
    """Observe the GPUs.

    Raises:
        HardwareError: No GPU can be observed; from the second attempt on the message says so.
    """
    attempt = job.request.attempt
    try:
        gpus = job.deps.gpus.observe()
    except errors.HardwareError as error:
        if attempt > 1:
            error.add(f"no GPU can be observed at attempt {attempt} either")
        raise
    job.status.note(gpus=gpus)
    return gpus


def observe_at_end(job: jobs.Job) -> model.ObservedGpus:
    """Observe the GPUs as a failed run left them; return none if that fails."""
    try:
        return observe(job)
    except errors.HardwareError:
        return model.NO_GPUS


def select(resolved: Resolved, gpus: model.ObservedGpus) -> dict[str, model.DesiredGpu]:
    """Return the desired state of the GPUs by UUID; log problems that lenient parsing accepts.

    Raises:
        LayoutError: The layout is for other GPUs; has the location in the file.
    """
    with layouts.located(resolved.layout, gpus):
        desired = layouts.select(resolved.layout, gpus)
    for remark in (*resolved.warnings, *layouts.lenient_warnings(resolved.layout, gpus)):
        _log.warning("config_overlooked", place=str(remark.location), problem=remark.message)
    return desired
