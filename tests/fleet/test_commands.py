"""The command ``rollout`` in this process: undo, what it refuses, an API that fails."""

import dataclasses
import json
from typing import Any

import pytest
import yaml

from mig_manager import reasons
from mig_manager.core.layout import layout_list, layout_parser
from mig_manager.core.objects import well_known
from mig_manager.sandbox.apiserver import kinds, store
from testkit import apiserver
from tests.fleet import census, fake_agents
from tests.fleet.rollout_rig import LAYOUT, RolloutRig
from tests.rigs.node import agents

FORMER = "all-balanced"


def test_undo_restores_every_nodes_former_label_or_removes_it(rig: RolloutRig) -> None:
    before: dict[str, str | None] = dict.fromkeys(rig.names)
    before |= dict.fromkeys(rig.names[:3], FORMER)
    rig.apply(FORMER, rig.names[:3])
    assert rig.roll(LAYOUT).status == 0
    assert rig.label("other") is None, "it is outside the selector"
    counted = census.Census(rig.server)

    # A layout file that cannot be used is a reason to undo, and no obstacle.
    rig.serve_config(text="mig-configs: [")
    answer = rig.roll("undo")

    assert (answer.status, answer.data["state"], answer.data["undo"]) == (0, "done", True)
    assert rig.labels() == before
    assert counted.most <= 2
    # Undone is undone: to say it twice changes nothing.
    assert rig.roll("undo").data["counts"]["success"] == 5
    assert rig.labels() == before


@pytest.mark.parametrize(
    ("rollouts", "expected"),
    [
        pytest.param(
            [(LAYOUT, "gpu=yes"), ("third", "pool=one")],
            {"undone": LAYOUT, "others": LAYOUT},
            id="another layout on one node",
        ),
        pytest.param(
            [(LAYOUT, "pool=one"), (LAYOUT, "gpu=yes")],
            {"undone": FORMER, "others": FORMER},
            id="the same layout on more nodes",
        ),
        pytest.param(
            [(LAYOUT, "gpu=yes"), ("undo", "gpu=yes"), (LAYOUT, "pool=one")],
            {"undone": FORMER, "others": FORMER},
            id="the same layout after an undo",
        ),
    ],
)
def test_undo_restores_only_nodes_of_the_last_rollout(
    rig: RolloutRig, rollouts: list[tuple[str, str]], expected: dict[str, str]
) -> None:
    rig.apply(FORMER, rig.names)
    rig.write("node-000", labels={"pool": "one"})
    for layout, selector in rollouts:
        assert rig(layout, "-l", selector, "--max-unavailable", "5").status == 0

    answer = rig.roll("undo")

    assert (answer.status, rig.label("node-000")) == (0, expected["undone"])
    assert {rig.label(name) for name in rig.names[1:]} == {expected["others"]}
    named = "labelled by an earlier rollout, not undone: node-001, node-002"
    assert (named in answer.err) is (expected["others"] == LAYOUT)


def test_rollout_labels_the_nodes_of_the_named_context(rig: RolloutRig) -> None:
    config = yaml.safe_load(rig.kubeconfig.read_text())
    (valid,) = config["contexts"]
    other = {"name": "other", "context": {**valid["context"], "cluster": "other"}}
    config["clusters"].append({"name": "other", "cluster": {"server": "http://127.0.0.1:9"}})
    config |= {"contexts": [valid, other], "current-context": "other"}
    rig.kubeconfig.write_text(yaml.safe_dump(config))

    rig.serve_config()
    for name in rig.names:
        rig.publish_gpus(name, "A30" if name == rig.names[0] else "A100-SXM4-40GB")

    unknown = rig.roll(LAYOUT, "--context", "nowhere")
    source = ("--config-map", "mig-manager/mig-manager-config", "--context", valid["name"])
    answer = rig(LAYOUT, "-l", "gpu=yes", "--max-unavailable", "5", *source)

    assert unknown.status == 2
    assert "nowhere" in unknown.err
    assert list(rig.labels().values()) == [None, *[LAYOUT] * 4]
    assert answer.out.endswith(f" --kubeconfig {rig.kubeconfig} --context {valid['name']}\n")


