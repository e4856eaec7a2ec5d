"""Run a command line of ``mig-manager``, or of ``nvidia-mig-parted`` through a link."""

import itertools
import shlex
from collections.abc import Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.adapters.host import line_writer
from mig_manager.cli import go_spellings, registry
from mig_manager.cli.toolkit import console, parser

_MIG_PARTED = "nvidia-mig-parted"
_COMPLETE = "__complete"  # before the words that a shell asks about, as in cobra
_SIMULATE = "To try it without a GPU, add --simulate 1xA100-SXM4-40GB."
_NAME_PRODUCT = "Without a GPU, name a product: --gpu A100-SXM4-40GB."
_WITHOUT_GPU = dict.fromkeys(
    ("status", "plan", "apply", "assert", "export", "checkpoint", "acceptance"), _SIMULATE
) | dict.fromkeys(("validate", "generate-config"), _NAME_PRODUCT)
_OTHER_OPERANDS = {
    **dict.fromkeys(("checkpoint", "restore"), "Name the file with -f FILE."),
    **{
        word: f"For the nodes of a cluster, run 'kubectl mig {word}'."
        for word in ("status", "plan", "apply")
    },
    "rollout": "Select the nodes by labels: -l SELECTOR.",
}
"""By the command that is given too many operands."""
_SIMULATION = ("--simulate", "--simulate-state")
_KEPT_FLAGS = {"status": _SIMULATION, "validate": ("-f", "--config-file", *_SIMULATION, "--gpu")}
"""By the command that a remedy names: the flags of the failed command that it repeats."""


def main(
    argv: Sequence[str], terminal: console.Console, *, program: str = registry.PROGRAM.name
) -> int:
    """Run one command line as the program of this name.

    Returns:
        The exit status: 0 success, 1 not applied or failed, 2 unusable input, 3 unknown command.
        ``nvidia-mig-parted`` has no 2: under that name it is 1.
    """
    status = terminal.exit_status(
        lambda: _run(argv, terminal),
        remedy=lambda error: _remedy(error, argv),
        priority=line_writer.Priority.ERROR,
    )
    is_parted = program == _MIG_PARTED and status == console.UNUSABLE
    return console.FAILED if is_parted else status


def _run(argv: Sequence[str], terminal: console.Console) -> int:
    if _COMPLETE in argv[:1]:
        from mig_manager.cli.commands import completion  # noqa: PLC0415 - on demand
        from mig_manager.cli.toolkit import completer  # noqa: PLC0415 - as above

        values = completion.values(terminal.environ)
        terminal.say(completer.answer(registry.PROGRAM, argv[1:], values))
        return console.DONE
    return parser.run(registry.PROGRAM, argv, terminal)


def _remedy(error: errors.MigManagerError, argv: Sequence[str]) -> str:
    _, words = parser.split(argv)
    usage = registry.PROGRAM.usage_remedy(error, argv)
    remedy = error.own_remedy or usage or error.reason.remedy_at_shell
    if isinstance(remedy, reasons.CommandRemedy):
        remedy = remedy.text.format(_with_same_flags(remedy.command, words))
    hints: Mapping[str, str] = {}
    if error.reason is reasons.Reason.DRIVER_NOT_LOADED:
        hints = _WITHOUT_GPU
    elif parser.is_surplus_operand(error):
        hints = _OTHER_OPERANDS
    return " ".join((remedy, *(hints[word] for word in words[:1] if word in hints)))


def _with_same_flags(command: str, failed: Sequence[str]) -> str:
    """Return a command that a remedy names, for the GPUs and the file of the one that failed."""
    kept, (spelt, _) = _KEPT_FLAGS[command], go_spellings.respell(failed[0], failed[1:])
    words = []
    for word, following in itertools.pairwise((*spelt, "")):
        is_short = word[:2] in kept and not word.startswith("--")
        if word in kept:
            words += [word, following]
        elif word.partition("=")[0] in kept or is_short:
            words.append(word)
    named = shlex.join(("mig-manager", command, *words))
    return named if "'" in named else f"'{named}'"
