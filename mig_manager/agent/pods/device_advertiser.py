"""An advertiser of a node's devices: NVIDIA's device plugin or its DRA driver.

The device plugin registers devices with kubelet, and the DRA driver publishes ResourceSlices. Both
list devices only when they start.
"""

import abc
from collections.abc import Iterable, Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.agent import attempts, node_context, run_recorder
from mig_manager.core import model, ports
from mig_manager.core.node.devices import strategies
from mig_manager.core.objects import pod_object


class Advertiser(abc.ABC):
    """A program that advertises devices, even if it does not run on the node.

    Raises:
        ClusterError: From every method with ports: the API refused or does not answer.
    """

    name: str
    deploy_label: str

    @abc.abstractmethod
    def owns(self, pod: pod_object.Pod) -> bool:
        """Return whether a pod runs it."""

    def is_awaited(self, recorder: run_recorder.RunRecorder, labels: Mapping[str, str]) -> bool:
        """Return whether it must serve the node again, even without a pod now.

        With its deploy label, one of the node's ``labels``, the owner can say that it must not.
        """
        must_serve = recorder.journal.node.advertisers | recorder.record.awaited
        return self.deploy_label in must_serve and labels.get(self.deploy_label) != "false"

    @abc.abstractmethod
    def why_refused(
        self,
        attempt: attempts.Attempt,
        layouts: Sequence[strategies.GpuLayout],
        pods: pod_object.Pods,
    ) -> str:
        """Return why it would exit with the layout's devices; empty if it would not, or unknown.

        ``pods`` are the node's.
        """

    @abc.abstractmethod
    def hide_devices(self, deps: ports.Dependencies) -> None:
        """Hide the advertised devices from pods until new ones are advertised."""

    @abc.abstractmethod
    def correct_and_compare(
        self,
        context: node_context.NodeContext,
        gpus: model.ObservedGpus,
        pods: pod_object.Pods,
        changed: frozenset[str],
    ) -> errors.NotReadyError | None:
        """Correct the node's counts of its devices; return how these differ from the GPUs'.

        None if they match. All devices of the GPUs with the UUIDs ``changed`` must be healthy.
        """

    @abc.abstractmethod
    def is_stale(self, deps: ports.Dependencies, gpus: model.ObservedGpus) -> bool:
        """Return whether a ready pod advertises stale devices."""

    @abc.abstractmethod
    def destroyed_devices(
        self, deps: ports.Dependencies, gpus: model.ObservedGpus, pods: pod_object.Pods
    ) -> frozenset[str] | None:
        """Return the advertised devices that no GPU has; None if unknown."""

    def why_not_starting(self, gpus: model.ObservedGpus) -> str:
        """Return why the layout may keep it from starting, for a message.

        Empty for an advertiser whose incompatible layouts are refused before the change.
        """
        return ""


def is_any_ready(pods: Iterable[pod_object.Pod]) -> bool:
    """Return whether a pod is ready and not terminating."""
    return any(pod.is_ready and not pod.is_terminating for pod in pods)


class PodWaitsError(errors.NotReadyError):
    """A container of a plugin or driver pod cannot start."""

    def __init__(self, message: str, *, why: str) -> None:
        super().__init__(message, reason=reasons.Reason.PLUGIN_NOT_READY)
        self.why = why
        """Pods and kubelet's reasons, without details that change."""


def not_ready(
    advertiser: Advertiser, pods: pod_object.Pods, gpus: model.ObservedGpus, label: str | None
) -> errors.NotReadyError:
    """Return the error that no pod of an advertiser is ready, with kubelet's reasons.

    ``label`` is the value of its deploy label; None: the node has none.
    """
    names = ", ".join(
        f"{pod.key} ({pod.waiting})" if pod.waiting is not None else pod.key for pod in pods
    )
    message = f"no new {advertiser.name} pod is ready: {names or 'none has started'}"
    if label in (None, "true"):
        message += advertiser.why_not_starting(gpus)
        if not pods:
            message += f"; if it was removed, label the node {advertiser.deploy_label}=false"
    else:
        message += f"; the label {advertiser.deploy_label}={label} keeps it away"
    why = ", ".join(f"{pod.key} {pod.waiting.reason}" for pod in pods if pod.waiting)
    if why:
        return PodWaitsError(message, why=why)
    return errors.NotReadyError(message, reason=reasons.Reason.PLUGIN_NOT_READY)


def not_allocatable(why: str) -> errors.NotReadyError | None:
    """Return the error that devices are not advertised; None if none is missing."""
    return errors.NotReadyError(why, reason=reasons.Reason.NOT_ALLOCATABLE) if why else None
