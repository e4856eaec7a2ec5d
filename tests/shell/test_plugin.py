"""``kubectl mig`` against the embedded API server; some tests start the real kubectl."""

import json
import pathlib
import re

import pytest
import yaml

import mig_manager
from mig_manager import errors
from mig_manager.core import bar, model
from mig_manager.core.records import journals
from tests.shell import plugin_rig as rig

# -- kubectl and the plugin -------------------------------------------------------------------


def test_kubectl_lists_the_plugin_runs_it_and_completes_a_line_with_it(viewer: rig.Viewer) -> None:
    completed = viewer.kubectl("__complete", "mig", "history", "gpu-2")

    assert str(rig.BIN / "kubectl-mig") in viewer.kubectl("plugin", "list").out
    assert viewer.mig("version").out == f"kubectl-mig {mig_manager.__version__}\n"
    assert completed.out.splitlines() == ["gpu-2", ":4"]
    # Files are left to the shell.
    assert viewer.complete("plan", "-f", "").out == ":0\n"


def test_help_is_given_for_all_and_for_each(viewer: rig.Viewer) -> None:
    assert "kubectl mig" in viewer.alone().out
    answer = viewer.alone("plan", "--help")
    assert "LAYOUT" in answer.out
    assert "--context" in answer.out
    assert viewer.alone("help", "plan").out == answer.out
    assert viewer.alone("help", "pla").status == 3


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("stat",), 3, "did you mean 'status'"),
        (("status", "--sort"), 2, "--sort"),
        (("status", "--sort"), 2, "See 'kubectl mig status --help'."),
        (("plan", "x", "--config-mp", "a/b"), 2, "did you mean '--config-map'?"),
        (("status", "gpu-1", "-l", "a=b"), 2, "not both"),
        (("status", "-o", "table"), 2, "not one of text, wide, json, yaml"),
        (("plan",), 2, "LAYOUT"),
        (("status", "-w", "-o", "json"), 2, "--watch shows text"),
        (("apply", "gpu-1"), 2, "-f FILE"),
        (("plan", "all-3g"), 2, "no layout 'all-3g'"),
        (("plan", "all-disabled", "-f", "missing.yaml"), 2, "missing.yaml"),
        (("plan", "all-disabled", "-f", "missing.yaml"), 2, "remedy: Check the file's path"),
        (("plan", "all-disabled", "--config-map", "x"), 2, "NAMESPACE/NAME"),
        (("plan", "all-disabled", "--config-map", "x/y"), 1, "not found"),
        (("plan", "all-disabled", "--config-map", "x/y", "-f", "z"), 2, "not both"),
        (("status", "-l", "pool=none"), 2, "no node with selector 'pool=none'"),
        (("status", "-l", "pool=none"), 2, "remedy: See all labels"),
        (("status", "-l", "((("), 1, ""),
        (("history", "gpu-9"), 1, 'nodes "gpu-9" not found'),
        (("layouts", "gpu-9"), 1, "remedy: Name a node with NVIDIA GPUs: gpu-1, gpu-2, gpu-3"),
        (("history", "../../../version"), 1, ""),
    ],
)
def test_invalid_input_is_refused_in_a_line(
    viewer: rig.Viewer, words: tuple[str, ...], status: int, message: str
) -> None:
    answer = viewer.alone(*words)

    assert (answer.status, answer.out) == (status, "")
    assert answer.err.startswith("kubectl-mig: ")
    assert message in answer.err
    assert "Traceback" not in answer.err


def test_a_missing_kubectl_is_to_be_installed(
    viewer: rig.Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(viewer.home / "empty"))

    answer = viewer.real("status")

    assert answer.status == 2
    assert "remedy: Install kubectl, or add its folder to the PATH." in answer.err


def test_contexts_and_kubeconfigs_are_those_of_kubectl(
    viewer: rig.Viewer, tmp_path: pathlib.Path
) -> None:
    document = json.loads((viewer.home / "kubeconfig").read_text())
    document["contexts"].append({"name": "other", "context": {"cluster": "gone", "user": ""}})
    document["clusters"].append({"name": "gone", "cluster": {"server": "http://127.0.0.1:1"}})
    elsewhere = tmp_path / "kubeconfig"
    elsewhere.write_text(json.dumps(document | {"current-context": "other"}))
    options = ("--kubeconfig", str(elsewhere))

    gone = viewer.real("history", "gpu-1", "--request-timeout=5s", *options)
    assert (gone.status, gone.out) == (1, "")
    assert "kubectl get nodes" in gone.err
    assert viewer.real("--context=sandbox", *options, "history", "gpu-1").status == 0
    unknown = viewer.real("history", "gpu-1", "--context", "nowhere")
    assert (unknown.status, unknown.out) == (1, "")
    assert "nowhere" in unknown.err


