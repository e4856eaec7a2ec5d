"""Labels, annotations, taints and conditions: the contract with users and the GPU operator.

See docs/labels.md.
"""

import re

CONFIG_LABEL = "nvidia.com/mig.config"
STATE_LABEL = "nvidia.com/mig.config.state"
APPLIED_LABEL = "mig-manager.io/applied"
STATUS_ANNOTATION = "mig-manager.io/status"
GPUS_ANNOTATION = "mig-manager.io/gpus"
"""The node's GPUs, for planners elsewhere; see ``records.inventory_codec``."""
LAYOUTS_ANNOTATION = "mig-manager.io/layouts"
"""The layouts that can be requested of the node; see ``layout.available_layouts``."""
CAPACITY_ANNOTATION = "mig-manager.io/capacity"
"""The instances in use, and the room for others; see ``records.capacity``."""
CUSTOM_LAYOUT = "custom"
"""Value of the request's label: the layout is the one in ``LAYOUT_ANNOTATION``."""
LAYOUT_ANNOTATION = "mig-manager.io/layout"  # a v1 document with one layout, for this node alone
PARTITIONING_LABEL = "mig-manager.io/partitioning"
"""On a node, ``on-demand`` lets the partitioner change it. The partitioner ignores a pod with
``off``."""
ON_DEMAND = "on-demand"
ROLLOUT_ANNOTATION = "mig-manager.io/rollout"
"""Written by ``mig-manager rollout``: the requested layout, and the one requested before."""
REQUEST_ANNOTATION = "mig-manager.io/request"
"""The request, and the layout that was verified for it; see ``records.requests``."""
JOURNAL_ANNOTATION = "mig-manager.io/journal"
UNREADABLE_JOURNAL_ANNOTATION = "mig-manager.io/journal-unreadable"
"""Keeps an invalid journal for inspection."""
DEPLOY_LABEL_PREFIX = "nvidia.com/gpu.deploy."
PLUGIN_DEPLOY_LABEL = "nvidia.com/gpu.deploy.device-plugin"
PAUSED_VALUE = "paused-for-mig-change"
RECONFIGURING_TAINT = "mig-manager.io/reconfiguring"
"""NoSchedule: keeps new pods off the node during a change, also pods of DaemonSets.

The scheduler and the DaemonSet controller honour it, and it evicts no pod. A cordon belongs to
people: ``kubectl drain`` does not change a cordoned node, and a manager that uncordons it
afterwards undoes that drain.
"""
CORDON_TAINT = "node.kubernetes.io/unschedulable"
"""Kubernetes adds it to a cordoned node, a moment after the field of the NodeSpec is set."""
NOT_READY_TAINT = "node.kubernetes.io/not-ready"
UNREACHABLE_TAINT = "node.kubernetes.io/unreachable"
LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""A label's value to the API unless it is empty, and a label's key after the slash."""
READY_CONDITION = "MigReady"
RECOVERY_CONDITION = "GpuRecoveryNeeded"
EVENT_COMPONENT = "mig-manager"  # reports our Events
RESOURCE_PREFIX = "nvidia.com/"
PLUGIN_CONFIG_LABEL = "nvidia.com/device-plugin.config"
"""Names the entry of the device plugin's ConfigMap that this node's plugin reads."""
KEEP_ANNOTATION = "mig-manager.io/do-not-evict"  # ``"true"`` on a pod: it is never evicted
GPU_CLAIM_DRIVER = "gpu.nvidia.com"
"""The DRA driver that hands out GPUs and MIG devices by ResourceClaim."""


def is_paused(value: str) -> bool:
    """Return whether a deploy label keeps a client away for a MIG change.

    NVIDIA's driver manager appends its own pause to ours (k8s-driver-manager, ``maybeSetPaused``).
    """
    return value.startswith(PAUSED_VALUE)


def is_deployed(value: str | None) -> bool:
    """Return whether a deploy label has a client run on the node, now or after our pause."""
    return value is not None and (value == "true" or is_paused(value))


def is_deploy_label(key: str) -> bool:
    """Return whether a key is a deploy label that the API accepts."""
    name = key.partition("/")[2]
    return key.startswith(DEPLOY_LABEL_PREFIX) and LABEL_VALUE.fullmatch(name) is not None
