"""Label and field selectors: text in a query, or ``LabelSelector`` objects in a spec.

Grammar and semantics: Kubernetes documentation, "Labels and Selectors" and "Field Selectors".
Note that ``!=`` and ``notin`` also select objects that lack the key.
"""

import re
from collections.abc import Callable, Mapping

from mig_manager.sandbox.api import statuses

Labels = Mapping[str, str]
Matcher = Callable[[Labels], bool]

_REQUIREMENT = re.compile(
    r"""
    \s* (?:
        ! \s* (?P<absent> [^\s,=!()<>]+ )
      | (?P<key> [^\s,=!()<>]+ ) \s* (?:
            (?P<set> (?:not)?in ) \s* \( (?P<values> [^()]* ) \)
          | (?P<op> ==|=|!=|<|> ) \s* (?P<value> [^\s,=!()<>]* )
        )?
    ) \s* (?: , (?=.) | $ )
    """,
    re.VERBOSE,
)
_OPERATOR = re.compile(r"(?<!\\)(==|!=|=)")
_UNESCAPED_COMMA = re.compile(r"(?<!\\),")

_POD_FIELDS = (
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.schedulerName",
    "spec.serviceAccountName",
    "spec.hostNetwork",
    "status.phase",
    "status.podIP",
    "status.nominatedNodeName",
)
_EVENT_FIELDS = (
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "involvedObject.apiVersion",
    "involvedObject.resourceVersion",
    "involvedObject.fieldPath",
    "reason",
    "reportingComponent",
    "type",
)
FIELDS: Mapping[str, tuple[str, ...]] = {
    "pods": _POD_FIELDS,
    "nodes": ("spec.unschedulable",),
    "namespaces": ("status.phase",),
    "events": _EVENT_FIELDS,
}
"""Selectable fields by storage key, besides ``metadata.name`` and ``metadata.namespace``."""


def parse_labels(text: str) -> Matcher:
    """Compile a label selector such as ``a=b,c in (d,e),!f``.

    Raises:
        ApiError: 400, the text is no selector.
    """
    requirements: list[Matcher] = []
    position = 0
    while position < len(text):
        match = _REQUIREMENT.match(text, position)
        if match is None:
            message = f"unable to parse requirement: found unexpected text in {text!r}"
            raise statuses.bad_request(message)
        requirements.append(_requirement(match))
        position = match.end()
    return lambda labels: all(holds(labels) for holds in requirements)


def _requirement(match: re.Match[str]) -> Matcher:
    if match["absent"]:
        return _expression(match["absent"], "DoesNotExist", frozenset())
    if match["set"]:
        values = frozenset(value.strip() for value in match["values"].split(","))
        return _expression(match["key"], "In" if match["set"] == "in" else "NotIn", values)
    if match["op"] in ("<", ">"):
        return _comparison(match["key"], match["op"], match["value"])
    if match["op"]:
        operator = "NotIn" if match["op"] == "!=" else "In"
        return _expression(match["key"], operator, frozenset([match["value"]]))
    return _expression(match["key"], "Exists", frozenset())


def _expression(key: str, operator: str, values: frozenset[str]) -> Matcher:
    match operator:
        case "In":
            return lambda labels: labels.get(key) in values
        case "NotIn":
            return lambda labels: labels.get(key) not in values
        case "Exists":
            return lambda labels: key in labels
        case "DoesNotExist":
            return lambda labels: key not in labels
        case _:
            raise statuses.bad_request(f'"{operator}" is not a valid label selector operator')


def _comparison(key: str, operator: str, bound: str) -> Matcher:
    if not bound.lstrip("-").isdigit():
        raise statuses.bad_request(f"for '<' and '>' the value must be an integer, not {bound!r}")

    def holds(labels: Labels) -> bool:
        value = labels.get(key, "")
        if not value.lstrip("-").isdigit():
            return False
        return int(value) < int(bound) if operator == "<" else int(value) > int(bound)

    return holds


def compile_selector(selector: statuses.Object | None) -> Matcher:
    """Compile a ``LabelSelector``: None selects nothing, an empty one everything.

    Raises:
        ApiError: 400, an operator is unknown.
    """
    if selector is None:
        return lambda _labels: False
    requirements = [
        _expression(key, "In", frozenset([value]))
        for key, value in (selector.get("matchLabels") or {}).items()
    ]
    requirements += [
        _expression(each["key"], each["operator"], frozenset(each.get("values") or ()))
        for each in selector.get("matchExpressions") or ()
    ]
    return lambda labels: all(holds(labels) for holds in requirements)


def parse_fields(text: str, storage: str) -> Callable[[statuses.Object], bool]:
    """Compile a field selector such as ``spec.nodeName=n1,status.phase!=Failed``.

    Raises:
        ApiError: 400, the text is no selector or the field cannot be selected by.
    """
    allowed = (*FIELDS.get(storage, ()), "metadata.name", "metadata.namespace")
    requirements: list[tuple[str, bool, str]] = []
    for part in _UNESCAPED_COMMA.split(text):
        if not part:
            continue
        pieces = _OPERATOR.split(part, maxsplit=1)
        if len(pieces) != 3:  # noqa: PLR2004 - left, operator, right
            message = f"invalid selector: '{text}'; can't understand '{part}'"
            raise statuses.bad_request(message)
        field, operator, value = pieces
        if field not in allowed:
            raise statuses.bad_request(f"field label not supported: {field}")
        requirements.append((field, operator != "!=", re.sub(r"\\(.)", r"\1", value)))
    return lambda thing: all(
        (field_value(thing, field) == value) is wanted for field, wanted, value in requirements
    )


def field_value(thing: statuses.Object, field: str) -> str:
    """Return a field as selectors compare it: absent is empty, ``spec.unschedulable`` a word."""
    value: object = thing
    for key in field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if field in ("spec.unschedulable", "spec.hostNetwork"):
        return "true" if value else "false"
    return str(value) if value is not None else ""
