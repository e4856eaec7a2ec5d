"""The requests of pods, and the nodes on which they can run, from the API's Pod objects.

It repeats the scheduler's checks of one pod and one node: node selector, required node affinity,
taints, cordon and all resources. So a pod that passes lacks only MIG devices. It omits checks
that depend on other pods or on storage: pod affinity, topology spread, host ports, volumes,
ResourceClaims. A pod that fails only these can get useless room on a node, once
(``situations.History``).

The rules come from k8s.io/component-helpers/scheduling/corev1 (``nodeaffinity``,
``helpers.go``) and k8s.io/component-helpers/resource (``PodRequests``).
"""

import collections
import dataclasses
import datetime as dt
import functools
from collections.abc import Mapping
from typing import Any

from mig_manager.core import messages, model, timestamps
from mig_manager.core.node.daemons import mig_managers
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import api_values, pod_parser, selectors, well_known

Amounts = tuple[tuple[str, int], ...]
"""Positive amounts by resource name, sorted: ``cpu`` in thousandths, others in units."""

_CPU = "cpu"
_PODS = "pods"
OFF = "off"  # value of ``PARTITIONING_LABEL`` on a pod, as a label or an annotation
_BLOCKING = ("NoSchedule", "NoExecute")
_UNREADY = (well_known.NOT_READY_TAINT, well_known.UNREACHABLE_TAINT)


