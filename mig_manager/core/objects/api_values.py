"""Parse values of Kubernetes API objects: quantities, resource lists, labels."""

import contextlib
import decimal
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mig_manager import errors, reasons
from mig_manager.core.objects import well_known


@contextlib.contextmanager
def as_cluster_error(what: str) -> Iterator[None]:
    """Turn the exceptions of parsing a malformed object into a ClusterError about ``what``."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as err:
        raise errors.ClusterError(
            f"{what} from the Kubernetes API is malformed: {err!r}",
            reason=reasons.Reason.API_ERROR,
        ) from err


def strings(mapping: Mapping[str, Any] | None) -> dict[str, str]:
    """Return labels, annotations or a selector, empty if absent."""
    return {str(key): str(value) for key, value in (mapping or {}).items()}


def is_ready(status: Mapping[str, Any]) -> bool:
    """Return whether the status of a pod or a node has the condition ``Ready``."""
    return any(
        each.get("type") == "Ready" and each.get("status") == "True"
        for each in status.get("conditions") or ()
    )


def gpu_resources(resources: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the ``nvidia.com/*`` entries of a resource list."""
    return {
        name: parse_quantity(amount)
        for name, amount in (resources or {}).items()
        if name.startswith(well_known.RESOURCE_PREFIX)
    }


_QUANTITY = re.compile(r"([+-]?[0-9.]+)(?:([eE][+-]?[0-9]+)|([KMGTPE]i|[numkMGTPE]))?")
_MAX_QUANTITY = 2**63 - 1
# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_SUFFIXES = {
    **{
        suffix: decimal.Decimal(1000) ** power
        for power, suffix in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)
    },
    **{f"{suffix}i": decimal.Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}


def parse_quantity(text: str | float, *, parts: int = 1) -> int:
    """Return a Kubernetes quantity, rounded up as the scheduler does; ValueError for others.

    Quantities beyond 64 bits count as the largest, as in the API server, which accepts them in
    pods. ``parts`` is the number of parts of a unit: 1000 for ``cpu``, as in the scheduler.
    """
    return _quantity(str(text), parts)


@functools.lru_cache(maxsize=4096)  # the pods of a cluster repeat few
def _quantity(text: str, parts: int) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    number, exponent, suffix = match.groups()
    try:
        # The API server accepts exponents beyond those of the default context.
        with decimal.localcontext(Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX):
            value = decimal.Decimal(number + (exponent or "")) * _SUFFIXES[suffix or ""] * parts
    except ArithmeticError as err:
        raise ValueError(f"{text!r} is not a quantity") from err
    value = max(min(value, decimal.Decimal(_MAX_QUANTITY)), decimal.Decimal(-_MAX_QUANTITY))
    return int(value.to_integral_value(rounding=decimal.ROUND_CEILING))
