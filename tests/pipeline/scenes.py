"""What happens to a node in memory before its agent runs, or meanwhile; and layouts for it."""

import dataclasses

from mig_manager.core import gpu_processes, model
from mig_manager.core.node.devices import claims
from tests.rigs.node import node_rig, nodes

# -- a drift ----------------------------------------------------------------------------------

TWO_GPUS = """\
version: v1
mig-configs:
  two-gpus:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 7}}
  - {devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 7}}
"""


def tamper(
    rig: node_rig.NodeRig, gpu: int = 0, profile: str | None = None
) -> tuple[model.Gpu, ...]:
    """Destroy the first instance of a GPU, or of a profile on it; return what there was."""
    before = rig.gpus
    instances = before[gpu].gpu_instances
    gone = next(gi for gi in instances if profile in (None, str(gi.profile)))
    rig.gpus = tuple(
        dataclasses.replace(each, gpu_instances=tuple(gi for gi in instances if gi is not gone))
        if each.index == gpu
        else each
        for each in before
    )
    return before


# -- processes that use GPUs -------------------------------------------------------------------


def process(owner: str = "", *instances: int, is_running: bool = True) -> gpu_processes.GpuProcess:
    return gpu_processes.GpuProcess(
        pid=7, name="trainer", owner=owner, gpu_instances=instances, is_running=is_running
    )


WHOLE = """
version: v1
mig-configs:
  whole: [{devices: [0], mig-enabled: true, mig-devices: {7g.40gb: 1}}]
"""


def outdated_node() -> node_rig.NodeRig:
    """MIG mode of GPU 0 went off behind the agent, while pods use its instances."""
    rig = nodes.node(layout="all-1g.5gb")
    for gpu in rig.gpus:
        for number, uuid in enumerate(gpu.mig_uuids):
            rig.pods.add(f"gpu{gpu.index}-{number}", devices=frozenset({uuid}))
    off = model.MigMode.DISABLED
    first = dataclasses.replace(rig.gpus[0], current_mode=off, pending_mode=off, gpu_instances=())
    rig.gpus = (first, rig.gpus[1])
    return rig


def processes_of_pods(rig: node_rig.NodeRig, gpu: int) -> tuple[gpu_processes.GpuProcess, ...]:
    return tuple(
        process(f"pod {uid}") for uid, pod in rig.pods.items() if pod.name.startswith(f"gpu{gpu}")
    )


# -- NVIDIA's DRA driver -----------------------------------------------------------------------

KEEP_ONE = """
version: v1
mig-configs:
  all-1g.5gb:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
  most-in-one:
  - {devices: [0], mig-enabled: true, mig-devices: {3g.20gb: 1, 2g.10gb: 1, 1g.5gb: 1}}
  - {devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 7}}
  parts:
  - {devices: all, mig-enabled: true, mig-devices: {1c.2g.10gb: 2}}
"""
"""Layout ``most-in-one`` has room for one of two pods whose instances are far apart."""


def published_uuids(rig: node_rig.NodeRig) -> frozenset[str]:
    return frozenset(uuid for each in rig.dra_driver.slices or () for uuid in each.uuids.values())


def without_driver(rig: node_rig.NodeRig) -> node_rig.NodeRig:
    """Remove the driver's pod, as a rolling update does."""
    rig.pods.remove_if(claims.is_driver)
    return rig


def without_pods(rig: node_rig.NodeRig) -> node_rig.NodeRig:
    """Remove the pods with claims for a device."""
    rig.pods.remove_if(lambda pod: bool(pod.claimed_ids))
    return rig


def add_unbound(rig: node_rig.NodeRig, device: str) -> str:
    """Let the scheduler allocate a device to a pod that it has not bound to the node yet."""
    uid = rig.pods.add(
        "unbound", has_claims=True, claimed_ids=frozenset({device}), phase="Pending"
    )
    rig.pods.elsewhere[uid] = dataclasses.replace(rig.pods.pop(uid), node_name="")
    return uid
