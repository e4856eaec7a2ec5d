"""Processes that use GPUs, and a node on which pods do."""

import dataclasses

from mig_manager.core import gpu_processes, model
from tests.rigs.node import node_rig, nodes


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
