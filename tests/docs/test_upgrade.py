"""Commands to install, upgrade and remove the agent, and the reasons with a command."""

import pathlib
import re
import shutil
from typing import Any

import pytest
import yaml

from mig_manager.core.objects import well_known
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.docs import pages
from tests.rigs import programs

UPGRADE = (pages.ROOT / "docs" / "upgrade.md").read_text(encoding="utf-8")
README = (pages.ROOT / "README.md").read_text(encoding="utf-8")
AT_REST = {
    well_known.STATUS_ANNOTATION,
    well_known.GPUS_ANNOTATION,
    well_known.LAYOUTS_ANNOTATION,
    well_known.CAPACITY_ANNOTATION,
    well_known.REQUEST_ANNOTATION,
    well_known.LAYOUT_ANNOTATION,
    well_known.ROLLOUT_ANNOTATION,
}


def commands(before: str) -> str:
    """Return the block of commands that follows some words of the page."""
    match = re.search(rf"{re.escape(before)}\n+```\n(.*?)^```$", UPGRADE, re.DOTALL | re.MULTILINE)
    assert match is not None
    return match[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("journal", "reconfiguring_taint", "also"),
    [
        pytest.param(set(), [], [], id="at rest"),
        pytest.param(
            {well_known.JOURNAL_ANNOTATION},
            [{"key": well_known.RECONFIGURING_TAINT, "effect": "NoSchedule"}],
            ["An interrupted change that no agent resumes:"],
            id="interrupted",
        ),
    ],
)
def test_the_commands_remove_what_the_agent_leaves_and_nothing_else(
    tmp_path: pathlib.Path,
    journal: set[str],
    reconfiguring_taint: list[dict[str, str]],
    also: list[str],
) -> None:
    programs.path_or_skip("kubectl")
    foreign = {"key": "example.com/mine", "value": "x", "effect": "NoSchedule"}
    kept = {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.deploy.device-plugin": "true"}
    used = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": "used",
            "labels": kept | {well_known.APPLIED_LABEL: "a", well_known.STATE_LABEL: "success"},
            "annotations": {"example.com/a": "b"} | dict.fromkeys(AT_REST | journal, "{}"),
        },
        "spec": {"taints": [foreign, *reconfiguring_taint]},
        "status": {
            "conditions": [
                {"type": "Ready", "status": "True"},
                {"type": well_known.READY_CONDITION, "status": "True"},
            ]
        },
    }
    other = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "other"},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    blocks = [commands(each) for each in ("<!-- run: by tests/docs/test_upgrade.py -->", *also)]
    script = "".join(blocks).replace("NODE", "used")

    with apiserver.serve() as server:
        server.store.create(used)
        server.store.create(other)
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig")
        programs.output("/bin/sh", "-euc", script, cwd=tmp_path, KUBECONFIG=str(kubeconfig))
        nodes = {name: server.get(kinds.NODES, name) for name in ("used", "other")}

    metadata = nodes["used"]["metadata"]
    assert metadata["labels"] == kept
    assert metadata["annotations"] == {"example.com/a": "b"}
    assert nodes["used"]["spec"]["taints"] == [foreign]
    for node in nodes.values():
        assert node["status"]["conditions"] == [{"type": "Ready", "status": "True"}]


def daemon_set(documents: str) -> dict[str, Any]:
    """Return the agent's DaemonSet among some manifests."""
    (manifest,) = (each for each in yaml.safe_load_all(documents) if each["kind"] == "DaemonSet")
    return dict(manifest)


def image(documents: str) -> str:
    (container,) = daemon_set(documents)["spec"]["template"]["spec"]["containers"]
    return str(container["image"])


@pytest.mark.parametrize("overlay", ["unprivileged", "privileged", "budget", "partitioner"])
def test_the_shipped_kustomization_takes_a_registry_and_an_overlay(
    tmp_path: pathlib.Path, overlay: str
) -> None:
    kubectl = programs.path_or_skip("kubectl")
    (pushed,) = re.findall(r"docker push (\S+)$", README, re.MULTILINE)
    for folder in ("deploy", "profiles"):
        shutil.copytree(pages.ROOT / folder, tmp_path / folder)
    file = tmp_path / "deploy" / "kustomization.yaml"
    lines = file.read_text("utf-8").replace("newName: mig-manager #", "newName:")
    file.write_text(lines.replace("overlays/unprivileged", f"overlays/{overlay}"), "utf-8")

    assert image(programs.output(kubectl, "kustomize", "deploy", cwd=tmp_path)) == pushed


def test_the_overview_begins_as_the_readme_does() -> None:
    overview = (pages.ROOT / "docs" / "index.md").read_text(encoding="utf-8")

    (command,) = re.findall(r"^```\n(.* mig-manager demo\n)```$", README, re.MULTILINE)

    assert command in overview


def test_an_overlay_as_the_page_shows_it_has_its_own_image_and_layouts(
    tmp_path: pathlib.Path,
) -> None:
    kubectl = programs.path_or_skip("kubectl")
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", UPGRADE, re.DOTALL | re.MULTILINE)
    for folder in ("deploy", "profiles"):
        shutil.copytree(pages.ROOT / folder, tmp_path / folder)
    (tmp_path / "kustomization.yaml").write_text(example, "utf-8")
    (tmp_path / "config.yaml").write_text("mine", "utf-8")

    documents = programs.output(kubectl, "kustomize", ".", cwd=tmp_path)

    assert image(documents).startswith("registry.example.com/mig-manager:")
    objects = list(yaml.safe_load_all(documents))
    (layouts,) = (each for each in objects if each["kind"] == "ConfigMap")
    assert layouts["data"] == {"config.yaml": "mine"}
    mounted = daemon_set(documents)["spec"]["template"]["spec"]["volumes"]
    assert {"configMap": {"name": layouts["metadata"]["name"]}, "name": "config"} in mounted
