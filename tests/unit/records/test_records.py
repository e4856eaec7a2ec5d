"""What agents keep as JSON: read back as it was written, and refused if it is not ours."""

import dataclasses
import json
from collections.abc import Callable

import pytest

from mig_manager import reasons
from mig_manager.core import model
from mig_manager.core.fleet import fleet_nodes, marks
from mig_manager.core.layout import layout_list
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import (
    applied_gpus,
    capacity,
    change_failures,
    gpu_repair,
    inventory_codec,
    journals,
    node_entries,
    requests,
    run_status,
    snapshot_codec,
    verified_layouts,
)
from tests.rigs.node import samples

GPU = samples.gpu(samples.A100, "1g.5gb@0", "1g.5gb@1", "2g.10gb@2", "3g.20gb@4")
JOURNAL = journals.Journal(
    layout="a",
    node=node_entries.NodeEntries(
        has_reconfiguring_taint=True, paused_labels={well_known.PLUGIN_DEPLOY_LABEL: "true"}
    ),
)
REQUEST = requests.RequestRecord(
    layout="custom",
    annotation_hash="0123456789ab",
    origin=requests.Origin.PARTITIONER,
    may_evict=False,
    verified=requests.Verified(content_hash="h", is_from_owner=True, is_as_applied=True),
    desired_hashes={"GPU-1": "g", "GPU-2": ""},
    rebooted_hash="h",
    applied_fingerprints=applied_gpus.GpuFingerprints(
        boot_id="boot-1", gpus={"GPU-1": "f"}, names={"GPU-1": "GPU 0 (A100, GPU-1)"}
    ),
)
REPAIR = gpu_repair.GpuRepairs(gpu="GPU-1", count=1, next_s=0).to_data()
FAILED = change_failures.FailedChanges(
    content_hash="x", boot_id="b1", reason=reasons.Reason.HOOK_FAILED, problem="it failed"
)
AT = "2026-03-01T12:00:00+00:00"
NONSENSE = ("", "[", "null", "[]", "{}", "[" * 100_000, '{"version": 99}')


@pytest.mark.parametrize(
    "entries",
    [
        JOURNAL.node,
        node_entries.NodeEntries(plugin_config=node_entries.PluginConfig(before=None, now="x")),
        node_entries.NodeEntries(plugin_config=node_entries.PluginConfig(before="x", now="y")),
    ],
)
def test_journal_round_trips(entries: node_entries.NodeEntries) -> None:
    journal = journals.Journal(layout="a", node=entries)
    assert journals.Journal.from_json(journal.to_json()) == journal
    # If the plugin has one config, a version before this one reads the journal too.
    assert ("pluginConfig" in journal.to_json()) is (entries.plugin_config is not None)


@pytest.mark.parametrize("record", [REQUEST, requests.RequestRecord(layout="a")])
def test_request_round_trips_with_members_of_a_newer_version(
    record: requests.RequestRecord,
) -> None:
    newer = json.loads(record.to_json()) | {"further": {"member": 1}}

    assert requests.RequestRecord.from_json(json.dumps(newer)) == record


def journal_with(**changed: object) -> str:
    return json.dumps(json.loads(JOURNAL.to_json()) | changed)


def snapshot_with(**changed: object) -> str:
    (snapshot,) = snapshot_codec.to_data([GPU.snapshot])
    return journal_with(snapshot=[snapshot | changed])


def request_with(**changed: object) -> str:
    return json.dumps(json.loads(REQUEST.to_json()) | changed)


def use_with(gpu: object, **changed: object) -> str:
    return json.dumps({"version": 1, "at": AT, "gpus": [gpu], **changed})


def status_with(**changed: object) -> str:
    return json.dumps({"config": "a", "state": "success"} | changed)