def test_rollout_waits_until_an_agent_has_the_content_of_a_named_file(
    rig: RolloutRig,
) -> None:
    rig.apply(LAYOUT, rig.names)
    layout = layout_parser.parse(agents.LAYOUTS_TEXT, source="").layout(LAYOUT)
    for name, content_hash in (("node-000", layout.content_hash), ("node-001", "0" * 12)):
        status = json.loads(rig.metadata(name)["annotations"][well_known.STATUS_ANNOTATION])
        status |= {"configHash": content_hash}
        rig.write(name, annotations={well_known.STATUS_ANNOTATION: json.dumps(status)})

    answer = rig.roll(LAYOUT, "-f", rig.layout_file(), "--node-timeout-s", "1")

    assert (answer.status, answer.data["counts"]["success"]) == (1, 4)
    message = "not applied 1 s after the start; its agent still has other content"
    assert answer.data["failures"] == [{"name": "node-001", "reason": "", "message": message}]
    assert rig.roll(LAYOUT).status == 0


def test_rollout_labels_no_node_that_lists_other_content_than_a_named_file(
    rig: RolloutRig,
) -> None:
    """Its agent would evict pods for that content, and for the file's once kubelet brings it."""
    layout = layout_parser.parse(agents.LAYOUTS_TEXT, source="").layout(LAYOUT)

    def list_content(content_hash: str) -> None:
        entry = layout_list.Entry(name=LAYOUT, content_hash=content_hash, origin="config.yaml:1")
        listed = layout_list.to_json([entry])
        rig.write("node-001", annotations={well_known.LAYOUTS_ANNOTATION: listed})

    list_content("0" * 12)
    command = (LAYOUT, "-l", "gpu=yes", "-f", rig.layout_file(), "--silence-timeout-s", "1")
    answer = rig(*command)

    assert (answer.status, rig.label("node-001")) == (1, None)
    assert "4 success, 1 to do" in answer.out
    assert "stalled: no further node can start" in answer.out
    assert "node-001: to-do: its agent still has other content" in answer.out

    list_content(layout.content_hash)
    assert (rig(*command).status, rig.label("node-001")) == (0, LAYOUT)


def test_a_node_that_never_had_an_agent_gets_no_request(rig: RolloutRig) -> None:
    rig.write("node-001", annotations=None)

    answer = rig.roll(LAYOUT)

    assert (answer.status, answer.data["state"]) == (1, "failed")
    assert answer.data["counts"] | {"success": 4, "skipped": 1} == answer.data["counts"]
    assert rig.label("node-001") is None
    assert "node-001: skipped: no agent shows its GPUs" in rig(LAYOUT, "-l", "gpu=yes").out


def test_a_node_with_a_dead_agent_fails_and_gets_its_label_back(rig: RolloutRig) -> None:
    rig.apply(FORMER, rig.names)
    rig.agents.dead.add("node-001")

    answer = rig.roll(LAYOUT, "--silence-timeout-s", "3")

    assert (answer.status, answer.data["state"]) == (1, "failed")
    assert answer.data["counts"]["success"] == 4
    (silent,) = answer.data["failures"]
    assert silent["name"] == "node-001"
    assert rig.label("node-001") == FORMER
    assert well_known.ROLLOUT_ANNOTATION not in rig.metadata("node-001")["annotations"]


def test_undo_without_an_agents_response_requests_the_layout_again(rig: RolloutRig) -> None:
    rig.apply(FORMER, rig.names)
    assert rig.roll(LAYOUT).status == 0
    rig.agents.dead.add("node-001")

    answer = rig.roll("undo", "--silence-timeout-s", "3")

    assert (answer.status, answer.data["state"]) == (1, "failed")
    assert answer.data["counts"] | {"success": 4, "no-response": 1} == answer.data["counts"]
    (silent,) = answer.data["failures"]
    assert silent["message"] == "no agent responded; the previous request is restored"
    assert rig.label("node-001") == LAYOUT
    rig.agents.wake()
    assert rig.roll("undo").status == 0
    assert rig.label("node-001") == FORMER


