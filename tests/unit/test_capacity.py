"""The annotation that says which instances are in use, and what could still be created."""

import datetime as dt
import json
from typing import Any

import pytest

from mig_manager.core import model
from mig_manager.core.records import capacity
from tests.unit import samples

AT = "2026-03-01T12:00:00+00:00"
GPUS = (
    samples.gpu(samples.A100, "3g.20gb@0", "2g.10gb@4", "1g.5gb@6", index=0),
    samples.gpu(samples.A100, mode=model.MigMode.DISABLED, index=1),
)
IN_USE = {"GPU-0": {model.Placement(6, 1), model.Placement(4, 2)}, "GPU-1": set[Any]()}


def test_the_use_of_gpus_round_trips_with_their_room_beside_it() -> None:
    text = capacity.to_json(GPUS, IN_USE, at=AT)

    use = capacity.from_json(text)
    assert use.at == dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
    assert use.on("GPU-0") == frozenset(IN_USE["GPU-0"])
    assert use.on("GPU-1") == frozenset()
    assert json.loads(text)["gpus"] == [
        {
            "uuid": "GPU-0",
            "inUse": [[4, 2], [6, 1]],
            "free": 5,
            "room": {"4g.20gb": 1, "3g.20gb": 1, "2g.10gb": 2, "1g.10gb": 2}
            | {"1g.5gb+me": 1, "1g.5gb": 4},
            "stranded": 1,
            "fragmentation": 0.2,
        },
        {
            "uuid": "GPU-1",
            "inUse": [],
            "free": 0,
            "room": {},
            "stranded": 0,
            "fragmentation": 0.0,
        },
    ]


def test_a_gpu_whose_use_is_not_known_is_omitted_and_never_idle() -> None:
    use = capacity.from_json(capacity.to_json(GPUS, {"GPU-1": ()}, at=AT))

    assert use.on("GPU-0") is None
    assert use.on("GPU-1") == frozenset()


def test_a_use_of_a_whole_gpu_leaves_no_room_on_it() -> None:
    text = capacity.to_json(GPUS[1:], {"GPU-1": {model.Placement(0, 8)}}, at=AT)

    assert capacity.from_json(text).on("GPU-1") == frozenset({model.Placement(0, 8)})
    assert json.loads(text)["gpus"][0]["free"] == 0


def test_the_time_of_an_observation_is_no_new_fact() -> None:
    text = capacity.to_json(GPUS, IN_USE, at=AT)
    later = capacity.to_json(GPUS, IN_USE, at="2026-03-01T13:00:00+00:00")
    other = capacity.to_json(GPUS, {"GPU-0": (), "GPU-1": ()}, at=AT)

    assert text != later
    assert capacity.has_same_facts(text, later)
    assert not capacity.has_same_facts(text, other)
    assert not any(capacity.has_same_facts(text, damaged) for damaged in ("", "[]", "[" * 100_000))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"version":2,"at":"2026-03-01T12:00:00+00:00","gpus":[]}',
        '{"version":1,"at":"noon","gpus":[]}',
        '{"version":1,"at":"2026-03-01T12:00:00+00:00","gpus":{}}',
        '{"version":1,"at":"2026-03-01T12:00:00+00:00","gpus":[{"uuid":"U"}]}',
        '{"version":1,"at":"2026-03-01T12:00:00+00:00","gpus":[{"uuid":"U","inUse":[[1]]}]}',
        '{"version":1,"at":"2026-03-01T12:00:00+00:00","gpus":[{"uuid":"U","inUse":[["a",1]]}]}',
        '{"version":1,"at":"2026-03-01T12:00:00+00:00","gpus":[{"uuid":"U","inUse":[[1e999,1]]}]}',
        "[" * 100_000,
    ],
)
def test_what_is_no_such_annotation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        capacity.from_json(text)
