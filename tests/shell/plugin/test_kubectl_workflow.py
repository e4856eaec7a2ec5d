"""What a cluster operator types: the real kubectl against a node with the real agent."""

import re
from collections.abc import Callable, Iterator

import pytest

from mig_manager.core.objects import well_known
from tests.rigs import programs
from tests.rigs.shell import plugin_rig
from tests.rigs.stage import agent_stage

LAYOUT = "all-1g.5gb"

Kubectl = Callable[..., str]


@pytest.fixture(scope="module")
def stage() -> Iterator[agent_stage.AgentStage]:
    programs.path_or_skip("kubectl")
    with agent_stage.AgentStage() as running:
        running.run_pods([("train", "nvidia.com/gpu", {})])
        yield running


@pytest.fixture(scope="module")
def kubectl(stage: agent_stage.AgentStage, tmp_path_factory: pytest.TempPathFactory) -> Kubectl:
    user = plugin_rig.kubectl_user(stage.server, tmp_path_factory.mktemp("kubectl"))

    def run(*arguments: str) -> str:
        done = user.kubectl(*arguments)
        assert done.status == 0, done.err
        return done.out

    return run


def label_and_wait(kubectl: Kubectl, layout: str) -> str:
    kubectl("label", "node", "sandbox", f"{well_known.CONFIG_LABEL}={layout}", "--overwrite")
    applied = "jsonpath={.metadata.labels.mig-manager\\.io/applied}"
    return kubectl("wait", "node", "sandbox", f"--for={applied}={layout}", "--timeout=180s")


def wait_for_event(stage: agent_stage.AgentStage, reason: str) -> None:
    """Wait for an Event: the agent publishes it after the labels."""

    def is_there() -> bool:
        events = stage.api.get("/api/v1/namespaces/default/events")["items"]
        return any(each["reason"] == reason for each in events)

    stage.wait(is_there, f"the event {reason}")


@pytest.mark.slow
def test_kubectl_and_plugin_show_a_change_of_the_agent(
    stage: agent_stage.AgentStage, kubectl: Kubectl
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
    assert drawn.startswith(f"sandbox · success · requested {LAYOUT} · Applied · since ")
    assert "GPU 0-1 · NVIDIA A100-SXM4-40GB · MIG on · 2 alike" in drawn
    assert "  1g.5gb  14 free" in drawn.splitlines()
    assert "applied at least since" in past
    assert f"Layout {LAYOUT} is active" in past
    assert "nvidia.com/mig-1g.5gb:" in described
    assert "0001" not in described  # the year of a time that is missing
    assert re.search("Draining .*1 pod to evict: default/train", described)


@pytest.mark.slow
def test_unknown_layout_ends_in_a_warning_and_the_old_one_stays(
    stage: agent_stage.AgentStage, kubectl: Kubectl
) -> None:
    label_and_wait(kubectl, LAYOUT)
    kubectl("label", "node", "sandbox", f"{well_known.CONFIG_LABEL}=all-9g.1gb", "--overwrite")
    state = "jsonpath={.metadata.labels.nvidia\\.com/mig\\.config\\.state}"
    kubectl("wait", "node", "sandbox", f"--for={state}=failed", "--timeout=180s")
    wait_for_event(stage, "UnknownConfig")

    shown = kubectl("get", "node", "sandbox", "-o", "jsonpath={.metadata.labels}")
    assert f'"{well_known.APPLIED_LABEL}":"{LAYOUT}"' in shown
    assert "UnknownConfig" in kubectl("get", "events", "--field-selector", "type=Warning")