OTHER_LIST = '{"version": 2, "layouts": {}, "custom": true}'
MALFORMED: dict[Callable[[str], object], tuple[str, ...]] = {
    inventory_codec.from_json: (),
    verified_layouts.VerifiedLayout.from_json: (
        '{"version": 1}',
        '{"version": 1, "snapshot": [], "covered": [], "bootId": null}',
        '{"version": 1, "snapshot": [], "covered": [null]}',
    ),
    journals.Journal.from_json: (
        '{"version": 1}',
        journal_with(version=3),
        *(journal_with(**{key: None}) for key in ("annotationHash", "bootId", "rebootedFrom")),
        journal_with(holdTaint=1),
        journal_with(pausedLabels=3),
        journal_with(pausedLabels={"a": 1}),
        journal_with(pausedLabels={"kubernetes.io/hostname": "true"}),
        journal_with(pausedLabels={"nvidia.com/gpu.deploy.not a key": "true"}),
        journal_with(pausedLabels={"nvidia.com/gpu.deploy.dcgm": "not a label value"}),
        snapshot_with(uuid=3),
        snapshot_with(uuid=None),
        snapshot_with(mode="maybe"),
        snapshot_with(instances=[[1]]),
        *(
            snapshot_with(created=[row])
            for row in ([], ["1g.5gb"], ["1g.5gb", 0, 1, 0], ["x", 0, 1], 3)
        ),
        *(journal_with(**{key: [None]}) for key in ("hostServices", "persistentGpus")),
        journal_with(pluginConfig=3),
        journal_with(pluginConfig={}),
        journal_with(pluginConfig={"before": 1, "now": "a"}),
        journal_with(pluginConfig={"before": None, "now": "not a label value"}),
    ),
    requests.RequestRecord.from_json: (
        '{"version": 1, "config": "a", "mayEvict": true}',
        request_with(version=2),
        request_with(origin="another"),
        *(request_with(**{key: None}) for key in ("config", "annotationHash", "rebootedFrom")),
        request_with(desiredHashes={"GPU-1": None}),
        *(request_with(awaited=each) for each in (None, [None], "nvidia.com/gpu.deploy.dcgm")),
        request_with(rebootedHash=1),
        request_with(verified={"configHash": None, "owners": True}),
        request_with(failedChanges=FAILED.to_data() | {"bootId": None}),
        request_with(verified=1),
        request_with(verified={}),
        request_with(applied=1),
        request_with(applied={}),
        request_with(applied={"bootId": "b", "gpus": 1}),
        request_with(applied={"bootId": None, "gpus": {}}),
        request_with(applied={"bootId": "b", "gpus": {"GPU-1": None}}),
        request_with(repairs=[REPAIR | {"gpu": None}]),
        request_with(repairs=[REPAIR | {"next": float("inf")}]),
    ),
    capacity.from_json: (
        use_with({}, gpus=[], version=2),
        use_with({}, gpus=[], at="noon"),
        use_with({}, gpus={}),
        use_with({"uuid": "U"}),
        use_with({"uuid": None, "inUse": []}),
        use_with({"uuid": "U", "inUse": [[1]]}),
        use_with({"uuid": "U", "inUse": [["a", 1]]}),
        use_with({"uuid": "U", "inUse": [[float("inf"), 1]]}),
    ),
    layout_list.from_json: (
        OTHER_LIST,
        '{"version": 1, "layouts": []}',
        '{"version": 1, "layouts": {"a": {"hash": null, "origin": ""}}}',
    ),
    run_status.parse: (
        *(status_with(**{key: None}) for key in ("config", "annotationHash", "message")),
        status_with(unreachableGpus=[{"index": 0, "uuid": None}]),
    ),
}


@pytest.mark.parametrize(
    ("read", "text"),
    [
        pytest.param(read, text, id=f"{read.__qualname__} {text[:60]}")
        for read, texts in MALFORMED.items()
        for text in (*NONSENSE, *texts)
    ],
)
def test_malformed_record_is_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read(text)


