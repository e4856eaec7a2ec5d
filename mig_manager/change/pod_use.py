"""Refuse to destroy the devices of pods: a pod has its device before it starts a process on it.

Commands at a shell ask kubelet. Without the Kubernetes API they cannot recognize finished pods,
which kubelet before 1.34 lists too (kubernetes/kubernetes#132028).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection

from mig_manager import errors
from mig_manager.core import model, ports
from mig_manager.core.node import gpu_use
from mig_manager.core.objects import pod_object, well_known

_OVERRIDE = "--ignore-pods destroys their devices all the same."
_REMEDY = (
    f"Where an agent runs, request the layout by the node's label {well_known.CONFIG_LABEL}: it "
    f"drains first. Or delete these pods. {_OVERRIDE}"
)
_REMEDY_WITHOUT_ANSWER = (
    "Start kubelet, or name its socket (--pod-resources-socket). Where no pod has a device, "
    "add --ignore-pods."
)


@dataclasses.dataclass(slots=True, kw_only=True)
class PodUse:
    """The devices of pods, as kubelet lists them during one command."""

    kubelet: Callable[[], ports.DeviceAllocations | None]
    """Returns kubelet's PodResources API; None: no kubelet has started on this machine."""
    is_ignored: bool = False  # whether devices of pods may be destroyed
    has_hook_run: Callable[[], bool] = lambda: False
    """Returns whether a hook of the command has run, which may have stopped kubelet."""
    _answer: tuple[pod_object.PodDevices, ...] | None = dataclasses.field(default=None, init=False)

    def usage(self) -> gpu_use.Usage:
        """Return the devices of pods; none if kubelet does not answer."""
        with contextlib.suppress(errors.KubeletError):
            return gpu_use.Usage(pods=(), assigned=self._allocations())
        return gpu_use.Usage()

    def require_unused(self, affected: Collection[str], gpus: Collection[model.Gpu]) -> None:
        """Raise ``GpuInUseError`` if pods have, or may have, one of these devices of the GPUs.

        A pod with a ResourceClaim may have any: kubelet does not list the UUIDs of its devices.
        Monitors count too, because kubelet lists neither admin access nor labels (k8s.io/kubelet,
        ``podresources/v1/api.proto``), and any user can name a pod like a monitor.
        """
        if self.is_ignored or not affected:
            return
        try:
            assigned = self._allocations()
        except errors.KubeletError as error:
            raise errors.GpuInUseError(
                error.message, reason=error.reason, remedy=_REMEDY_WITHOUT_ANSWER
            ) from error
        usage = gpu_use.Usage(pods=(), assigned=assigned)
        if users := usage.users(affected):
            names = {each: name for each, name in _device_names(gpus).items() if each in affected}
            pods = usage.describe_users(sorted(users, key=lambda pod: pod.key), names)
            raise errors.GpuInUseError(
                f"pods have devices that the change destroys or resets: {pods}",
                remedy=_REMEDY,
            )

    def _allocations(self) -> tuple[pod_object.PodDevices, ...]:
        """Return kubelet's answer, or its last one if a hook may have stopped it since."""
        try:
            return self._ask()
        except errors.KubeletError:
            if self._answer is None or not self.has_hook_run():
                raise
            return self._answer

    def _ask(self) -> tuple[pod_object.PodDevices, ...]:
        """Ask kubelet; no pods if it has not started, an error if it answered before."""
        kubelet = self.kubelet()
        if kubelet is None:
            if self._answer is None:
                return ()
            raise errors.KubeletError(
                "kubelet does not report which pods have which devices: its socket is gone"
            )
        self._answer = kubelet.assigned_devices()
        return self._answer


def _device_names(gpus: Collection[model.Gpu]) -> dict[str, str]:
    """Return the GPU of each device, and its instance, in words by the device's id."""
    names = {gpu.uuid: f"GPU {gpu.index}" for gpu in gpus}
    names |= {
        ci.uuid: f"{ci.profile} at {gi.placement} of GPU {gpu.index}"
        for gpu in gpus
        for gi in gpu.gpu_instances
        for ci in gi.compute_instances
        if ci.uuid
    }
    return names
