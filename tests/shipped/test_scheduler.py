"""The shipped scheduler profile knows every MIG resource, and its pods have no other rights."""

import pathlib

import yaml

from mig_manager.catalogue import hardware
from mig_manager.core.node.devices import resources
from tests.rigs.shipped.overlays import ROOT, kustomize

CONFIG = ROOT / "deploy" / "scheduler" / "config.yaml"


def test_profile_packs_every_mig_resource_of_the_catalogue() -> None:
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    (profile,) = config["profiles"]
    arguments = {each["name"]: each["args"] for each in profile["pluginConfig"]}
    strategy = arguments["NodeResourcesFit"]["scoringStrategy"]
    resource_names = {
        name
        for gpu in hardware.known_gpus()
        for row in gpu.profiles or ()
        if row.profile.memory_gb and (name := resources.of_profile(row.profile))
    }

    assert strategy["type"] == "MostAllocated"
    listed = [each["name"] for each in strategy["resources"]]
    assert sorted(listed) == sorted(resource_names)
    assert {each["weight"] for each in strategy["resources"]} == {1}


def test_manifest_runs_replicas_with_the_config() -> None:
    made = {each["kind"]: each for each in yaml.safe_load_all(kustomize("deploy/scheduler"))}
    pod = made["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (volume,) = pod["volumes"]
    (mount,) = container["volumeMounts"]
    option = f"--config={pathlib.Path(mount['mountPath'], 'config.yaml')}"

    assert option in container["command"]
    assert volume["configMap"]["name"] == made["ConfigMap"]["metadata"]["name"]
    assert pod["serviceAccountName"] == made["ServiceAccount"]["metadata"]["name"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert pod["securityContext"]["runAsNonRoot"]
