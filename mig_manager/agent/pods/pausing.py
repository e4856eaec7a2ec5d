"""Choose the GPU clients that a change pauses: by their deploy labels, or by deletion."""

import dataclasses
from collections.abc import Mapping

from mig_manager.agent.pods import advertisers
from mig_manager.core import steps
from mig_manager.core.node import claims, clients, node_object, pod_object

_Pods = tuple[pod_object.Pod, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Which GPU clients to pause, and how."""

    labels: Mapping[str, str]
    label_managed: _Pods
    """Pods that the labels stop."""
    to_delete: _Pods
    """Pods that no label stops."""

    @staticmethod
    def of(
        pods: _Pods,
        plan: steps.Plan,
        extra_clients: tuple[clients.ExtraClient, ...],
        view: node_object.NodeView,
        *,
        is_driver: bool,
    ) -> "Pause":
        """Choose the pods and labels that a plan pauses.

        ``is_driver`` chooses between the DRA driver and all other clients.
        """
        labels = clients.labels_to_pause(view.labels, plan, extra_clients)
        label_managed = clients.gated_by(pods, labels)
        every = (
            *filter(advertisers.is_advertiser, pods),
            *clients.members(pods, extra_clients),
        )
        to_delete = {pod.uid: pod for pod in every if pod not in label_managed}

        def is_in_part(pod: pod_object.Pod) -> bool:
            return claims.is_driver(pod) is is_driver

        return Pause(
            labels={
                key: value
                for key, value in labels.items()
                if (key == claims.DEPLOY_LABEL) is is_driver
            },
            label_managed=tuple(filter(is_in_part, label_managed)),
            to_delete=tuple(filter(is_in_part, to_delete.values())),
        )

    @property
    def kinds(self) -> frozenset[advertisers.Kind]:
        """The programs that advertise the node's devices, paused or not."""
        labelled = {k for k in advertisers.KINDS if k.deploy_label in self.labels}
        return advertisers.kinds_of((*self.label_managed, *self.to_delete)) | labelled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """The GPU clients that were paused, or are verified as if they had been."""

    kinds: frozenset[advertisers.Kind]
    """The advertisers of the node's devices; empty: nothing to restart or verify."""
    old_uids: frozenset[str] = frozenset()
    """Their pods from before the change: the devices that they advertise are stale."""
    kept_uids: frozenset[str] = frozenset()
    """DRA driver pods that are not restarted: they advertise what the GPUs have."""
    changed: frozenset[str] = frozenset()
    """UUIDs of the changed GPUs: all of their devices must be schedulable."""
    labels_with_pods: frozenset[str] = frozenset()
    """Deploy labels that placed a pod here: worth waiting for its successor."""
    extra_clients: tuple[clients.ExtraClient, ...] = ()

    @property
    def has_dra_driver(self) -> bool:
        """Whether the DRA driver is among them."""
        return advertisers.DRIVER in self.kinds

    @property
    def restarted(self) -> tuple[advertisers.Kind, ...]:
        """The advertisers to restart."""
        kept = {advertisers.DRIVER} if self.kept_uids else set()
        return tuple(kind for kind in advertisers.KINDS if kind in self.kinds - kept)

    @property
    def restarted_names(self) -> str:
        """The names of the advertisers to restart, for a sentence."""
        return " and ".join(f"the {kind.name}" for kind in self.restarted)
