"""``mig-manager schema``: the JSON Schemas of answers, annotations and layout files."""

import pkgutil

from mig_manager import errors
from mig_manager.cli.toolkit import console, settings
from mig_manager.core import messages, options

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
KINDS = (
    *("Acceptance", "AutoscalerTags", "Boot", "CapacityAnnotation", "Change"),
    *("ClusterCapacity", "ClusterPlan"),
    *("ClusterStatus", "Doctor", "GpusAnnotation", "JournalAnnotation", "LayoutFile"),
    *("LayoutsAnnotation", "NodeHistory", "NodeLayouts", "Plan", "Replay"),
    *("RequestAnnotation", "Rollout", "RolloutPreview"),
    *("Simulation", "Status", "StatusAnnotation", "Validation", "Validations"),
)


class Settings(settings.DebugSettings):
    """Settings of ``schema``."""

    schema: str | None = options.text(
        "the kind of an answer, an annotation, or LayoutFile (default: list them)",
        metavar="KIND",
        words=KINDS,
        has_variable=False,
        is_operand=True,
    )


def run(chosen: Settings, terminal: console.Console) -> int:
    """Print a schema, or the names of all; UsageError if the name is unknown."""
    name = chosen.schema
    if name is None:
        terminal.say("\n".join(KINDS))
        return console.DONE
    if name not in KINDS:
        hint = messages.did_you_mean(name, KINDS, most=1)
        raise errors.UsageError(
            f"unknown schema {name!r}{hint}", remedy="'mig-manager schema' lists the names."
        )
    try:
        schema = pkgutil.get_data("mig_manager", f"schemas/{name}.json") or b""
    except FileNotFoundError as error:
        raise errors.UsageError(
            "this source has no schemas; installing generates them", remedy="pip install -e ."
        ) from error
    terminal.say(schema.decode())
    return console.DONE
