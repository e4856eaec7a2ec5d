"""What a cluster operator types: the real kubectl against a node with the real agent."""

import os
import pathlib
import re
from collections.abc import Callable, Iterator

import pytest

from mig_manager.core.node import well_known
from mig_manager.sandbox import stages
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.node import sandbox_node
from tests import programs
from tests.shell import plugin_rig as rig

PROFILES = pathlib.Path(__file__).parents[2] / "profiles" / "mig-parted.yaml"
LAYOUT = "all-1g.5gb"

Kubectl = Callable[..., str]


@pytest.fixture(scope="module")
def stage() -> Iterator[stages.Stage]:
    programs.needed("kubectl")
    with stages.Stage(
        "2xA100-SXM4-40GB",
        PROFILES.read_text(encoding="utf-8"),
        latency=states.Latency(),
        node_options=sandbox_node.NodeOptions(tick_s=0.1),
    ) as running:
        running.run_pods([("train", "nvidia.com/gpu", {})])
        yield running


@pytest.fixture(scope="module")
def kubectl(stage: stages.Stage, tmp_path_factory: pytest.TempPathFactory) -> Kubectl:
    home = tmp_path_factory.mktemp("kubectl")
    environment = {
        "HOME": str(home),
        "KUBECONFIG": str(stage.server.kubeconfig(home / "kubeconfig", token="person")),  # noqa: S106
        # The plugin is where this environment's console scripts are.
        "PATH": os.pathsep.join([str(rig.BIN), os.environ["PATH"]]),
    }

    def run(*arguments: str) -> str:
        done = rig.run([programs.needed("kubectl"), *arguments], environment)
        assert done.status == 0, done.err
        return done.out

    return run


def label_and_wait(kubectl: Kubectl, layout: str) -> str:
    kubectl("label", "node", "sandbox", f"{well_known.CONFIG_LABEL}={layout}", "--overwrite")
    applied = "jsonpath={.metadata.labels.mig-manager\\.io/applied}"
    return kubectl("wait", "node", "sandbox", f"--for={applied}={layout}", "--timeout=60s")


def wait_for_event(stage: stages.Stage, reason: str) -> None:
    """Wait for an Event: the agent publishes it after the labels."""

    def is_there() -> bool:
        events = stage.api.get("/api/v1/namespaces/default/events")["items"]
        return any(each["reason"] == reason for each in events)

    stage.wait(is_there, f"the event {reason}")


def test_kubectl_and_plugin_show_a_change_of_the_agent(
    stage: stages.Stage, kubectl: Kubectl
) -> None:
    columns = ("-L", well_known.STATE_LABEL, "-L", well_known.APPLIED_LABEL)
    waited = label_and_wait(kubectl, LAYOUT)
    wait_for_event(stage, "Applied")

    _, line = kubectl("get", "node", *columns).splitlines()
    drawn = kubectl("mig", "status", "sandbox")
    past = kubectl("mig", "history", "sandbox")
    described = kubectl("describe", "node", "sandbox")

    assert waited == "node/sandbox condition met\n"
    assert line.split()[:2] == ["sandbox", "Ready"]
    assert line.split()[-2:] == ["success", LAYOUT]
    assert drawn.startswith(f"sandbox · applied · requested {LAYOUT} · Applied · since ")
    assert "GPU 0-1 · NVIDIA A100-SXM4-40GB · MIG on · 2 alike" in drawn
    assert "  1g.5gb  14 free" in drawn.splitlines()
    assert "applied at least since" in past
    assert f"Layout {LAYOUT} is active" in past
    assert "nvidia.com/mig-1g.5gb:" in described
    assert re.search("Draining .*1 pod to evict: default/train", described)


def test_unknown_layout_ends_in_a_warning_and_the_old_one_stays(
    stage: stages.Stage, kubectl: Kubectl
) -> None:
    label_and_wait(kubectl, LAYOUT)
    kubectl("label", "node", "sandbox", f"{well_known.CONFIG_LABEL}=all-9g.1gb", "--overwrite")
    state = "jsonpath={.metadata.labels.nvidia\\.com/mig\\.config\\.state}"
    kubectl("wait", "node", "sandbox", f"--for={state}=failed", "--timeout=60s")
    wait_for_event(stage, "UnknownConfig")

    shown = kubectl("get", "node", "sandbox", "-o", "jsonpath={.metadata.labels}")
    assert f'"{well_known.APPLIED_LABEL}":"{LAYOUT}"' in shown
    assert "UnknownConfig" in kubectl("get", "events", "--field-selector", "type=Warning")
