"""Find other programs that change the MIG instances of this node, by their pods.

Two of them on one node undo each other's work. A match keeps the agent from changing the node, so
it must be certain: a container name or a setting that only that program has, never a pod name.

Facts, from the public manifests:

- **NVIDIA's mig-manager** (gpu-operator, ``assets/state-mig-manager/0600_daemonset.yaml``, and the
  example in mig-parted): label ``app=nvidia-mig-manager``, container ``nvidia-mig-manager``, and
  image ``k8s-mig-manager``. In its place our own agent has that label and that container.
- **NVIDIA's DRA driver for GPUs** (``kubeletplugin.yaml`` of its chart; gpu-operator,
  ``manifests/state-dra-driver``): one pod with container ``gpus`` for GPUs, and
  ``compute-domains`` for what is none of ours. It creates and destroys instances only with the
  feature gate ``DynamicMIG`` (alpha, and off by default), which stands in the variable
  ``FEATURE_GATES``; without it the driver hands out the instances that are there.
- **nos** (``daemonset_mig-agent.yaml`` of its chart, ``config/migagent``): image
  ``nos-mig-agent``; by the chart label ``app.kubernetes.io/name=nos-mig-agent``, by kustomize
  label ``app.kubernetes.io/component=mig-agent`` and container ``mig-agent``.
- **OpenShift's Dynamic Accelerator Slicer**, formerly InstaSlice: container ``das-daemonset``;
  before ``instaslice-daemonset``, or ``daemonset`` under ``app=controller-daemonset`` with an
  image named after InstaSlice.
- **Another mig-manager of ours**, from a second installation: its label and its container.
"""

from collections.abc import Iterable

from mig_manager import errors
from mig_manager.core.node import cluster

_OPERATORS = "nvidia-mig-manager"
_OURS = "mig-manager"


def managers(pods: Iterable[cluster.Pod], own_uid: str | None) -> tuple[str, ...]:
    """Return the pods of this node that change MIG instances too, as ``namespace/name (kind)``.

    A pod that has not started yet counts, because it may at any moment; a finished one does not.
    If ``own_uid``, the UID of our pod, is None, nothing counts that could be ourselves.
    """
    return tuple(
        f"{pod.key} ({what})"
        for pod in pods
        if not pod.is_finished
        and pod.uid != own_uid
        and (what := _what(pod, knows_ourselves=own_uid is not None))
    )


def refusal(names: Iterable[str]) -> errors.MigManagerError:
    """Return the error for a node that other managers serve (FOREIGN_MANAGER)."""
    return errors.MigManagerError(
        f"another program manages MIG on this node: {', '.join(names)}",
        reason=errors.Reason.FOREIGN_MANAGER,
    )


def _what(pod: cluster.Pod, *, knows_ourselves: bool) -> str:
    """Say what a pod is that changes instances; empty when it does not, or may be ourselves."""
    is_operators = pod.labels.get("app") == _OPERATORS or _OPERATORS in pod.container_names
    if is_operators and (knows_ourselves or "k8s-mig-manager" in _image_names(pod)):
        return "NVIDIA's mig-manager"
    if "gpus" in pod.container_names and pod.feature_gates.get("DynamicMIG", False):
        return "NVIDIA's DRA driver with DynamicMIG"
    if _is_nos(pod):
        return "nos' mig-agent"
    if _is_slicer(pod):
        return "OpenShift's Dynamic Accelerator Slicer"
    is_ours = pod.labels.get("app.kubernetes.io/name") == _OURS and _OURS in pod.container_names
    if knows_ourselves and is_ours:
        return "another mig-manager"
    return ""


def _is_nos(pod: cluster.Pod) -> bool:
    is_theirs_by_component = (
        pod.labels.get("app.kubernetes.io/component") == "mig-agent"
        and "mig-agent" in pod.container_names
    )
    return (
        is_theirs_by_component
        or pod.labels.get("app.kubernetes.io/name") == "nos-mig-agent"
        or "nos-mig-agent" in _image_names(pod)
    )


def _is_slicer(pod: cluster.Pod) -> bool:
    if not {"das-daemonset", "instaslice-daemonset"}.isdisjoint(pod.container_names):
        return True
    return pod.labels.get("app") == "controller-daemonset" and any(
        name.startswith("instaslice") for name in _image_names(pod)
    )


def _image_names(pod: cluster.Pod) -> frozenset[str]:
    """Return the last part of each image's name, which stays the same in any registry."""
    return frozenset(
        image.partition("@")[0].rpartition("/")[2].partition(":")[0] for image in pod.images
    )