def test_more_nodes_than_a_page_holds_are_all_shown(user: rig.Viewer) -> None:
    for number in range(501):
        user.server.store.create(rig.node(f"n{number:03}"))

    answer = user.alone("status")

    assert len(re.findall(r"^n\d+ .*no-request", answer.out, re.MULTILINE)) == 501


def test_a_failed_node_says_when_its_agent_tries_again(user: rig.Viewer) -> None:
    failed = rig.node("n1", requested="a", state=model.State.FAILED, reason=errors.Reason.IN_USE)
    run = json.loads(failed["metadata"]["annotations"]["mig-manager.io/status"])
    for name, when in (("soon", rig.ago(minutes=-10.2)), ("over", rig.ago(minutes=10))):
        failed["metadata"]["name"] = name
        text = json.dumps(run | {"retryAt": when})
        failed["metadata"]["annotations"]["mig-manager.io/status"] = text
        user.server.store.create(failed)

    assert " ago · next attempt in 10m\n" in user.alone("status", "soon").out
    assert "next attempt" not in user.alone("status", "over").out


# -- status -----------------------------------------------------------------------------------


def test_one_node_is_drawn_with_the_pods_that_use_it(viewer: rig.Viewer) -> None:
    answer = viewer.alone("status", "gpu-1")

    assert (answer.status, answer.err) == (0, "")
    first, *_ = lines = answer.out.splitlines()
    assert first.startswith("gpu-1 · applied · requested all-balanced · Applied · since 20")
    assert "GPU 0-7 · NVIDIA A100-SXM4-40GB · MIG on · 8 alike" in lines
    assert sum("3g.20gb" in line and "│" in line for line in lines) == 1
    assert "  1g.5gb   2 of 16 in use by ml/serve (2)" in lines
    assert "  2g.10gb  8 free" in lines
    assert "  3g.20gb  1 of 8 in use by ml/train" in lines
    assert "only kubelet knows" in lines[-1]
    assert max(map(len, lines)) <= bar.WIDTH


def test_many_nodes_are_a_line_each_with_explanations_below(viewer: rig.Viewer) -> None:
    answer = viewer.alone("status")

    assert answer.status == 1
    table, _, why = answer.out.partition("\n\n")
    rows = [line.split()[:3] for line in table.splitlines()]
    assert rows == [
        ["NODE", "STATE", "REASON"],
        ["gpu-1", "applied", "Applied"],
        ["gpu-2", "failed", "UnknownProfile"],
        ["gpu-3", "waiting,not-ready", "Applied"],
        ["gpu-4", "stale", "Drain"],
        ["gpu-5", "no-agent", "-"],
    ]
    assert "8x 3g.20gb, 8x 2g.10gb, 16x 1g.5gb" in table
    assert "2x whole GPU" in table
    assert "gpu-2: GPU 0 has no profile 1g.5gb" in why
    assert "gpu-3: it is applied; the node is not ready" in why
    assert "gpu-1" not in why
    assert "cpu" not in answer.out


def test_nodes_are_selected_by_label_and_drawn_in_colour_if_wanted(viewer: rig.Viewer) -> None:
    answer = viewer.alone("status", "-l", "pool=train", "-o", "wide")
    coloured = viewer.alone("status", "gpu-2", "--color", "always")

    assert answer.status == 1
    assert "\x1b[31mfailed" in coloured.out
    assert "\x1b" not in answer.out
    assert answer.out.startswith("gpu-1 · applied")
    assert "NVIDIA H100 80GB HBM3" in answer.out
    assert "gpu-3" not in answer.out


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("status", "gpu-1"), "applied all-balanced (before)"),
        (("status",), "all-balanced (before)"),
    ],
)
def test_the_layout_applied_before_a_change_is_shown_during_it(
    user: rig.Viewer, words: tuple[str, ...], shown: str
) -> None:
    gpus = rig.gpus("1xA100-SXM4-40GB")
    node = rig.node("gpu-1", gpus=gpus, requested="all-1g.5gb", state=model.State.PENDING)
    journal = journals.Journal(config="all-1g.5gb", applied="all-balanced")
    node["metadata"]["annotations"]["mig-manager.io/journal"] = journal.to_json()
    user.server.store.create(node)
    user.server.store.create(rig.node("gpu-2", gpus=gpus))

    assert shown in user.alone(*words).out
    (as_json,) = user.alone("status", "gpu-1", "-o", "json").data["nodes"]
    assert (as_json["applied"], as_json["applied_before"]) == (None, "all-balanced")


