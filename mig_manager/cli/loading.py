"""Load the code of a command when it runs.

``--help`` does not load YAML; commands for people load neither Kubernetes nor gRPC.
"""
# ruff: noqa: PLC0415 - see above

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mig_manager.cli.toolkit import console, program

if TYPE_CHECKING:
    from mig_manager.cli.commands import gpus


def on_gpus(
    act: Callable[["gpus.GpuCommands"], int],
) -> Callable[[program.Parsed, console.Console], int]:
    """Return the function that runs a command on this machine's GPUs."""

    def run(parsed: program.Parsed, terminal: console.Console) -> int:
        from mig_manager.cli.commands import gpus

        return act(gpus.GpuCommands(parsed, terminal))

    return run


def doctor(parsed: program.Parsed, terminal: console.Console) -> int:
    """Run ``doctor``."""
    from mig_manager.cli.commands import doctor

    return doctor.run(parsed, terminal)


def acceptance(parsed: program.Parsed, terminal: console.Console) -> int:
    """Run ``acceptance``."""
    from mig_manager.cli.commands import acceptance

    return acceptance.run(parsed, terminal)


def support_bundle(
    parsed: program.Parsed,
    terminal: console.Console,
    parse: Callable[[Sequence[str]], program.Parsed],
) -> int:
    """Run ``support-bundle``."""
    from mig_manager.cli.commands import support_bundle

    return support_bundle.run(parsed, terminal, parse)


def agent(
    parsed: program.Parsed, terminal: console.Console, unknown_variables: Mapping[str, str]
) -> int:
    """Run the agent, which logs the unknown variables."""
    from mig_manager.cli.commands import services

    return services.agent(parsed, terminal, unknown_variables)


def partitioner(parsed: program.Parsed, terminal: console.Console) -> int:
    """Run the partitioner."""
    from mig_manager.cli.commands import services

    return services.partitioner(parsed, terminal)


def rollout(parsed: program.Parsed, terminal: console.Console) -> int:
    """Run ``rollout``."""
    from mig_manager.cli.commands import rollout

    return rollout.run(parsed, terminal)


def demo(parsed: program.Parsed, terminal: console.Console) -> int:
    """Run ``demo``."""
    from mig_manager.cli.commands import demo

    return demo.run(parsed, terminal)


def completion(parsed: program.Parsed, terminal: console.Console) -> int:
    """Run ``completion``."""
    from mig_manager.cli.commands import completion

    return completion.run(parsed, terminal)


def complete(words: Sequence[str], terminal: console.Console, of: program.Program) -> int:
    """Complete a command line for a shell."""
    from mig_manager.cli.commands import completion as layouts
    from mig_manager.cli.toolkit import completion

    terminal.say(completion.answer(of, words, layouts.values(terminal.environ)))
    return console.DONE
