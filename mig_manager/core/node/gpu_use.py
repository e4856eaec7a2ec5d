"""Find the pods and processes that use a node's GPUs: from kubelet, ResourceClaims and NVML.

``Usage`` is the only definition of "in use": published capacity, planner, drain, custom layouts on
demand, rollback and commands at a shell all use it.

A device that may be in use counts as in use. Kubelet does not show the devices of a pod that
starts, nor all of a running init container. Such a pod may have any device that its resource
stands for.
"""

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Self

from mig_manager.core import gpu_processes, messages, model, steps
from mig_manager.core.node import pod_device_use
from mig_manager.core.node.daemons import client_table, clients
from mig_manager.core.node.devices import claims, resources
from mig_manager.core.objects import pod_object, well_known

_ENDS_SOON = 10**3  # use of a device by a pod that ends without an eviction
_IN_USE = 10**7  # use by another pod or process
_MUST_STAY = 10**13  # use by a pod that the agent may not evict, so that the change would fail

_STUCK_AFTER_S = 120.0
"""More than kubelet needs after the grace period, and than clocks of nodes differ."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """The pods of a node, the devices that they use, and the processes that use its GPUs."""

    pods: pod_object.Pods = ()  # all pods of the node, as the API lists them
    assigned: tuple[pod_object.PodDevices, ...] | None = None
    """Kubelet's allocations, or its last answer if it is silent now; None: it never answered."""
    no_answer: str = ""  # why kubelet does not answer now
    known_ids: frozenset[str] | None = None  # see ``device_ids.of_gpus``
    resource_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """See ``resource_names``; a device without a name here may have any."""
    processes: gpu_processes.Processes | None = None  # None: unknown
    extra_clients: tuple[client_table.ExtraClient, ...] = ()
    """GPU clients beside NVIDIA's: a change pauses or deletes them, so they do not count."""

    def with_pods(self, pods: pod_object.Pods) -> Self:
        """Return the usage with newer pods: a pod keeps its devices until it is gone."""
        present = {pod.uid for pod in pods}
        absent = {pod.key for pod in self.pods if pod.uid not in present}
        assigned = self.assigned and tuple(one for one in self.assigned if one.key not in absent)
        return dataclasses.replace(self, pods=pods, assigned=assigned)

    def users(self, affected: Collection[str] | None) -> pod_object.Pods:
        """Return the pods that use, or may use, one of the devices; None: any GPU.

        Kubelet does not list devices of ordinary init containers (PodResources v1). So a pod that
        requests a GPU and has no device in ``assigned`` counts, unless its resource is of another
        MIG profile. A pod also counts if its device's id is unknown or no UUID, and if it has
        ResourceClaims for such a device or for unknown devices. A pod that only kubelet knows
        counts as ``is_unlisted``: it was deleted by force, or is static and has no mirror. It may
        have a successor of the same name, which kubelet has not admitted yet or lists too.
        """
        if affected is not None and not affected:
            return ()
        return tuple(
            use.pod
            for use in self._pod_uses
            if use.may_use(affected, self.resource_names)
            or (use.unknown_ids and self._may_run(use.pod))
        )

    @functools.cached_property
    def _pod_uses(self) -> tuple[pod_device_use.PodDeviceUse, ...]:
        """The devices of each unfinished pod, also of pods that only kubelet lists.

        GPU clients do not count: a change pauses them.
        """
        entries = collections.Counter(one.key for one in self.assigned or () if one.device_ids)
        listed = {pod.key for pod in self.pods if pod.is_admitted and entries[pod.key] <= 1}
        unlisted = (one for key, one in self._allocations.items() if key not in listed)
        return tuple(
            self._use_of(pod)
            for pod in (*self.pods, *map(_unlisted_pod, unlisted))
            if not (
                pod.is_finished
                or clients.is_plugin_or_monitor(pod)
                or any(client.matches(pod) for client in self.extra_clients)
            )
        )

    def _use_of(self, pod: pod_object.Pod) -> pod_device_use.PodDeviceUse:
        # An allocation with the name of a new pod is its predecessor's.
        listed = self._allocations.get(pod.key) if pod.is_admitted else None
        return pod_device_use.PodDeviceUse.of(pod, listed, self.known_ids)

    def undecided_users(self, affected: Collection[str] | None) -> pod_object.Pods:
        """Return the users that kubelet may still exclude, because it lists no device of them yet.

        Empty if all devices are affected: then every pod with a GPU is a user.
        """
        if affected is None or (
            self.known_ids is not None and self.known_ids <= frozenset(affected)
        ):
            return ()
        is_incomplete = bool(self.why_incomplete)
        return tuple(
            pod
            for pod in self.users(affected)
            if self.why_uncertain(pod)
            and self._use_of(pod).may_be_listed(is_incomplete=is_incomplete)
        )

    @property
    def why_incomplete(self) -> str:
        """Why kubelet's answer does not show which pods have which devices; empty if it does.

        A kubelet that starts lists no pod at first, and without its checkpoint no device. Then a
        pod looks the same whether it has devices or never got any.
        """
        if self.no_answer or self.assigned is None:
            return self.no_answer or "kubelet does not answer"
        running = {
            pod.key
            for pod in self.pods
            if pod.phase == "Running"
            and self._use_of(pod).plugin_resources
            and not pod.has_gpu_init
        }
        if not running or any(one.key in running and one.device_ids for one in self.assigned):
            return ""
        return "kubelet lists no device of a running pod, or the pod was started without one"

    def use_by_device(
        self,
        plan: steps.Plan,
        gpus: Collection[model.Gpu],
        *,
        used_ids: Iterable[str] = (),
        now_s: float = 0.0,
        within_s: float = 0.0,
    ) -> collections.Counter[str]:
        """Return how much the loss of each device matters, as for ``planner.plan``.

        ``used_ids`` are devices that processes use: one that no pod is known to have matters as
        much as a pod.

        It is the sum over the pods that are known to have the device: several share one by
        replicas or a claim. A pod with several devices is evicted once, so each of those on GPUs
        that change has a part of the pod's weight: a plan for the fewest pods is then found more
        often. A pod with a device on a GPU whose mode changes is evicted anyway, so it has none.

        A pod that ends within ``within_s`` matters least, unless it is stuck: it has not ended
        long after its grace period. ``now_s`` is in Unix time. ``plan`` is any plan of the change:
        all change the same GPUs.
        """
        changed = {
            uuid: gpu.uuid
            for gpu in gpus
            if gpu.uuid in plan.gpu_uuids
            for uuid in (gpu.uuid, *gpu.mig_uuids)
        }
        whole = {each.gpu_uuid for each in plan.gpus if each.takes_whole_gpu}
        use = collections.Counter[str]()
        unknown = set(used_ids)
        for each in self._pod_uses:
            ids = each.ids & changed.keys()
            unknown -= ids
            if whole.isdisjoint(changed[one] for one in ids):
                weight = _weight(each.pod, now_s, within_s) // max(1, len(ids))
                use.update(dict.fromkeys(ids, weight))
        use.update(dict.fromkeys(unknown, _IN_USE))
        return use

    @property
    def has_unknown_ids(self) -> bool:
        """Whether a pod has a device that no GPU has: only processes show the use of it."""
        return any(each.unknown_ids for each in self._pod_uses)

    def why_uncertain(self, pod: pod_object.Pod) -> str:
        """Return why an affected pod may use none of the devices; empty if it does use one."""
        is_silent = bool(self.no_answer) or self.assigned is None
        return self._use_of(pod).why_uncertain(is_kubelet_silent=is_silent)

    def describe_users(
        self, users: Iterable[pod_object.Pod], names: Mapping[str, str] | None = None
    ) -> str:
        """Name pods, with the reason for each uncertain user.

        ``names``: of devices by id, to be named with the certain users.
        """
        return messages.by_cause(
            (pod.key, self.why_uncertain(pod) or self._list_devices(pod, names or {}))
            for pod in users
        )

    def _list_devices(self, pod: pod_object.Pod, names: Mapping[str, str]) -> str:
        ids = self._use_of(pod).listed_ids
        return messages.list_names([name for each, name in names.items() if each in ids])

    def blocking(
        self,
        plan: steps.Plan,
        *,
        leaving: Collection[pod_object.Pod] = (),
        services: Iterable[str] = (),
    ) -> tuple[str, ...]:
        """Describe the processes that block a plan and will not end before it.

        Processes of drained pods, MPS daemons of their claims, GPU clients and ``services`` end
        before the change and do not count. A process of no known pod or unit may be one of these,
        so it counts only if it prevents the first instance. The NVML session of the change checks
        them all.
        """
        names = {f"pod {pod.uid}": f"pod {pod.key}" for pod in self.pods}
        daemons = filter(claims.is_mps_daemon, self.pods)
        ended_with = daemons if any(pod.may_claim for pod in leaving) else ()
        ending = {f"pod {pod.uid}" for pod in (*leaving, *ended_with)} | self.client_owners
        ending |= {f"unit {name}" for name in services}

        def stays(gpu: steps.GpuPlan, user: gpu_processes.GpuProcess) -> bool:
            is_known = bool(user.owner) or user in gpu_processes.keeping_out(gpu, (user,))
            return is_known and user.owner not in ending

        return tuple(
            f"{gpu} is in use by "
            f"{dataclasses.replace(user, owner=names.get(user.owner, user.owner))}"
            for gpu in plan.gpus
            for user in gpu_processes.blocking(gpu, (self.processes or {}).get(gpu.gpu_uuid, ()))
            if stays(gpu, user)
        )

    @property
    def client_owners(self) -> frozenset[str]:
        """The owners, as ``gpu_processes.GpuProcess`` has them, of pods that a change pauses."""
        own_labels = {each.deploy_label for each in self.extra_clients if each.deploy_label}
        paused = (
            *filter(clients.is_device_plugin, self.pods),
            *filter(claims.is_driver, self.pods),
            *client_table.members(self.pods, self.extra_clients),
            *clients.gated_by(self.pods, clients.PAUSED_LABELS | own_labels),
        )
        return frozenset(f"pod {pod.uid}" for pod in paused)

    @functools.cached_property
    def _allocations(self) -> Mapping[str, pod_object.PodDevices]:
        """Kubelet's allocations to unfinished pods, by the pods' keys.

        Kubelet before 1.34 lists the devices of finished pods (kubernetes/kubernetes#132028). A
        pod that was deleted by force and its successor may have the same name.
        """
        finished = {pod.key for pod in self.pods if pod.is_finished}
        by_key: dict[str, pod_object.PodDevices] = {}
        for one in self.assigned or ():
            if one.key not in finished:
                other = by_key.get(one.key)
                by_key[one.key] = one if other is None else _join(other, one)
        return by_key

    def _may_run(self, pod: pod_object.Pod) -> bool:
        """Return whether a process on a GPU may belong to this pod.

        Right after a reboot, kubelet still lists pods whose instances are gone.
        """
        if self.processes is None:
            return True
        users = (user for each in self.processes.values() for user in each)
        owners = {user.owner for user in users if not gpu_processes.is_releasing_daemon(user)}
        return not owners.isdisjoint(("", f"pod {pod.uid}"))


