"""Publish GPUs and layouts of a node without a request, and admit workloads."""

import structlog

from mig_manager import errors
from mig_manager.agent import capacity, jobs, publish, served_layouts
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


def publish_gpus(
    shared: jobs.Shared,
    layouts: served_layouts.LayoutList,
    report: capacity.CapacityReport,
    view: node_object.NodeView,
) -> bool:
    """Publish the GPUs and their layouts, for requests that are planned before a label is set.

    Returns:
        Whether it failed but may succeed later.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    annotations = publish.of_record(requests.NONE)
    try:
        with shared.hold_lock("observing the GPUs"):
            gpus = shared.deps.gpus.observe()
    except (errors.HardwareError, errors.LockedError) as error:
        _log.info("gpus_not_published", reason=error.reason.value, error=error.message)
        shared.publisher.annotate(annotations)
        return error.reason.is_transient
    fitting = layouts.fitting(gpus)
    annotations[well_known.GPUS_ANNOTATION] = gpu_codec.to_json(gpus)
    annotations |= layouts.annotations(fitting)
    annotations |= report.annotations(gpus, view.annotations)
    shared.publisher.annotate(annotations)
    layouts.write(fitting)
    return False
