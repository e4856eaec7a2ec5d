"""The host in a run: services, the owner's hooks, a reboot, and the layout for the next boot."""

import dataclasses
from collections.abc import Callable, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import jobs
from mig_manager.change import local
from mig_manager.core import host_files, messages, model, steps, timing
from mig_manager.core.node import clients, policies

_log = structlog.get_logger()


def restore(job: jobs.Job) -> str:
    """Start the stopped services and run the exit hooks.

    Returns:
        The failures as part of a sentence; they stay in the journal. Empty: all succeeded.
    """
    services = start_services(job)
    try:
        exit_hooks(job)
    except errors.MigManagerError as error:
        return messages.join(services, error.message)
    return services


# -- services ------------------------------------------------------------------------------------


def running_services(job: jobs.Job, names: Sequence[str], plan: steps.Plan) -> tuple[str, ...]:
    """Return the running services to stop, if the plan removes devices.

    Raises:
        HostError: HOST_SERVICE_FAILED or NO_PERMISSION: the init system does not answer.
    """
    if job.deps.services is None or not names or not clients.destroys_instances(plan):
        return ()
    return job.deps.services.running(names)


def stop_services(job: jobs.Job, names: Sequence[str], plan: steps.Plan) -> None:
    """Stop the running services, if the plan removes devices.

    Raises:
        ClusterError: The API refused or does not answer; no service was stopped.
        HostError: HOST_SERVICE_FAILED: a service did not stop.
    """
    stopped = job.undo_stack.journal.host_services
    running = tuple(n for n in running_services(job, names, plan) if n not in stopped)
    if job.deps.services is None or not running:
        return
    job.undo_stack.enter(
        model.Phase.PAUSE,
        f"stopping the host's {', '.join(running)}",
        host_services=(*stopped, *running),
    )
    for name in running:
        job.deps.telemetry.still_working()
        job.deps.services.stop(name)
        _log.info("host_service_stopped", service=name)


def start_services(job: jobs.Job) -> str:
    """Start the stopped services; services that do not start stay in the journal.

    Other programs can write to the journal, because it is an annotation. So the agent starts only
    services in its settings, and the services that systemd stops along with these.

    Returns:
        The failures as part of a sentence; empty if every service started.
    """
    failed: list[str] = []
    for name in host_files.start_order(job.undo_stack.journal.host_services):
        job.deps.telemetry.still_working()
        try:
            _start(job, name)
        except errors.MigManagerError as error:
            _log.warning("host_service_not_started", service=name, error=error.message)
            failed.append(error.message)
            continue
        stopped = job.undo_stack.journal.host_services
        job.undo_stack.note(host_services=tuple(one for one in stopped if one != name))
    return "; ".join(failed)


def _start(job: jobs.Job, name: str) -> None:
    services = job.deps.services
    if services is None or not services.may_have_stopped(name, job.deps.service_names()):
        _log.warning("host_service_refused", service=name)
        job.deps.node.emit(
            reason="HostServiceRefused",
            message=f"{name} is in the journal of an interrupted run, but not among the host "
            "services that this agent may start, so it was not started. If it is yours, start it "
            "on the node (systemctl start).",
            is_warning=True,
        )
        return
    if services.start(name):
        _log.info("host_service_started", service=name)


# -- hooks ---------------------------------------------------------------------------------------


def start_hooks(job: jobs.Job, plan: steps.Plan) -> None:
    """Run the ``apply-start`` hooks, if the programs of all hooks for this change exist.

    After ``apply-start``, ``apply-exit`` must run. The journal records this first, so that the
    next run does it after a crash.

    Raises:
        ClusterError: The API refused or does not answer.
        HostError: HOOK_FAILED; nothing was changed.
        Superseded: Another layout is requested; ``apply-exit`` must run if a hook was running.
    """
    job.hooks.require(plan)
    if job.hooks.is_empty:
        return
    job.undo_stack.enter(model.Phase.RESOLVE, "running the apply-start hooks", exit_hook=True)
    try:
        job.hooks.start(job.cancel.check)
    except errors.MigManagerError:
        job.undo_stack.note(exit_hook=False)
        raise
    except errors.Superseded:
        job.undo_stack.note(exit_hook=job.hooks.has_run)
        raise


