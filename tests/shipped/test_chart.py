"""The Helm chart, rendered by helm and compared with the kustomize overlays."""

import json
import pathlib
import shutil
import subprocess
from typing import Any

import pytest
import yaml

import mig_manager
from tests import programs
from tests.shipped.overlays import kustomize

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "charts" / "mig-manager"
MODES = ("unprivileged", "privileged", "simulated")

VERSION = mig_manager.__version__

Object = dict[str, Any]


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    chart = tmp_path_factory.mktemp("charts") / "mig-manager"
    shutil.copytree(SOURCE, chart)
    return chart


def helm(chart: pathlib.Path, values: Object) -> "subprocess.CompletedProcess[str]":
    file = chart.parent / "values.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    options = ("--namespace", "gpus", "--kube-version", "1.34.0", "-f", str(file))
    command = (programs.needed("helm"), "template", "mig", chart, *options)
    return programs.run(*command, cwd=chart.parent)


def render(chart: pathlib.Path, **values: Any) -> list[Object]:
    done = helm(chart, values)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


def pod_template(objects: list[Object]) -> Object:
    found: Object = by_name(objects)["DaemonSet", "mig-manager"]["spec"]["template"]
    return found


def kustomized(mode: str) -> list[Object]:
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
    assert by_name(render(chart, **values)) == by_name(kustomized(mode))


def test_helm_lint_accepts_the_chart_of_this_version(chart: pathlib.Path) -> None:
    done = programs.run(programs.needed("helm"), "lint", "--strict", chart, cwd=chart.parent)
    about = yaml.safe_load((SOURCE / "Chart.yaml").read_text(encoding="utf-8"))

    assert done.returncode == 0, done.stdout
    assert about["version"] == about["appVersion"] == mig_manager.__version__


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({"repository": "example.com:5000/gpu/mig"}, f"example.com:5000/gpu/mig:{VERSION}"),
        ({"tag": "next"}, "mig-manager:next"),
    ],
)
def test_image_can_come_from_anywhere(chart: pathlib.Path, image: Object, expected: str) -> None:
    (container,) = pod_template(render(chart, image=image))["spec"]["containers"]

    assert container["image"] == expected


def test_what_people_add_comes_to_what_the_mode_has(chart: pathlib.Path) -> None:
    env = {"MIG_MANAGER_SIMULATE": "4xA30", "MIG_MANAGER_LOG_LEVEL": "debug"}
    volume, mount = {"name": "hooks"}, {"name": "hooks", "mountPath": "/etc/hooks"}
    shipped = pod_template(render(chart, mode="simulated"))
    changed = pod_template(
        render(
            chart,
            mode="simulated",
            nodeSelector={"pool": "gpu"},
            tolerations=[{"key": "dedicated", "operator": "Exists"}],
            podAnnotations={"a": "b"},
            runtimeClassName="nvidia",
            volumes=[volume],
            volumeMounts=[mount],
            imagePullSecrets=[{"name": "registry"}],
            resources={"requests": {"cpu": "20m"}},
            env=env,
        )
    )

    was, now = shipped["spec"], changed["spec"]
    assert now["nodeSelector"] == was["nodeSelector"] | {"pool": "gpu"}
    assert now["tolerations"] == [*was["tolerations"], {"key": "dedicated", "operator": "Exists"}]
    assert changed["metadata"]["annotations"] == {"a": "b"}
    assert now["runtimeClassName"] == "nvidia"
    assert now["volumes"] == [*was["volumes"], volume]
    mounts = was["containers"][0]["volumeMounts"]
    assert now["containers"][0]["volumeMounts"] == [*mounts, mount]
    assert now["imagePullSecrets"] == [{"name": "registry"}]
    assert now["containers"][0]["resources"] == {"requests": {"cpu": "20m"}}
    before = {each["name"]: each for each in was["containers"][0]["env"]}
    after = {each["name"]: each for each in now["containers"][0]["env"]}
    assert len(after) == len(now["containers"][0]["env"])
    assert after == before | {name: {"name": name, "value": value} for name, value in env.items()}


def test_with_a_budget_the_agents_have_its_settings_and_its_rights(chart: pathlib.Path) -> None:
    made, shipped = by_name(render(chart, maxConcurrentNodes=10)), by_name(kustomized("budget"))
    key = ("DaemonSet", "mig-manager")

    def environ(daemons: Object) -> dict[str, Object]:
        (container,) = daemons["spec"]["template"]["spec"]["containers"]
        return {each["name"]: each for each in container["env"]}

    assert environ(made.pop(key)) == environ(shipped.pop(key))
    assert made == shipped