@pytest.mark.parametrize("text", ["", "null", "[]", "1", "{", "[" * 100_000, OTHER_LIST])
def test_a_malformed_mark_or_list_of_layouts_is_ignored(text: str) -> None:
    view = node_object.NodeView(
        name="n", allocatable={}, annotations={well_known.LAYOUTS_ANNOTATION: text}
    )
    node = fleet_nodes.FleetNode(view=view, is_ready=True)
    assert node.listed is layout_list.UNKNOWN
    assert marks.parse(text) is None
    for mark in ({"layout": "a"}, {"layout": None, "before": "a"}, {"layout": "a", "before": 1}):
        assert marks.parse(json.dumps(mark)) is None


def test_status_annotation_has_layout_reason_and_devices() -> None:
    text = run_status.RunStatus(
        layout="a",
        content_hash="h",
        state=run_status.State.FAILED,
        phase=run_status.Phase.DRAIN,
        reason=reasons.Reason.DRAIN_TIMEOUT,
        message="m",
        attempt=2,
        started_at="t0",
        finished_at="t1",
        observed_gpus=model.ObservedGpus([GPU]),
    ).to_json()

    assert '"reason": "DrainTimeout"' in text
    assert '"devices": {"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2}' in text


@pytest.mark.parametrize("value", ["true", 1, None, {}])
def test_a_request_may_evict_only_with_true(value: object) -> None:
    assert not requests.RequestRecord.from_json(request_with(mayEvict=value)).may_evict


VERIFIED = requests.Verified(content_hash="x", is_as_applied=True)
EDITED = dataclasses.replace(VERIFIED, content_hash="y")
ANY = requests.Verified(content_hash="", is_as_applied=True)
SEEN_ELSEWHERE = requests.Verified(content_hash="x")
"""Of generated content that has changed: it counts, and the GPUs do not show it."""


CONTENTS = {
    "nothing was verified": (None, "x", {}, True, None),
    "the same content": (VERIFIED, "x", {}, True, VERIFIED),
    "the same generated content": (VERIFIED, "x", {}, False, VERIFIED),
    "other content with unknown goals": (VERIFIED, "y", {}, True, None),
    "another goal of one GPU": (VERIFIED, "y", {"G0": "same", "G1": "other"}, True, None),
    "no goal of one GPU any more": (VERIFIED, "y", {"G0": "same", "G1": ""}, True, None),
    "other content with the same goals": (
        VERIFIED,
        "y",
        {"G0": "same", "G1": "same"},
        True,
        EDITED,
    ),
    "the same goal of the only reachable GPU": (VERIFIED, "y", {"G0": "same"}, True, VERIFIED),
    "another goal of the only reachable GPU": (VERIFIED, "y", {"G0": "other"}, True, None),
    "the goal of a new GPU": (VERIFIED, "y", {"G2": "same"}, True, None),
    "other generated content": (VERIFIED, "y", {}, False, SEEN_ELSEWHERE),
    "whatever content was verified": (ANY, "y", {}, True, requests.Verified(content_hash="")),
}


@pytest.mark.parametrize(
    ("verified", "content_hash", "desired_hashes", "is_from_owner", "after"),
    CONTENTS.values(),
    ids=CONTENTS,
)
def test_only_content_with_another_goal_from_the_owner_is_a_new_request(
    verified: requests.Verified | None,
    content_hash: str,
    desired_hashes: dict[str, str],
    *,
    is_from_owner: bool,
    after: requests.Verified | None,
) -> None:
    before = {"G0": "same", "G1": "same"}
    record = requests.RequestRecord(layout="a", verified=verified, desired_hashes=before)

    edited = record.with_content(content_hash, desired_hashes, is_from_owner=is_from_owner)

    assert edited.verified == after
    # Once GPU 1 is back, its part of the edit counts.
    assert edited.desired_hashes == before | desired_hashes


REBOOTED = requests.RequestRecord(
    layout="a", verified=VERIFIED, rebooted_hash="x", rebooted_from="b1"
)
PASSIVE = requests.RequestRecord(layout="a", may_evict=False)


