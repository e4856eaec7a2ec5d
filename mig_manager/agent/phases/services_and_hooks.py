"""Stop and start the host's services during a run, and run the owner's hooks."""

import dataclasses
from collections.abc import Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts
from mig_manager.core import messages, steps
from mig_manager.core.files import service_files
from mig_manager.core.records import run_status

_log = structlog.get_logger()


def restore(attempt: attempts.Attempt) -> str:
    """Start the stopped services and run the exit hooks.

    Returns:
        The failures as part of a sentence; they stay in the journal. Empty: all succeeded.
    """
    failures = []
    for undo in (start_services, exit_hooks):
        try:
            undo(attempt)
        except errors.MigManagerError as error:
            failures.append(error.message)
    return messages.join(*failures)


def running_services(
    attempt: attempts.Attempt, names: Sequence[str], plan: steps.Plan
) -> tuple[str, ...]:
    """Return the running services to stop, if the plan removes devices.

    Raises:
        HostError: HOST_SERVICE_FAILED or NO_PERMISSION: the init system does not answer.
    """
    if attempt.deps.services is None or not names or not plan.destroys_instances:
        return ()
    return attempt.deps.services.running(names)


def stop_services(attempt: attempts.Attempt, names: Sequence[str], plan: steps.Plan) -> None:
    """Stop the running services, if the plan removes devices.

    Raises:
        ClusterError: The API refused or does not answer; no service was stopped.
        HostError: HOST_SERVICE_FAILED: a service did not stop.
    """
    before = attempt.journal.host
    running = running_services(attempt, names, plan)
    if attempt.deps.services is None or not running:
        return
    attempt.recorder.enter(
        run_status.Phase.PAUSE,
        f"stopping the host's {', '.join(running)}",
        host=dataclasses.replace(
            before, stopped_services=tuple(dict.fromkeys((*before.stopped_services, *running)))
        ),
    )
    attempt.memory.add_stopped_services(running)
    for name in running:
        attempt.deps.telemetry.still_working()
        attempt.deps.services.stop(name)
        _log.info("host_service_stopped", service=name)


def start_services(attempt: attempts.Attempt) -> None:
    """Start the stopped services; services that do not start stay in the journal.

    Other programs can write to the journal, because it is an annotation. So the agent starts only
    services that it stopped itself, services in its settings, and the services that systemd stops
    along with these.

    Raises:
        HostError: HOST_SERVICE_FAILED: some services did not start.
    """
    failures: list[str] = []
    for name in service_files.start_order(attempt.journal.host.stopped_services):
        attempt.deps.telemetry.still_working()
        try:
            _start(attempt, name)
        except errors.MigManagerError as error:
            _log.warning("host_service_not_started", service=name, error=error.message)
            failures.append(error.message)
            continue
        before = attempt.journal.host
        stopped = tuple(one for one in before.stopped_services if one != name)
        attempt.recorder.set_journal(host=dataclasses.replace(before, stopped_services=stopped))
    if failures:
        raise errors.HostError("; ".join(failures), reason=reasons.Reason.HOST_SERVICE_FAILED)


def _start(attempt: attempts.Attempt, name: str) -> None:
    services = attempt.deps.services
    is_own = name in attempt.memory.stopped_services
    if services is None or not (
        is_own or services.may_have_stopped(name, attempt.deps.service_names())
    ):
        _log.warning("host_service_refused", service=name)
        attempt.deps.node.emit(
            reason="HostServiceRefused",
            message=f"{name} is in the journal of an interrupted run, but not among the host "
            "services that this agent may start, so it was not started. If it is yours, start it "
            "on the node (systemctl start).",
            is_warning=True,
        )
        return
    was_down = services.start(name)
    attempt.memory.remove_stopped_service(name)
    if was_down:
        _log.info("host_service_started", service=name)


def start_hooks(attempt: attempts.Attempt, plan: steps.Plan) -> None:
    """Run the ``apply-start`` hooks, if the programs of all hooks for this change exist.

    Once ``apply-start`` has begun, ``apply-exit`` must run. The journal records this first.

    Raises:
        ClusterError: The API refused or does not answer.
        HostError: HOOK_FAILED; no pod or GPU was changed.
        Superseded: Another layout is requested.
    """
    attempt.hooks.require(plan)
    if not attempt.hooks.has_hooks:
        return
    with_exit = dataclasses.replace(attempt.journal.host, must_run_exit_hooks=True)
    attempt.recorder.enter(
        run_status.Phase.RESOLVE, "running the apply-start hooks", host=with_exit
    )
    attempt.hooks.start(attempt.cancel.check)


def exit_hooks(attempt: attempts.Attempt) -> None:
    """Run the ``apply-exit`` hooks, if the journal lists them; every run tries once.

    Raises:
        ConfigError: The hooks file is unreadable or invalid.
        HostError: HOOK_FAILED.
    """
    before = attempt.journal.host
    if not before.must_run_exit_hooks or attempt.hooks.has_passed_exit:
        return
    if attempt.deps.hooks is None:
        _log.warning("hook_forgotten", point="apply-exit")
    attempt.hooks.exit()
    attempt.recorder.set_journal(host=dataclasses.replace(before, must_run_exit_hooks=False))
