"""Publish the GPUs of a node at rest, with their use and the layouts that fit them."""

import structlog

from mig_manager import errors
from mig_manager.agent import node_context, node_patches
from mig_manager.agent.reports import capacity_report, faults, layout_report
from mig_manager.core import model
from mig_manager.core.objects import node_object, well_known

_UNCHANGED = node_object.NodePatch()

_log = structlog.get_logger()


def observe(
    context: node_context.NodeContext, report: faults.FaultReport
) -> tuple[model.ObservedGpus | None, bool]:
    """Observe the GPUs, and report a failure that is due to them.

    Returns:
        The GPUs, empty if none can be observed, None if another manager is at work; and whether a
        failure may pass.
    """
    try:
        return context.observe(), False
    except (errors.HardwareError, errors.LockedError) as error:
        _log.info("gpus_not_observed", reason=error.reason.value, error=error.message)
        report.publish_failure(error.reason, error.message)
        is_locked = isinstance(error, errors.LockedError)
        return (None if is_locked else model.NO_GPUS), error.reason.is_transient


def is_published(context: node_context.NodeContext, gpus: model.ObservedGpus) -> bool:
    """Return whether the node shows what was observed."""
    shown = node_patches.of_gpus(gpus).items()
    return all(context.publisher.written(key) == (text or "") for key, text in shown)


def publish_gpus(
    context: node_context.NodeContext,
    gpus: model.ObservedGpus,
    layouts: layout_report.LayoutReport,
    report: capacity_report.CapacityReport,
    change: node_object.NodePatch = _UNCHANGED,
) -> None:
    """Publish the GPUs, their use and layouts: requests are planned before a label is set.

    ``change`` goes in the same patch.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    fitting = layouts.fitting(gpus)
    annotations = node_patches.of_gpus(gpus) | layouts.annotations(fitting)
    annotations |= report.observe_annotations(
        gpus, context.publisher.written(well_known.CAPACITY_ANNOTATION)
    )
    context.publisher.patch(change.merge(node_object.NodePatch(annotations=annotations)))
    layouts.write(fitting)
