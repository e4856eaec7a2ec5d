"""A drift of a node in memory."""

import dataclasses

from mig_manager.core import model
from tests.rigs.node import node_rig


def tamper(rig: node_rig.NodeRig) -> tuple[model.Gpu, ...]:
    """Destroy the first instance of the first GPU; return what there was."""
    before = rig.gpus
    first, *others = before
    rig.gpus = (dataclasses.replace(first, gpu_instances=first.gpu_instances[1:]), *others)
    return before


TWO_GPUS = """\
version: v1
mig-configs:
  two-gpus:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 7}}
  - {devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 7}}
"""
