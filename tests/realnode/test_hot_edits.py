"""The layouts in their ConfigMap are edited while the agent runs."""

import json
from collections.abc import Iterator

import pytest

from tests.realnode import contract_keys, node_state, real_cluster
from tests.rigs import waiting

pytestmark = pytest.mark.realnode

MOUNT = "volumes/kubernetes.io~configmap/config/config.yaml"


def document(*devices: dict[str, int]) -> str:
    """Return a layout file whose layout ``mine`` has these devices on each GPU."""
    rules = [
        {"devices": [index], "mig-enabled": True, "mig-devices": each}
        for index, each in enumerate(devices)
    ]
    return json.dumps({"version": "v1", "mig-configs": {"mine": rules}}, indent=1)


def edit(cluster: real_cluster.RealCluster, text: str) -> None:
    """Edit the ConfigMap; return when the agent's container sees it."""
    patch = json.dumps({"data": {"config.yaml": text}})
    namespace = "--namespace=mig-manager"
    cluster.kubectl("patch", "configmap", "mig-manager-config", namespace, f"--patch={patch}")
    (agent,) = cluster.pods("mig-manager")
    pods = cluster.node.folder / "var/lib/kubelet/pods"
    file = pods / str(agent["metadata"]["uid"]) / MOUNT
    numbers = iter(range(1_000))

    def is_mounted() -> bool:
        # kubelet mounts it with the pod's next sync, for which a change of the pod is a reason.
        touch = f"example.com/touched={next(numbers)}"
        cluster.kubectl("annotate", "pods", "--all", "--overwrite", namespace, touch)
        return file.read_text() == text

    waiting.until(is_mounted, "the edited layouts")


@pytest.fixture
def shipped_layouts(cluster: real_cluster.RealCluster) -> Iterator[None]:
    """Put the shipped layouts back when the story has ended."""
    namespace = "--namespace=mig-manager"
    text = cluster.get("configmap", "mig-manager-config", namespace)["data"]["config.yaml"]
    yield
    cluster.withdraw()
    edit(cluster, text)


@pytest.mark.usefixtures("shipped_layouts")
def test_a_broken_edit_changes_nothing_and_a_corrected_one_takes_effect(
    cluster: real_cluster.RealCluster,
) -> None:
    edit(cluster, document({"3g.20gb": 2}, {"3g.20gb": 1}))
    cluster.apply_layout("mine")
    cluster.deploy("train", "mig-3g.20gb", 3)
    log, instances = cluster.listen(), cluster.driver.instances()
    before = node_state.use(cluster, "train")

    edit(cluster, document({"3g.20gb": 2}, {"3g.20gb": 1}).replace("2", "two", 1))

    waiting.until(lambda: "configProblem" in cluster.status(), "the complaint")
    assert "config.yaml:" in cluster.status()["configProblem"]
    assert cluster.labels()[contract_keys.STATE_LABEL] == "success"
    assert cluster.driver.instances() == instances
    node_state.assert_at_rest(cluster)

    edit(cluster, document({"3g.20gb": 2}, {"3g.20gb": 1, "1g.5gb": 2}))

    waiting.until(lambda: cluster.status().get("reason") == "Applied", "the edited layout")
    assert "configProblem" not in cluster.status()
    assert instances < cluster.driver.instances()
    assert cluster.allocatable() == {"mig-3g.20gb": 3, "mig-1g.5gb": 2}
    assert node_state.use(cluster, "train") == before
    assert log.evicted_pods() == []
    node_state.assert_at_rest(cluster)
