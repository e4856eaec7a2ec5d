"""Choose the GPU clients that a change pauses: by their deploy labels, or by deletion."""

import dataclasses
from collections.abc import Mapping

from mig_manager.agent.pods import advertisers
from mig_manager.core import steps
from mig_manager.core.node import claims, clients, cluster

_Pods = tuple[cluster.Pod, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Which GPU clients to pause, and how."""

    labels: Mapping[str, str]
    gated: _Pods
    loose: _Pods

    @staticmethod
    def of(
        pods: _Pods,
        plan: steps.Plan,
        extra_clients: tuple[clients.ExtraClient, ...],
        view: cluster.NodeView,
    ) -> "Pause":
        """Return what a plan pauses of these pods and of a node's labels."""
        labels = clients.labels_to_pause(view.labels, plan, extra_clients)
        gated = clients.gated_by(pods, labels)
        chosen = (
            *filter(advertisers.is_advertiser, pods),
            *clients.members(pods, extra_clients),
        )
        every = {pod.uid: pod for pod in chosen}
        return Pause(
            labels=labels,
            gated=gated,
            loose=tuple(pod for pod in every.values() if pod not in gated),
        )

    def part(self, *, is_driver: bool) -> "Pause":
        """Return what of this is about the DRA driver, or about all others."""

        def is_in_part(pod: cluster.Pod) -> bool:
            return claims.is_driver(pod) is is_driver

        return Pause(
            labels={
                key: value
                for key, value in self.labels.items()
                if (key == claims.DEPLOY_LABEL) is is_driver
            },
            gated=tuple(filter(is_in_part, self.gated)),
            loose=tuple(filter(is_in_part, self.loose)),
        )

    @property
    def kinds(self) -> frozenset[advertisers.Kind]:
        """The programs that advertise the node's devices, or would if they were not paused."""
        labelled = {k for k in advertisers.KINDS if k.deploy_label in self.labels}
        return advertisers.kinds_of((*self.gated, *self.loose)) | labelled
