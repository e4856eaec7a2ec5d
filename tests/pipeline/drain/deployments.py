"""A deployment with a budget on a node in memory, and the agent that drains it again and again."""

import dataclasses
import itertools
from collections.abc import Iterable

from mig_manager.agent import outcomes
from tests.rigs.node import agents, cluster_parts, moments, node_rig, nodes


class Deployment:
    """Replicas with a budget; its controller replaces a pod that is gone.

    A successor starts on another node while there is room, else on ours if that is open, and
    waits for a node otherwise.
    """

    def __init__(
        self,
        rig: node_rig.NodeRig,
        devices: list[str],
        *,
        room_elsewhere: int,
        name: str = "serving",
        max_unavailable: int = 1,
        starts: bool = True,
    ) -> None:
        self.rig = rig
        self.name = name
        self.room_elsewhere = room_elsewhere
        self.starts = starts
        self.kills = 0
        self._serial = 0
        self.local_devices: dict[str, str] = {}
        """UID of a replica on our node -> its device."""
        for device in devices:
            self._start_here(device)
        self.budget = cluster_parts.Budget(name, name, len(devices), max_unavailable)
        self.least_healthy = len(devices)
        rig.disruptions.budgets.append(self.budget)
        rig.callbacks.add(moments.Wait, self.reconcile)

    def reconcile(self) -> None:
        """Replace what is gone, and place what waits for a node."""
        healthy = self.budget.with_status(self.rig.pods.everywhere).healthy
        self.least_healthy = min(self.least_healthy, healthy)
        for uid in self.local_devices.keys() - self.rig.pods.keys():
            self.kills += 1
            waiting = self._add(phase="Pending", is_ready=False)
            self.rig.pods.elsewhere[waiting] = dataclasses.replace(
                self.rig.pods.pop(waiting),
                node_name="",
                node_selector={"device": self.local_devices.pop(uid)},
            )
        for uid, pod in list(self.rig.pods.elsewhere.items()):
            if pod.labels["app"] != self.name or pod.node_name:
                continue
            if self.room_elsewhere:
                self.room_elsewhere -= 1
                self.rig.pods.elsewhere[uid] = dataclasses.replace(
                    pod, node_name="node-b", phase="Running", is_ready=self.starts
                )
            elif not is_closed(self.rig):
                del self.rig.pods.elsewhere[uid]
                self._start_here(pod.node_selector["device"])

    def _start_here(self, device: str) -> None:
        self.local_devices[self._add(devices=frozenset({device}))] = device

    def _add(self, *, devices: frozenset[str] = frozenset(), **fields: object) -> str:
        self._serial += 1
        return self.rig.pods.add(
            f"{self.name}-{self._serial}",
            devices=devices,
            labels={"app": self.name},
            owner_kind="ReplicaSet",
            **fields,
        )


def restart_always(
    rig: node_rig.NodeRig, name: str, devices: Iterable[frozenset[str]], *, kind: str
) -> None:
    """Start a pod on each of some devices, and another when it is gone: they tolerate the taint.

    Kubelet admits them until the GPUs change.
    """
    each, gpus = tuple(devices), rig.gpus
    names = (f"{name}-{number}" for number in itertools.count())

    def start_missing() -> None:
        used = rig.kubelet.devices_in_use
        for ids in each:
            if rig.gpus == gpus and used.isdisjoint(ids):
                rig.pods.add(
                    next(names),
                    devices=ids,
                    labels={"app": name},
                    owner_kind=kind,
                    owner_name=name,
                )

    start_missing()
    rig.callbacks.add(moments.Wait, start_missing)


def is_closed(rig: node_rig.NodeRig) -> bool:
    return rig.node_object.is_unschedulable or rig.node_object.has_reconfiguring_taint


def node_with(
    *, room_elsewhere: int, starts: bool = True, replicas: int = 4
) -> tuple[node_rig.NodeRig, Deployment]:
    """A node with a deployment on its first GPU, whose budget grants one eviction at a time."""
    rig = nodes.node(layout="all-1g.5gb")
    devices = list(rig.gpus[0].mig_uuids)[:replicas]
    return rig, Deployment(rig, devices, room_elsewhere=room_elsewhere, starts=starts)


CONFIG = """
version: v1
mig-configs:
  all-1g.5gb:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
  first-gpu-whole:
  - {devices: [0], mig-enabled: true, mig-devices: {7g.40gb: 1}}
  unknown-profile:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.99gb: 1}}
"""


def try_once(
    rig: node_rig.NodeRig, by: agents.AgentInMemory | None = None, layout: str = "first-gpu-whole"
) -> outcomes.Outcome:
    """Try a layout, once more if the agent has tried before, and let the pause after it pass."""
    agent = by or agents.new_agent(rig, layouts=CONFIG)
    outcome = agents.run(rig, layout, by=agent, attempt=len(agent.outcomes) + 1)
    for _ in range(30):
        rig.clock.wait(1)
    return outcome
