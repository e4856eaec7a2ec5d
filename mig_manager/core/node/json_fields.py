"""Read fields of the API's JSON objects, and refuse objects that are not what they should be."""

import contextlib
import decimal
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mig_manager import errors
from mig_manager.core.node import cluster

_QUANTITY = re.compile(r"([+-]?[0-9.]+)(?:([eE][+-]?[0-9]+)|([KMGTPE]i|[numkMGTPE]))?")
_LARGEST = 2**63 - 1
_TRUE = frozenset({"1", "t", "T", "true", "True", "TRUE"})
"""What Go takes for true (``strconv.ParseBool``)."""
# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_SUFFIXES = {
    **{
        suffix: decimal.Decimal(1000) ** power
        for power, suffix in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)
    },
    **{f"{suffix}i": decimal.Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """Turn the surprise at a malformed object into an error of ours.

    Raises:
        ClusterError: The code within met a field that is missing or of another type.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as err:
        raise errors.ClusterError(
            f"{what} as the Kubernetes API sends it makes no sense: {err!r}",
            reason=errors.Reason.API_ERROR,
        ) from err


def quantity(text: str | float) -> int:
    """Return a Kubernetes quantity as a whole number, rounded up as the scheduler does.

    Raises:
        ValueError: It is not a quantity.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    number, exponent, suffix = match.groups()
    try:
        value = decimal.Decimal(number + (exponent or "")) * _SUFFIXES[suffix or ""]
    except ArithmeticError as err:
        raise ValueError(f"{text!r} is not a quantity") from err
    if abs(value) > _LARGEST:
        raise ValueError(f"{text!r} is not a quantity: it is too large")
    return int(value.to_integral_value(rounding=decimal.ROUND_CEILING))


def gpu_resources(resources: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the ``nvidia.com/*`` entries of a resource list."""
    return {
        name: quantity(amount)
        for name, amount in (resources or {}).items()
        if name.startswith(cluster.RESOURCE_PREFIX)
    }


def strings(mapping: Mapping[str, Any] | None) -> dict[str, str]:
    """Return labels, annotations or a selector; what is absent is empty."""
    return {str(key): str(value) for key, value in (mapping or {}).items()}


def switches(text: str) -> dict[str, bool]:
    """Return what ``Name=true,Other=false`` says, which is how Kubernetes writes feature gates."""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name.strip(): value.strip() in _TRUE for name, equals, value in pairs if equals}