def test_rollout_stalls_when_unready_nodes_fill_its_budget(rig: RolloutRig) -> None:
    unknown = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    for name in rig.names[:2]:
        rig.server.merge(kinds.NODES, name, unknown)

    answer = rig.roll(LAYOUT, "--silence-timeout-s", "3")

    assert (answer.status, answer.data["state"]) == (1, "stalled")
    assert answer.data["unavailable"] == ["node-000", "node-001"]
    assert answer.data["counts"] | {"success": 0} == answer.data["counts"]


def test_changes_are_printed_as_lines_and_on_a_terminal_as_one_table(
    rig: RolloutRig,
) -> None:
    # Long enough to be seen by a rollout on a busy machine.
    rig.agents.work_s = 0.5
    answer = rig(LAYOUT, "-l", "gpu=yes", "--max-unavailable", "40%")

    assert answer.status == 0
    assert ": pending" in answer.out
    assert "node-003: success" in answer.out
    assert answer.out.endswith(
        "layout all-1g.5gb: 5 success; 0 of at most 2 unavailable\nThe rollout is done.\n"
    )
    drawn = rig(FORMER, "-l", "gpu=yes", is_terminal=True)
    assert drawn.status == 0
    assert "\r\x1b[1A\x1b[J" in drawn.out
    assert drawn.out.endswith("The rollout is done.\n")


def test_failure_that_an_agent_retries_is_printed_with_its_message(rig: RolloutRig) -> None:
    rig.agents.work_s = 0.5
    rig.agents.failures["node-004"] = fake_agents.NodeFailure(
        reason=reasons.Reason.DRAIN_TIMEOUT, message="pod a/b stays", is_retried=True
    )

    answer = rig(
        *(LAYOUT, "-l", "gpu=yes", "--max-unavailable", "100%"),
        *("--node-timeout-s", "3", "--silence-timeout-s", "3"),
    )

    assert answer.status == 1
    first, *_ = [line for line in answer.out.splitlines() if line.startswith("node-004: failed")]
    assert first == "node-004: failed, will be retried: DrainTimeout: pod a/b stays"


def test_a_node_whose_layout_is_not_active_on_an_unreachable_gpu_is_marked(
    rig: RolloutRig,
) -> None:
    row = {"index": 3, "uuid": "GPU-3", "reason": "GpuLost", "message": "GPU is lost"}
    malformed: list[Any] = [None, {}, "GPU 3", [row], [3, {}, [[]], {"index": "3"}]]
    rig.agents.unreachable.update(zip(rig.names, malformed, strict=True))

    answer = rig(LAYOUT, "-l", "gpu=yes")
    assert answer.status == 0
    marked = "node-003: success without unreachable GPU 3 (GPU-3)"
    assert answer.out.count(marked) == 2
    assert "5 success, 1 with unreachable GPUs;" in answer.out

    nodes = {node["name"]: node["unreachableGpus"] for node in rig.roll(LAYOUT).data["nodes"]}
    assert nodes == {name: [] for name in rig.names} | {"node-003": ["GPU 3 (GPU-3)"]}
    assert yaml.safe_load(rig(LAYOUT, "-l", "gpu=yes", "-o", "yaml").out)["state"] == "done"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((LAYOUT,), "-l SELECTOR"),
        (("-l", "gpu=yes"), "name a layout"),
        ((LAYOUT, "-l", "gpu=no"), "selects no node\n  remedy: See all labels"),
        ((LAYOUT, "-l", "gpu=yes", "--max-unavailable", "0"), "neither a number"),
        ((LAYOUT, "-l", "gpu=yes", "--max-unavailable", "101%"), "neither a number"),
        (("no/label", "-l", "gpu=yes"), "not a valid label value; write LAYOUT -l SELECTOR"),
        (("undo", "-l", "gpu=yes"), "was labelled by a rollout"),
        ((LAYOUT, "-l", "gpu=yes", "--config-map", "x"), "NAMESPACE/NAME"),
        # No variable starts a rollout or an undo.
        (("SELECTED_CONFIG=night", "-l", "gpu=yes"), "name a layout"),
        (("LAYOUT=undo", "-l", "gpu=yes"), "name a layout"),
    ],
)
def test_invalid_options_are_refused_and_no_node_is_changed(
    rig: RolloutRig, argv: tuple[str, ...], message: str
) -> None:
    variable, is_variable, value = argv[0].partition("=")
    variables = {f"MIG_MANAGER_{variable}": value} if is_variable else {}

    answer = rig(*argv[bool(is_variable) :], variables=variables)

    assert answer.status == 2
    assert message in answer.err
    assert not any(rig.labels().values())


