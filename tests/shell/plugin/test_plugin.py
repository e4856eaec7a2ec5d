"""``kubectl mig`` against the embedded API server; some tests start the real kubectl."""

import json
import pathlib
import re
from collections.abc import Sequence

import pytest
import yaml

import mig_manager
from mig_manager import reasons
from mig_manager.core.records import run_status
from tests.rigs.shell import plugin_rig


@pytest.mark.slow
def test_kubectl_lists_the_plugin_runs_it_and_completes_a_line_with_it(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    completed = five_node_cluster.kubectl("__complete", "mig", "history", "gpu-2")

    assert str(plugin_rig.BIN / "kubectl-mig") in five_node_cluster.kubectl("plugin", "list").out
    assert (
        five_node_cluster.run_kubectl_mig("version").out
        == f"kubectl-mig {mig_manager.__version__}\n"
    )
    assert completed.out.splitlines() == ["gpu-2", ":4"]
    # Files are left to the shell.
    assert five_node_cluster.complete("plan", "-f", "").out == ":0\n"


def test_help_exists_for_the_plugin_and_for_each_command(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    assert "kubectl mig" in five_node_cluster.run_plugin().out
    answer = five_node_cluster.run_plugin("plan", "--help")
    assert "LAYOUT" in answer.out
    assert five_node_cluster.run_plugin("help", "plan").out == answer.out
    # kubectl's own options hold for every command.
    assert (
        "--context" in answer.out,
        "--context" in five_node_cluster.run_plugin("--help").out,
    ) == (
        False,
        True,
    )
    assert five_node_cluster.run_plugin("help", "pla").status == 3


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("stat",), 3, "did you mean 'status'"),
        (("rollout",), 3, "run 'mig-manager rollout', which mig-manager's Python package has"),
        (("status", "--sort"), 2, "--sort"),
        (("status", "--sort"), 2, "See 'kubectl mig status --help'."),
        (("plan", "x", "--config-mp", "a/b"), 2, "did you mean '--config-map'?"),
        (("status", "-n", "gpu-operator"), 2, "-n; nodes have no namespace"),
        (("status", "--namespace=x"), 2, "nodes have no namespace"),
        (("-n", "x", "status"), 2, "nodes have no namespace"),
        (("status", "-nfoo"), 2, "-nfoo; nodes have no namespace"),
        (("-nfoo", "status"), 2, "option -nfoo; nodes have no namespace"),
        (("status", "gpu-1", "-l", "a=b"), 2, "not both"),
        (("status", "-o", "table"), 2, "not one of text, wide, json, yaml"),
        (("plan",), 2, "LAYOUT"),
        (("plan",), 2, "' (example: kubectl mig plan all-1g.5gb node-7)."),
        (("status", "-w", "-o", "json"), 2, "--watch shows text"),
        (("apply",), 2, "required: NODE; usage: kubectl mig apply [OPTION]... [LAYOUT] NODE"),
        (("apply", "gpu-1"), 2, "-f FILE"),
        (("apply", "gpu-1", "all-x"), 2, "comes first: kubectl mig apply all-x gpu-1"),
        (("plan", "gpu-1", "all-x"), 2, "the layout comes first: kubectl mig plan all-x gpu-1"),
        (("plan", "all-x", "gpu-9"), 1, 'nodes "gpu-9" not found'),
        (("plan", "all-3g"), 2, "unknown layout 'all-3g'"),
        (("plan", __file__), 2, f"'{__file__}' is a file: write -f {__file__}"),
        (("plan", "a" * 300), 2, "unknown layout 'aaa"),
        (("plan", "all-disabled", "-f", "missing.yaml"), 2, "missing.yaml"),
        (("plan", "all-disabled", "-f", "missing.yaml"), 2, "remedy: Check the file's path"),
        (("plan", "all-disabled", "--config-map", "x"), 2, "NAMESPACE/NAME"),
        (("plan", "all-disabled", "--config-map", "x/y"), 2, "layouts found (x/y); name"),
        (("plan", "all-disabled", "--config-map", "x/y", "-f", "z"), 2, "not both"),
        (("status", "-l", "pool=none"), 2, "no node with selector 'pool=none'"),
        (("status", "-l", "pool=none"), 2, "remedy: See all labels"),
        (("status", "-l", "((("), 2, "is not a label selector"),
        (("history", "gpu-9"), 1, 'nodes "gpu-9" not found'),
        (("layouts", "gpu-9"), 1, "remedy: Name a node with NVIDIA GPUs: gpu-1, gpu-2, gpu-3"),
        (("history", "../../../version"), 1, ""),
    ],
)
def test_invalid_input_is_refused_in_a_line(
    five_node_cluster: plugin_rig.KubectlUser, words: tuple[str, ...], status: int, message: str
) -> None:
    answer = five_node_cluster.run_plugin(*words)

    assert (answer.status, answer.out) == (status, "")
    assert answer.err.startswith("kubectl-mig: ")
    assert message in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("plan", "all-balanced"),
        ("validate",),
        ("layouts", "gpu-1"),
        ("capacity",),
        ("history", "gpu-1"),
        ("device-classes",),
        ("autoscaler-tags", "all-balanced", "--gpu", "8xA100-SXM4-40GB"),
    ],
    ids=" ".join,
)
def test_the_yaml_of_a_command_equals_its_json(
    five_node_cluster: plugin_rig.KubectlUser, words: Sequence[str]
) -> None:
    as_json, as_yaml = (
        five_node_cluster.run_plugin(*words, "-o", each) for each in ("json", "yaml")
    )

    assert yaml.safe_load(as_yaml.out) == as_json.data


