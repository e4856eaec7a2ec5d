"""How a command line may go on: what kubectl asks of ``kubectl_complete-mig``.

kubectl calls it with the words after ``mig``, the last one unfinished, and takes lines of
candidates (a tab before their description) and a last line ``:DIRECTIVE`` (``kubectl plugin``,
"Shell completion"; the directives are those of Go's library cobra).
"""

from collections.abc import Iterable, Mapping, Sequence

from mig_manager import errors
from mig_manager.adapters import kubectl
from mig_manager.cli import console
from mig_manager.kubectl import arguments, selecting

_NO_FILES, _FILES = 4, 0
"""cobra's ShellCompDirectiveNoFileComp and ShellCompDirectiveDefault."""
_TIMEOUT_S = 5.0
"""For how long a person may look at a prompt that does nothing."""
_FILE_OPTIONS = ("-f", "--filename", "--kubeconfig")
_CHOICES: Mapping[str, Sequence[str]] = {
    "-o": arguments.FORMATS,
    "--output": arguments.FORMATS,
    "--color": ("auto", "always", "never"),
}


def main(argv: Sequence[str], terminal: console.Console) -> int:
    """Answer with candidates.

    Args:
        argv: The words after ``mig``; the last is what is being typed.
        terminal: Where the answer goes.

    Returns:
        0: a completion that fails says nothing.
    """
    *before, word = argv or ("",)
    last = before[-1] if before else ""
    if last in _FILE_OPTIONS:
        terminal.say(f":{_FILES}")
        return 0
    try:
        found = [each for each in _candidates(before, last, word) if each.startswith(word)]
    except errors.MigManagerError:
        found = []
    terminal.say("\n".join([*found, f":{_NO_FILES}"]))
    return 0


def _candidates(before: Sequence[str], last: str, word: str) -> Iterable[str]:
    if last in _CHOICES:
        return _CHOICES[last]
    _, commands = arguments.build()
    name = next((each for each in before if each in commands), None)
    if last == "--context":
        return _api(before).contexts()
    if name is None:
        return [f"{each}\t{text}" for each, text in arguments.COMMANDS.items()]
    if last in arguments.options_of(commands[name], with_value=True):
        return ()
    if word.startswith("-"):
        return arguments.options_of(commands[name])
    return _words(name, before)


def _words(name: str, before: Sequence[str]) -> Iterable[str]:
    """Return nodes or layouts, whichever come next."""
    rest = before[list(before).index(name) + 1 :]
    given = [each for each in rest if not each.startswith("-")]
    seen = selecting.Cluster(_api(before))
    match name:
        case "validate":
            return _layouts(seen)
        case "plan" if not given:
            return _layouts(seen)
        case "status" | "plan" | "history":
            nodes = (node for node in seen.selected(None) if node.is_about_gpus)
            return [node.view.name for node in nodes if node.view.name not in given]
        case _:
            return ()


def _layouts(seen: selecting.Cluster) -> Iterable[str]:
    # Whoever wrote the document must not drive the terminal.
    return [name for name in seen.document(None).layouts if name.isprintable()]


def _api(before: Sequence[str]) -> kubectl.Kubectl:
    how = arguments.reach(before)
    patience = {"request_timeout": how.get("request_timeout") or f"{_TIMEOUT_S:g}s"}
    options = arguments.kubectl_options({**how, **patience})
    return kubectl.Kubectl(options, tell=lambda _said: None, timeout_s=_TIMEOUT_S)
