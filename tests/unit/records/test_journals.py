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


@pytest.mark.parametrize(
    ("before", "after", "labels", "changed", "reconfiguring_taint"),
    [
        (NOTHING, NOTHING, {DCGM: "true"}, {}, None),
        (NOTHING, TAINTED, {}, {}, True),
        (TAINTED, PAUSING, {DCGM: "true"}, {DCGM: PAUSED}, True),
        # NVIDIA's manager left it so.
        (TAINTED, PAUSING, {DCGM: PAUSED}, {DCGM: PAUSED}, True),
        (PAUSING, EXECUTING, {DCGM: PAUSED, APPLIED: "old"}, {APPLIED: None}, True),
        # Another program wrote it since the pause.
        (PAUSING, PAUSING, {DCGM: "true"}, {DCGM: PAUSED}, True),
        (PAUSING, PAUSING, {DCGM: "false"}, {}, True),
        (EXECUTING, RESUMED, {DCGM: PAUSED}, {DCGM: "true", CONFIG: "sliced"}, False),
        (EXECUTING, RESUMED, {DCGM: "false"}, {CONFIG: "sliced"}, False),
        (RESUMED, RESUMED, {CONFIG: "sliced"}, {}, None),
        (RESUMED, RESUMED, {}, {CONFIG: "sliced"}, None),
        (RESUMED, WITH_OTHER_CONFIG, {CONFIG: "sliced"}, {CONFIG: "whole"}, None),
        (RESUMED, REMAINING, {CONFIG: "sliced"}, {CONFIG: None, APPLIED: "old"}, None),
        (RESUMED, REMAINING, {CONFIG: "foreign"}, {APPLIED: "old"}, None),
        (PAUSING, REMAINING, {DCGM: PAUSED}, {DCGM: "true", APPLIED: "old"}, False),
        (
            PAUSING,
            PAUSING.remaining(node_entries.RunEnd.DRAIN_RETRIED),
            {DCGM: PAUSED},
            {DCGM: "true", APPLIED: "old"},
            True,
        ),
        # Until the snapshot is restored, the GPUs do not have the layout.
        (
            EXECUTING,
            EXECUTING.remaining(node_entries.RunEnd.RESTORED),
            {DCGM: PAUSED},
            {DCGM: "true"},
            False,
        ),
        (
            UNREACHABLE,
            dataclasses.replace(UNREACHABLE, node=TAINT),
            {APPLIED: "new"},
            {},
            True,
        ),
    ],
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
