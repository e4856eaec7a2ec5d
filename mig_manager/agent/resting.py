"""Publish GPUs and layouts of a node without a request, and admit workloads."""

import structlog

from mig_manager import errors
from mig_manager.agent import capacity, faults, jobs, publish, served_layouts
from mig_manager.core import model
from mig_manager.core.node import node_object, well_known
from mig_manager.core.records import gpu_codec, readiness, requests

_log = structlog.get_logger()


def admit_workloads(shared: jobs.Shared, view: node_object.NodeView) -> None:
    """Remove start-up taints: without a request, workloads need not wait for a layout.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    shared.deps.node.set_condition(readiness.NO_LAYOUT_REQUESTED)
    taints = shared.limits.policy.startup_taints & view.taint_keys
    if taints:
        shared.publisher.update(lambda _view: node_object.NodePatch(removed_taints=taints))


def observe(shared: jobs.Shared, report: faults.FaultReport) -> tuple[model.ObservedGpus, bool]:
    """Observe the GPUs, and report a failure that is due to them.

    Returns:
        The GPUs, empty after a failure; and whether it may pass.
    """
    try:
        with shared.hold_lock("observing the GPUs"):
            return shared.deps.gpus.observe(), False
    except (errors.HardwareError, errors.LockedError) as error:
        _log.info("gpus_not_observed", reason=error.reason.value, error=error.message)
        report.publish_failure(error.reason, error.message)
        return model.NO_GPUS, error.reason.is_transient


def publish_gpus(
    shared: jobs.Shared,
    gpus: model.ObservedGpus,
    layouts: served_layouts.LayoutList,
    report: capacity.CapacityReport,
    view: node_object.NodeView,
) -> None:
    """Publish the GPUs and their layouts, for requests that are planned before a label is set.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    annotations = publish.of_record(requests.NONE)
    fitting = layouts.fitting(gpus)
    if gpus is not model.NO_GPUS:
        annotations[well_known.GPUS_ANNOTATION] = gpu_codec.to_json(gpus)
    annotations |= layouts.annotations(fitting)
    annotations |= report.annotations(gpus, view.annotations)
    shared.publisher.annotate(annotations)
    layouts.write(fitting)
