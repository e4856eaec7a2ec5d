"""What a change of the journal's entries changes on the Node."""

import dataclasses

import pytest

from mig_manager.core.objects import well_known
from mig_manager.core.records import journals, node_entries
from tests.rigs.node import samples

DCGM = well_known.DEPLOY_LABEL_PREFIX + "dcgm"
CONFIG, APPLIED = well_known.PLUGIN_CONFIG_LABEL, well_known.APPLIED_LABEL
PAUSED = well_known.PAUSED_VALUE
GPU = samples.gpu(samples.A100, "7g.40gb@0").snapshot

NOTHING = journals.Journal(layout="a")
TAINT = node_entries.NodeEntries(has_reconfiguring_taint=True)
TAINTED = dataclasses.replace(NOTHING, applied_before="old", node=TAINT)
PAUSING = dataclasses.replace(
    TAINTED, node=dataclasses.replace(TAINT, paused_labels={DCGM: "true"})
)
EXECUTING = dataclasses.replace(PAUSING, gpus=journals.GpuEntries(snapshots=(GPU,)))
SLICED, WHOLE = (
    node_entries.NodeEntries(plugin_config=node_entries.PluginConfig(before=None, now=now))
    for now in ("sliced", "whole")
)
RESUMED = dataclasses.replace(EXECUTING, node=SLICED)
WITH_OTHER_CONFIG = dataclasses.replace(RESUMED, node=WHOLE)
REMAINING = NOTHING.remaining(node_entries.RunEnd.RESTORED)
UNREACHABLE = dataclasses.replace(REMAINING, gpus=EXECUTING.gpus)


CHANGES = {
    "no entry changes": (NOTHING, NOTHING, {DCGM: "true"}, {}, None),
    "the node is tainted": (NOTHING, TAINTED, {}, {}, True),
    "a client is paused": (TAINTED, PAUSING, {DCGM: "true"}, {DCGM: PAUSED}, True),
    "a client was paused by NVIDIA's manager": (
        TAINTED,
        PAUSING,
        {DCGM: PAUSED},
        {DCGM: PAUSED},
        True,
    ),
    "the applied label is removed": (
        PAUSING,
        EXECUTING,
        {DCGM: PAUSED, APPLIED: "old"},
        {APPLIED: None},
        True,
    ),
    "a client that another program resumed is paused again": (
        PAUSING,
        PAUSING,
        {DCGM: "true"},
        {DCGM: PAUSED},
        True,
    ),
    "a client that is switched off stays so": (PAUSING, PAUSING, {DCGM: "false"}, {}, True),
    "clients resume with the plugin's config": (
        EXECUTING,
        RESUMED,
        {DCGM: PAUSED},
        {DCGM: "true", CONFIG: "sliced"},
        False,
    ),
    "a client that is switched off does not resume": (
        EXECUTING,
        RESUMED,
        {DCGM: "false"},
        {CONFIG: "sliced"},
        False,
    ),
    "the config stays": (RESUMED, RESUMED, {CONFIG: "sliced"}, {}, None),
    "a removed config is set again": (RESUMED, RESUMED, {}, {CONFIG: "sliced"}, None),
    "another config is set": (
        RESUMED,
        WITH_OTHER_CONFIG,
        {CONFIG: "sliced"},
        {CONFIG: "whole"},
        None,
    ),
    "config and applied label are restored": (
        RESUMED,
        REMAINING,
        {CONFIG: "sliced"},
        {CONFIG: None, APPLIED: "old"},
        None,
    ),
    "the config of another program stays": (
        RESUMED,
        REMAINING,
        {CONFIG: "foreign"},
        {APPLIED: "old"},
        None,
    ),
    "clients and applied label are restored": (
        PAUSING,
        REMAINING,
        {DCGM: PAUSED},
        {DCGM: "true", APPLIED: "old"},
        False,
    ),
    "the taint stays until the drain is retried": (
        PAUSING,
        PAUSING.remaining(node_entries.RunEnd.DRAIN_RETRIED),
        {DCGM: PAUSED},
        {DCGM: "true", APPLIED: "old"},
        True,
    ),
    # Until the snapshot is restored, the GPUs do not have the layout.
    "no applied label before the snapshot is restored": (
        EXECUTING,
        EXECUTING.remaining(node_entries.RunEnd.RESTORED),
        {DCGM: PAUSED},
        {DCGM: "true"},
        False,
    ),
    "the taint comes back beside an unreachable GPU": (
        UNREACHABLE,
        dataclasses.replace(UNREACHABLE, node=TAINT),
        {APPLIED: "new"},
        {},
        True,
    ),
}


@pytest.mark.parametrize(
    ("before", "after", "labels", "changed", "reconfiguring_taint"),
    CHANGES.values(),
    ids=CHANGES,
)
def test_node_changes_with_the_entries_and_keeps_what_others_wrote(
    before: journals.Journal,
    after: journals.Journal,
    labels: dict[str, str],
    changed: dict[str, str | None],
    *,
    reconfiguring_taint: bool | None,
) -> None:
    view = samples.node_view(labels=labels)

    patch = journals.patch_between(before, after, view)

    assert (dict(patch.labels), patch.reconfiguring_taint) == (changed, reconfiguring_taint)