def test_a_missing_node_does_not_hide_the_others(viewer: rig.Viewer) -> None:
    answer = viewer.alone("status", "gpu-1", "gpu-9")

    assert answer.status == 1
    assert "gpu-1 · applied" in answer.out
    assert 'nodes "gpu-9" not found' in answer.err


def test_json_and_yaml_have_everything(viewer: rig.Viewer) -> None:
    answer = viewer.alone("status", "-o", "json").data

    as_yaml = yaml.safe_load(viewer.alone("status", "-o", "yaml").out)
    assert as_yaml["nodes"][0] == answer["nodes"][0]
    assert answer["is_good"] is False
    assert [node["status"] for node in answer["nodes"]] == [
        "applied", "failed", "waiting", "stale", "no-agent",
    ]  # fmt: skip
    first = answer["nodes"][0]
    assert len(first["gpus"]) == 8
    assert "id" not in first["gpus"][0]["gpu_instances"][0]
    assert {each["resource"]: each["pods"] for each in first["device_requests"]} == {
        "nvidia.com/mig-1g.5gb": {"ml/serve": 2},
        "nvidia.com/mig-2g.10gb": {},
        "nvidia.com/mig-3g.20gb": {"ml/train": 1},
    }


# -- plan -------------------------------------------------------------------------------------


def test_a_plan_is_drawn_with_the_affected_pods(viewer: rig.Viewer) -> None:
    answer = viewer.alone("plan", "all-1g.5gb", "gpu-1")

    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith("gpu-1: all-1g.5gb of ConfigMap gpu-operator/default-mig-parted")
    assert "goes" in answer.out
    assert "16 instances destroyed, 40 created, 16 kept; no reset" in answer.out
    assert "8 of 8 3g.20gb go: these pods are evicted: ml/train" in answer.out
    assert "ml/serve" not in answer.out


def test_a_plan_for_many_nodes_is_a_line_each_and_changes_nothing(viewer: rig.Viewer) -> None:
    viewer.server.log.clear()

    answer = viewer.alone("plan", "all-balanced")

    assert answer.status == 1
    rows = {line.split()[0]: line for line in answer.out.splitlines()[1:6]}
    assert "yes    nothing" in rows["gpu-1"]
    assert rows["gpu-2"].split()[1] == "no"
    assert "instances destroyed" in rows["gpu-3"]
    assert "1 GPU reset   1 evicted" in rows["gpu-4"]
    assert "config:8:" in answer.out
    assert "GPU 0 (NVIDIA A30" in answer.out
    assert "presumed not partitioned" in answer.out
    assert "of 5 nodes 2 would change, 1 unchanged, 2 cannot have it, 0 unknown." in " ".join(
        answer.out.split()
    )
    assert {each.verb for each in viewer.server.log.requests()} <= {"get", "list", ""}


def test_a_layout_may_come_from_a_file_or_from_a_pipe(
    viewer: rig.Viewer, tmp_path: pathlib.Path
) -> None:
    mine = rig.CONFIG.replace("all-1g.5gb", "mine")
    file = tmp_path / "layouts.yaml"
    file.write_text(mine)

    assert viewer.alone("plan", "mine", "gpu-1", "-f", str(file)).status == 0
    assert viewer.alone("plan", "-f", "-", "mine", "gpu-1", stdin=mine).status == 0
    assert viewer.alone("plan", "mine", "gpu-1").status == 2


def test_another_layout_of_the_same_name_is_noted(viewer: rig.Viewer) -> None:
    gpus = rig.gpus("1xA30")
    odd = rig.node(
        "odd",
        gpus=gpus,
        requested="all-disabled",
        config_hash="0123456789ab",
        labels={"test": "odd"},
    )
    viewer.server.store.create(odd)

    answer = viewer.alone("plan", "all-disabled", "-l", "test=odd")

    assert "another layout named all-disabled" in answer.out
    viewer.server.store.remove(("nodes", "", "odd"))


def test_a_plan_as_json(viewer: rig.Viewer) -> None:
    answer = viewer.alone("plan", "all-1g.5gb", "gpu-1", "gpu-2", "-o", "json")

    assert answer.status == 1
    first, second = answer.data["nodes"]
    assert (first["fits"], first["plan"]["instances"]["created"]) == (True, 40)
    assert [lost["pods"] for lost in first["losses"]] == [{"ml/train": 1}]
    assert "gpu_instance_id" not in json.dumps(answer.data)
    assert (second["fits"], second["plan"]) == (False, None)


