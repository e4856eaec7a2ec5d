"""Rows name modules, and no type checker follows a name."""

import collections
import dataclasses
import importlib
import pkgutil
import typing

import pytest

from mig_manager.cli import go_spellings
from mig_manager.cli import registry as cli
from mig_manager.cli.toolkit import command_line, console
from mig_manager.core.settings import options
from mig_manager.kubectl import plugin_registry

ROWS = [
    pytest.param(of, row, id=f"{of.name} {row.name}")
    for of in (cli.PROGRAM, plugin_registry.PROGRAM)
    for row in of.rows
    if row.module
]


@pytest.mark.parametrize(("of", "row"), ROWS)
def test_a_row_names_a_module_with_settings_and_their_runner(
    of: command_line.Program, row: command_line.Command
) -> None:
    module = of.module(row.name)
    settings = module.Settings
    accepted, *others = typing.get_type_hints(module.run).values()

    assert issubclass(settings, accepted)
    assert others == [console.Console, int]
    option_names = {option.name for option in options.of(settings)}
    own_fields = [
        (field.name, object, dataclasses.field(default=None, metadata=field.metadata))
        for field in dataclasses.fields(settings)
        if field.name in settings.__annotations__
    ]
    declared = options.of(dataclasses.make_dataclass("Own", own_fields))
    assert option_names
    assert {option.name for option in declared} <= option_names


@pytest.mark.parametrize(("of", "row"), ROWS)
def test_no_two_bases_of_settings_declare_the_same_field(
    of: command_line.Program, row: command_line.Command
) -> None:
    settings = of.module(row.name).Settings
    declared = collections.Counter(
        name
        for base in settings.__mro__[1:]
        for name in vars(base).get("__annotations__", {})
        if name in {field.name for field in dataclasses.fields(settings)}
    )

    assert [name for name, bases in declared.items() if bases > 1] == []


@pytest.mark.parametrize(
    ("of", "folder"),
    [
        (cli.PROGRAM, "mig_manager.cli.commands"),
        (plugin_registry.PROGRAM, "mig_manager.kubectl.commands"),
    ],
)
def test_rows_name_all_commands_of_their_programs_layer(
    of: command_line.Program, folder: str
) -> None:
    path = importlib.import_module(folder).__path__
    modules = {
        name: importlib.import_module(f"{folder}.{name}")
        for _, name, _ in pkgutil.iter_modules(path)
    }
    commands = {name for name, each in modules.items() if {"Settings", "run"} <= vars(each).keys()}

    assert of.folder == folder
    assert {row.module for row in of.rows} - {""} == commands
    assert [row.name for row in of.rows if not row.module] == ["help", "version"]


def test_go_spellings_are_known_of_every_option_of_mig_parted() -> None:
    of = cli.PROGRAM
    declared = {
        option
        for command in of.commands
        for option in of.options_of(command)
        if option.variable.startswith("MIG_PARTED_")
    }
    switches = {each.name: each.short for each in declared if not each.metavar and each.short}

    assert switches == go_spellings.SWITCHES
    assert {each.name for each in declared} - switches.keys() == go_spellings.OPTIONS


def test_undeclared_options_that_a_class_takes_are_refused() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Settings:
        takes: typing.ClassVar = ("label", "takn")
        label: str = options.text("a text", default="")

    with pytest.raises(LookupError, match="Settings declares no option takn"):
        options.of(Settings)
