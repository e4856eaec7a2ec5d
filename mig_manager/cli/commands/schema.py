"""``mig-manager schema``: the JSON Schemas of answers, annotations and layout files."""

import pkgutil

from mig_manager import errors
from mig_manager.cli.toolkit import console, program
from mig_manager.core import options

KIND = options.Option(
    name="schema",
    help="the kind of an answer, an annotation, or LayoutFile (default: list them)",
    metavar="KIND",
    words=(
        *("Acceptance", "AutoscalerTags", "Boot", "CapacityAnnotation", "Change"),
        *("ClusterCapacity", "ClusterPlan"),
        *("ClusterStatus", "Doctor", "GpusAnnotation", "JournalAnnotation", "LayoutFile"),
        *("LayoutsAnnotation", "NodeHistory", "NodeLayouts", "Plan", "RequestAnnotation"),
        *("Replay", "Rollout", "RolloutPreview"),
        *("Simulation", "Status", "StatusAnnotation", "Validation", "Validations"),
    ),
    has_variable=False,
    is_operand=True,
)


def run(parsed: program.Parsed, terminal: console.Console) -> int:
    """Print a schema, or the names of all; UsageError if the name is unknown."""
    name, known = parsed["schema"], KIND.words
    if name is None:
        terminal.say("\n".join(known))
        return console.DONE
    if name not in known:
        similar = program.closest(str(name), known)
        hint = f"; did you mean '{similar}'?" if similar else ""
        raise errors.UsageError(f"unknown schema {name!r}{hint}")
    try:
        schema = pkgutil.get_data("mig_manager", f"schemas/{name}.json") or b""
    except FileNotFoundError as error:
        raise errors.UsageError(
            "this source has no schemas; installing generates them", remedy="pip install -e ."
        ) from error
    terminal.say(schema.decode())
    return console.DONE
