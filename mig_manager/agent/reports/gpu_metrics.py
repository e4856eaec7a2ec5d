"""Prometheus metrics of the node's GPUs: instances, faults, use and room."""

import collections
import functools
from collections.abc import Mapping

from mig_manager.adapters import metric_registry
from mig_manager.core import model
from mig_manager.core.planner import free_capacity


class GpuMetrics:
    """The instances of the GPUs, and the GPUs with a fault."""

    def __init__(self, registry: metric_registry.MetricRegistry) -> None:
        gauge, counter = registry.gauge, registry.counter
        self._instances = gauge(
            "instances", "Compute instances when the GPUs were last observed.", ("profile",)
        )
        self._xids = counter("xids", "Critical errors (Xid) of the GPUs.", ("uuid", "xid"))
        self._repairs = counter(
            "gpu_repairs", "Repairs of GPUs with a fault, by a reset.", ("result",)
        )
        self._unreachable = gauge(
            "unreachable_gpu",
            "1 for each GPU that the driver counts but that could not be observed.",
            ("index", "uuid", "reason"),
        )
        self._action = gauge(
            "gpu_recovery_action",
            "1 for each GPU with a fault, with the action that recovers it.",
            ("index", "uuid", "action"),
        )

        for result in ("success", "failure"):
            # Start at zero: increase() misses the first event of a series that appears as 1.
            self._repairs.labels(result=result)

    def count_xid(self, uuid: str, xid: int) -> None:
        """Count a critical error of a GPU."""
        self._xids.labels(uuid=uuid, xid=str(xid)).inc()

    def count_repair(self, *, is_good: bool) -> None:
        """Count a repair of a GPU."""
        self._repairs.labels(result="success" if is_good else "failure").inc()

    def set_gpus(self, gpus: model.ObservedGpus) -> None:
        """Replace the series of the GPUs, as they were last observed."""
        _set_counts(
            self._instances,
            collections.Counter(device.profile for gpu in gpus for device in gpu.devices),
        )
        lost: dict[tuple[str, ...], int] = {
            (str(gpu.index), gpu.uuid, gpu.reason.value): 1 for gpu in gpus.unreachable
        }
        metric_registry.replace(self._unreachable, lost)
        actions: dict[tuple[str, ...], int] = {
            (str(gpu.index), gpu.uuid, gpu.recovery_action.value): 1
            for gpu in (*gpus, *gpus.unreachable)
            if gpu.recovery_action and gpu.recovery_action is not model.RecoveryAction.NONE
        }
        metric_registry.replace(self._action, actions)


class UseMetrics:
    """The use of the GPUs, and the remaining room."""

    def __init__(self, registry: metric_registry.MetricRegistry) -> None:
        gauge = registry.gauge
        per_gpu = functools.partial(gauge, labelnames=("index", "uuid"))
        self._free = per_gpu(
            "free_memory_slices", "Memory slices outside the GPU instances in use."
        )
        self._stranded = per_gpu(
            "stranded_memory_slices", "Free memory slices that no instance could use."
        )
        self._fragmentation = per_gpu(
            "fragmentation_ratio",
            "Share of the free memory slices outside the largest possible instance.",
        )
        self._room = gauge(
            "room",
            "GPU instances that could be created on all GPUs beside those in use, each profile "
            "alone.",
            ("profile",),
        )
        self._in_use = gauge("instances_in_use", "GPU instances in use.", ("profile",))
        self._time = gauge(
            "use_timestamp_seconds",
            "When the GPU instances in use were last determined; 0: they are not known.",
        )

    def set_use(
        self,
        gpus: model.ObservedGpus,
        in_use: Mapping[str, frozenset[model.Placement]],
        *,
        at_s: float,
    ) -> None:
        """Replace the series by the use at a time; GPUs whose use is unknown have none."""
        free_by_labels = {
            (str(gpu.index), gpu.uuid): (
                free_capacity.measure(gpu, in_use[gpu.uuid]) or free_capacity.NONE
            )
            for gpu in gpus
            if gpu.uuid in in_use
        }
        metric_registry.replace(
            self._free, {labels: free.free_slices for labels, free in free_by_labels.items()}
        )
        metric_registry.replace(
            self._stranded,
            {labels: free.stranded_slices for labels, free in free_by_labels.items()},
        )
        metric_registry.replace(
            self._fragmentation,
            {labels: free.fragmentation for labels, free in free_by_labels.items()},
        )
        fitting: collections.Counter[model.Profile] = collections.Counter()
        for free in free_by_labels.values():
            fitting.update(free.room)
        _set_counts(self._room, fitting)
        used = collections.Counter(
            gi.profile
            for gpu in gpus
            for gi in gpu.gpu_instances
            if gi.placement in in_use.get(gpu.uuid, ())
        )
        _set_counts(self._in_use, used)
        self._time.set(at_s)


def _set_counts(gauge: metric_registry.Gauge, counts: Mapping[model.Profile, int]) -> None:
    metric_registry.replace(gauge, {(str(profile),): count for profile, count in counts.items()})
