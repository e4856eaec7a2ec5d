"""The schemas of answers and annotations as tests hold answers to them."""

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jsonschema

import mig_manager
from mig_manager.core.files import yaml_text, yaml_tree
from mig_manager.core.objects import well_known

GOLDEN = pathlib.Path(__file__).parents[1] / "shipped/golden/v1"
"""Answers and annotations that each release promised to write."""
SCHEMAS = pathlib.Path(mig_manager.__file__).parent / "schemas"
ANNOTATIONS = {
    well_known.CAPACITY_ANNOTATION: "CapacityAnnotation",
    well_known.GPUS_ANNOTATION: "GpusAnnotation",
    well_known.JOURNAL_ANNOTATION: "JournalAnnotation",
    well_known.LAYOUTS_ANNOTATION: "LayoutsAnnotation",
    well_known.REQUEST_ANNOTATION: "RequestAnnotation",
    well_known.STATUS_ANNOTATION: "StatusAnnotation",
}


@functools.cache
def installed_schemas() -> Mapping[str, str]:
    """Return the installed schemas, which ``pip install -e .`` makes of the types, by file."""
    texts = {path.name: path.read_text("utf-8") for path in sorted(SCHEMAS.glob("*.json"))}
    assert texts, f"{SCHEMAS} has no schemas: run `pip install -e .`, which makes them"
    return texts


@functools.cache
def schema_of_wheel(name: str) -> Any:
    """Return a schema as the wheel has it."""
    return json.loads(installed_schemas()[f"{name}.json"])


@functools.cache
def _validator(name: str) -> Any:
    schema = schema_of_wheel(name)
    cls = jsonschema.validators.validator_for(schema)
    cls.check_schema(schema)
    return cls(without_unknown_keys(schema), format_checker=cls.FORMAT_CHECKER)


def without_unknown_keys(schema: Any) -> Any:
    """Return a schema that refuses keys it does not name: one that was renamed, for example."""
    if isinstance(schema, list):
        return [without_unknown_keys(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: without_unknown_keys(each) for key, each in schema.items()}
    is_object = inner.get("type") == "object" and isinstance(inner.get("properties"), dict)
    return {**inner, "additionalProperties": False} if is_object else inner


def check(name: str, data: object) -> None:
    """Fail if data is not as its schema says, to the key."""
    error = jsonschema.exceptions.best_match(_validator(name).iter_errors(data))
    # No ValidationError: an agent in memory passes on only the failed assertions of its fakes.
    assert error is None, (
        f"{name}.json refuses {error.json_path}: {error.message}\n"
        f"if {SCHEMAS} is older than the types of this source, run `pip install -e .`"
    )


def check_output(text: str) -> None:
    """Fail if a command wrote an answer, or a layout file, that is not as its schema says."""
    if text.startswith(("{\n", "apiVersion: ", "version: ")):
        data: Any = yaml_tree.plain(yaml_text.parse(text, source="the answer"))
        is_of_kubernetes = data.get("apiVersion") == "v1"
        if "$schema" in data or is_of_kubernetes:
            return
        check("LayoutFile" if "mig-configs" in data else data["kind"], data)


@functools.lru_cache(maxsize=4096)
def check_annotation(key: str, value: str | None) -> None:
    """Fail if an annotation that an agent writes is not as its schema says."""
    if value and key in ANNOTATIONS:
        check(ANNOTATIONS[key], json.loads(value))