# -- validate ---------------------------------------------------------------------------------


def test_layouts_are_checked_against_the_products_that_the_nodes_have(viewer: rig.Viewer) -> None:
    answer = viewer.alone("validate", "all-1g.5gb", "all-1g.10gb", "-o", "json")

    assert answer.status == 1
    fits = {(each["layout"], each["product"]): each["fit"] for each in answer.data["verdicts"]}
    a100, a30, h100 = "NVIDIA A100-SXM4-40GB", "NVIDIA A30", "NVIDIA H100 80GB HBM3"
    assert fits == {
        ("all-1g.5gb", a100): "fits",
        ("all-1g.5gb", a30): "does-not-fit",
        ("all-1g.5gb", h100): "does-not-fit",
        ("all-1g.10gb", a100): "not-for-it",
        ("all-1g.10gb", a30): "not-for-it",
        ("all-1g.10gb", h100): "fits",
    }
    note = "gpu-5: its agent has published nothing; by its labels it has 4x NVIDIA A30"
    assert note in answer.err


def test_validate_without_a_name_checks_all_layouts(viewer: rig.Viewer) -> None:
    answer = viewer.alone("validate", "-l", "pool=train", "-o", "json")

    assert answer.status == 0
    fits = [each["fit"] for each in answer.data["verdicts"] if "H100" in each["product"]]
    assert fits == ["fits", "elsewhere", "elsewhere", "fits"]
    assert viewer.alone("validate", "-l", "pool=train", "--must-fit").status == 1


# -- history ----------------------------------------------------------------------------------


def test_history_orders_own_events_and_dates_the_layout(viewer: rig.Viewer) -> None:
    answer = viewer.alone("history", "gpu-1", "-o", "json").data
    good, bad = viewer.alone("history", "gpu-1"), viewer.alone("history", "gpu-2")

    assert [moment["what"] for moment in answer["moments"]] == [
        "Recovered", "Applied", "started", "Applied", "AlreadyApplied",
    ]  # fmt: skip
    assert answer["applied_since"] == answer["moments"][1]["at"]
    assert (good.status, bad.status) == (0, 0)
    assert "applied at least since 20" in good.out
    assert "3h ago" in good.out
    assert "at least since" not in bad.out
    assert "UnknownProfile   GPU 0 has no profile 1g.5gb" in bad.out


def test_a_history_names_the_writer_of_the_request(viewer: rig.Viewer) -> None:
    thing = rig.node("owned", requested="all-disabled", state=None)
    thing["metadata"]["managedFields"] = [
        {"manager": "kubelet", "time": rig.ago(minutes=1), "fieldsV1": {"f:status": {}}},
        {
            "manager": "kubectl-label",
            "time": rig.ago(minutes=7),
            "fieldsV1": {"f:metadata": {"f:labels": {"f:nvidia.com/mig.config": {}}}},
        },
    ]
    viewer.server.store.create(thing)

    answer = viewer.alone("history", "owned")

    assert "last write by kubectl-label, which requested all-disabled" in answer.out
    viewer.server.store.remove(("nodes", "", "owned"))


# -- completion ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        (("st",), ["status"]),
        (
            ("",),
            [
                *("status", "top", "plan", "apply", "capacity", "validate", "layouts", "history"),
                *("autoscaler-tags", "device-classes", "help", "version"),
            ],
        ),
        (("status", "gpu-"), ["gpu-1", "gpu-2", "gpu-3", "gpu-4", "gpu-5"]),
        (("status", "gpu-1", "gpu-1"), []),
        (("plan", "all-1"), ["all-1g.5gb", "all-1g.10gb"]),
        (("plan", "all-disabled", "gpu-1"), ["gpu-1"]),
        (("validate", "all-b"), ["all-balanced"]),
        (("history", "gpu-2"), ["gpu-2"]),
        (("capacity", "gpu-2"), ["gpu-2"]),
        (("autoscaler-tags", "all-b"), ["all-balanced"]),
        (("autoscaler-tags", "all-balanced", ""), []),
        (("status", "--conte"), ["--context"]),
        (("status", "--context", ""), ["sandbox"]),
        (("status", "-o", "y"), ["yaml"]),
        (("status", "-l", ""), []),
        (("version", ""), []),
        (("status", "--context", "nowhere", ""), []),
    ],
)
def test_a_line_is_completed(
    viewer: rig.Viewer, words: tuple[str, ...], candidates: list[str]
) -> None:
    answer = viewer.complete(*words)

    *found, directive = answer.out.splitlines()
    assert [line.partition("\t")[0] for line in found] == candidates
    assert directive == ":4"


