"""Which pods of kubelet's answer keep a change from beginning."""

import contextlib
import dataclasses
from collections.abc import Mapping

import pytest

from mig_manager import errors
from mig_manager.change import pod_use
from mig_manager.core.objects import pod_object
from tests.rigs.node import driver_rules, samples

DEVICE, OTHER = driver_rules.mig_uuid("1"), driver_rules.mig_uuid("2")
(_INSTANCE,) = samples.gpu(samples.A100, "2g.10gb@4").gpu_instances
(_WHOLE,) = _INSTANCE.compute_instances
GPU = dataclasses.replace(
    samples.gpu(samples.A100, index=1),
    gpu_instances=(
        dataclasses.replace(
            _INSTANCE, compute_instances=(dataclasses.replace(_WHOLE, uuid=DEVICE),)
        ),
    ),
)
PLACE = "nvidia0/gi1"  # what a device plugin calls a device that it does not name by its UUID


class PodsOfKubelet:
    """Has one pod."""

    def __init__(self, device: str, resource: str, claim: str) -> None:
        self.pod = pod_object.PodDevices(
            namespace="ns",
            name="train",
            device_ids=frozenset(filter(None, [device])),
            claim_drivers=frozenset(filter(None, [claim])),
            gpu_resources=frozenset(filter(None, [resource])),
        )

    def assigned_devices(self) -> tuple[pod_object.PodDevices, ...]:
        return (self.pod,)

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        return {}


@pytest.mark.parametrize(
    ("device", "resource", "claim", "named"),
    [
        (DEVICE, "nvidia.com/mig-2g.10gb", "", "ns/train (2g.10gb at 4:2 of GPU 1)"),
        (OTHER, "nvidia.com/mig-2g.10gb", "", ""),
        (PLACE, "nvidia.com/gpu", "", "ns/train (its device ids are not UUIDs)"),
        (PLACE, "", "", ""),
        ("", "", "gpu.nvidia.com", "ns/train (its ResourceClaim may stand for any GPU)"),
        ("", "", "vendor.com", ""),
    ],
    ids=["its device", "another", "by another id", "not of a GPU", "a claim", "another claim"],
)
def test_a_pod_counts_if_it_has_or_may_have_a_device(
    device: str, resource: str, claim: str, named: str
) -> None:
    pods = pod_use.PodUse(kubelet=lambda: PodsOfKubelet(device, resource, claim))

    with pytest.raises(errors.GpuInUseError) if named else contextlib.nullcontext() as caught:
        pods.require_unused({DEVICE}, (GPU,))

    assert not caught or caught.value.message.endswith(f"or resets: {named}")


def test_a_pod_counts_while_a_hook_keeps_kubelet_from_answering() -> None:
    kubelets = iter([PodsOfKubelet(DEVICE, "nvidia.com/mig-2g.10gb", "")])
    pods = pod_use.PodUse(kubelet=lambda: next(kubelets, None), has_hook_run=lambda: True)
    pods.usage()

    with pytest.raises(errors.GpuInUseError, match="ns/train"):
        pods.require_unused({DEVICE}, (GPU,))
