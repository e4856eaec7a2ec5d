"""Nodes in memory: busy ones, and those that a policy, GPU clients or the driver make special."""

import functools
from typing import Any

from mig_manager.agent import outcomes
from mig_manager.core import model
from mig_manager.core.node import policies
from mig_manager.core.node.devices import claims
from mig_manager.core.objects import well_known
from tests.rigs import layout_table
from tests.rigs.node import agents, driver_rules, gpu_values, moments, node_rig, samples


def node(*, layout: str | None = None, label_managed: bool = True) -> node_rig.NodeRig:
    """Two A100s with a device plugin; ``layout`` is already active."""
    return _node(layout=layout, label_managed=label_managed).fork()


@functools.cache
def _node(*, layout: str | None, label_managed: bool) -> node_rig.NodeRig:
    rig = node_rig.NodeRig(gpus=gpu_values.gpus_of("2xA100-SXM4-40GB"))
    rig.plugin.is_label_managed = label_managed
    if layout:
        agents.run(rig, layout)
        rig.forget_past()
    if label_managed:
        rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] = "true"
    if not rig.pods:
        rig.start_plugin()
    return rig


def at_rest(
    layout: str, *, rig: node_rig.NodeRig | None = None, **options: Any
) -> tuple[node_rig.NodeRig, agents.AgentInMemory, outcomes.Outcome]:
    """Return a node whose layout is active, its agent with these options, and the last outcome."""
    rig = rig or node(layout=layout)
    agent = agents.new_agent(rig, **options)
    outcome = agents.run(rig, layout, by=agent)
    rig.forget_past()
    return rig, agent, outcome


def device(rig: node_rig.NodeRig, gpu: int, profile: str) -> str:
    """UUID of the first MIG device of a profile."""
    instances = rig.gpus[gpu].gpu_instances
    uuids = [
        ci.uuid or ""
        for gi in instances
        for ci in gi.compute_instances
        if str(ci.profile) == profile
    ]
    assert uuids, f"no {profile} on GPU {gpu}: {layout_table.gpu_in_words(rig.gpus[gpu])}"
    return uuids[0]


def busy_node() -> node_rig.NodeRig:
    """Balanced: a pod on GPU 0 is affected by "one-slice-changed", and one on GPU 1 is not."""
    rig = node(layout="all-balanced")
    rig.pods.add("affected", devices=frozenset({device(rig, 0, "2g.10gb")}))
    rig.pods.add("spared", devices=frozenset({device(rig, 1, "3g.20gb")}))
    return rig


DRA_MONITORS = tuple(
    well_known.DEPLOY_LABEL_PREFIX + name for name in ("dcgm-dra", "dcgm-exporter-dra")
)


def dra_node(*, label_managed: bool = True) -> node_rig.NodeRig:
    """The DRA driver serves the node, and two pods have a device of GPU 0 by a claim."""
    rig = node(layout="all-1g.5gb")
    rig.pods.clear()
    rig.kubelet.schedulable = {}
    del rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL]
    rig.dra_driver.is_installed, rig.dra_driver.is_label_managed = True, label_managed
    if label_managed:
        rig.node_object.labels |= dict.fromkeys((claims.DEPLOY_LABEL, *DRA_MONITORS), "true")
        rig.daemons.is_ready_by_label |= dict.fromkeys(DRA_MONITORS, True)
    rig.advance()
    for name, start in (("low", 0), ("high", 6)):
        rig.pods.add(name, has_claims=True, claimed_ids=frozenset({device_at(rig, start)}))
    return rig


def device_at(rig: node_rig.NodeRig, start: int) -> str:
    """UUID of the MIG device of GPU 0 that begins at a memory slice."""
    (instance,) = (gi for gi in rig.gpus[0].gpu_instances if gi.placement.start == start)
    return instance.compute_instances[0].uuid or ""


def hosted_node() -> node_rig.NodeRig:
    """Host services use the GPUs; one of them does not run."""
    rig = busy_node()
    rig.host.services |= {"dcgm.service": True, "nvsm.service": True, "off.service": False}
    rig.owner.stopped_services = frozenset({"off.service"})
    return rig


HOOKS = """
version: v1
hooks:
  apply-start: [{command: start}]
  pre-apply-mode: [{command: mode}]
  pre-apply-config: [{command: config}]
  apply-exit: [{command: exit}]
"""


def write_deploy_label(rig: node_rig.NodeRig, key: str, value: str | None) -> None:
    """Have the owner or another program write a deploy label; None removes it."""
    for labels in (rig.node_object.labels, rig.owner.deploy_labels):
        labels.pop(key, None)
        if value is not None:
            labels[key] = value


