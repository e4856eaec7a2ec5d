"""The schemas of answers and annotations as tests hold answers to them, and older schemas.

``python -m tests.contract`` prints all that a release promises, for ``tests/shipped/golden``.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema

from docs.generator import schemas
from mig_manager.core import yaml_tree
from mig_manager.core.node import cluster

Schema = Mapping[str, Any]

ANNOTATIONS = {
    cluster.CAPACITY_ANNOTATION: "CapacityAnnotation",
    cluster.GPUS_ANNOTATION: "GpusAnnotation",
    cluster.JOURNAL_ANNOTATION: "JournalAnnotation",
    cluster.LAYOUTS_ANNOTATION: "LayoutsAnnotation",
    cluster.REQUEST_ANNOTATION: "RequestAnnotation",
    cluster.STATUS_ANNOTATION: "StatusAnnotation",
}


made = functools.cache(schemas.files)


@functools.cache
def shipped(name: str) -> Any:
    """Return a schema as the wheel has it."""
    return json.loads(made()[f"{name}.json"])


@functools.cache
def _validator(name: str) -> Any:
    schema = shipped(name)
    cls = jsonschema.validators.validator_for(schema)
    cls.check_schema(schema)
    return cls(closed(schema), format_checker=cls.FORMAT_CHECKER)


def closed(schema: Any) -> Any:
    """Return a schema that refuses keys it does not name: one that was renamed, for example."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(each) for key, each in schema.items()}
    is_object = inner.get("type") == "object" and isinstance(inner.get("properties"), dict)
    return {**inner, "additionalProperties": False} if is_object else inner


def check(name: str, data: object) -> None:
    """Fail if data is not as its schema says, to the key."""
    _validator(name).validate(data)


def check_output(text: str) -> None:
    """Fail if a command wrote an answer, or a layout file, that is not as its schema says."""
    if text.startswith(("{\n", "apiVersion: ", "version: ")):
        data: Any = yaml_tree.plain(yaml_tree.parse(text, source="the answer"))
        if "$schema" in data:
            return
        check("LayoutFile" if "mig-configs" in data else data["kind"], data)


@functools.lru_cache(maxsize=4096)
def check_annotation(key: str, value: str | None) -> None:
    """Fail if an annotation that an agent writes is not as its schema says."""
    if value and key in ANNOTATIONS:
        check(ANNOTATIONS[key], json.loads(value))


# -- what a newer schema may change --------------------------------------------------------------


def breaks(old: Schema, new: Schema) -> list[str]:
    """Return what a schema takes from those who rely on an older one of the same version.

    Keys and values of enumerations may be added. A key that is added is optional, because the
    older program does not write it.
    """
    return list(_breaks(old, new, (old, new), "$"))


def _breaks(old: Schema, new: Schema, roots: tuple[Schema, Schema], place: str) -> Iterator[str]:
    old, new = (_resolved(*each) for each in zip((old, new), roots, strict=True))
    for word in ("type", "const", "format", "minItems", "maxItems"):
        if old.get(word) != new.get(word):
            yield f"{place}: {word} is {new.get(word)}, not {old.get(word)}"
    if ("enum" in old) != ("enum" in new) or set(old.get("enum", ())) - set(new.get("enum", ())):
        yield f"{place}: values are gone"
    yield from _object_breaks(old, new, roots, place)
    for word in ("items", "additionalProperties", "propertyNames"):
        if (word in old) != (word in new):
            yield f"{place}: {word}"
        elif word in old:
            yield from _breaks(old[word], new[word], roots, f"{place}.{word}")
    rows = old.get("prefixItems", []), new.get("prefixItems", [])
    for number, pair in enumerate(zip(*rows, strict=False)):
        yield from _breaks(*pair, roots, f"{place}[{number}]")
    yield from _union_breaks(old.get("anyOf", []), new.get("anyOf", []), roots, place)


def _resolved(schema: Schema, root: Schema) -> Schema:
    named = schema.get("$ref")
    found: Schema = root["$defs"][named.removeprefix("#/$defs/")] if named else schema
    return found


def _object_breaks(
    old: Schema, new: Schema, roots: tuple[Schema, Schema], place: str
) -> Iterator[str]:
    before, after = old.get("properties", {}), new.get("properties", {})
    for key in before:
        if key in after:
            yield from _breaks(before[key], after[key], roots, f"{place}.{key}")
        else:
            yield f"{place}.{key} is gone"
    for key in set(old.get("required", ())) ^ set(new.get("required", ())):
        yield f"{place}.{key}: not required by both"


def _union_breaks(
    old: list[Schema], new: list[Schema], roots: tuple[Schema, Schema], place: str
) -> Iterator[str]:
    kept = [[each for each in new if not list(_breaks(one, each, roots, place))] for one in old]
    for one, same in zip(old, kept, strict=True):
        if not same:
            yield f"{place}: {json.dumps(one)} is gone"
    for each in new:
        # A step of a new kind is recognized by its action.
        if not any(each in same for same in kept) and "action" not in each.get("properties", {}):
            yield f"{place}: {json.dumps(each)} is new"


if __name__ == "__main__":
    for title in sorted(schemas.schemas().keys() - {"LayoutFile"}):
        print(json.dumps(shipped(title)))
