"""What a cluster operator types: the real kubectl against a node with the real agent."""

import os
import pathlib
import re
from collections.abc import Callable, Iterator

import pytest

from mig_manager.core.node import cluster
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
    kubectl("label", "node", "sandbox", f"{cluster.CONFIG_LABEL}={layout}", "--overwrite")
    applied = "jsonpath={.metadata.labels.mig-manager\\.io/applied}"
    return kubectl("wait", "node", "sandbox", f"--for={applied}={layout}", "--timeout=60s")


def wait_for_event(stage: stages.Stage, reason: str) -> None:
    """Wait for an Event: the agent publishes it after the labels."""

    def is_there() -> bool:
        events = stage.api.get("/api/v1/namespaces/default/events")["items"]
        return any(each["reason"] == reason for each in events)

    stage.wait(is_there, f"the event {reason}")


@pytest.fixture(scope="module")
def waited(stage: stages.Stage, kubectl: Kubectl) -> str:
    """Return the output of the wait for the first layout, which is applied then."""
    output = label_and_wait(kubectl, LAYOUT)
    wait_for_event(stage, "Applied")
    return output


def test_kubectl_waits_for_a_layout_and_lists_the_state(kubectl: Kubectl, waited: str) -> None:
    columns = ("-L", cluster.STATE_LABEL, "-L", cluster.APPLIED_LABEL)

    head, line = kubectl("get", "node", *columns).splitlines()

    assert waited == "node/sandbox condition met\n"
    assert head.split()[-2:] == ["MIG.CONFIG.STATE", "APPLIED"]
    assert line.split()[:2] == ["sandbox", "Ready"]
    assert line.split()[-2:] == ["success", LAYOUT]
    # The new plugin, and no pod that had to go.
    _, pod = kubectl("get", "pods", "-A").splitlines()
    assert (pod.split()[0], pod.split()[3]) == ("gpu-operator", "Running")


@pytest.mark.usefixtures("waited")
def test_the_plugin_draws_what_the_agent_published(kubectl: Kubectl) -> None:
    drawn = kubectl("mig", "status", "sandbox")
    past = kubectl("mig", "history", "sandbox")

    assert drawn.startswith(f"sandbox · applied · requested {LAYOUT} · Applied · since ")
    assert "GPU 0-1 · NVIDIA A100-SXM4-40GB · MIG on · 2 alike" in drawn
    assert "  1g.5gb  14 free" in drawn.splitlines()
    assert "applied at least since" in past
    assert f"Layout {LAYOUT} is active" in past


def section(described: str, title: str) -> list[str]:
    """Return the words of a section of ``kubectl describe``, by line."""
    found = re.search(rf"^{title}:(.*\n(?: .*\n)*)", described, re.MULTILINE)
    assert found
    return [" ".join(line.split()) for line in found[1].splitlines()]


@pytest.mark.usefixtures("waited")
def test_kubectl_describe_shows_labels_devices_and_events(kubectl: Kubectl) -> None:
    described = kubectl("describe", "node", "sandbox")
    devices = [line for line in section(described, "Allocatable") if "nvidia.com/" in line]
    ours = [line for line in section(described, "Events") if " mig-manager " in line]

    assert {
        f"{cluster.CONFIG_LABEL}={LAYOUT}",
        f"{cluster.STATE_LABEL}=success",
        f"{cluster.APPLIED_LABEL}={LAYOUT}",
    } <= set(section(described, "Labels"))
    assert "nvidia.com/mig-1g.5gb: 14" in devices
    assert all(line.endswith(" 0") for line in devices if "mig-1g.5gb" not in line)
    assert [line.split()[:2] for line in ours] == [["Normal", "Draining"], ["Normal", "Applied"]]
    assert "1 pod to evict: default/train" in ours[0]
    assert f"Layout {LAYOUT} is active." in ours[1]


@pytest.mark.usefixtures("waited")
def test_unknown_layout_ends_in_a_warning_and_the_old_one_stays(
    stage: stages.Stage, kubectl: Kubectl
) -> None:
    kubectl("label", "node", "sandbox", f"{cluster.CONFIG_LABEL}=all-9g.1gb", "--overwrite")
    state = "jsonpath={.metadata.labels.nvidia\\.com/mig\\.config\\.state}"
    kubectl("wait", "node", "sandbox", f"--for={state}=failed", "--timeout=60s")
    wait_for_event(stage, "UnknownConfig")

    shown = kubectl("get", "node", "sandbox", "-o", "jsonpath={.metadata.labels}")
    warnings = kubectl("get", "events", "--field-selector", "type=Warning")

    assert f'"{cluster.APPLIED_LABEL}":"{LAYOUT}"' in shown
    assert "UnknownConfig" in warnings
    label_and_wait(kubectl, LAYOUT)