@pytest.mark.parametrize(
    "place", ["mig-manager/mig-manager-config", "gpu-operator/default-mig-parted-config"]
)
def test_rollout_refuses_a_layout_that_the_config_lacks(rig: RolloutRig, place: str) -> None:
    rig.serve_config(place)
    for name in rig.names:
        rig.publish_gpus(name, "A100-SXM4-40GB")
        rig.list_layouts(name)

    answer = rig("all-1g.5bg", "-l", "gpu=yes")

    assert answer.status == 2
    assert "all-1g.5bg" in answer.err
    assert not any(rig.labels().values())
    rig.server.inject(apiserver.Fault(resource="configmaps", status=403, times=None))
    unread = "the agents' layout file is not read: "
    assert unread in rig.roll(LAYOUT, "--dry-run").err
    rolled = rig.roll(LAYOUT)
    assert (rolled.status, rolled.err) == (0, "")


def test_rollout_refuses_a_layout_that_no_node_lists(rig: RolloutRig) -> None:
    for name in rig.names:
        rig.publish_gpus(name, "A100-SXM4-40GB")
        rig.list_layouts(name)

    answer = rig("all-1g.5bg", "-l", "gpu=yes")

    assert (answer.status, any(rig.labels().values())) == (2, False)
    assert "no node lists layout 'all-1g.5bg'; did you mean 'all-1g.5gb'" in answer.err
    assert "just added, name its ConfigMap with --config-map" in " ".join(answer.err.split())
    assert rig.roll(LAYOUT).status == 0


@pytest.mark.parametrize("count", [1, 5])
def test_rollout_labels_no_node_that_its_dry_run_refuses(rig: RolloutRig, count: int) -> None:
    rig.serve_config()
    for name in rig.names:
        rig.publish_gpus(name, "A30" if name in rig.names[:count] else "A100-SXM4-40GB")

    source = ("--config-map", "mig-manager/mig-manager-config")
    answer = rig(LAYOUT, "-l", "gpu=yes", "--max-unavailable", "5", *source)

    assert list(rig.labels().values()) == [None] * count + [LAYOUT] * (5 - count)
    assert answer.status == (2 if count == 5 else 1)
    reason = "UnknownProfile: ConfigMap mig-manager/mig-manager-config"
    assert " ".join((answer.out + answer.err).split()).count(reason) == min(count, 3)
    undo = f"\nUndo: mig-manager rollout undo -l gpu=yes --kubeconfig {rig.kubeconfig}\n"
    assert "Nothing was changed" in answer.err if count == 5 else answer.out.endswith(undo)


