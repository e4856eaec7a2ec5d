"""The record of a request as text: what an agent writes, and what it may find instead."""

import json
from typing import Any

import pytest

from mig_manager.core.records import requests

FULL = requests.Request(
    config="custom",
    annotation_hash="0123456789ab",
    origin=requests.Origin.PARTITIONER,
    may_evict=False,
    verified=requests.Verified(config_hash="h", boot_id="boot-1", is_owners=True, gpus="f"),
    rebooted_hash="h",
)


@pytest.mark.parametrize("record", [FULL, requests.Request(config="a")])
def test_a_record_is_read_as_it_was_written(record: requests.Request) -> None:
    assert requests.Request.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "null",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({"version": 2}),
        json.dumps({"version": 1, "config": "a", "mayEvict": True}),
        json.dumps({"version": 1, "config": "a", "mayEvict": True, "origin": "another"}),
        json.dumps(
            {"version": 1, "config": "a", "mayEvict": True, "origin": "label", "verified": 1}
        ),
    ],
)
def test_an_invalid_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the text is the reader's own
        requests.Request.from_json(text)


@pytest.mark.parametrize("value", ["true", 1, None, {}])
def test_only_true_lets_a_record_evict(value: Any) -> None:
    data = json.loads(FULL.to_json()) | {"mayEvict": value}

    assert not requests.Request.from_json(json.dumps(data)).may_evict


def test_a_record_of_a_newer_version_with_further_members_is_read() -> None:
    data = json.loads(FULL.to_json()) | {"further": {"member": 1}}

    assert requests.Request.from_json(json.dumps(data)) == FULL
