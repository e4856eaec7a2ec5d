"""Past pods that requested MIG devices, from the API's objects and from Prometheus.

The API forgets deleted pods. kube-state-metrics reports every pod while it exists, and Prometheus
keeps that: ``QUERY`` selects it. Its names of resources have ``_`` for other characters, and it
lacks node selectors, affinity, tolerations and priority.
"""

import dataclasses
import datetime as dt
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mig_manager import errors
from mig_manager.core import timestamps
from mig_manager.core.files import json_text
from mig_manager.core.objects import api_values
from mig_manager.core.partitioning import demand

_REQUESTS = "kube_pod_container_resource_requests"
_CREATED = "kube_pod_created"
_STARTED = "kube_pod_start_time"
_COMPLETED = "kube_pod_completion_time"
_MIG = f'{_REQUESTS}{{resource=~"nvidia_com_mig_.+"}}'
QUERY = f'{{__name__=~"{_CREATED}|{_STARTED}|{_COMPLETED}"}} and on (uid) {_MIG} or {_MIG}'
"""In PromQL, for the range API; the times and requests of pods that request MIG devices."""
_EPOCH = dt.datetime.fromtimestamp(0, dt.UTC)
_RESOURCE = re.compile(r"nvidia_com_mig_(.+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PastPod:
    """A past pod that requested MIG devices."""

    pod: demand.PendingPod
    created: dt.datetime
    start: dt.datetime | None  # None: not started
    end: dt.datetime | None  # None: not ended


def parse(item: Mapping[str, Any]) -> PastPod | None:
    """Parse a Pod object; None if it requested no MIG device, ClusterError if malformed."""
    with api_values.as_cluster_error("a pod"):
        pod, status = demand.as_pending(item), item.get("status") or {}
        if pod.created_at is None or not pod.needs.profiles:
            return None
        start = timestamps.parse(status.get("startTime"))
        has_ended = status.get("phase") in ("Succeeded", "Failed")
        return PastPod(
            pod=pod,
            created=pod.created_at,
            start=start,
            end=max(_ends(status), default=start or pod.created_at) if has_ended else None,
        )


def _ends(status: Mapping[str, Any]) -> Iterator[dt.datetime]:
    """Yield when the containers of an ended pod ended, or else when its conditions changed.

    A pod that kubelet rejected has neither. The containers of a lost node's pod stay running.
    """
    containers = [
        (each.get("state") or {}).get("terminated") or {}
        for kind in ("containerStatuses", "initContainerStatuses")
        for each in status.get(kind) or ()
    ]
    ends = [timestamps.parse(each.get("finishedAt")) for each in containers]
    changes = [
        timestamps.parse(each.get("lastTransitionTime")) for each in status.get("conditions") or ()
    ]
    yield from filter(None, ends if any(ends) else changes)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Series:
    """What Prometheus knows about a pod."""

    namespace: str
    name: str
    times: dict[str, dt.datetime] = dataclasses.field(default_factory=dict)  # by metric
    requests: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """By container and resource."""
    last: dt.datetime = _EPOCH  # the last sample: the pod still existed


def parse_prometheus(answers: Iterable[str]) -> tuple[PastPod, ...]:
    """Parse answers of the range API to ``QUERY``, of the same time or of several.

    A pod that has not completed ends with its last sample: it was deleted.

    Raises:
        UsageError: A text is no such answer.
    """
    pods: dict[str, _Series] = {}
    for number, text in enumerate(answers, 1):
        try:
            with json_text.decoding("a matrix of pods"):
                _add(pods, json_text.parse_object(text))
        except ValueError as error:
            place = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            raise errors.UsageError(
                f"answer {number} of Prometheus is not one of its range API about pods{place}: "
                f"{error}",
                remedy="See 'Replay a week' in docs/partitioner.md for the query.",
            ) from error
    parsed = (_past_pod(uid, series) for uid, series in pods.items())
    return tuple(pod for pod in parsed if pod)


def _add(pods: dict[str, _Series], answer: Mapping[str, Any]) -> None:
    if answer["data"]["resultType"] != "matrix":
        raise ValueError("it is no answer to a range query")
    for each in answer["data"]["result"]:
        metric, values = each["metric"], each["values"]
        # Without honorLabels, Prometheus renames labels that its target has too.
        namespace, name = (
            str(metric.get(f"exported_{label}") or metric[label]) for label in ("namespace", "pod")
        )
        entry = pods.setdefault(str(metric["uid"]), _Series(namespace=namespace, name=name))
        at_s, value = float(values[-1][0]), float(values[-1][1])
        entry.last = max(entry.last, _EPOCH + dt.timedelta(seconds=at_s))
        if metric["__name__"] == _REQUESTS:
            container = str(metric.get("exported_container") or metric["container"])
            entry.requests[container, str(metric["resource"])] = int(value)
        else:
            entry.times[str(metric["__name__"])] = _EPOCH + dt.timedelta(seconds=value)


def _past_pod(uid: str, series: _Series) -> PastPod | None:
    counts = {"pods": 1}
    for (_, resource), count in series.requests.items():
        match = _RESOURCE.fullmatch(resource)
        if match:
            name = f"nvidia.com/mig-{match[1].replace('_', '.')}"
            counts[name] = counts.get(name, 0) + count
    needs = demand.Needs(amounts=demand.to_amounts(counts))
    created = series.times.get(_CREATED)
    if created is None or not needs.profiles:
        return None
    return PastPod(
        pod=demand.PendingPod(
            namespace=series.namespace,
            name=series.name,
            uid=uid,
            needs=needs,
            created_at=created,
        ),
        created=created,
        start=series.times.get(_STARTED),
        end=series.times.get(_COMPLETED, series.last),
    )
