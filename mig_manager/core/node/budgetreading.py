"""What a PodDisruptionBudget object says, free of the library that brought it."""

from collections.abc import Mapping
from typing import Any

from mig_manager.core.node import disruption


def read(item: Mapping[str, Any]) -> disruption.Budget:
    """Return what we want to know of a budget; surprises are the caller's to translate."""
    metadata = item["metadata"]
    spec, status = item.get("spec") or {}, item.get("status") or {}
    return disruption.Budget(
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        selector=_selector(spec.get("selector")),
        allowed=int(status.get("disruptionsAllowed") or 0),
        healthy=int(status.get("currentHealthy") or 0),
        desired=int(status.get("desiredHealthy") or 0),
        is_current=int(status.get("observedGeneration") or 0)
        >= int(metadata.get("generation") or 0),
        always_allows_unready=spec.get("unhealthyPodEvictionPolicy") == "AlwaysAllow",
    )


def _selector(selector: Mapping[str, Any] | None) -> tuple[disruption.Requirement, ...] | None:
    """Return the requirements; None for a selector that is absent, as ``LabelSelector`` has it."""
    if selector is None:
        return None
    equal = (selector.get("matchLabels") or {}).items()
    return (
        *(
            disruption.Requirement(
                key=str(key), operator=disruption.Operator.IN, values=frozenset({str(value)})
            )
            for key, value in equal
        ),
        *(
            disruption.Requirement(
                key=str(each["key"]),
                operator=disruption.Operator(each["operator"]),
                values=frozenset(map(str, each.get("values") or ())),
            )
            for each in selector.get("matchExpressions") or ()
        ),
    )
