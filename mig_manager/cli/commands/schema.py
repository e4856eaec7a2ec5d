"""``mig-manager schema``: the JSON Schemas of answers, annotations and layout files."""

import pathlib

import mig_manager
from mig_manager import errors
from mig_manager.cli.toolkit import command_settings, console
from mig_manager.core import messages
from mig_manager.core.settings import options

ABOUT = """
Every answer of '-o json' and '-o yaml', also by 'kubectl mig', has its schema's name in
'kind'. Node annotations have names such as StatusAnnotation. Within an 'apiVersion' or
'version' keys are only added.

$ mig-manager schema
List the names.

$ mig-manager schema LayoutFile > layout-file.json
For an editor: docs/config-file.md.

$ mig-manager schema Plan > plan.json
For a program that reads 'mig-manager plan -o json'.
"""
_FOLDER = pathlib.Path(mig_manager.__file__).parent / "schemas"
KINDS = tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


class Settings(command_settings.DebugSettings):
    """Settings of ``schema``."""

    schema: str | None = options.text(
        "the kind of an answer, an annotation, or LayoutFile (default: list them)",
        metavar="KIND",
        words=KINDS,
        has_variable=False,
        is_operand=True,
    )


def run(settings: Settings, terminal: console.Console) -> int:
    """Print a schema, or the names of all; UsageError if the name is unknown."""
    name = settings.schema
    if not KINDS:
        raise errors.UsageError(
            "this source has no schemas; installing generates them", remedy="pip install -e ."
        )
    if name is None:
        terminal.say("\n".join(KINDS))
        return console.DONE
    if name not in KINDS:
        hint = messages.did_you_mean(name, KINDS, limit=1)
        raise errors.UsageError(
            f"unknown schema {name!r}{hint}", remedy="'mig-manager schema' lists the names."
        )
    terminal.say((_FOLDER / f"{name}.json").read_text("utf-8"))
    return console.DONE
