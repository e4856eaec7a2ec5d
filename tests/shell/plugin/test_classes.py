"""``kubectl mig autoscaler-tags`` and ``device-classes``."""

import pytest
import yaml

from tests.rigs.shell import plugin_rig

AWS = "k8s.io/cluster-autoscaler/node-template"
GCE = "nvidia.com/gpu=0,nvidia.com/mig-3g.20gb=8,nvidia.com/mig-2g.10gb=8,nvidia.com/mig-1g.5gb=16"
AZURE = "k8s.io_cluster-autoscaler_node-template"


def test_autoscaler_tags_are_the_devices_of_future_nodes(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    answer = five_node_cluster.run_plugin(
        "autoscaler-tags", "all-balanced", "--gpu", "8xA100-SXM4-40GB"
    )

    lines = [line.strip() for line in answer.out.splitlines()]
    assert answer.status == 0
    assert lines[0] == "8xA100-SXM4-40GB with layout all-balanced, MIG strategy mixed"
    for each in (
        f"{AWS}/label/nvidia.com/mig.config=all-balanced",
        f"{AWS}/resources/nvidia.com/gpu=0",
        f"{AWS}/resources/nvidia.com/mig-1g.5gb=16",
        f"{AZURE}_label_nvidia.com_mig.config=all-balanced",
        f"{AZURE}_resources_nvidia.com_mig-3g.20gb=8",
        f"node_labels=nvidia.com/mig.config=all-balanced;extended_resources={GCE}",
        'nvidia.com/mig-2g.10gb: "8"',
    ):
        assert each in lines


def test_with_the_strategy_single_the_tags_count_gpus(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    command = ("autoscaler-tags", "all-1g.5gb", "--gpu", "2xa100", "--strategy", "single")

    tags = yaml.safe_load(five_node_cluster.run_plugin(*command, "-o", "yaml").out)

    assert tags["resources"] == {"nvidia.com/gpu": 14}
    assert tags["awsTags"] == {
        f"{AWS}/label/nvidia.com/mig.config": "all-1g.5gb",
        f"{AWS}/resources/nvidia.com/gpu": "14",
    }
    assert tags["karpenterCapacity"] == {"nvidia.com/gpu": "14"}


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("all-balanced",), 2, "--gpu is missing"),
        (("no-such-layout",), 2, "--gpu is missing"),
        (("all-balanced", "--gpu", "A100", "--strategy", "none"), 2, "not one of mixed, single"),
        (("all-balanced", "--gpu", "A100", "--strategy", "single"), 2, "MIG devices differ"),
        (("all-balanced", "--gpu", "B9000"), 2, "unknown GPU 'B9000'"),
        (("all-balanced", "--gpu", "A30"), 1, "kubectl-mig: NVIDIA A30 has no profile 3g.20gb"),
        (("all-balanced", "--gpu", "A30"), 1, "  remedy: Use a profile that the message lists.\n"),
        (("all-balanced", "--gpu", "T4"), 1, "which has no MIG"),
        (("--gpu", "A30"), 2, "LAYOUT"),
        (("small;big", "--gpu", "A30"), 2, "'small;big' is not a valid label value"),
    ],
)
def test_no_tags_are_printed_that_no_node_would_have(
    five_node_cluster: plugin_rig.KubectlUser, words: tuple[str, ...], status: int, message: str
) -> None:
    answer = five_node_cluster.run_plugin("autoscaler-tags", *words)

    assert (answer.status, answer.out) == (status, "")
    assert message in answer.err


@pytest.fixture
def hopper_cluster(empty_cluster: plugin_rig.KubectlUser) -> plugin_rig.KubectlUser:
    gpus = plugin_rig.gpus_with("1xH100-SXM5-80GB")
    empty_cluster.server.create(plugin_rig.node("gpu-1", gpus=gpus))
    return empty_cluster


def test_device_class_of_a_resource_selects_the_devices_of_its_profile(
    hopper_cluster: plugin_rig.KubectlUser,
) -> None:
    items = hopper_cluster.run_plugin("device-classes", "-o", "json").data["items"]

    by_resource = {each["spec"]["extendedResourceName"]: each for each in items}
    assert len(by_resource) == len(items)
    small = by_resource["nvidia.com/mig-1g.10gb"]
    assert small["metadata"]["name"] == "mig-1g-10gb.gpu.nvidia.com"
    (selector,) = small["spec"]["selectors"]
    assert selector["cel"]["expression"] == (
        "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig'"
        " && device.attributes['gpu.nvidia.com'].profile == '1g.10gb'"
    )
    media = by_resource["nvidia.com/mig-1g.10gb.me"]
    assert media["metadata"]["name"] == "mig-1g-10gb-me.gpu.nvidia.com"


@pytest.mark.slow
def test_device_classes_are_listed_as_present_once_they_are_applied(
    hopper_cluster: plugin_rig.KubectlUser,
) -> None:
    answer = hopper_cluster.run_plugin_with_kubectl("device-classes", "-o", "yaml")
    items = yaml.safe_load(answer.out)["items"]
    assert answer.status == 0

    for item in items:
        hopper_cluster.server.create(item)

    lines = hopper_cluster.run_plugin("device-classes").out.splitlines()
    assert len(lines) == 1 + len(items)
    assert lines[1].split() == [
        *("mig-7g-80gb.gpu.nvidia.com", "nvidia.com/mig-7g.80gb", "yes", "1"),
    ]


@pytest.mark.slow
def test_no_device_class_is_made_beside_one_of_another_name(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    spec_7g = {"extendedResourceName": "nvidia.com/mig-7g.40gb", "selectors": []}
    other_spec = {"extendedResourceName": "nvidia.com/gpu", "selectors": []}
    for name, spec in (("own", spec_7g), ("gpu.nvidia.com", other_spec)):
        metadata = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass"}
        empty_cluster.server.create({**metadata, "metadata": {"name": name}, "spec": spec})
    empty_cluster.server.create(
        plugin_rig.node("gpu-1", gpus=plugin_rig.gpus_with("1xA100-SXM4-40GB")),
        plugin_rig.node("gpu-2"),
    )

    table = empty_cluster.run_plugin("device-classes", "gpu-1", "gpu-2")
    made = empty_cluster.run_plugin("device-classes", "gpu-1", "-o", "json").data

    assert table.status == 1
    assert "gpu-2: its agent has not published its GPUs" in table.err
    assert ["nvidia.com/mig-7g.40gb", "own", "1"] in [
        line.split()[1:] for line in table.out.splitlines()
    ]
    assert "kubectl apply -f -" in table.out
    resources = {each["spec"]["extendedResourceName"] for each in made["items"]}
    assert "nvidia.com/mig-7g.40gb" not in resources
    assert "nvidia.com/mig-1g.5gb" in resources