def resource_names(gpus: Iterable[model.Gpu]) -> dict[str, str]:
    """Return each device's resource name under strategy mixed, by the device's id."""
    return {
        uuid: name
        for gpu in gpus
        for uuid, name, _ in ((gpu.uuid, resources.GPU, None), *resources.devices(gpu))
        if uuid
    }


def _weight(pod: pod_object.Pod, now_s: float, within_s: float) -> int:
    """Return how much the eviction of a pod matters; see ``Usage.use_by_device``."""
    if pod.is_terminating:
        is_soon = -_STUCK_AFTER_S <= pod.ends_by_s - now_s <= within_s
        return _ENDS_SOON if is_soon else _IN_USE
    return _MUST_STAY if pod.is_mirror or pod.is_kept else _IN_USE


def _join(one: pod_object.PodDevices, other: pod_object.PodDevices) -> pod_object.PodDevices:
    return dataclasses.replace(
        one,
        device_ids=one.device_ids | other.device_ids,
        claim_drivers=one.claim_drivers | other.claim_drivers,
        gpu_resources=one.gpu_resources | other.gpu_resources,
    )


def _unlisted_pod(allocated: pod_object.PodDevices) -> pod_object.Pod:
    """Build the pod that only kubelet lists, as far as known."""
    return pod_object.Pod(
        namespace=allocated.namespace,
        name=allocated.name,
        uid="",
        phase="Running",
        gpu_resources=dict.fromkeys(allocated.gpu_resources, 1),
        has_claims=well_known.GPU_CLAIM_DRIVER in allocated.claim_drivers,
        is_unlisted=True,
    )
