"""Scenes for tests that repeat a run with a fault at each of its calls, and their nodes."""

import dataclasses
from collections.abc import Callable

import pytest

from mig_manager.core.node import policies, well_known
from tests.node import fakes
from tests.node.scenes import (
    busy_node,
    device,
    dra_node,
    has_layout,
    hooked,
    hosted_node,
    node,
)


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


_SWEPT_BY_DEFAULT = ("first-layout", "host-services")

SCENARIOS: dict[str, tuple[Callable[[], fakes.NodeRig], str]] = {
    "first-layout": (node, "all-1g.5gb"),
    "first-layout-ungated": (lambda: node(gated=False), "all-1g.5gb"),
    "one-slice-on-a-busy-node": (busy_node, "one-slice-changed"),
    "mode-off": (busy_node, "all-disabled"),
    "by-force": (guarded_node, "one-slice-changed"),
    "no-eviction": (waiting_node, "one-slice-changed"),
    "whole-node": (whole_node, "one-slice-changed"),
    "starting-pod": (starting_node, "one-slice-changed"),
    "monitors": (monitored_node, "one-slice-changed"),
    "extra-clients": (watched_node, "one-slice-changed"),
    "host-services": (hosted_node, "one-slice-changed"),
    "hooks": (lambda: hooked(hosted_node()), "one-slice-changed"),
    "hooks-of-the-mode": (lambda: hooked(node()), "all-1g.5gb"),
    "reset": (resetting_node, "all-1g.5gb"),
    "plugin-config": (sharing_node, "one-slice-changed"),
    "dra-driver": (dra_node, "all-balanced"),
    "dra-driver-ungated": (lambda: dra_node(gated=False), "all-balanced"),
}


def spared(scenario: str) -> dict[str, str]:
    """Return the names of the pods that a scene's change does not affect, by UID."""
    make, layout = SCENARIOS[scenario]
    rig = make()
    affected = {"affected"} if layout == "one-slice-changed" else {"affected", "spared"}
    if rig.policy.drain is policies.DrainPolicy.NODE:
        return {}
    return {
        uid: rig.pods[uid].name
        for uid in rig.kubelet.assigned
        if rig.pods[uid].name not in affected
    }


SWEPT = [
    pytest.param(name, marks=() if name in _SWEPT_BY_DEFAULT else pytest.mark.slow)
    for name in SCENARIOS
    if name != "one-slice-on-a-busy-node"  # its calls are also those with host services
]
"""The scenes for tests that play each of them dozens of times."""


IMPOSSIBLE = ("too-much", "no-such-layout", "no-such-profile")


def assert_says_the_truth(rig: fakes.NodeRig) -> None:
    """The label names a layout that is active, or there is none."""
    applied = rig.labels.get(well_known.APPLIED_LABEL)
    assert applied is None or has_layout(rig, applied)
