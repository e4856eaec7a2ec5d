"""Layouts with placements at a shell, and ``export --placements``."""

import pytest
import yaml

from tests.rigs.shell.commandline import Shell
from tests.shell.layout_files import instances, layouts

SPEC = ("--simulate", "1xA30")


@pytest.mark.slow
def test_a_layout_with_placements_is_planned_applied_asserted_and_exported(shell: Shell) -> None:
    spec = ("--simulate", "2xA100-SXM4-40GB")
    uuid = shell("status", *spec, "-o", "json").data["gpus"][0]["uuid"]
    rule = instances('1g.5gb@4: 1, "2c.3g.20gb@0": 1, "1c.3g.20gb@0": 1, 1g.5gb: 1')
    file = shell.file(layouts(x=rule.replace("all", f"[{uuid}]")))

    statuses = [
        shell(command, "-f", file, *spec).status
        for command in ("assert", "plan", "apply", "assert")
    ]
    text = shell("export", "--placements", *spec).out

    assert statuses == [1, 0, 0, 0]
    assert shell("assert", "-f", shell.file(text, "again.yaml"), *spec).status == 0
    first, second = yaml.safe_load(text)["mig-configs"]["current"]
    placements = first["mig-devices"]
    assert placements.pop("2c.3g.20gb@0") == placements.pop("1c.3g.20gb@0") == 1
    assert placements.pop("1g.5gb@4") == 1
    assert len(placements) == 1
    assert (first["devices"], second["devices"]) == ([0], [1])
    plain = yaml.safe_load(shell("export", *spec).out)["mig-configs"]["current"]
    assert plain[0]["mig-devices"] == {"2c.3g.20gb": 1, "1c.3g.20gb": 1, "1g.5gb": 2}


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        ("1g.6gb@3: 1, 2g.12gb@2: 1", (), "they collide in slice 3"),
        ("1g.6gb: 8", ("--lenient",), "layouts.yaml:4:"),
    ],
)
def test_an_impossible_layout_is_refused_before_anything_is_touched(
    shell: Shell, devices: str, options: tuple[str, ...], message: str
) -> None:
    before = shell("status", "-o", "json", *SPEC).out

    answer = shell("apply", "-f", shell.file(layouts(x=instances(devices))), *options, *SPEC)

    assert answer.status == 1
    assert "layouts.yaml:4:" in answer.err
    assert message in answer.err
    assert shell("status", "-o", "json", *SPEC).out == before


def test_an_instance_at_another_placement_is_not_reported_as_missing(shell: Shell) -> None:
    shell("apply", "-f", shell.file(layouts(x=instances("1g.6gb@1: 1"))), *SPEC)

    answer = shell("assert", "-f", shell.file(layouts(x=instances("1g.6gb@2: 1"))), *SPEC)

    assert answer.status == 1
    assert "GPU 0 has 1x 1g.6gb as requested, but at other placements" in answer.err