def test_a_missing_kubectl_is_an_error_with_a_remedy(
    five_node_cluster: plugin_rig.KubectlUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(five_node_cluster.home / "empty"))

    answer = five_node_cluster.run_plugin_with_kubectl("status")

    assert answer.status == 2
    assert "remedy: Install kubectl, or add its folder to the PATH." in answer.err


def test_contexts_and_kubeconfigs_are_those_of_kubectl(
    five_node_cluster: plugin_rig.KubectlUser, tmp_path: pathlib.Path
) -> None:
    document = json.loads((five_node_cluster.home / "kubeconfig").read_text())
    document["contexts"].append({"name": "other", "context": {"cluster": "gone", "user": ""}})
    document["clusters"].append({"name": "gone", "cluster": {"server": "http://127.0.0.1:1"}})
    elsewhere = tmp_path / "kubeconfig"
    elsewhere.write_text(json.dumps(document | {"current-context": "other"}))
    options = ("--kubeconfig", str(elsewhere))

    gone = five_node_cluster.run_plugin_with_kubectl(
        "history", "gpu-1", "--request-timeout=5s", *options
    )
    assert (gone.status, gone.out) == (1, "")
    assert "kubectl get nodes" in gone.err
    assert (
        five_node_cluster.run_plugin_with_kubectl(
            "--context=sandbox", *options, "history", "gpu-1"
        ).status
        == 0
    )
    unknown = five_node_cluster.run_plugin_with_kubectl("history", "gpu-1", "--context", "nowhere")
    assert (unknown.status, unknown.out) == (1, "")
    assert "nowhere" in unknown.err


def test_more_nodes_than_a_page_holds_are_all_shown(empty_cluster: plugin_rig.KubectlUser) -> None:
    for number in range(501):
        empty_cluster.server.store.create(plugin_rig.node(f"n{number:03}"))

    answer = empty_cluster.run_plugin("status")

    assert len(re.findall(r"^n\d+ .*no-request", answer.out, re.MULTILINE)) == 501


def test_a_failed_node_says_when_its_agent_tries_again(
    empty_cluster: plugin_rig.KubectlUser,
) -> None:
    failed = plugin_rig.node(
        "n1", requested="a", state=run_status.State.FAILED, reason=reasons.Reason.IN_USE
    )
    run = json.loads(failed["metadata"]["annotations"]["mig-manager.io/status"])
    for name, when in (
        ("soon", plugin_rig.ago(minutes=-10.9)),
        ("over", plugin_rig.ago(minutes=10)),
    ):
        failed["metadata"]["name"] = name
        text = json.dumps(run | {"retryAt": when})
        failed["metadata"]["annotations"]["mig-manager.io/status"] = text
        empty_cluster.server.store.create(failed)

    assert " ago · next attempt in 10m\n" in empty_cluster.run_plugin("status", "soon").out
    assert "next attempt" not in empty_cluster.run_plugin("status", "over").out


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
        (("plan", "-f", "~no-such-user/layouts.yaml", ""), []),
        (("version", ""), []),
        (("status", "--context", "nowhere", ""), []),
    ],
)
def test_a_command_line_is_completed(
    five_node_cluster: plugin_rig.KubectlUser, words: tuple[str, ...], candidates: list[str]
) -> None:
    answer = five_node_cluster.complete(*words)

    *lines, directive = answer.out.splitlines()
    assert [line.partition("\t")[0] for line in lines] == candidates
    assert directive == ":4"
