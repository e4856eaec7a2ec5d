"""The record of a request as text: what an agent writes, and what it may find instead."""

import dataclasses
import json
from typing import Any

import pytest

from mig_manager.core.records import requests
from tests.unit import samples

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
        json.dumps(json.loads(FULL.to_json()) | {"version": 2}),
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


KNOWN = requests.Verified(config_hash="x", gpus="f")
ANY = requests.Verified(config_hash="", gpus="f")
SEEN_ELSEWHERE = requests.Verified(config_hash="x")
"""Of generated content that has changed: it counts, and the GPUs do not show it."""


@pytest.mark.parametrize(
    ("verified", "config_hash", "is_owners", "after"),
    [
        (None, "x", True, None),
        (KNOWN, "x", True, KNOWN),
        (KNOWN, "x", False, KNOWN),
        (KNOWN, "y", True, None),
        (KNOWN, "y", False, SEEN_ELSEWHERE),
        (ANY, "y", True, requests.Verified(config_hash="")),
    ],
)
def test_only_the_owners_other_content_is_a_new_request(
    verified: requests.Verified | None,
    config_hash: str,
    *,
    is_owners: bool,
    after: requests.Verified | None,
) -> None:
    record = requests.Request(config="a", verified=verified)

    assert record.resolved(config_hash, is_owners=is_owners).verified == after


@pytest.mark.parametrize(
    ("asked", "is_new", "may_evict", "is_verified"),
    [
        (requests.Request(config="a"), False, True, True),
        (requests.Request(config="a", may_evict=False), False, False, True),
        (requests.Request(config="a"), True, True, False),
        (requests.Request(config="a", annotation_hash="h"), False, True, True),
        (requests.Request(config="b"), False, True, False),
    ],
)
def test_the_same_request_keeps_what_it_has_reached(
    asked: requests.Request, *, is_new: bool, may_evict: bool, is_verified: bool
) -> None:
    known = requests.Request(config="a", verified=KNOWN, rebooted_hash="x", rebooted_from="b1")

    begun = known.begun(asked, is_new=is_new)

    assert begun.key == asked.key
    assert begun.may_evict is may_evict
    assert (begun.verified is not None) is is_verified
    is_rebooted = asked.config == "a"
    assert (begun.rebooted_hash, begun.rebooted_from) == (
        ("x", "b1") if is_rebooted else (None, "")
    )


def test_a_request_that_may_not_evict_does_not_begin_to() -> None:
    known = requests.Request(config="a", may_evict=False)

    assert not known.begun(requests.Request(config="a"), is_new=False).may_evict
    assert known.begun(requests.Request(config="a"), is_new=True).may_evict


def test_a_fingerprint_does_not_depend_on_the_order_of_the_gpus() -> None:
    first, second = samples.gpu(samples.A100, "7g.40gb@0"), samples.gpu(samples.A100)
    gpus = (first, dataclasses.replace(second, uuid="GPU-other"))

    assert requests.fingerprint(gpus) == requests.fingerprint(gpus[::-1])
