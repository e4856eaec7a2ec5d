"""Requirements about labels, as label selectors and node affinities have them."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

_QUERIES = {
    "In": "{} in ({})",
    "NotIn": "{} notin ({})",
    "Exists": "{}",
    "DoesNotExist": "!{}",
}
"""Operators of label selectors in the form of a query; node affinities also have Gt and Lt."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One requirement about a label."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether labels meet it."""
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case _:
                return len(self.values) == 1 and compares(self.operator, value, self.values[0])

    def __str__(self) -> str:
        values = ",".join(sorted(self.values))
        if query := _QUERIES.get(self.operator):
            return query.format(self.key, values)
        return f"{self.key} {self.operator} {values}"


def compares(operator: str, value: str | None, bound: str) -> bool:
    """Return whether an integer is greater (``Gt``) or less (``Lt``) than another."""
    if not (_INTEGER.fullmatch(value or "") and _INTEGER.fullmatch(bound)):
        return False
    difference = int(value or "") - int(bound)
    return (operator == "Gt" and difference > 0) or (operator == "Lt" and difference < 0)


def parse_requirements(expressions: Iterable[Mapping[str, Any]] | None) -> tuple[Requirement, ...]:
    """Parse ``matchExpressions`` or ``matchFields``; none if absent."""
    return tuple(
        Requirement(
            key=str(each["key"]),
            operator=str(each["operator"]),
            values=tuple(map(str, each.get("values") or ())),
        )
        for each in expressions or ()
    )


def parse_label_selector(selector: Mapping[str, Any]) -> tuple[Requirement, ...]:
    """Parse a ``LabelSelector``; see ``api_values.as_cluster_error`` for its exceptions."""
    expressions = parse_requirements(selector.get("matchExpressions"))
    if unknown := {each.operator for each in expressions} - _QUERIES.keys():
        raise ValueError(f"unknown operators {unknown}")
    equal = (
        Requirement(key=str(key), operator="In", values=(str(value),))
        for key, value in (selector.get("matchLabels") or {}).items()
    )
    return (*equal, *expressions)


_BETWEEN = re.compile(r",(?![^(]*\))")  # commas outside of parentheses
_KEY = r"(?P<key>[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?)"
_FORMS = (
    re.compile(rf"{_KEY}\s*(?:(?P<negated>!)=|==?)\s*(?P<values>[A-Za-z0-9._-]*)"),
    re.compile(rf"{_KEY}\s+(?P<negated>not|)in\s*\((?P<values>[A-Za-z0-9._,\s-]*)\)"),
    re.compile(rf"{_KEY}\s*(?P<negated>)(?P<sign>[<>])\s*(?P<values>[0-9]+)"),
    re.compile(rf"(?P<negated>!?)\s*{_KEY}"),
)
_SIGNS = {">": "Gt", "<": "Lt"}


def parse_selector(text: str) -> tuple[Requirement, ...]:
    """Parse a label selector as ``kubectl -l`` takes it; ValueError if it is invalid."""
    requirements = []
    for part in _BETWEEN.split(text) if text.strip() else ():
        match = next(filter(None, (form.fullmatch(part.strip()) for form in _FORMS)), None)
        if match is None:
            raise ValueError("is not a label selector, such as pool=a100,zone in (a,b)")
        values, is_negated = match.groupdict().get("values"), bool(match["negated"])
        if sign := match.groupdict().get("sign"):
            operator = _SIGNS[sign]
        elif values is None:
            operator = "DoesNotExist" if is_negated else "Exists"
        else:
            operator = "NotIn" if is_negated else "In"
        listed = () if values is None else tuple(map(str.strip, values.split(",")))
        requirements.append(Requirement(key=match["key"], operator=operator, values=listed))
    return tuple(requirements)


def validate_selector(text: str) -> str:
    """Return a label selector as it is; ValueError if it is invalid."""
    parse_selector(text)
    return text
