"""The real agent on a node without GPUs: the node advertises what it simulates."""

import pathlib
from collections.abc import Iterator

import pytest

from mig_manager.core.objects import well_known
from mig_manager.sandbox import machines
from testkit import apiserver
from tests.rigs import waiting
from tests.rigs.stage import plain_node

STARTUP = "example.com/mig-not-ready"


@pytest.fixture
def rig(tmp_path: pathlib.Path) -> Iterator[plain_node.PlainNode]:
    with apiserver.serve() as server:
        plain = plain_node.PlainNode(server)
        agent = machines.Process(
            *("agent", "--node-name", plain.name),
            *("--kubeconfig", str(server.kubeconfig(tmp_path / "kubeconfig"))),
            *("--pod-resources-socket", str(tmp_path / "none.sock")),
            *("--simulate", "8xA100-SXM4-40GB", "--simulate-state", str(tmp_path / "gpus.json")),
            *("--advertise-simulated", "--poll-interval-s", "0.2"),
            *("--startup-taint", STARTUP),
            log=tmp_path / "agent.log",
        )
        yield plain
        agent.end()


@pytest.mark.slow
def test_node_without_gpus_offers_simulated_devices(rig: plain_node.PlainNode) -> None:
    waiting.until(lambda: rig.schedulable() == {"nvidia.com/gpu": "8"}, "the devices")

    rig.label("all-1g.5gb")

    assert rig.wait_for_end("all-1g.5gb") == "success"
    assert rig.schedulable() == {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "56"}

    rig.label("all-3g.20gb")

    assert rig.wait_for_end("all-3g.20gb") == "success"
    assert rig.schedulable() == {
        "nvidia.com/gpu": "0",
        "nvidia.com/mig-1g.5gb": "0",
        "nvidia.com/mig-3g.20gb": "16",
    }


@pytest.mark.slow
def test_node_registered_again_is_published_again(rig: plain_node.PlainNode) -> None:
    rig.label("all-1g.5gb")
    assert rig.wait_for_end("all-1g.5gb") == "success"
    waiting.until(lambda: condition(rig) == "LayoutVerified", "the condition")
    before, devices = rig.node()["metadata"], rig.schedulable()

    taint = {"key": STARTUP, "effect": "NoSchedule"}
    rig.register(taint, **{well_known.CONFIG_LABEL: "all-1g.5gb"})

    assert rig.wait_for_end("all-1g.5gb") == "success"
    waiting.until(lambda: condition(rig) == "LayoutVerified", "the condition")
    after = rig.node()
    assert rig.schedulable() == {name: n for name, n in devices.items() if n != "0"}
    assert not after["spec"].get("taints")
    assert after["metadata"]["labels"] == before["labels"]
    assert set(after["metadata"]["annotations"]) == set(before["annotations"])
    assert rig.status()["reason"] == "AlreadyApplied"


def condition(rig: plain_node.PlainNode) -> str | None:
    """Return the reason of ``MigReady``."""
    conditions = (rig.node().get("status") or {}).get("conditions") or ()
    reasons = (each["reason"] for each in conditions if each["type"] == well_known.READY_CONDITION)
    return next(reasons, None)
