"""Resume the GPU clients, and verify that the layout's devices are schedulable."""

import dataclasses
from collections.abc import Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts, outcomes
from mig_manager.agent.phases import services_and_hooks
from mig_manager.agent.pods import node_advertisers, paused_clients, resuming, schedulability
from mig_manager.core import messages, model
from mig_manager.core.objects import well_known
from mig_manager.core.records import journals, run_status

_log = structlog.get_logger()


def resume_and_verify(
    attempt: attempts.Attempt,
    paused: paused_clients.PausedClients,
    gpus: model.ObservedGpus,
    notes: Sequence[str] = (),
) -> outcomes.Outcome:
    """Resume the paused clients, wait until devices are schedulable, then resume the monitors.

    Raises:
        ClusterError: The API refused or does not answer.
        HostError: HOST_SERVICE_FAILED or HOOK_FAILED.
        NotReadyError: The devices are not schedulable by the deadline.
        Superseded: Another layout is requested; the next run verifies this change.
    """
    services_and_hooks.start_services(attempt)
    services_and_hooks.exit_hooks(attempt)
    expected = resuming.resume_advertisers(attempt, paused, plugin_config=attempt.plugin_config)
    _wait_schedulable(attempt, expected, gpus, "waiting for the new devices to be schedulable")
    resuming.resume_monitors(attempt, paused)
    return outcomes.success(
        attempt.status,
        reasons.Reason.APPLIED,
        "is active",
        gpus=gpus,
        more="".join(notes),
    )


def verify_unchanged(
    attempt: attempts.Attempt, gpus: model.ObservedGpus, unrestored: model.Snapshots
) -> outcomes.Outcome:
    """Verify a layout that needs no step, and finish an interrupted run if there is one.

    ``unrestored`` has the snapshots in the journal that stay there.

    Raises:
        MigManagerError: As ``resume_and_verify``; DEVICE_FILES_FAILED.
        Superseded: Another layout is requested.
    """
    interrupted = attempt.journal
    snapshots = interrupted.gpus.snapshots
    unverified = tuple(gpu for gpu in snapshots if gpu not in unrestored)
    is_stale = interrupted.gpus.has_stale_files or bool(unverified)
    attempt.recorder.set_journal(
        gpus=dataclasses.replace(
            interrupted.gpus, snapshots=unrestored, is_verified=True, has_stale_files=is_stale
        )
    )
    attempt.forget_former_layout()
    if unverified or attempt.journal.remainder is journals.Remainder.CHANGE:
        return _finish_interrupted(attempt, gpus, snapshots)
    if is_stale:
        attempt.new_transaction().refresh()
    present = attempt.node_labels.get(well_known.PLUGIN_CONFIG_LABEL)
    if attempt.plugin_config not in (None, present):
        _set_plugin_config(attempt, gpus, unrestored)
    else:
        _verify_active(attempt, gpus)
    return outcomes.success(
        attempt.status, reasons.Reason.ALREADY_APPLIED, "is already active", gpus=gpus
    )


def _finish_interrupted(
    attempt: attempts.Attempt, gpus: model.ObservedGpus, changed: model.Snapshots
) -> outcomes.Outcome:
    """Finish a run whose change is done but not verified, or which paused clients before it."""
    paused = paused_clients.remove_phantoms_as_if_paused(attempt, gpus, changed)
    attempt.new_transaction().refresh()
    return resume_and_verify(attempt, paused, gpus)


def _set_plugin_config(
    attempt: attempts.Attempt, gpus: model.ObservedGpus, unrestored: model.Snapshots
) -> None:
    """Restart the advertisers with the device plugin's config for the layout."""
    expected = resuming.resume_advertisers(
        attempt,
        paused_clients.remove_phantoms_as_if_paused(attempt, gpus, unrestored),
        plugin_config=attempt.plugin_config,
    )
    _wait_schedulable(attempt, expected, gpus, "waiting for the plugin's new config")


def _verify_active(attempt: attempts.Attempt, gpus: model.ObservedGpus) -> None:
    """Verify that the devices are schedulable; restart advertisers of others."""
    # Kubelet still counts the devices that a plugin registered before the GPU was lost.
    returned = attempt.record.returned_gpus(gpu.uuid for gpu in gpus)
    if schedulability.correct_and_check_schedulable(attempt, gpus, returned):
        return
    attempt.recorder.enter(run_status.Phase.VERIFY, "waiting for the devices to be schedulable")
    expected = schedulability.restart_stale(attempt, gpus, returned)
    schedulability.wait_schedulable(attempt, expected, gpus)


def verify_restored(
    attempt: attempts.Attempt, gpus: model.ObservedGpus, outcome: outcomes.Outcome
) -> outcomes.Outcome:
    """Verify that the former devices are schedulable, if the failed run paused their advertisers.

    No attempt follows that would report it, so the outcome does, and the label of the applied
    layout is not restored. A newer request, or the end of the agent, ends the wait.
    """
    advertisers = node_advertisers.find_resumed(attempt.recorder, attempt.node_labels)
    if not (advertisers and gpus):
        return outcome
    try:
        schedulability.wait_schedulable(
            attempt, schedulability.ExpectedAdvertisers(advertisers=advertisers), gpus
        )
    except errors.Superseded as end:
        _log.info("former_devices_not_verified", why=end.why)
    except (errors.ClusterError, errors.NotReadyError) as error:
        attempt.recorder.set_journal(applied_before="")
        description = messages.join(outcome.description, error.message)
        return dataclasses.replace(outcome, description=description)
    else:
        labels = {each.deploy_label for each in advertisers}
        attempt.recorder.set_record(attempt.record.without_awaited(labels))
    return outcome


def _wait_schedulable(
    attempt: attempts.Attempt,
    expected: schedulability.ExpectedAdvertisers,
    gpus: model.ObservedGpus,
    message: str,
) -> None:
    attempt.recorder.enter(run_status.Phase.VERIFY, message)
    schedulability.wait_schedulable(attempt, expected, gpus)
