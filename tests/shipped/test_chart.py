"""The Helm chart, rendered by helm and compared with the kustomize overlays."""

import json
import pathlib
import shutil
import subprocess
from typing import Any

import jsonschema
import pytest
import yaml

import mig_manager
from tests.rigs import programs
from tests.rigs.api_objects import Object
from tests.rigs.shipped.overlays import kustomize

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "charts" / "mig-manager"
MODES = ("unprivileged", "privileged", "simulated")

SCHEMA = json.loads((SOURCE / "values.schema.json").read_text(encoding="utf-8"))
AGENTS, PARTITIONER = ("DaemonSet", "mig-manager"), ("Deployment", "mig-manager-partitioner")

Objects = dict[tuple[str, str], Object]


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    chart = tmp_path_factory.mktemp("charts") / "mig-manager"
    shutil.copytree(SOURCE, chart)
    return chart


def helm(chart: pathlib.Path, values: Object) -> "subprocess.CompletedProcess[str]":
    file = chart.parent / "values.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    options = ("--namespace", "gpus", "--kube-version", "1.34.0", "-f", str(file))
    command = (programs.path_or_skip("helm"), "template", "mig", chart, *options)
    return programs.run(*command, cwd=chart.parent)


def render(chart: pathlib.Path, **values: Any) -> list[Object]:
    done = helm(chart, values)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def by_name(objects: list[Object]) -> Objects:
    named = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(named) == len(objects)
    return named


def environ(pod: Object) -> dict[str, Object]:
    """Return the variables of a pod's one container; each is there once."""
    (container,) = pod["containers"]
    variables = {each["name"]: each for each in container["env"]}
    assert len(variables) == len(container["env"])
    return variables


def overlay_objects(mode: str) -> list[Object]:
    """Return the overlay's objects as they would be in namespace ``gpus``."""
    moved = kustomize(f"deploy/overlays/{mode}").replace(
        "namespace: mig-manager\n", "namespace: gpus\n"
    )
    moved = moved.replace("serviceaccount:mig-manager:", "serviceaccount:gpus:")
    return [each for each in yaml.safe_load_all(moved) if each["kind"] != "Namespace"]


@pytest.mark.parametrize("mode", MODES)
def test_without_other_values_the_chart_is_the_overlay_object_by_object(
    chart: pathlib.Path, mode: str
) -> None:
    # The default is the first.
    values = {} if mode == MODES[0] else {"mode": mode}
    assert by_name(render(chart, **values)) == by_name(overlay_objects(mode))


def test_helm_lint_accepts_the_chart_of_this_version(chart: pathlib.Path) -> None:
    done = programs.run(programs.path_or_skip("helm"), "lint", "--strict", chart, cwd=chart.parent)
    about = yaml.safe_load((SOURCE / "Chart.yaml").read_text(encoding="utf-8"))

    assert done.returncode == 0, done.stdout
    assert about["version"] == about["appVersion"] == mig_manager.__version__


# -- values -----------------------------------------------------------------------------------

VALUES: Object = {
    "mode": "simulated",
    "image": {"repository": "example.com:5000/gpu/mig", "tag": "next"},
    "config": "version: v1\nmig-configs:\n  none:\n  - {devices: all, mig-enabled: false}\n",
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "startupTaints": ["a.b/c", "d"],
    "podAnnotations": {"a": "b"},
    "runtimeClassName": "nvidia",
    "volumes": [{"name": "hooks"}],
    "volumeMounts": [{"name": "hooks", "mountPath": "/etc/hooks"}],
    "imagePullSecrets": [{"name": "registry"}],
    "resources": {"requests": {"cpu": "20m"}},
    "env": {"MIG_MANAGER_SIMULATE": "4xA30", "MIG_MANAGER_LOG_LEVEL": "debug"},
    "confineEvictions": True,
    "partitioner": {
        "enabled": True,
        "mode": "act",
        "env": {"MIG_MANAGER_MODE": "of the variable", "MIG_MANAGER_RESERVE": "1g.5gb=2"},
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "resources": {"limits": {"memory": "1Gi"}},
    },
}


@pytest.fixture(scope="module")
def changed_objects(chart: pathlib.Path) -> Objects:
    """The objects with a value of a person's own for almost everything."""
    return by_name(render(chart, **VALUES))


