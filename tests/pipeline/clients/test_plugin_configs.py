"""The device plugin's config that goes with a layout."""

import pytest

from mig_manager.core import steps
from mig_manager.core.node import policies
from mig_manager.core.objects import well_known
from mig_manager.reasons import Reason
from tests.rigs.node import agents, call_errors, ends, moments, nodes, strikes
from tests.rigs.node.nodes import (
    sharing_node,
)


def test_the_plugin_starts_with_the_config_that_goes_with_the_layout() -> None:
    rig = sharing_node()
    keys = (well_known.PLUGIN_CONFIG_LABEL, well_known.PLUGIN_DEPLOY_LABEL)
    label_pairs = rig.note(
        lambda: (rig.node_object.labels[keys[0]], rig.node_object.labels[keys[1]])
    )

    ends.run_to(rig, "one-slice-changed", Reason.APPLIED)

    assert set(label_pairs) == {
        ("whole", "true"),
        ("whole", well_known.PAUSED_VALUE),
        ("sliced", "true"),
    }
    assert rig.node_object.labels[well_known.PLUGIN_CONFIG_LABEL] == "sliced"


@pytest.mark.parametrize("is_plugin_broken", [True, False])
def test_a_plugin_config_is_restored_where_the_change_or_the_plugin_fails(
    *, is_plugin_broken: bool
) -> None:
    rig = sharing_node()
    rig.plugin.is_broken = is_plugin_broken
    if not is_plugin_broken:
        rig.failures.add(steps.CreateGpuInstance, call_errors.REFUSED, times=1)

    reason = Reason.PLUGIN_NOT_READY if is_plugin_broken else Reason.INSUFFICIENT_RESOURCES
    ends.run_to(rig, "one-slice-changed", reason)

    assert rig.node_object.labels[well_known.PLUGIN_CONFIG_LABEL] == "whole"


def test_the_first_plugin_config_is_restored_after_an_upgrade_with_another() -> None:
    rig = sharing_node()
    rig.plugin.is_broken = True
    strikes.kill_when(
        rig,
        lambda: rig.node_object.labels[well_known.PLUGIN_CONFIG_LABEL] == "sliced",
        lambda rig: agents.run(rig, "one-slice-changed"),
    )
    rig.owner.policy = policies.Policy(plugin_configs=(("one-slice-changed", "halved"),))

    assert agents.resume(rig, "one-slice-changed").reason is Reason.PLUGIN_NOT_READY

    assert rig.node_object.labels[well_known.PLUGIN_CONFIG_LABEL] == "whole"


def test_plugin_config_of_another_program_is_not_overwritten() -> None:
    rig = sharing_node()
    rig.plugin.is_broken = True

    def choose() -> None:
        if rig.node_object.labels[well_known.PLUGIN_CONFIG_LABEL] == "sliced":
            rig.node_object.labels[well_known.PLUGIN_CONFIG_LABEL] = "mine"

    rig.callbacks.add(moments.Wait, choose)
    agents.run(rig, "one-slice-changed")

    assert rig.node_object.labels[well_known.PLUGIN_CONFIG_LABEL] == "mine"


def test_active_layout_gets_its_plugin_config_without_gpu_changes() -> None:
    rig = nodes.node(layout="one-slice-changed")
    rig.owner.policy = policies.Policy(plugin_configs=(("*", "sliced"),))
    (old_plugin,) = rig.pods

    ends.run_to(rig, "one-slice-changed", Reason.ALREADY_APPLIED)

    assert rig.node_object.labels[well_known.PLUGIN_CONFIG_LABEL] == "sliced"
    assert old_plugin not in rig.pods
    assert "gpus.execute" not in rig.log
