"""How runs end on a node in memory, and what they have left."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from mig_manager import errors, reasons
from mig_manager.agent import outcomes
from mig_manager.core import model
from mig_manager.core.objects import well_known
from mig_manager.core.records import journals
from tests.rigs import layout_table
from tests.rigs.node import agents, fake_cluster, fakes, gpu_values, node_rig, unrestored

NodeAndAgent = tuple[node_rig.NodeRig, agents.AgentInMemory]


def has_layout(rig: node_rig.NodeRig, layout: str) -> bool:
    """Return whether the GPUs have exactly what a layout lists, and no mode is pending."""
    return layout_table.have(rig.gpus, layout_table.gpus_with(layout))


def assert_applied_label_is_true(rig: node_rig.NodeRig) -> None:
    """The label names a layout that is active, or there is none."""
    applied = rig.node_object.labels.get(well_known.APPLIED_LABEL)
    assert applied is None or has_layout(rig, applied)


def is_as_before(rig: node_rig.NodeRig, before: Iterable[model.Gpu | model.GpuSnapshot]) -> bool:
    """Return whether GPUs have the modes, instances and placements that they had."""
    return gpu_values.geometry(before).items() <= gpu_values.geometry(rig.gpus).items()


def run_to(
    rig: node_rig.NodeRig, layout: str, reason: reasons.Reason, *texts: str, **options: Any
) -> outcomes.Outcome:
    """Apply a layout; check reason and message, and that the node is restored.

    Args:
        rig: The node.
        layout: What is requested.
        reason: How the run ends.
        texts: What its message has.
        options: As for ``agents.run``.
    """
    outcome = agents.run(rig, layout, **options)
    assert outcome.reason is reason, outcome.message
    for text in texts:
        assert text in outcome.message
    assert_restored(rig)
    return outcome


def supersede(
    rig: node_rig.NodeRig, layout: str, *, by: agents.AgentInMemory | None = None, **options: Any
) -> None:
    """Apply a layout until its request ends; ``options`` as for ``FakeCancellation``."""
    cancel = fakes.FakeCancellation(rig.clock, **options)
    with pytest.raises(errors.Superseded):
        agents.run(rig, layout, by=by, cancel=cancel)


def supersede_at_checks(
    make: Callable[[], NodeAndAgent], layout: str, *, is_replaced: bool = False
) -> Iterator[NodeAndAgent]:
    """Yield node and agent of a run whose request ends at a check, for each of its checks."""
    for number in itertools.count(1):
        rig, agent = make()
        cancel = fakes.FakeCancellation(rig.clock, ends_at=number, is_replaced=is_replaced)
        with contextlib.suppress(errors.Superseded):
            agents.run(rig, layout, by=agent, cancel=cancel)
            return
        yield rig, agent


def assert_restored(
    rig: node_rig.NodeRig, *, is_stopped: bool = False, is_in_drain: bool = False
) -> None:
    """Check that nothing of a change is left on the node.

    - The journal has no entry but one that a later attempt needs.
    - No GPU client is paused.
    - Neither the reconfiguring taint nor a cordon is left.
    - The plugin's config is what it was, unless the layout that it goes with succeeded.
    - Host services run if and only if they ran.
    - The node has no slot, unless the journal says that it still blocks workloads.
    - No exit hook is pending, but one that failed and stands in the journal.

    A stopped agent, or one in a drain, may leave it to the next attempt to verify the devices of
    plugin and DRA driver; one in a drain, its taint.
    """
    assert unrestored_on(rig, is_stopped=is_stopped, is_in_drain=is_in_drain) == []


def unrestored_on(
    rig: node_rig.NodeRig, *, is_stopped: bool = False, is_in_drain: bool = False
) -> list[str]:
    """List what an agent has not restored; empty if the node is as its owner has it.

    These are entries of the Node, the plugin's config, host services, slot and hooks.
    """
    owner = rig.owner
    view = fake_cluster.FakeNode(rig).latest(is_at_rest=True)
    journal = journals.parse_or_none(view.annotations.get(well_known.JOURNAL_ANNOTATION))
    configs = dict(rig.owner.policy.plugin_configs)
    applied = rig.node_object.labels.get(well_known.APPLIED_LABEL, "")
    config = rig.node_object.labels.get(well_known.PLUGIN_CONFIG_LABEL)
    expected_config = configs.get(applied, configs.get("*", owner.plugin_config))
    services = [
        name
        for name, is_on in rig.host.services.items()
        if is_on is (name in owner.stopped_services)
    ]
    has_exit_hook = journal is not None and journal.host.must_run_exit_hooks
    blocks_workloads = journal is not None and journal.node.blocks_workloads
    pending_entries = (
        # They stay if the hook or the switch failed: the next attempt tries it again.
        *("must_run_exit_hooks", "persistent_gpus"),
        # After a failure the next run refreshes the device files.
        *(
            ("has_stale_files",)
            if rig.node_object.labels.get(well_known.STATE_LABEL) != "success"
            else ()
        ),
        *(("advertisers",) if is_stopped or is_in_drain else ()),
        *(("has_reconfiguring_taint",) if is_in_drain else ()),
    )
    return [
        *unrestored.on_node(
            view,
            *pending_entries,
            is_cordoned=owner.is_cordoned,
            deployed=owner.deploy_labels or None,
        ),
        *([f"config {config}"] if config not in (None, expected_config) else []),
        *([f"services {services}"] if services else []),
        *(["slot"] if rig.slots.is_taken and not blocks_workloads else []),
        *(["exit hook"] if rig.hooks.pending_exit is not has_exit_hook else []),
    ]


def assert_restored_or_in_drain(rig: node_rig.NodeRig, before_failure: Iterable[str]) -> None:
    """Once a drain has removed pods, the taint stays until the next attempt, and nothing else."""
    if rig.node_object.has_reconfiguring_taint:
        assert {"workloads.evict", "workloads.delete"} & set(before_failure)
        assert rig.node_object.status["phase"] in ("Drain", "Pause")
    assert_restored(rig, is_in_drain=rig.node_object.has_reconfiguring_taint)
