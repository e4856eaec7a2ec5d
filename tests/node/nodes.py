"""Busy nodes in memory that a policy, a GPU client or the driver makes special."""

import dataclasses

from mig_manager.core.node import policies, well_known
from tests.node import fakes
from tests.node.scenes import busy_node, device, node


def guarded_node() -> fakes.NodeRig:
    """A budget protects the affected pod, and the policy allows force."""
    rig = busy_node()
    rig.disruptions.refusals["affected"] = "budget 'pdb-a' allows no disruption"
    rig.policy = policies.Policy(is_forced=True)
    return rig


def waiting_node() -> fakes.NodeRig:
    """No pod may be evicted; the affected pod finishes after a while."""
    rig = busy_node()
    rig.policy = policies.Policy(drain=policies.DrainPolicy.NONE)
    affected = rig.uid_of("affected")

    def finish() -> None:
        if rig.clock.now_s > 1 and affected in rig.pods:
            rig.pods[affected] = dataclasses.replace(rig.pods[affected], phase="Succeeded")

    rig.clock.on_wait.append(finish)
    return rig


def starting_node() -> fakes.NodeRig:
    """A pod whose device stays was just bound, and kubelet has just started."""
    rig = busy_node()
    devices = frozenset({device(rig, 1, "1g.5gb")})
    uid = rig.add_pod("starting", devices=devices, phase="Pending", is_ready=False)
    rig.kubelet.lists_from_s, rig.kubelet.listed_from_s[uid] = 5.0, 6.0
    return rig


def whole_node() -> fakes.NodeRig:
    rig = busy_node()
    rig.policy = policies.Policy(drain=policies.DrainPolicy.NODE)
    return rig


GFD, DCGM, EXPORTER = (
    well_known.DEPLOY_LABEL_PREFIX + name
    for name in ("gpu-feature-discovery", "dcgm", "dcgm-exporter")
)


def monitored_node() -> fakes.NodeRig:
    """The operator's monitors and its validator; one monitor is deployed nowhere."""
    rig = busy_node()
    rig.labels |= dict.fromkeys((GFD, DCGM, EXPORTER), "true")
    rig.daemons.deployed |= {GFD: True, EXPORTER: True}
    rig.daemons.loose.add("nvidia-operator-validator")
    rig.live()
    return rig


EXTRA_CLIENTS = """
version: v1
clients:
- labels: {app: watcher}
- labels: {app: sampler}
  namespace: default
  deploy-label: nvidia.com/gpu.deploy.sampler
"""


SAMPLER = well_known.DEPLOY_LABEL_PREFIX + "sampler"


def watched_node() -> fakes.NodeRig:
    """Extra GPU clients, one with a deploy label and one without."""
    rig = busy_node()
    rig.extra_clients = EXTRA_CLIENTS
    rig.labels[SAMPLER] = "true"
    rig.daemons.deployed[SAMPLER] = True
    rig.daemons.loose.add("watcher")
    rig.live()
    return rig


def sharing_node() -> fakes.NodeRig:
    rig = busy_node()
    rig.labels[well_known.PLUGIN_CONFIG_LABEL] = "whole"
    others = [(name, "whole") for name in ("all-disabled", "all-1g.5gb")]
    rig.policy = policies.Policy(plugin_configs=(*others, ("one-slice-changed", "sliced")))
    return rig


def resetting_node() -> fakes.NodeRig:
    """A MIG mode change takes effect only after a reset."""
    rig = node()
    rig.driver.mode_waits = rig.resets.are_available = True
    return rig
