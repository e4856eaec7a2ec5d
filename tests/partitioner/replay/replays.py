"""Pods that have ended, and replays of them."""

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

from tests.partitioner import partitioner_rig
from tests.rigs.cluster.partitions import NOW, pod
from tests.rigs.shell import commandline


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
    item = pod(name, profile, node_name="a", age_s=-arrival_s, **more)
    began_s = arrival_s + wait_s
    item["status"] = {
        "phase": "Succeeded",
        "startTime": _at(began_s),
        "containerStatuses": [terminated_status(at_s=began_s + runs_s)],
    }
    return item


def failed_pod(name: str, profile: str, *, arrival_s: float, status: Mapping[str, Any]) -> Any:
    """A pod that failed, and whose app containers report no end."""
    item = pod(name, profile, node_name="a", age_s=-arrival_s)
    item["status"] = {"phase": "Failed", "startTime": _at(arrival_s), **status}
    return item


def terminated_status(*, at_s: float) -> Any:
    """The status of a container that ended."""
    return {"state": {"terminated": {"finishedAt": _at(at_s)}}}


def condition(kind: str, *, at_s: float) -> Any:
    """A condition of a pod."""
    return {"type": kind, "status": "True", "lastTransitionTime": _at(at_s)}


def _at(seconds: float) -> str:
    return (NOW + dt.timedelta(seconds=seconds)).isoformat()


def replay(
    shell: commandline.Shell,
    nodes: Sequence[Mapping[str, Any]],
    pods: Sequence[Mapping[str, Any]],
    *options: str,
) -> commandline.Answer:
    return partitioner_rig.simulate(shell, nodes, pods, "--replay", *options)


def rows(answer: commandline.Answer) -> dict[str, Any]:
    assert answer.status == 0, answer.err
    return {row["name"]: row for row in answer.data["rows"]}