CONTINUED = {
    "the same layout": (REBOOTED, requests.RequestRecord(layout="a"), False, True, True),
    "by a request that may not evict": (REBOOTED, PASSIVE, False, False, True),
    "requested again": (REBOOTED, requests.RequestRecord(layout="a"), True, True, False),
    "in the annotation": (
        REBOOTED,
        requests.RequestRecord(layout="a", annotation_hash="h"),
        False,
        True,
        True,
    ),
    "another layout": (REBOOTED, requests.RequestRecord(layout="b"), False, True, False),
    "one that may not evict": (PASSIVE, requests.RequestRecord(layout="a"), False, False, False),
    "one that may not evict, requested again": (
        PASSIVE,
        requests.RequestRecord(layout="a"),
        True,
        True,
        False,
    ),
}


@pytest.mark.parametrize(
    ("former", "newer", "is_new", "may_evict", "is_verified"),
    CONTINUED.values(),
    ids=CONTINUED,
)
def test_the_same_request_keeps_its_progress(
    former: requests.RequestRecord,
    newer: requests.RequestRecord,
    *,
    is_new: bool,
    may_evict: bool,
    is_verified: bool,
) -> None:
    begun = former.continued_as(newer, is_new=is_new, now_s=0.0)

    assert begun.key == newer.key
    assert (begun.may_evict, begun.verified is not None) == (may_evict, is_verified)
    is_kept = newer.layout == former.layout
    kept = (former.rebooted_hash, former.rebooted_from) if is_kept else (None, "")
    assert (begun.rebooted_hash, begun.rebooted_from) == kept


SECOND = samples.gpu(samples.A100, "7g.40gb@0", index=1)
CHANGED = samples.gpu(samples.A100, "1g.5gb@0")


@pytest.mark.parametrize(
    ("gpus", "boot_id", "is_outdated"),
    [
        ((GPU, SECOND), "b", False),
        ((GPU, SECOND), "next", False),
        ((), "b", False),
        ((), "next", True),
        ((GPU,), "b", False),
        ((GPU,), "next", True),
        ((CHANGED, SECOND), "b", True),
        ((CHANGED,), "b", True),
        ((GPU, SECOND, samples.gpu(samples.A100, index=2)), "b", True),
    ],
)
def test_label_is_outdated_unless_the_gpus_have_or_may_have_the_layout(
    gpus: tuple[model.Gpu, ...], boot_id: str, *, is_outdated: bool
) -> None:
    applied = applied_gpus.GpuFingerprints.of(model.ObservedGpus((GPU, SECOND)), "b")
    assert applied.is_outdated(gpus, boot_id) is is_outdated


@pytest.mark.parametrize(
    ("last", "content_hash", "boot_id", "are_enough"),
    [
        (FAILED, "x", "b1", True),
        (FAILED, "y", "b1", False),
        (FAILED, "x", "b2", False),
        (dataclasses.replace(FAILED, content_hash="y"), "y", "b1", False),
        (dataclasses.replace(FAILED, boot_id="b2"), "x", "b2", False),
    ],
)
def test_failed_changes_forbid_evictions_for_their_content_and_boot(
    last: change_failures.FailedChanges, content_hash: str, boot_id: str, *, are_enough: bool
) -> None:
    record = requests.RequestRecord(layout="a")
    for each in (FAILED, FAILED, last):
        record = record.with_failed_change(each)
    read = requests.RequestRecord.from_json(record.to_json()).failed_changes
    assert read is not None
    assert read.are_enough(content_hash, boot_id) is are_enough


def test_failed_changes_with_a_reason_of_a_newer_version_are_left_out() -> None:
    kept = requests.RequestRecord(layout="a", failed_changes=FAILED).to_json()
    newer = kept.replace(f'"{FAILED.reason.value}"', '"OfANewerVersion"')

    assert newer != kept
    assert requests.RequestRecord.from_json(newer) == requests.RequestRecord(layout="a")