def exit_hooks(job: jobs.Job) -> None:
    """Run the ``apply-exit`` hooks, if the journal lists them; every run tries once.

    Raises:
        ConfigError: The hooks file is unreadable or invalid.
        HostError: HOOK_FAILED.
    """
    if not job.undo_stack.journal.exit_hook or job.hooks.has_passed_exit:
        return
    if job.deps.hooks is None:
        _log.warning("hook_forgotten", point="apply-exit")
    job.hooks.exit()
    job.undo_stack.note(exit_hook=False)


# -- reboot --------------------------------------------------------------------------------------


def may_reboot(job: jobs.Job, error: errors.MigManagerError, *, was_rebooted: bool) -> bool:
    """Check whether a reboot can help after an error, is allowed, and was not done before.

    It helps if a GPU's new MIG mode is pending, or a process prevents a reset. ``was_rebooted``
    is True if the status names a reboot for this request.
    """
    # The journal is newer than the status.
    before = job.undo_stack.journal.rebooted_from
    if before:
        was_rebooted = before != job.deps.boot_id
    elif job.undo_stack.record.rebooted_from == job.deps.boot_id:
        # A reboot was requested, but the machine is still up.
        was_rebooted = False
    drains = job.limits.policy.drain is not policies.Drain.NONE
    if was_rebooted or job.deps.reboot is None or not drains:
        return False
    if isinstance(error, errors.HostError):
        return error.reason.is_mode_pending or error.reason is errors.Reason.IN_USE
    try:
        return error.reason.is_mode_pending and any(
            gpu.has_pending_mode for gpu in job.deps.gpus.observe()
        )
    except errors.HardwareError:
        return False


def reboot(job: jobs.Job, error: errors.MigManagerError, drain_node: Callable[[], object]) -> str:
    """Drain the node, request a reboot, and wait for it.

    Returns:
        Why the machine did not reboot, as part of a sentence.

    Raises:
        Rebooting: The agent stops, because the node goes down.
    """
    name, why = job.request.config, error.message
    try:
        drain_node()
        job.status.note(is_rebooted=True)
        job.undo_stack.enter(
            model.Phase.REBOOT,
            f"rebooting: {why}",
            state=model.State.REBOOTING,
            rebooted_from=job.deps.boot_id or "unknown",
        )
        job.deps.node.emit(reason="Rebooting", message=f"{name}: {why}", is_warning=True)
        if job.deps.reboot is not None:
            job.deps.reboot(f"MIG layout {name} needs it")
        _wait_for_stop(job)
    except errors.MigManagerError as refused:
        job.status.note(is_rebooted=False)
        return refused.message
    return f"the machine is still up {job.limits.reboot_timeout_s:g} s after the reboot request"


def _wait_for_stop(job: jobs.Job) -> None:
    """Wait for the signal to stop; another layout does not end the wait.

    A run for that layout would work on a node that is going down.
    """

    def sleep(seconds: float) -> None:
        try:
            job.cancel.wait(seconds)
        except errors.Superseded as end:
            if end.is_stopping:
                raise errors.Rebooting(end.why) from end
            job.deps.clock.wait(seconds)

    wait = dataclasses.replace(
        job.wait(job.limits.reboot_timeout_s), sleep=sleep, backoff=timing.Backoff(first_s=1.0)
    )
    for _ in wait.attempts():
        job.deps.telemetry.still_working()


def save_layout(job: jobs.Job, gpus: model.ObservedGpus) -> None:
    """Save the verified layout for the next boot; a failure is logged."""
    record = job.undo_stack.record
    if job.deps.boot_layout is None:
        return
    try:
        local.save_layout(
            job.deps.boot_layout,
            gpus,
            config=record.config,
            config_hash=record.verified.config_hash if record.verified else "",
            boot_id=job.deps.boot_id,
        )
    except errors.ConfigError as error:
        _log.warning("layout_not_saved", error=error.message)
