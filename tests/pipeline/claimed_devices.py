"""A node whose devices NVIDIA's DRA driver publishes, and pods that claim them."""

import dataclasses

from mig_manager.core.node.devices import claims
from tests.rigs.node import node_rig

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
