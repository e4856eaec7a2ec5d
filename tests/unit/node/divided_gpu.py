"""A GPU with two MIG devices, and the processes that use it."""

import dataclasses

from mig_manager.core import gpu_processes, model
from tests.rigs.node import driver_rules, samples

LOW, HIGH = "4:2", "6:1"
MIG = {LOW: driver_rules.mig_uuid("1"), HIGH: driver_rules.mig_uuid("2")}
GPU = driver_rules.mig_uuid("gpu").replace("MIG", "GPU")


def gpu() -> model.Gpu:
    """Build a GPU with two MIG devices, one at slices 4-5 and one at 6."""
    divided = samples.gpu(samples.A100, "2g.10gb@4", "1g.5gb@6")
    return dataclasses.replace(
        divided,
        uuid=GPU,
        gpu_instances=tuple(
            dataclasses.replace(
                gi,
                compute_instances=tuple(
                    dataclasses.replace(ci, uuid=MIG[str(gi.placement)])
                    for ci in gi.compute_instances
                ),
            )
            for gi in divided.gpu_instances
        ),
    )


def process(*instances: int, name: str = "python", owner: str = "") -> gpu_processes.GpuProcess:
    return gpu_processes.GpuProcess(pid=7, name=name, owner=owner, gpu_instances=instances)
