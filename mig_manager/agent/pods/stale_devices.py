"""Stop a node at rest from advertising devices that no GPU has.

Only a run restarts the device plugin and the DRA driver, and none follows without a request, after
one that fails early, or in a drift. If another program destroys devices then, the scheduler still
binds pods to them, and these pods fail.
"""

import structlog

from mig_manager import errors
from mig_manager.agent import node_context
from mig_manager.agent.pods import device_advertiser, device_plugin, device_usage, node_advertisers
from mig_manager.core import messages, model, ports
from mig_manager.core.node.devices import device_ids
from mig_manager.core.objects import node_object

_log = structlog.get_logger()


def observe_and_remove(context: node_context.NodeContext) -> None:
    """Observe the GPUs and remove stale devices, unless the owner has disabled the drift check.

    For an untainted node whose run waits: a plugin would not return to a tainted one.
    """
    if not context.settings.drift_check_interval_s:
        return
    try:
        gpus = context.observe()
        view = context.deps.node.latest(is_at_rest=True)
    except (errors.HardwareError, errors.LockedError, errors.ClusterError) as error:
        # Neither a published outcome nor a wait for a slot depends on the devices.
        _log.info("devices_not_checked", reason=error.reason.value, error=error.message)
        return
    remove(context, gpus, view)


def remove(
    context: node_context.NodeContext, gpus: model.ObservedGpus, view: node_object.NodeView
) -> None:
    """Restart the advertisers of devices that no GPU has, once; remove phantom devices.

    An advertiser that only lacks devices is not restarted: its owner may have left some out.
    Nothing is done while a GPU is unreachable, or while another program manages MIG.

    Args:
        context: The node's ports, and the memory, which has the checked devices.
        gpus: The GPUs; empty if they could not be observed.
        view: The Node as last reported.
    """
    ids = device_ids.of_gpus(gpus) if gpus else None
    if ids is None:
        return
    is_checked = False
    try:
        # Before a restart: kubelet calls the devices of a stopped plugin unhealthy.
        device_plugin.remove_reported_phantoms(context, gpus, view)
        is_checked = ids == context.memory.checked_ids or _restart(context.deps, gpus)
    except errors.ClusterError as error:
        _log.info("devices_not_checked", reason=error.reason.value, error=error.message)
    context.memory.set_checked(ids if is_checked else None)


def _restart(deps: ports.Dependencies, gpus: model.ObservedGpus) -> bool:
    """Restart the advertisers; return whether all devices were known."""
    pods = deps.workloads.present()
    if device_usage.foreign_managers(deps, pods):
        return False
    gone_ids = {each: each.destroyed_devices(deps, gpus, pods) for each in node_advertisers.ALL}
    for advertiser, ids in gone_ids.items():
        if ids:
            own_pods = node_advertisers.restart_pods(deps, advertiser, pods)
            _report(deps.node, advertiser, len(ids), is_restarted=bool(own_pods))
    return None not in gone_ids.values()


def _report(
    node: ports.Node, advertiser: device_advertiser.Advertiser, count: int, *, is_restarted: bool
) -> None:
    _log.warning(
        "destroyed_devices_advertised",
        by=advertiser.name,
        devices=count,
        is_restarted=is_restarted,
    )
    remedy = "it is restarted" if is_restarted else "restart it, the agent found no pod of it"
    what = f"{messages.count(count, 'device')} that no GPU has"
    node.emit(
        reason="DestroyedDevices",
        message=f"the {advertiser.name} advertises {what}: {remedy}",
        is_warning=True,
    )
