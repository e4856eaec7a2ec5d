"""Runs that fail before they change a GPU or evict a pod, each with its reason."""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from mig_manager import errors
from mig_manager.core.node import policies
from mig_manager.core.objects import discovery_labels, well_known
from mig_manager.reasons import Reason
from tests.pipeline.claimed_devices import KEEP_ONE, without_driver, without_pods
from tests.rigs import layout_table
from tests.rigs.node import (
    agents,
    cluster_parts,
    ends,
    gpu_values,
    moments,
    node_rig,
    nodes,
    parts,
    samples,
)

Make = Callable[[], node_rig.NodeRig]


def with_fields(make: Make = nodes.busy_node, **fields: Any) -> Make:
    """Return what makes a node that differs in some fields."""

    def make_changed() -> node_rig.NodeRig:
        rig = make()
        for name, value in fields.items():
            setattr(rig, name, value)
        return rig

    return make_changed


def with_unknown_services() -> node_rig.NodeRig:
    rig = nodes.hosted_node()
    rig.failures.add("services.running", NO_BUS)
    return rig


def with_strategy_single(*, by_label: bool = True) -> node_rig.NodeRig:
    rig = nodes.node(layout="all-1g.5gb")
    if by_label:
        rig.node_object.labels[discovery_labels.STRATEGY] = "single"
    else:
        for uid in rig.pods:
            rig.pods.change(uid, mig_strategy="single")
    rig.pods.add("train", devices=frozenset({nodes.device(rig, 0, "1g.5gb")}))
    return rig


def with_mps() -> node_rig.NodeRig:
    """The plugin shares whole GPUs by MPS, and a pod has a replica."""
    rig = nodes.node()
    rig.node_object.labels |= {
        discovery_labels.STRATEGY: "single",
        discovery_labels.MPS_CAPABLE: "true",
    }
    rig.pods.add("sharing", devices=frozenset({f"{rig.gpus[0].uuid}::1"}))
    return rig


def with_two_models() -> node_rig.NodeRig:
    """Return a node whose GPUs are of two models, which share the name of a profile."""
    rig = node_rig.NodeRig(gpus=gpu_values.gpus_of("A100-SXM4-80GB+H100 80GB HBM3"))
    rig.node_object.labels |= {
        well_known.PLUGIN_DEPLOY_LABEL: "true",
        discovery_labels.STRATEGY: "single",
    }
    rig.start_plugin()
    return rig


def with_managers(*names: str, **fields: Any) -> node_rig.NodeRig:
    rig = nodes.node()
    for name in names:
        rig.pods.add(name, owner_kind="DaemonSet", **fields)
    registered = json.dumps([{"id": "GPU-1", "mode": "mig"}])
    rig.node_object.annotations["hami.io/node-nvidia-register"] = registered
    return rig


CLASH = agents.LAYOUTS_TEXT + (
    "  clash:\n  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb@4: 1, 3g.20gb@4: 1}}\n"
)
NO_BUS = errors.HostError("no bus", reason=Reason.HOST_SERVICE_FAILED)
NVIDIAS = {
    "labels": {"app": "nvidia-mig-manager"},
    "container_names": ("nvidia-mig-manager",),
}
HAMI = {"labels": {"app.kubernetes.io/component": "hami-device-plugin"}}
ALIKE = layout_table.render({"alike": [layout_table.rule_line("all", {"1g.10gb": 7})]})
DIFFERS = "MIG devices differ: 1g.5gb, 2g.10gb, 3g.20gb"
PARTS = "the DRA driver would not start: it knows no part of a GPU instance: 1c.2g.10gb"


class RefusedRun(NamedTuple):
    """A request that fails before anything is changed."""

    make: Make
    reason: Reason
    texts: tuple[str, ...] = ()  # in its message
    options: Mapping[str, str] = MappingProxyType({})  # the layout, and the file with layouts


