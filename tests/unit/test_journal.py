"""The journal and the status of a run, as the Node keeps them."""

import json

import pytest

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.node import cluster
from mig_manager.core.records import journals, status
from tests.unit import samples


@pytest.mark.parametrize(
    "switch",
    [
        None,
        journals.PluginConfig(before=None, now="sliced"),
        journals.PluginConfig(before="whole", now="sliced"),
    ],
)
def test_a_journal_reads_back_as_it_was_written(switch: journals.PluginConfig | None) -> None:
    journal = journals.Journal(
        config="a",
        hold_taint=True,
        paused_labels={cluster.PLUGIN_DEPLOY_LABEL: "true"},
        plugin_config=switch,
    )

    assert journals.Journal.from_json(journal.to_json()) == journal
    # Where the plugin has one config, a version before this one reads the journal too.
    assert ("pluginConfig" in journal.to_json()) is (switch is not None)


GPU = samples.gpu(samples.A100, "1g.5gb@0", "1g.5gb@1", "2g.10gb@2", "3g.20gb@4")


def _paused(key: str, value: str) -> str:
    return journals.Journal(config="a", paused_labels={key: value}).to_json()


def _of_gpu(**changed: object) -> str:
    data = json.loads(journals.Journal(config="a", snapshot=(GPU.snapshot,)).to_json())
    data["snapshot"][0] |= changed
    return json.dumps(data)


def _switched(value: object) -> str:
    data = json.loads(journals.Journal(config="a").to_json())
    return json.dumps(data | {"pluginConfig": value})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2}',
        '{"version": 1, "config": "a", "holdTaint": 1, "pausedLabels": {}}',
        '{"version": 1, "config": "a", "holdTaint": false, "pausedLabels": 3}',
        '{"version":1,"config":"a","holdTaint":true,"pausedLabels":{"a":1}}',
        _paused("kubernetes.io/hostname", "true"),
        _paused("nvidia.com/gpu.deploy.not a key", "true"),
        _paused("nvidia.com/gpu.deploy.dcgm", "not a label value"),
        _of_gpu(uuid=3),
        _of_gpu(uuid=None),
        _of_gpu(mode="maybe"),
        _switched(3),
        _switched({}),
        _switched({"before": 1, "now": "a"}),
        _switched({"before": None, "now": "not a label value"}),
        "[" * 100_000,
    ],
)
def test_a_journal_that_is_not_ours_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        journals.Journal.from_json(text)


def test_the_status_annotation_has_layout_reason_and_devices() -> None:
    text = status.Status(
        config="a",
        config_hash="h",
        state=model.State.FAILED,
        phase=model.Phase.DRAIN,
        reason=errors.Reason.DRAIN_TIMEOUT,
        message="m",
        attempt=2,
        started_at="t0",
        finished_at="t1",
        gpus=model.ObservedGpus([GPU]),
    ).to_json()

    assert '"reason": "DrainTimeout"' in text
    assert '"devices": {"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2}' in text