def test_added_values_extend_those_of_the_mode(changed_objects: Objects) -> None:
    template = changed_objects[AGENTS]["spec"]["template"]
    was, now = (
        by_name(overlay_objects("simulated"))[AGENTS]["spec"]["template"]["spec"],
        template["spec"],
    )
    (container,) = now["containers"]
    taints = [{"key": key, "operator": "Exists"} for key in VALUES["startupTaints"]]
    added = {
        **VALUES["env"],
        "MIG_MANAGER_STARTUP_TAINT": "a.b/c,d",
        "MIG_MANAGER_CUSTOM_LAYOUTS": "true",
    }

    assert now["nodeSelector"] == was["nodeSelector"] | VALUES["nodeSelector"]
    assert now["tolerations"] == [*was["tolerations"], *VALUES["tolerations"], *taints]
    assert template["metadata"]["annotations"] == VALUES["podAnnotations"]
    assert now["volumes"] == [*was["volumes"], *VALUES["volumes"]]
    mounts = was["containers"][0]["volumeMounts"]
    assert container["volumeMounts"] == [*mounts, *VALUES["volumeMounts"]]
    for name in ("runtimeClassName", "imagePullSecrets"):
        assert now[name] == VALUES[name]
    assert container["resources"] == VALUES["resources"]
    assert environ(now) == environ(was) | {
        name: {"name": name, "value": value} for name, value in added.items()
    }


def test_values_replace_image_and_layouts_and_confine_evictions(changed_objects: Objects) -> None:
    for key in (AGENTS, PARTITIONER):
        (container,) = changed_objects[key]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "example.com:5000/gpu/mig:next"
    assert changed_objects["ConfigMap", "mig-manager-config"]["data"] == {
        "config.yaml": VALUES["config"]
    }
    policy = changed_objects["ValidatingAdmissionPolicy", "mig-manager-labelled-evictions"]
    assert ":gpus:mig-manager:" in policy["spec"]["matchConditions"][0]["expression"]
    assert ("ValidatingAdmissionPolicyBinding", "mig-manager-evictions") in changed_objects


def test_the_partitioner_has_settings_and_a_place_of_its_own(changed_objects: Objects) -> None:
    pod, values = changed_objects[PARTITIONER]["spec"]["template"]["spec"], VALUES["partitioner"]

    assert environ(pod)["MIG_MANAGER_MODE"]["value"] == "of the variable"
    assert environ(pod)["MIG_MANAGER_RESERVE"]["value"] == "1g.5gb=2"
    assert (pod["nodeSelector"], pod["tolerations"]) == (
        values["nodeSelector"],
        values["tolerations"],
    )
    assert pod["containers"][0]["resources"] == values["resources"]


def test_with_a_budget_the_agents_have_its_settings_and_its_rights(chart: pathlib.Path) -> None:
    made = by_name(render(chart, maxConcurrentNodes=10, customLayouts=True))
    shipped = by_name(overlay_objects("budget"))
    agents, template = (each.pop(AGENTS)["spec"]["template"]["spec"] for each in (made, shipped))

    custom = environ(agents).pop("MIG_MANAGER_CUSTOM_LAYOUTS")
    assert custom["value"] == "true"
    assert environ(agents) == environ(template) | {custom["name"]: custom}
    assert made == shipped


def test_chart_with_the_partitioner_is_its_overlay(chart: pathlib.Path) -> None:
    made = by_name(render(chart, partitioner={"enabled": True}))
    shipped = by_name(overlay_objects("partitioner"))

    for key in (AGENTS, PARTITIONER):
        pods = [each[key]["spec"]["template"]["spec"] for each in (made, shipped)]
        assert environ(pods[0]) == environ(pods[1])
        for pod in pods:
            del pod["containers"][0]["env"]
    assert made == shipped


REFUSED: list[Object] = [
    {"mode": "careless"},
    {"imag": {}},
    {"image": {"pullPolicy": "Sometimes"}},
    {"env": {"lower": "case"}},
    {"env": {"NUMBER": 1}},
    {"maxConcurrentNodes": "10"},
    {"maxConcurrentNodes": -1},
    {"tolerations": [{"kee": "x"}]},
    {"customLayouts": "true"},
    {"startupTaints": "a.b/c"},
    {"startupTaints": ["a.b/c=true:NoSchedule"]},
    {"partitioner": {"mode": "perhaps"}},
    {"partitioner": {"enabled": "yes"}},
]


def test_meaningless_values_are_refused(chart: pathlib.Path) -> None:
    is_valid = jsonschema.Draft7Validator(SCHEMA).is_valid
    done = helm(chart, REFUSED[0])

    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr
    assert is_valid(VALUES)
    assert [each for each in REFUSED if is_valid(VALUES | each)] == []


def test_every_value_is_in_the_schema_and_every_property_has_a_default() -> None:
    values = yaml.safe_load((SOURCE / "values.yaml").read_text(encoding="utf-8"))

    # Helm itself adds "global".
    assert SCHEMA["properties"].keys() - {"global"} == values.keys()
    for name in ("image", "partitioner"):
        assert SCHEMA["properties"][name]["properties"].keys() == values[name].keys()


def test_chart_has_the_objects_of_the_overlays_as_they_are_now(tmp_path: pathlib.Path) -> None:
    programs.path_or_skip("kubectl")
    programs.output(ROOT / "charts" / "assemble", tmp_path)

    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert made == {
        path.name: path.read_text(encoding="utf-8")
        for path in (SOURCE / "files").iterdir()
        if not path.is_symlink()
    }
