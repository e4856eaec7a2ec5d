"""Watch at the simulated drivers that no pod loses its device."""

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterator, Mapping

from mig_manager.sandbox.driver import state_file
from mig_manager.sandbox.node import device_manager, device_plugin

_PERIOD_S = 0.02
"""The driver takes longer to create an instance again where one has been destroyed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WatchedNode:
    """What there is on a node, and what its kubelet has given to pods."""

    name: str
    state: state_file.SharedState
    kubelet: device_manager.DeviceManager


class DeviceWatch:
    """What has been seen since the start."""

    def __init__(self, nodes: Collection[WatchedNode]) -> None:
        self._nodes = nodes
        self.checks = 0
        self.losses: set[str] = set()
        """Pod, node and device of each pod that kubelet had given a device which then was gone."""

    def check(self) -> None:
        """Compare the devices of pods with those of the drivers."""
        for node in self._nodes:
            before = _devices(node.kubelet)
            gpus = device_plugin.enumerate_gpus(node.state)
            there = {uuid for gpu in gpus for uuid in (gpu.uuid, *gpu.mig_devices)}
            # Without those that came or went meanwhile.
            after = _devices(node.kubelet)
            for pod in before.keys() & after.keys():
                for device in (before[pod] & after[pod]) - there:
                    self.losses.add(f"{pod} on {node.name}: {device}")
        self.checks += 1


@contextlib.contextmanager
def watching(nodes: Collection[WatchedNode]) -> Iterator[DeviceWatch]:
    """Check again and again."""
    watch, is_over = DeviceWatch(nodes), threading.Event()

    def check_until_ended() -> None:
        while not is_over.wait(_PERIOD_S):
            watch.check()

    thread = threading.Thread(target=check_until_ended, name="device-watch")
    thread.start()
    try:
        yield watch
    finally:
        is_over.set()
        thread.join()


def _devices(kubelet: device_manager.DeviceManager) -> Mapping[str, frozenset[str]]:
    return {pod.name: pod.device_ids for pod in kubelet.allocations()}
