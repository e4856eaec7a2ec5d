"""The script for fish."""

from collections.abc import Iterable, Iterator, Sequence

from mig_manager.cli import commandline, placeholders

_BEFORE = """\
# fish completion for mig-manager; made by 'mig-manager completion fish'.

function __mig_manager_is --description 'Whether the command line has this command'
    set --local found
    for word in (commandline --tokenize --cut-at-cursor --current-process)[2..]
        if not string match --quiet -- '-*' $word
            set found $word
            break
        end
    end
    test "$found" = "$argv[1]"
end

function __mig_manager_layouts --description 'The layouts of the document that is named'
    set --local words (commandline --tokenize --cut-at-cursor --current-process)
    set --local file
    for position in (seq 2 (count $words))
        switch $words[$position]
            case -f --config-file
                set file -f $words[(math $position + 1)]
            case '--config-file=*'
                set file -f (string replace --regex '^[^=]*=' '' -- $words[$position])
        end
    end
    # As typed, with a tilde that the shell has not yet seen.
    set file (string replace --regex '^~/' "$HOME/" -- $file)
    $words[1] completion --layouts $file 2>/dev/null
end

function __mig_manager_spec --description 'Simulated GPUs: how many of which product, and others'
    set --local begun (commandline --current-token)
    set --local lead (string match --regex -- '^(?:.*\\+)?(?:[0-9]+x)?' $begun)
    printf "$lead%s\\n" $__mig_manager_products
end

complete --command mig-manager --no-files
"""
_VALUES = {
    placeholders.FILE: "--require-parameter --force-files",
    placeholders.FOLDER: "--exclusive --arguments '(__fish_complete_directories)'",
    placeholders.LAYOUT: "--exclusive --arguments '(__mig_manager_layouts)'",
    placeholders.PRODUCT: "--exclusive --arguments '$__mig_manager_products'",
    placeholders.SPEC: "--exclusive --arguments '(__mig_manager_spec)'",
}


def script(
    program: commandline.Command,
    commands: Sequence[commandline.Command],
    products: Iterable[str],
) -> str:
    """Return the script.

    Args:
        program: What may stand before a command.
        commands: All commands.
        products: GPUs to simulate or to ask about.
    """
    lines = [
        _BEFORE + f"set --global __mig_manager_products {' '.join(products)}",
        *_options(program),
        *(
            f"{_start('')} --arguments {command.name} --description {_quoted(command.summary)}"
            for command in commands
        ),
        *(line for command in commands for line in (*_options(command), *_operands(command))),
    ]
    return "\n".join(lines) + "\n"


def _start(command: str) -> str:
    condition = _quoted(f'__mig_manager_is "{command}"')
    return f"complete --command mig-manager --condition {condition}"


def _options(command: commandline.Command) -> Iterator[str]:
    for option in command.options:
        flags = " ".join(
            f"--long-option {flag[2:]}" if flag.startswith("--") else f"--short-option {flag[1:]}"
            for flag in option.flags
        )
        parts = (
            _start(command.name),
            flags,
            _value(option),
            "--description",
            _quoted(option.told),
        )
        yield " ".join(filter(None, parts))


def _operands(command: commandline.Command) -> Iterator[str]:
    for operand in command.operands:
        if operand.words:
            yield f"{_start(command.name)} --arguments {_quoted(' '.join(operand.words))}"
        elif operand.placeholder == placeholders.LAYOUT:
            yield f"{_start(command.name)} --arguments '(__mig_manager_layouts)'"


def _value(option: commandline.Option) -> str:
    if not option.placeholder or option.is_value_optional:
        return ""
    if option.words:
        return f"--exclusive --arguments {_quoted(' '.join(option.words))}"
    return _VALUES.get(option.placeholder, "--exclusive")


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
