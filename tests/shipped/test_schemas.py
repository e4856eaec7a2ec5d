"""The JSON Schemas of answers and annotations: what programs rely on stays.

``golden/v1`` has answers of earlier programs, one a line.
"""

import hashlib
import json
import pathlib

import pytest
import yaml

from mig_manager.core.records import capacity
from tests.rigs import contract
from tests.rigs.shell import commandline

ROOT = pathlib.Path(__file__).parents[2]
DIGESTS = contract.GOLDEN.with_name("schemas.sha256")
LINES = {
    path.stem: path.read_text("utf-8").splitlines()
    for path in sorted(contract.GOLDEN.glob("[A-Z]*.jsonl"))
}
ANSWERS = [
    pytest.param(name, line, id=f"{name} {number}")
    for name, lines in LINES.items()
    for number, line in enumerate(lines)
]


def test_a_changed_schema_changes_the_list_of_digests() -> None:
    """No schema is committed, so that a review sees in this list that the contract changes."""
    digests = {
        name: hashlib.sha256(text.encode()).hexdigest()
        for name, text in contract.installed_schemas().items()
    }
    listed = "".join(f"{digest}  {name}\n" for name, digest in digests.items())

    assert DIGESTS.read_text("utf-8") == listed, (
        f"if the change is meant: (cd mig_manager/schemas && sha256sum *) > {DIGESTS}"
    )


def test_the_command_names_and_prints_every_schema(tmp_path: pathlib.Path) -> None:
    shell = commandline.Shell(tmp_path)
    names = shell("schema").out.splitlines()

    assert [f"{name}.json" for name in names] == list(contract.installed_schemas())
    for name in names:
        assert shell("schema", name).data == contract.schema_of_wheel(name)
    unknown = shell("schema", "plan")
    assert (unknown.status, unknown.out) == (2, "")
    assert "unknown schema 'plan'; did you mean 'Plan'?" in unknown.err


@pytest.mark.parametrize(("name", "line"), ANSWERS)
def test_an_answer_of_an_earlier_program_is_as_its_schema_says(name: str, line: str) -> None:
    contract.check(name, json.loads(line))


@pytest.mark.parametrize("name", LINES)
def test_an_answer_without_a_key_or_with_another_one_is_refused(name: str) -> None:
    data = json.loads(min(LINES[name], key=len))
    for key in contract.schema_of_wheel(name)["required"]:
        without = {each: value for each, value in data.items() if each != key}
        for wrong in (without, {**without, f"{key}_2": data[key]}, {**data, key: [[]]}):
            with pytest.raises(AssertionError, match=f"{name}.json refuses"):
                contract.check(name, wrong)


def test_every_capacity_that_the_schema_admits_is_parsed() -> None:
    for line in LINES["CapacityAnnotation"]:
        (in_use,) = capacity.from_json(line).in_use.values()
        assert len(in_use) == 2


@pytest.mark.parametrize(
    "path", sorted((ROOT / "profiles").glob("mig-*.yaml")), ids=lambda p: p.name
)
def test_the_shipped_layouts_are_as_the_schema_for_editors_says(path: pathlib.Path) -> None:
    contract.check("LayoutFile", yaml.safe_load(path.read_text("utf-8")))