@pytest.mark.parametrize("has_config_map", [False, True])
@pytest.mark.parametrize("lists", ["truncated", "missing"])
def test_rollout_requests_a_layout_that_a_node_may_have_unlisted(
    rig: RolloutRig,
    lists: str,
    has_config_map: bool,  # noqa: FBT001 - a case
) -> None:
    entries = [
        layout_list.Entry(name=f"team-{number}", content_hash="0" * 12, origin="config.yaml:1")
        for number in range(1100)
    ]
    text = layout_list.to_json(entries)
    for name in rig.names if lists == "truncated" else ():
        rig.write(name, annotations={well_known.LAYOUTS_ANNOTATION: text})
    if has_config_map:
        rig.serve_config("gpu-operator/default-mig-parted-config")

    assert rig.roll(entries[-1].name).status == 0


@pytest.mark.parametrize(
    ("argv", "variable"),
    [
        (("--config-map", "mig-manager/mig-manager-config"), {"CONFIG_FILE": "/nonexistent"}),
        (("-f", "FILE"), {"CONFIG_MAP": "x/y"}),
    ],
)
def test_a_named_source_overrides_a_variable_for_the_other_source(
    rig: RolloutRig, argv: tuple[str, str], variable: dict[str, str]
) -> None:
    rig.serve_config()
    source = (word.replace("FILE", rig.layout_file()) for word in argv)
    variables = {f"MIG_MANAGER_{name}": value for name, value in variable.items()}

    assert rig(LAYOUT, "-l", "gpu=yes", *source, variables=variables).status == 0


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (apiserver.Fault(status=403), "403"),
        (
            apiserver.Fault(reverts=True),
            f"did not keep nvidia.com/mig.config, {well_known.ROLLOUT_ANNOTATION}: does an",
        ),
    ],
)
def test_a_request_that_the_api_refuses_or_reverts_is_reported(
    rig: RolloutRig, fault: apiserver.Fault, error: str
) -> None:
    rig.server.inject(dataclasses.replace(fault, method="PATCH", resource="nodes", times=None))

    answer = rig(LAYOUT, "-l", "gpu=yes")

    assert answer.status == 1
    assert error in answer.err


FAULTS = {
    "409": apiserver.Fault(method="PATCH", resource="nodes", status=409),
    "500": apiserver.Fault(method="PATCH", resource="nodes", status=500),
    "500-when-done": apiserver.Fault(
        method="PATCH", resource="nodes", status=500, is_carried_out=True
    ),
    "reset-when-done": apiserver.Fault(
        method="PATCH", resource="nodes", reset=True, is_carried_out=True
    ),
    "watch-503": apiserver.Fault(verb="watch", resource="nodes", status=503),
    "watch-410": apiserver.Fault(verb="watch", resource="nodes", status=410),
    "list-500": apiserver.Fault(verb="list", resource="nodes", status=500),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_api_failure_fails_no_node_and_exceeds_no_budget(rig: RolloutRig, name: str) -> None:
    counted = census.Census(rig.server)
    rig.server.inject(FAULTS[name])

    answer = rig.roll(LAYOUT)

    assert answer.status == 0, answer.err
    assert rig.server.faults_waiting() == 0
    assert counted.most <= 2
    assert counted.ever == set(rig.names)


def test_an_outage_longer_than_its_timeouts_fails_no_node_of_a_rollout(rig: RolloutRig) -> None:
    rig.agents.work_s = 0.2
    broken: list[store.Record] = []

    def break_once(record: store.Record) -> None:
        if record.obj["metadata"]["labels"].get(well_known.APPLIED_LABEL) and not broken:
            broken.append(record)
            # With the backoff of the watch, the outage takes 3 to 6 s.
            rig.server.inject(apiserver.Fault(verb="watch", resource="nodes", reset=True, times=4))
            rig.server.break_watches(apiserver.Break.RESET)

    rig.server.store.subscribe(break_once)
    limits = ("--node-timeout-s", "3", "--silence-timeout-s", "3", "--pause-on-failure")

    answer = rig.roll(LAYOUT, *limits)

    assert answer.status == 0, answer.data
    assert broken
    assert rig.server.faults_waiting() == 0