Term = tuple[tuple[selectors.Requirement, ...], tuple[selectors.Requirement, ...]]
"""A term of a node affinity: requirements about labels, and about fields, which are only the name.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str
    effect: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """A toleration of a pod; an empty key or effect tolerates all."""

    key: str
    operator: str  # ``Equal``, ``Exists``, ``Gt`` or ``Lt``
    value: str
    effect: str

    def tolerates(self, taint: Taint) -> bool:
        """Return whether it tolerates the taint."""
        if self.effect not in ("", taint.effect) or self.key not in ("", taint.key):
            return False
        match self.operator:
            case "Exists":
                return True
            case "Equal":
                return bool(self.key) and self.value == taint.value
            case _:
                return selectors.compares(self.operator, taint.value, self.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """The facts that decide where a pod can run; decisions group pods with equal needs."""

    amounts: Amounts  # peak request, overhead included
    selector: tuple[tuple[str, str], ...] = ()  # nodeSelector, sorted
    affinity: tuple[Term, ...] | None = None
    """All requirements of one of these terms must hold; None: no required affinity."""
    tolerations: tuple[Toleration, ...] = ()

    @functools.cached_property
    def profiles(self) -> Mapping[model.Profile, int]:
        """The requested MIG devices by profile, without unknown names."""
        counts = ((resources.profile_of(name), count) for name, count in self.amounts)
        return {profile: count for profile, count in counts if profile}

    @functools.cached_property
    def devices(self) -> model.Devices:
        """The profiles, largest first."""
        return model.in_order(self.profiles)

    @functools.cached_property
    def unknown(self) -> tuple[str, ...]:
        """The requested MIG resources without a profile: misspelled, or with replicas."""
        names = (name for name, _ in self.amounts)
        return tuple(n for n in names if resources.is_mig(n) and not resources.profile_of(n))

    @functools.cached_property
    def mig(self) -> Amounts:
        """The requested MIG resources."""
        return tuple(item for item in self.amounts if resources.is_mig(item[0]))

    @functools.cached_property
    def others(self) -> Amounts:
        """The requested resources other than MIG devices."""
        return tuple(item for item in self.amounts if not resources.is_mig(item[0]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PendingPod:
    """An unschedulable pod that requests MIG devices."""

    namespace: str
    name: str
    uid: str
    needs: Needs
    priority: int = 0
    nominated: str = ""  # node on which the scheduler preempts other pods for it
    created_at: dt.datetime | None = None
    pending_since: dt.datetime | None = None
    """By the clock of a decision; None: since its creation."""

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BoundPod:
    """A pod that has a node and has not ended, with its requests."""

    uid: str
    node_name: str
    amounts: Amounts
    needs: Needs | None = None  # None: it requests no MIG device
    is_ready_agent: bool | None = None  # None: it is not an agent's pod


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NominatedPod:
    """A pod for which the scheduler preempts others on a node, and that is not ``PendingPod``."""

    uid: str
    node_name: str


PodOfNode = BoundPod | NominatedPod


def parse(item: Mapping[str, Any]) -> PendingPod | PodOfNode | None:
    """Parse a Pod object; None if the pod neither waits for MIG devices nor runs.

    A pod is ``PendingPod`` if it is not bound, deleted or gated, the scheduler reported it
    unschedulable, it requests ``nvidia.com/mig-*``, and no label or annotation
    ``mig-manager.io/partitioning: off`` excludes it.

    Raises:
        ClusterError: The object is malformed.
    """
    with api_values.as_cluster_error("a pod"):
        metadata, spec = item["metadata"], item["spec"]
        status = item.get("status") or {}
        if status.get("phase") in ("Succeeded", "Failed"):
            return None
        if node_name := str(spec.get("nodeName") or ""):
            needs = Needs(amounts=_amounts(spec))
            return BoundPod(
                uid=str(metadata["uid"]),
                node_name=node_name,
                amounts=needs.amounts,
                # Few of a cluster's pods request MIG devices; parsing the rest takes long.
                needs=_with_rules(needs, spec) if needs.mig else None,
                is_ready_agent=_is_ready_agent(metadata, spec, status),
            )
        is_excluded = any(
            (metadata.get(kind) or {}).get(well_known.PARTITIONING_LABEL) == OFF
            for kind in ("labels", "annotations")
        )
        is_unschedulable = any(
            (each.get("type"), each.get("status"), each.get("reason"))
            == ("PodScheduled", "False", "Unschedulable")
            for each in status.get("conditions") or ()
        )
        if metadata.get("deletionTimestamp") or spec.get("schedulingGates"):
            return None
        nominated = str(status.get("nominatedNodeName") or "")
        if is_unschedulable and not is_excluded and (pod := as_pending(item)).needs.mig:
            return dataclasses.replace(pod, nominated=nominated)
        if nominated and (spec.get("resourceClaims") or Needs(amounts=_amounts(spec)).mig):
            return NominatedPod(uid=str(metadata["uid"]), node_name=nominated)
        return None


def as_pending(item: Mapping[str, Any]) -> PendingPod:
    """Parse a Pod object as it was at its creation; exceptions as ``parse_needs``."""
    metadata, spec = item["metadata"], item["spec"]
    return PendingPod(
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        needs=parse_needs(spec),
        priority=int(spec.get("priority") or 0),
        created_at=timestamps.parse(metadata.get("creationTimestamp")),
    )


def parse_needs(spec: Mapping[str, Any]) -> Needs:
    """Parse a PodSpec; see ``api_values.as_cluster_error`` for its exceptions."""
    return _with_rules(Needs(amounts=_amounts(spec)), spec)


def _with_rules(needs: Needs, spec: Mapping[str, Any]) -> Needs:
    """Return the needs with what else a PodSpec says about nodes."""
    node_affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = None if required is None else required.get("nodeSelectorTerms") or ()
    return dataclasses.replace(
        needs,
        selector=tuple(sorted(api_values.strings(spec.get("nodeSelector")).items())),
        affinity=None
        if terms is None
        else tuple(
            (
                selectors.parse_requirements(term.get("matchExpressions")),
                selectors.parse_requirements(term.get("matchFields")),
            )
            for term in terms
        ),
        tolerations=tuple(
            Toleration(
                key=str(each.get("key") or ""),
                operator=str(each.get("operator") or "Equal"),
                value=str(each.get("value") or ""),
                effect=str(each.get("effect") or ""),
            )
            for each in spec.get("tolerations") or ()
        ),
    )


def parse_taints(spec: Mapping[str, Any]) -> tuple[Taint, ...]:
    """Parse the taints of a NodeSpec that keep pods off, including a cordon.

    It omits temporary taints: the agent's taint, and taints of a node that is not ready, which its
    condition also shows.
    """
    taints = [
        Taint(
            key=str(each["key"]),
            value=str(each.get("value") or ""),
            effect=str(each.get("effect") or ""),
        )
        for each in spec.get("taints") or ()
        if each["key"] not in (well_known.RECONFIGURING_TAINT, *_UNREADY)
    ]
    if spec.get("unschedulable"):
        # The taint may not be there yet.
        taints.append(Taint(key=well_known.CORDON_TAINT, value="", effect="NoSchedule"))
    return tuple(dict.fromkeys(each for each in taints if each.effect in _BLOCKING))


def amounts(named: Mapping[str, Any] | None) -> Amounts:
    """Parse a resource list."""
    return to_amounts(_counter(named))


def to_amounts(counts: Mapping[str, int]) -> Amounts:
    """Return counted resources in canonical form."""
    return tuple(sorted((name, count) for name, count in counts.items() if count))


def why_short(needs: Amounts, available: Mapping[str, int]) -> str:
    """Name the resources that are too few; empty if all suffice."""
    short = [name for name, count in needs if count > available.get(name, 0)]
    return f"too little {messages.list_names(short)}" if short else ""


def _is_ready_agent(
    metadata: Mapping[str, Any], spec: Mapping[str, Any], status: Mapping[str, Any]
) -> bool | None:
    names = (str(container["name"]) for container in spec["containers"])
    if not mig_managers.is_mig_manager(api_values.strings(metadata.get("labels")), names):
        return None
    return api_values.is_ready(status)


def _amounts(spec: Mapping[str, Any]) -> Amounts:
    # Requests of the whole pod replace the sums of its containers.
    peak = pod_parser.peak(spec, lambda container: collections.Counter(_requests(container)))
    total = collections.Counter({**peak, **_requests(spec)})
    total.update(_counter(spec.get("overhead")))
    total[_PODS] += 1
    return to_amounts(total)


def _requests(part: Mapping[str, Any]) -> dict[str, int]:
    """Return the requests of a pod or container; they default to its limits."""
    named = part.get("resources") or {}
    return {**_counter(named.get("limits")), **_counter(named.get("requests"))}


def _counter(named: Mapping[str, Any] | None) -> dict[str, int]:
    return {
        str(name): api_values.parse_quantity(amount, parts=1000 if name == _CPU else 1)
        for name, amount in (named or {}).items()
    }