CASES = {
    "unknown layout": RefusedRun(
        make=nodes.busy_node, options={"layout": "all-9g"}, reason=Reason.UNKNOWN_CONFIG
    ),
    "malformed file": RefusedRun(
        make=nodes.busy_node,
        options={"layouts": "version: v1\nmig-configs: ["},
        reason=Reason.INVALID_CONFIG,
    ),
    "invalid layout": RefusedRun(
        make=nodes.busy_node,
        options={"layout": "all-1g.5gb", "layouts": agents.LAYOUTS_TEXT.replace("7}", "seven}")},
        reason=Reason.INVALID_CONFIG,
    ),
    "unknown profile": RefusedRun(
        make=nodes.busy_node, options={"layout": "no-such-profile"}, reason=Reason.UNKNOWN_PROFILE
    ),
    "too much": RefusedRun(
        make=nodes.busy_node, options={"layout": "too-much"}, reason=Reason.DOES_NOT_FIT
    ),
    "other GPUs": RefusedRun(
        make=nodes.busy_node, options={"layout": "other-gpu"}, reason=Reason.NO_GPU_MATCHES
    ),
    "placements clash": RefusedRun(
        make=lambda: nodes.node(layout="all-balanced"),
        options={"layout": "clash", "layouts": CLASH},
        reason=Reason.DOES_NOT_FIT,
        texts=("test.yaml:21:5: the layout does not fit GPU 0",),
    ),
    "budget": RefusedRun(
        make=with_fields(
            disruptions=cluster_parts.Disruptions(
                refusals={"affected": "budget 'pdb-a' allows no disruption"}
            )
        ),
        options={"layout": "all-1g.5gb"},
        reason=Reason.DRAIN_TIMEOUT,
        texts=("default/affected (budget 'pdb-a'", "default/spared (waits for the others)"),
    ),
    "drain policy none": RefusedRun(
        make=with_fields(
            owner=parts.Owner(policy=policies.Policy(drain=policies.DrainPolicy.NONE))
        ),
        reason=Reason.DRAIN_TIMEOUT,
        texts=("default/affected (--drain-policy none evicts no pod)",),
    ),
    "client table": RefusedRun(
        make=with_fields(owner=parts.Owner(extra_clients="version: v1\nclients:\n- labels: {}\n")),
        reason=Reason.INVALID_CONFIG,
        texts=("test.yaml:3:11: labels must be",),
    ),
    "hooks file": RefusedRun(
        make=with_fields(hooks=parts.Hooks("hooks: {apply: []}")),
        reason=Reason.INVALID_CONFIG,
        texts=("hooks.yaml:1:9",),
    ),
    "program of a hook": RefusedRun(
        make=with_fields(hooks=parts.Hooks(nodes.HOOKS, missing={"config"})),
        reason=Reason.HOOK_FAILED,
        texts=("hooks.yaml:6:32: program config",),
    ),
    "init system": RefusedRun(
        make=with_unknown_services, reason=Reason.HOST_SERVICE_FAILED, texts=("no bus",)
    ),
    "NVIDIA's manager": RefusedRun(
        make=lambda: with_managers("first", "second", **NVIDIAS),
        reason=Reason.FOREIGN_MANAGER,
        texts=("default/first (NVIDIA's mig-manager), default/second (NVIDIA's mig-manager)",),
    ),
    "HAMi": RefusedRun(
        make=lambda: with_managers("hami", **HAMI),
        reason=Reason.FOREIGN_MANAGER,
        texts=("default/hami (HAMi in MIG mode)",),
    ),
    "strategy of the node": RefusedRun(
        make=with_strategy_single,
        options={"layout": "all-balanced"},
        reason=Reason.STRATEGY_MISMATCH,
        texts=("MIG strategy single", DIFFERS),
    ),
    "strategy of the plugin": RefusedRun(
        make=lambda: with_strategy_single(by_label=False),
        options={"layout": "all-balanced"},
        reason=Reason.STRATEGY_MISMATCH,
        texts=("MIG strategy single", DIFFERS),
    ),
    "replicas by MPS": RefusedRun(
        make=with_mps,
        options={"layout": "all-1g.5gb"},
        reason=Reason.STRATEGY_MISMATCH,
        texts=("MPS cannot share MIG devices", discovery_labels.MPS_CAPABLE),
    ),
    "strategy of a plugin for two models": RefusedRun(
        make=with_two_models,
        options={"layout": "alike", "layouts": ALIKE},
        reason=Reason.STRATEGY_MISMATCH,
        texts=("1g.10gb has 9728 MiB and 14 SMs on GPU 0, 9984 MiB and 16 SMs on GPU 1",),
    ),
    "parts beside the DRA driver": RefusedRun(
        make=nodes.dra_node,
        options={"layout": "parts", "layouts": KEEP_ONE},
        reason=Reason.STRATEGY_MISMATCH,
        texts=(PARTS,),
    ),
    "parts before the DRA driver": RefusedRun(
        make=lambda: without_driver(without_pods(nodes.dra_node())),
        options={"layout": "parts", "layouts": KEEP_ONE},
        reason=Reason.STRATEGY_MISMATCH,
        texts=(PARTS,),
    ),
}


