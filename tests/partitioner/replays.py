"""Pods that have ended, and replays of them."""

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

from tests.partitioner import rig as rigs
from tests.shell import commandline
from tests.unit.partitions import NOW, pod


def past(
    name: str,
    profile: str,
    *,
    arrival_s: float,
    runs_s: float,
    wait_s: float = 0,
    **more: Any,
) -> Any:
    """A pod that has ended."""
    item = pod(name, profile, node="a", age_s=-arrival_s, **more)
    began = NOW + dt.timedelta(seconds=arrival_s + wait_s)
    ended = (began + dt.timedelta(seconds=runs_s)).isoformat()
    item["status"] = {
        "phase": "Succeeded",
        "startTime": began.isoformat(),
        "containerStatuses": [{"state": {"terminated": {"finishedAt": ended}}}],
    }
    return item


def replayed(
    shell: commandline.Shell,
    nodes: Sequence[Mapping[str, Any]],
    pods: Sequence[Mapping[str, Any]],
    *options: str,
) -> commandline.Answer:
    return rigs.simulated(shell, nodes, pods, "--replay", *options)


def rows(answer: commandline.Answer) -> dict[str, Any]:
    assert answer.status == 0, answer.err
    return {row["name"]: row for row in answer.data["rows"]}