def add_hooks(rig: node_rig.NodeRig) -> node_rig.NodeRig:
    rig.hooks.text = HOOKS
    return rig


def add_unowned_instance(rig: node_rig.NodeRig, profile: str, start: int) -> model.Placement:
    """Create a GPU instance on GPU 0, as another program does; return its placement."""
    first, *others = rig.gpus
    create = gpu_values.gi_step(first, profile, start)
    rig.gpus = (driver_rules.execute(first, [create]), *others)
    return create.placement


def add_pod_on_unowned_instances(
    rig: node_rig.NodeRig, profile: str = "1g.5gb", count: int = 7
) -> None:
    """Create instances outside the layout, and a pod that uses them."""
    desired = samples.desired_gpu({profile: count})
    rig.gpus = (*gpu_values.with_desired(rig.gpus[:1], desired), *rig.gpus[1:])
    rig.pods.add("foreign", devices=frozenset(rig.gpus[0].mig_uuids))


def guarded_node() -> node_rig.NodeRig:
    """A budget protects the affected pod, and the policy allows force."""
    rig = busy_node()
    rig.disruptions.refusals["affected"] = "budget 'pdb-a' allows no disruption"
    rig.owner.policy = policies.Policy(is_forced=True)
    return rig


def node_without_evictions() -> node_rig.NodeRig:
    """No pod may be evicted; the affected pod finishes after a while."""
    rig = busy_node()
    rig.owner.policy = policies.Policy(drain=policies.DrainPolicy.NONE)
    affected = rig.pods.uid_of("affected")

    def finish() -> None:
        if affected in rig.pods:
            rig.pods.change(affected, phase="Succeeded")

    rig.callbacks.add(moments.Time(1), finish)
    return rig


def starting_node() -> node_rig.NodeRig:
    """A pod whose device stays was just bound, and kubelet has just started."""
    rig = busy_node()
    devices = frozenset({device(rig, 1, "1g.5gb")})
    uid = rig.pods.add("starting", devices=devices, phase="Pending", is_ready=False)
    rig.kubelet.all_listed_from_s, rig.kubelet.pod_listed_from_s[uid] = 5.0, 6.0
    return rig


def node_with_whole_node_drain() -> node_rig.NodeRig:
    """The policy drains all pods that use a GPU, affected or not."""
    rig = busy_node()
    rig.owner.policy = policies.Policy(drain=policies.DrainPolicy.NODE)
    return rig


GFD, DCGM, EXPORTER = (
    well_known.DEPLOY_LABEL_PREFIX + name
    for name in ("gpu-feature-discovery", "dcgm", "dcgm-exporter")
)


def monitored_node() -> node_rig.NodeRig:
    """The operator's monitors and its validator; one monitor is deployed nowhere."""
    rig = busy_node()
    rig.node_object.labels |= dict.fromkeys((GFD, DCGM, EXPORTER), "true")
    rig.daemons.is_ready_by_label |= {GFD: True, EXPORTER: True}
    rig.daemons.without_label.add("nvidia-operator-validator")
    rig.advance()
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


def node_with_extra_clients() -> node_rig.NodeRig:
    """Extra GPU clients, one with a deploy label and one without."""
    rig = busy_node()
    rig.owner.extra_clients = EXTRA_CLIENTS
    rig.node_object.labels[SAMPLER] = "true"
    rig.daemons.is_ready_by_label[SAMPLER] = True
    rig.daemons.without_label.add("watcher")
    rig.advance()
    return rig


def sharing_node() -> node_rig.NodeRig:
    """The config of the device plugin follows the layout."""
    rig = busy_node()
    rig.node_object.labels[well_known.PLUGIN_CONFIG_LABEL] = rig.owner.plugin_config = "whole"
    others = [(name, "whole") for name in ("all-disabled", "all-1g.5gb")]
    rig.owner.policy = policies.Policy(plugin_configs=(*others, ("one-slice-changed", "sliced")))
    return rig


def limited_node() -> node_rig.NodeRig:
    """The cluster limits how many nodes are under change, and a slot is free."""
    rig = busy_node()
    rig.slots.are_limited = True
    return rig


def rebooting_node() -> node_rig.NodeRig:
    """A MIG mode change takes effect only after a reboot, which the agent may request."""
    rig = node()
    must_reboot(rig)
    return rig


def must_reboot(rig: node_rig.NodeRig) -> None:
    """Have MIG mode changes wait for a reboot, which the agent may request; it resets no GPU."""
    rig.driver.mode_waits = rig.host.may_reboot = True
    rig.resets.are_available = False


def resetting_node() -> node_rig.NodeRig:
    """A MIG mode change takes effect only after a reset."""
    rig = node()
    rig.driver.mode_waits = True
    return rig
