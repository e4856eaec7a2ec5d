"""GPUs that another program changed: they no longer have the layout that an agent verified."""

import dataclasses

from mig_manager.core import model
from tests.rigs.node import node_rig

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
