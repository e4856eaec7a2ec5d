"""The JSON Schemas that ``mig-manager schema`` prints, of the types of answers and annotations.

They leave out ``additionalProperties``: a later program of the same version may write more keys.
"""

import dataclasses
import datetime as dt
import enum
import importlib
import inspect
import json
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from docs.generator import annotations, layout_schema
from mig_manager.cli.toolkit import console
from mig_manager.core import answers, model
from mig_manager.core.answers import plan_answers
from mig_manager.core.files import json_text

DRAFT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]

_PLAIN: Mapping[object, Schema] = {
    Any: {},
    bool: {"type": "boolean"},
    dt.datetime: {"type": "string", "format": "date-time"},
    float: {"type": "number"},
    int: {"type": "integer"},
    model.Placement: {"type": "string"},
    model.Profile: {"type": "string"},
    str: {"type": "string"},
    types.NoneType: {"type": "null"},
}
_WIDTH = 100


def files() -> Mapping[str, str]:
    """Return every schema as text, by the name of its file."""
    return {f"{name}.json": _render(schema, 0) + "\n" for name, schema in schemas().items()}


def schemas() -> dict[str, Schema]:
    """Return every schema by its name: the ``kind`` of an answer, or the annotation."""
    by_name = {}
    names = (each.name for each in pkgutil.iter_modules(answers.__path__, f"{answers.__name__}."))
    for module in (*map(importlib.import_module, names), annotations):
        for name, each in inspect.getmembers(module, typing.is_typeddict):
            is_whole = "kind" in each.__annotations__ or name.endswith("Annotation")
            if is_whole and each.__module__ == module.__name__:
                by_name[name] = _whole(name, each)
    return dict(sorted((by_name | {"LayoutFile": layout_schema.schema()}).items()))


def _whole(name: str, of: Any) -> Schema:
    definitions: dict[str, Schema] = {}
    body = _object(of, definitions)
    if "kind" in body["properties"]:
        kind = body["properties"].pop("kind")
        header = {"apiVersion": {"const": console.API_VERSION}, "kind": kind}
        body["properties"] = header | body["properties"]
        body["required"] = list(dict.fromkeys([*header, *body["required"]]))
    head = {"$schema": DRAFT, "title": name, "description": inspect.getdoc(of)}
    defined = {"$defs": dict(sorted(definitions.items()))} if definitions else {}
    return head | body | defined


def _object(of: Any, definitions: dict[str, Schema]) -> Schema:
    properties, remarks = {}, _remarks(of)
    hints = typing.get_type_hints(of, include_extras=True)
    for key, hint in hints.items():
        inner = typing.get_args(hint)[0] if _is_optional(hint) else hint
        remark = {"description": remarks[key]} if key in remarks else {}
        properties[json_text.camel_case(key)] = remark | _schema(inner, definitions)
    required = [json_text.camel_case(key) for key in hints if key in of.__required_keys__]
    return {"type": "object", "properties": properties, "required": required}


def _is_optional(hint: object) -> bool:
    return typing.get_origin(hint) is typing.NotRequired


def _remarks(of: Any) -> dict[str, str]:
    """Return what the source says behind keys, those of the base included."""
    head, *lines = inspect.getsource(of).splitlines()
    base = getattr(sys.modules[of.__module__], head.partition("(")[2].rstrip("):"))
    remarks = _remarks(base) if typing.is_typeddict(base) else {}
    matches = (re.match(r"    (\w+): .*?  # (.+)", line) for line in lines)
    return remarks | {match[1]: match[2] for match in matches if match}


def _schema(of: Any, definitions: dict[str, Schema]) -> Schema:
    if of in _PLAIN:
        return dict(_PLAIN[of])
    if typing.is_typeddict(of):
        name = of.__name__.removeprefix("_")
        if name not in definitions:
            definitions[name] = _object(of, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if isinstance(of, enum.EnumMeta):
        return {"enum": _values(of)}
    return _generic(typing.get_origin(of), typing.get_args(of), definitions)


def _generic(origin: Any, inner: tuple[Any, ...], definitions: dict[str, Schema]) -> Schema:
    if origin is typing.Annotated:
        return _schema_of_metadata(*inner, definitions=definitions)
    if origin is typing.Literal:
        return {"const": inner[0]} if len(inner) == 1 else {"enum": list(inner)}
    parts = [_schema(each, definitions) for each in inner]
    if origin is list:
        return {"type": "array", "items": parts[0]}
    if origin is dict:
        names = {"propertyNames": parts[0]} if "enum" in parts[0] else {}
        return {"type": "object", **names, "additionalProperties": parts[1]}
    if origin is tuple:
        size = len(parts)
        return {"type": "array", "prefixItems": parts, "minItems": size, "maxItems": size}
    return _union(parts)


def _union(members: list[Schema]) -> Schema:
    if all(each.keys() == {"type"} for each in members):
        return {"type": [each["type"] for each in members]}
    return {"anyOf": members}


def _schema_of_metadata(_: Any, *more: Any, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of what the metadata names; see ``answers``."""
    if not isinstance(more[0], str):
        rows = [_schema(each, definitions) for each in more]
        return rows[0] if len(rows) == 1 else _union(rows)
    named, *others = (_load(each) if "." in each else each for each in more)
    if isinstance(named, enum.EnumMeta):
        return {"enum": [*_values(named), *others]}
    if dataclasses.is_dataclass(named):
        return _fields(named, (), definitions)
    # The steps of a plan, by class; those that kubectl prints lack the ids of the node.
    absent = plan_answers.OMITTED_FIELDS.union(*others, {"uuid"} if others else ())
    return {
        "anyOf": [
            _fields(cls, absent, definitions, {"action": {"const": action}})
            for cls, action in named.items()
        ]
    }


def _values(of: Any) -> list[str]:
    return [each.value for each in of]


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"mig_manager.{module}"), name)


def _fields(
    of: Any, absent: Collection[str], definitions: dict[str, Schema], first: Schema | None = None
) -> Schema:
    """Return the schema of a dataclass."""
    properties = (first or {}) | {
        json_text.camel_case(key): _schema(hint, definitions)
        for key, hint in typing.get_type_hints(of).items()
        if key not in absent
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def _render(value: Any, depth: int) -> str:
    """Return JSON with a line for what fits into one, and for a list of plain values."""
    flat = json.dumps(value)
    is_list = isinstance(value, list)
    nested = [each for each in value if isinstance(each, dict | list)] if is_list else [value]
    if len(flat) + 2 * depth <= _WIDTH or not nested or not isinstance(value, dict | list):
        return flat
    inner, outer = "\n" + "  " * (depth + 1), "\n" + "  " * depth
    if isinstance(value, list):
        items = [_render(each, depth + 1) for each in value]
        return f"[{inner}{f',{inner}'.join(items)}{outer}]"
    rows = [f"{json.dumps(key)}: {_render(each, depth + 1)}" for key, each in value.items()]
    return f"{{{inner}{f',{inner}'.join(rows)}{outer}}}"
