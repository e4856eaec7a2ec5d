"""Watch at the simulated drivers that no pod loses its device."""

import contextlib
import threading
from collections.abc import Iterator, Mapping

from mig_manager.sandbox.node import device_plugin, sandbox_node
from tests.cluster import sandbox_nodes

_PERIOD_S = 0.02
"""The driver takes longer to create an instance again where one has been destroyed."""


class DeviceWatch:
    """What has been seen since the start."""

    def __init__(self) -> None:
        self.looks = 0
        self.losses: set[str] = set()
        """Pod, node and device of each pod that kubelet had given a device which then was gone."""


@contextlib.contextmanager
def watching(nodes: sandbox_nodes.Nodes) -> Iterator[DeviceWatch]:
    """Compare the devices of pods with those of the drivers, again and again."""
    watch, ended = DeviceWatch(), threading.Event()
    gpus = {
        machine.name: device_plugin.SimulatedGpus(machine.state_file) for machine in nodes.machines
    }

    def watch_until_ended() -> None:
        while not ended.wait(_PERIOD_S):
            for name, sandbox in nodes.sandboxes.items():
                _compare(watch, name, gpus[name], sandbox)

    thread = threading.Thread(target=watch_until_ended, name="device-watch")
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()


def _compare(
    watch: DeviceWatch,
    node: str,
    gpus: device_plugin.SimulatedGpus,
    sandbox: sandbox_node.SandboxNode,
) -> None:
    before = _devices(sandbox)
    seen = gpus.observe()
    there = {gpu.uuid for gpu in seen}
    there |= {device.uuid for gpu in seen for device in gpu.mig_devices}
    after = _devices(sandbox)
    watch.looks += 1
    for pod in before.keys() & after.keys():
        for device in before[pod] - there:
            watch.losses.add(f"{pod} on {node}: {device}")


def _devices(sandbox: sandbox_node.SandboxNode) -> Mapping[str, frozenset[str]]:
    return {pod.name: pod.device_ids for pod in sandbox.devices.assigned()}
