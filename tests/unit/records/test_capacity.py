"""The use of the GPUs as the agent publishes it, with the room beside it."""

import datetime as dt
import json

from mig_manager.core import model
from mig_manager.core.records import capacity
from tests.rigs.node import samples

AT = "2026-03-01T12:00:00+00:00"
GPUS = (
    samples.gpu(samples.A100, "3g.20gb@0", "2g.10gb@4", "1g.5gb@6"),
    samples.gpu(samples.A100, mode=model.MigMode.DISABLED, index=1),
)
IN_USE = {"GPU-0": frozenset({model.Placement(6, 1), model.Placement(4, 2)}), "GPU-1": frozenset()}
ROOM = {"4g.20gb": 1, "3g.20gb": 1, "2g.10gb": 2, "1g.10gb": 2, "1g.5gb+me": 1, "1g.5gb": 4}


def test_use_round_trips_with_the_room_beside_it() -> None:
    text = capacity.to_json(GPUS, IN_USE, at=AT)

    use = capacity.from_json(text)
    assert use.at == dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
    assert use.in_use.get("GPU-0") == IN_USE["GPU-0"]
    assert use.in_use.get("GPU-1") == frozenset()
    first = {"uuid": "GPU-0", "inUse": [[4, 2], [6, 1]], "free": 5, "room": ROOM}
    second = {"uuid": "GPU-1", "inUse": [], "free": 0, "room": {}}
    assert json.loads(text)["gpus"] == [
        first | {"stranded": 1, "fragmentation": 0.2},
        second | {"stranded": 0, "fragmentation": 0.0},
    ]


def test_gpu_of_unknown_use_is_omitted_and_a_whole_gpu_has_no_room() -> None:
    text = capacity.to_json(GPUS, {"GPU-1": {model.Placement(0, 8)}}, at=AT)

    use = capacity.from_json(text)
    assert (use.in_use.get("GPU-0"), use.in_use.get("GPU-1")) == (
        None,
        frozenset({model.Placement(0, 8)}),
    )
    assert [gpu["free"] for gpu in json.loads(text)["gpus"]] == [0]


def test_use_at_another_time_has_the_same_facts() -> None:
    text = capacity.to_json(GPUS, IN_USE, at=AT)
    later = capacity.to_json(GPUS, IN_USE, at="2026-03-01T13:00:00+00:00")
    other = capacity.to_json(GPUS, {"GPU-0": (), "GPU-1": ()}, at=AT)

    assert text != later
    assert capacity.has_same_facts(text, later)
    assert not capacity.has_same_facts(text, other)
    assert not any(capacity.has_same_facts(text, damaged) for damaged in ("", "[]", "[" * 100_000))