def test_chart_with_the_partitioner_is_its_overlay(chart: pathlib.Path) -> None:
    made = by_name(render(chart, partitioner={"enabled": True}))
    shipped = by_name(kustomized("partitioner"))

    def environ(objects: dict[tuple[str, str], Object], kind: str) -> dict[str, Object]:
        (found,) = (objects.pop(key) for key in list(objects) if key[0] == kind)
        (container,) = found["spec"]["template"]["spec"].pop("containers")
        env = {each["name"]: each for each in container.pop("env")}
        return {**env, "": (found, container)}

    for kind in ("DaemonSet", "Deployment"):
        assert environ(made, kind) == environ(shipped, kind)
    assert made == shipped


def test_evictions_are_confined_by_a_value(chart: pathlib.Path) -> None:
    made = by_name(render(chart, confineEvictions=True))

    policy = made["ValidatingAdmissionPolicy", "mig-manager-labelled-evictions"]
    assert ":gpus:mig-manager:" in policy["spec"]["matchConditions"][0]["expression"]
    assert ("ValidatingAdmissionPolicyBinding", "mig-manager-evictions") in made


def test_the_partitioner_has_settings_and_a_place_of_its_own(chart: pathlib.Path) -> None:
    own = {
        "enabled": True,
        "mode": "act",
        "env": {"MIG_MANAGER_RESERVE": "1g.5gb=2"},
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "resources": {"limits": {"memory": "1Gi"}},
    }
    objects = by_name(render(chart, partitioner=own, image={"repository": "example.com/mig"}))
    pod = objects["Deployment", "mig-manager-partitioner"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environ = {each["name"]: each.get("value") for each in container["env"]}

    assert container["image"] == f"example.com/mig:{mig_manager.__version__}"
    assert environ["MIG_MANAGER_MODE"] == "act"
    assert environ["MIG_MANAGER_RESERVE"] == "1g.5gb=2"
    assert len(environ) == len(container["env"])
    assert (pod["nodeSelector"], pod["tolerations"]) == (own["nodeSelector"], own["tolerations"])
    assert container["resources"] == own["resources"]


@pytest.mark.parametrize(
    ("values", "variable", "value", "tolerated"),
    [
        ({"customLayouts": True}, "CUSTOM_LAYOUTS", "true", ()),
        ({"startupTaints": ["a.b/c", "d"]}, "STARTUP_TAINT", "a.b/c,d", ("a.b/c", "d")),
    ],
)
def test_a_value_adds_a_variable_and_tolerations(
    chart: pathlib.Path, values: Object, variable: str, value: str, tolerated: tuple[str, ...]
) -> None:
    shipped, changed = (pod_template(render(chart, **each))["spec"] for each in ({}, values))
    env, own = (pod["containers"][0]["env"] for pod in (shipped, changed))

    assert own == [*env, {"name": f"MIG_MANAGER_{variable}", "value": value}]
    added = [{"key": key, "operator": "Exists"} for key in tolerated]
    assert changed["tolerations"] == [*shipped["tolerations"], *added]


def test_a_config_document_of_ones_own_replaces_the_shipped_one(chart: pathlib.Path) -> None:
    document = "version: v1\nmig-configs:\n  none:\n  - {devices: all, mig-enabled: false}\n"
    objects = by_name(render(chart, config=document))

    assert objects["ConfigMap", "mig-manager-config"]["data"] == {"config.yaml": document}


@pytest.mark.parametrize(
    "values",
    [
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
    ],
)
def test_values_that_mean_nothing_are_refused(chart: pathlib.Path, values: Object) -> None:
    done = helm(chart, values)

    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


def test_every_value_is_in_the_schema_and_every_property_has_a_default() -> None:
    schema = json.loads((SOURCE / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((SOURCE / "values.yaml").read_text(encoding="utf-8"))

    # Helm itself adds "global".
    assert schema["properties"].keys() - {"global"} == values.keys()
    for name in ("image", "partitioner"):
        assert schema["properties"][name]["properties"].keys() == values[name].keys()


def test_chart_has_the_objects_of_the_overlays_as_they_are_now(tmp_path: pathlib.Path) -> None:
    programs.needed("kubectl")
    programs.output(ROOT / "charts" / "assemble", tmp_path)

    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert made == {
        path.name: path.read_text(encoding="utf-8")
        for path in (SOURCE / "files").iterdir()
        if not path.is_symlink()
    }