FOUND_BY_ASKING = (
    Reason.FOREIGN_MANAGER,
    Reason.HOOK_FAILED,
    Reason.HOST_SERVICE_FAILED,
    Reason.STRATEGY_MISMATCH,
)
"""Known only after planning, from pods and host."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_refused_run_changes_nothing(case: RefusedRun) -> None:
    rig, reason = case.make(), case.reason
    gpus, labels, pods = rig.gpus, dict(rig.node_object.labels), dict(rig.pods)

    options = {"layout": "one-slice-changed", **case.options}
    outcome = ends.run_to(rig, options.pop("layout"), reason, *case.texts, **options)

    assert outcome.should_retry is reason.is_transient
    # That a drain fails is known only after the node is tainted.
    is_late = reason is Reason.DRAIN_TIMEOUT
    was_pending = is_late or reason in FOUND_BY_ASKING
    assert rig.node_object.states == [*(["pending"] if was_pending else []), "failed"]
    assert rig.node_object.labels == {**labels, well_known.STATE_LABEL: "failed"}
    assert (rig.gpus, rig.driver.executed_steps, rig.hooks.commands) == (gpus, [], [])
    assert {"workloads.evict", "workloads.delete"}.isdisjoint(rig.log)
    may_evict = rig.owner.policy.drain is not policies.DrainPolicy.NONE
    assert may_evict or "workloads.can_evict" not in rig.log
    assert is_late or rig.pods == pods
    assert reason.remedy in rig.node_object.status["message"]
    assert ("retryAt" in rig.node_object.status) is outcome.should_retry


def configure_mixed(rig: node_rig.NodeRig) -> None:
    rig.owner.policy = policies.Policy(plugin_configs=(("all-balanced", "mixed"),))


def remove_plugin(rig: node_rig.NodeRig) -> None:
    rig.pods.clear()
    rig.kubelet.schedulable = {}
    rig.node_object.labels[well_known.PLUGIN_DEPLOY_LABEL] = "false"


@pytest.mark.parametrize(
    ("prepare", "layout"),
    [
        pytest.param(lambda _rig: None, "all-disabled", id="uniform layout"),
        pytest.param(configure_mixed, "all-balanced", id="other plugin config"),
        pytest.param(remove_plugin, "all-balanced", id="no plugin"),
    ],
)
def test_strategy_single_allows_uniform_layouts_and_other_configs(
    prepare: Callable[[node_rig.NodeRig], None], layout: str
) -> None:
    rig = with_strategy_single()
    prepare(rig)

    ends.run_to(rig, layout, Reason.APPLIED)


def test_a_drained_run_goes_on_despite_an_outdated_strategy_label() -> None:
    rig = nodes.busy_node()
    (plugin,) = rig.pods.plugins
    rig.pods.change(plugin.uid, mig_strategy="mixed")
    rig.pods.add("former", labels=samples.PLUGIN_LABELS, **samples.OF_PLUGIN, phase="Failed")
    rig.node_object.labels[discovery_labels.STRATEGY] = "single"
    devices = frozenset({nodes.device(rig, 0, "2g.10gb")})
    rig.callbacks.add(
        moments.Call,
        lambda: rig.pods.add("late", devices=devices),
        when=lambda: rig.node_object.is_plugin_paused,
        times=1,
    )

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)


def test_hami_in_another_mode_manages_no_instances() -> None:
    rig = with_managers("hami", **HAMI)
    rig.node_object.annotations = {
        key: text.replace("mig", "mps") for key, text in rig.node_object.annotations.items()
    }

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)
