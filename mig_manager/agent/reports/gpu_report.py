"""Publish the GPUs of a node at rest, with their use and the layouts that fit them."""

import structlog

from mig_manager import errors
from mig_manager.agent import node_context, node_patches
from mig_manager.agent.reports import capacity_report, faults, layout_report
from mig_manager.core import model
from mig_manager.core.objects import node_object, well_known

_UNCHANGED = node_object.NodePatch()

_log = structlog.get_logger()


def observe_or_report(
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


class GpuReport:
    """The GPUs as published, with their use and the layouts that fit them."""

    def __init__(
        self,
        context: node_context.NodeContext,
        layouts: layout_report.LayoutReport,
        capacity: capacity_report.CapacityReport,
    ) -> None:
        self._publisher = context.publisher
        self._layouts = layouts
        self._capacity = capacity

    def is_published(self, gpus: model.ObservedGpus) -> bool:
        """Return whether the node shows what was observed."""
        shown = node_patches.of_gpus(gpus).items()
        return all(self._publisher.written(key) == (text or "") for key, text in shown)

    def publish(
        self, gpus: model.ObservedGpus, change: node_object.NodePatch = _UNCHANGED
    ) -> None:
        """Publish the GPUs, their use and layouts: requests are planned before a label is set.

        ``change`` goes in the same patch.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        fitting = self._layouts.fitting(gpus)
        annotations = node_patches.of_gpus(gpus) | self._layouts.annotations(fitting)
        annotations |= self._capacity.observe_annotations(
            gpus, self._publisher.written(well_known.CAPACITY_ANNOTATION)
        )
        self._publisher.patch(change.merge(node_object.NodePatch(annotations=annotations)))
        self._layouts.write(fitting)
