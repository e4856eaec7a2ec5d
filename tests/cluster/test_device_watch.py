"""The watch by which the tests of on-demand partitioning see a lost device."""

import pathlib

from mig_manager.sandbox.driver import library
from mig_manager.sandbox.node import device_manager, device_plugin, objects
from tests.cluster import device_watch

GPU, SMALL = "nvidia.com/gpu", "nvidia.com/mig-1g.5gb"


def test_pod_whose_device_is_not_on_the_node_is_the_only_loss(tmp_path: pathlib.Path) -> None:
    library.create("A100-SXM4-40GB", tmp_path / "gpus.json")
    gpus = device_plugin.SimulatedGpus(tmp_path / "gpus.json")
    kubelet = device_manager.DeviceManager()
    kubelet.register({GPU: (gpus.observe()[0].uuid,), SMALL: ("MIG-gone",)})
    watch = device_watch.DeviceWatch([device_watch.Node(name="n1", gpus=gpus, kubelet=kubelet)])
    for name, resource in (("whole", GPU), ("small", SMALL)):
        pod = objects.gpu_pod(name, resource)
        pod["metadata"]["uid"] = name
        kubelet.admit(pod)

    watch.check()

    assert watch.losses == {"small on n1: MIG-gone"}
    assert watch.checks == 1
