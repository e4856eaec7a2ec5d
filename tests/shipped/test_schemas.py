"""The JSON Schemas of answers and annotations: what programs rely on stays.

``golden/v1`` has answers of earlier programs, one a line, and their schemas.
"""

import copy
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

import mig_manager
from mig_manager.cli import parser
from mig_manager.core.records import capacity
from tests import contract
from tests.shell import commandline

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = pathlib.Path(__file__).parent / "golden" / "v1"
DIGESTS = GOLDEN.with_name("schemas.sha256")
OLD = {
    schema["title"]: schema
    for schema in map(json.loads, (GOLDEN / "schemas.jsonl").read_text("utf-8").splitlines())
}
ANSWERS = [
    pytest.param(path.stem, line, id=f"{path.stem} {number}")
    for path in sorted(GOLDEN.glob("[A-Z]*.jsonl"))
    for number, line in enumerate(path.read_text("utf-8").splitlines())
]


def test_the_installed_schemas_are_those_of_the_types() -> None:
    folder = pathlib.Path(mig_manager.__file__).parent / "schemas"
    present = {path.name: path.read_text("utf-8") for path in folder.glob("*")}

    assert present == contract.made(), "run: pip install -e ."


def test_a_changed_schema_is_seen_in_the_list_of_digests() -> None:
    """No schema is committed, so that a review sees in this list that the contract changes."""
    digests = {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in contract.made().items()
    }
    listed = "".join(f"{digest}  {name}\n" for name, digest in digests.items())

    assert DIGESTS.read_text("utf-8") == listed, (
        f"if the change is meant: (cd mig_manager/schemas && sha256sum *) > {DIGESTS}"
    )


def test_the_command_names_and_prints_every_schema(tmp_path: pathlib.Path) -> None:
    shell = commandline.Shell(tmp_path)
    names = shell("schema").out.splitlines()

    assert [f"{name}.json" for name in names] == list(contract.made())
    for name in names:
        assert shell("schema", name).data == contract.shipped(name)
    unknown = shell("schema", "plan")
    assert (unknown.status, unknown.out) == (2, "")
    assert "there is no schema 'plan'; did you mean 'Plan'?" in unknown.err
    assert tuple(names) == parser.SCHEMA.words


@pytest.mark.parametrize(("name", "line"), ANSWERS)
def test_an_answer_of_an_earlier_program_is_as_its_schema_says(name: str, line: str) -> None:
    contract.check(name, json.loads(line))


def test_there_is_an_earlier_answer_of_each_kind() -> None:
    assert {each.values[0] for each in ANSWERS} == OLD.keys()


@pytest.mark.parametrize("name", OLD)
def test_no_schema_breaks_the_promise_of_an_earlier_one(name: str) -> None:
    assert contract.breaks(OLD[name], contract.shipped(name)) == []


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield each object of a schema that has keys."""
    inner = schema.values() if isinstance(schema, dict) else schema
    for each in inner if isinstance(schema, dict | list) else ():
        yield from objects(each)
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        yield schema


def changed(schema: dict[str, Any], number: int, key: str, how: str) -> dict[str, Any]:
    """Return a schema with one key of its object of that number changed."""
    copied = copy.deepcopy(schema)
    found = list(objects(copied))[number]
    properties, required = found["properties"], found["required"]
    if how == "optional":
        required.remove(key)
    elif how == "of another type":
        properties[key] = {"type": "array", "items": {"type": "null"}}
    else:
        old = properties.pop(key)
        found["required"] = [each for each in required if each != key]
        if how == "renamed":
            properties[f"{key}_2"] = old
    return copied


@pytest.mark.parametrize("how", ["gone", "renamed", "of another type", "optional"])
@pytest.mark.parametrize("name", OLD)
def test_a_key_of_an_earlier_schema_cannot_change_unnoticed(name: str, how: str) -> None:
    for number, found in enumerate(objects(OLD[name])):
        for key in found["required"] if how == "optional" else found["properties"]:
            assert contract.breaks(OLD[name], changed(OLD[name], number, key, how)), key


@pytest.mark.parametrize(("name", "line"), ANSWERS)
def test_an_answer_without_a_key_or_with_another_one_is_refused(name: str, line: str) -> None:
    data = json.loads(line)
    for key in contract.shipped(name)["required"]:
        without = {each: value for each, value in data.items() if each != key}
        for wrong in (without, {**without, f"{key}_2": data[key]}, {**data, key: [[]]}):
            with pytest.raises(jsonschema.ValidationError):
                contract.check(name, wrong)


def test_a_key_a_value_of_an_enumeration_and_an_action_may_be_added() -> None:
    old = OLD["Plan"]
    new = copy.deepcopy(old)
    new["properties"]["added"] = {"type": "string"}
    actions = new["$defs"]["GpuPlan"]["properties"]["steps"]["items"]["anyOf"]
    actions.append({"type": "object", "properties": {"action": {"const": "wait"}}})
    new["$defs"]["UnreachableGpu"]["properties"]["reason"]["enum"].append("Added")

    assert contract.breaks(old, new) == []
    new["required"].append("added")
    assert contract.breaks(old, new) == ["$.added: not required by both"]
    assert contract.breaks(new, old) != []


def test_what_the_schema_of_the_capacity_admits_can_be_read() -> None:
    for line in (GOLDEN / "CapacityAnnotation.jsonl").read_text("utf-8").splitlines():
        (gpu,) = capacity.from_json(line).gpus
        assert len(gpu.in_use) == 2


@pytest.mark.parametrize(
    "path", sorted((ROOT / "profiles").glob("mig-*.yaml")), ids=lambda p: p.name
)
def test_the_shipped_layouts_are_as_the_schema_for_editors_says(path: pathlib.Path) -> None:
    contract.check("LayoutFile", yaml.safe_load(path.read_text("utf-8")))