# -- autoscaler-tags --------------------------------------------------------------------------

AWS = "k8s.io/cluster-autoscaler/node-template"
GCE = "nvidia.com/gpu=0,nvidia.com/mig-3g.20gb=8,nvidia.com/mig-2g.10gb=8,nvidia.com/mig-1g.5gb=16"
AZURE = "k8s.io_cluster-autoscaler_node-template"


def test_autoscaler_tags_are_the_devices_of_future_nodes(viewer: rig.Viewer) -> None:
    answer = viewer.alone("autoscaler-tags", "all-balanced", "--gpu", "8xA100-SXM4-40GB")

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


def test_with_the_strategy_single_the_tags_count_gpus(viewer: rig.Viewer) -> None:
    command = ("autoscaler-tags", "all-1g.5gb", "--gpu", "2xa100", "--strategy", "single")

    found = yaml.safe_load(viewer.alone(*command, "-o", "yaml").out)

    assert found["resources"] == {"nvidia.com/gpu": 14}
    assert found["aws_tags"] == {
        f"{AWS}/label/nvidia.com/mig.config": "all-1g.5gb",
        f"{AWS}/resources/nvidia.com/gpu": "14",
    }
    assert found["karpenter_capacity"] == {"nvidia.com/gpu": "14"}


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("all-balanced",), 2, "--gpu is missing"),
        (("no-such-layout",), 2, "--gpu is missing"),
        (("all-balanced", "--gpu", "A100", "--strategy", "none"), 2, "not one of mixed, single"),
        (("all-balanced", "--gpu", "A100", "--strategy", "single"), 2, "MIG devices differ"),
        (("all-balanced", "--gpu", "B9000"), 2, "unknown GPU 'B9000'"),
        (("all-balanced", "--gpu", "A30"), 1, "has no profile 3g.20gb"),
        (("all-balanced", "--gpu", "T4"), 1, "which has no MIG"),
        (("--gpu", "A30"), 2, "LAYOUT"),
    ],
)
def test_no_tags_are_printed_that_no_node_would_have(
    viewer: rig.Viewer, words: tuple[str, ...], status: int, message: str
) -> None:
    answer = viewer.alone("autoscaler-tags", *words)

    assert (answer.status, answer.out) == (status, "")
    assert message in answer.err


# -- device-classes ---------------------------------------------------------------------------


def test_device_classes_are_a_list_that_kubectl_applies(user: rig.Viewer) -> None:
    user.server.create(rig.node("gpu-1", gpus=rig.gpus("1xH100-SXM5-80GB")))
    answer = user.real("device-classes", "-o", "yaml")

    items = yaml.safe_load(answer.out)["items"]
    by_resource = {each["spec"]["extendedResourceName"]: each for each in items}
    assert answer.status == 0
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
    for item in items:
        user.server.create(item)
    lines = user.alone("device-classes").out.splitlines()
    assert len(lines) == 1 + len(items)
    assert lines[1].split() == [
        *("mig-7g-80gb.gpu.nvidia.com", "nvidia.com/mig-7g.80gb", "yes", "1"),
    ]


def test_no_device_class_is_made_beside_one_of_another_name(user: rig.Viewer) -> None:
    own = {"extendedResourceName": "nvidia.com/mig-7g.40gb", "selectors": []}
    other = {"extendedResourceName": "nvidia.com/gpu", "selectors": []}
    for name, spec in (("own", own), ("gpu.nvidia.com", other)):
        metadata = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass"}
        user.server.create({**metadata, "metadata": {"name": name}, "spec": spec})
    user.server.create(rig.node("gpu-1", gpus=rig.gpus("1xA100-SXM4-40GB")), rig.node("gpu-2"))

    table = user.alone("device-classes", "gpu-1", "gpu-2")
    made = json.loads(user.alone("device-classes", "gpu-1", "-o", "json").out)

    assert table.status == 1
    assert "gpu-2: its agent has not published its GPUs" in table.err
    assert ["nvidia.com/mig-7g.40gb", "own", "1"] in [
        line.split()[1:] for line in table.out.splitlines()
    ]
    assert "kubectl apply -f -" in table.out
    resources = {each["spec"]["extendedResourceName"] for each in made["items"]}
    assert "nvidia.com/mig-7g.40gb" not in resources
    assert "nvidia.com/mig-1g.5gb" in resources
