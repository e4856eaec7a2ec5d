"""The script for zsh, for its own system of completions."""

from collections.abc import Iterable, Iterator, Sequence

from mig_manager.cli import commandline, placeholders

_BEFORE = """\
#compdef mig-manager
# zsh completion for mig-manager; made by 'mig-manager completion zsh'.
# To be found by compinit as _mig-manager, or evaluated after it.

_mig_manager_layouts() {
    local file= position
    local -a found
    for ((position = 2; position < CURRENT; position++)); do
        case $words[position] in
        -f | --config-file) file=$words[position+1] ;;
        --config-file=*) file=${words[position]#*=} ;;
        esac
    done
    # As typed, with a tilde that the shell has not yet seen.
    [[ $file != "~/"* ]] || file=$HOME/${file#"~/"}
    found=(${(f)"$(_call_program layouts ${(q)program} completion --layouts \\
        ${file:+-f ${(qq)${(Q)file}}} 2>/dev/null)"})
    compadd -a found
}

_mig_manager_products() {
    compadd -a mig_manager_products
}

_mig_manager_spec() {
    # What may stand before a product: others and a plus, and how many of it there are.
    compset -P '*+'
    compset -P '[0-9]##x'
    compadd -a mig_manager_products
}

_mig_manager() {
    local program=$words[1] curcontext=$curcontext state line
    typeset -A opt_args
    setopt localoptions extendedglob
"""
_AFTER = """\
    esac
}

if [[ $funcstack[1] == _mig-manager ]]; then
    _mig_manager "$@"
else
    compdef _mig_manager mig-manager
fi
"""
_ACTIONS = {
    placeholders.FILE: "_files",
    placeholders.FOLDER: "_files -/",
    placeholders.LAYOUT: "_mig_manager_layouts",
    placeholders.PRODUCT: "_mig_manager_products",
    placeholders.SPEC: "_mig_manager_spec",
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
        _BEFORE + f"    local -a mig_manager_products=({' '.join(products)})",
        "    local -a mig_manager_commands=(",
        *(
            f"        {_quoted(f'{each.name}:{_escaped(each.summary, colons=True)}')}"
            for each in commands
        ),
        "    )",
        "    _arguments -C \\",
        *(f"        {spec} \\" for spec in _specs(program)),
        "        '1:command:->command' '*::argument:->argument'",
        "    case $state in",
        "    command) _describe -t commands command mig_manager_commands ;;",
        "    argument)",
        "        case $words[1] in",
        *(line for command in commands for line in _case(command)),
        "        esac",
        "        ;;",
        _AFTER,
    ]
    return "\n".join(lines)


def _case(command: commandline.Command) -> Iterator[str]:
    yield f"        {command.name})"
    yield "            _arguments -s \\"
    specs = [*_specs(command), *_operands(command)]
    for spec in specs[:-1]:
        yield f"                {spec} \\"
    yield f"                {specs[-1]}"
    yield "            ;;"


def _specs(command: commandline.Command) -> Iterator[str]:
    for option in command.options:
        others = f"({' '.join(option.flags)})" if len(option.flags) > 1 else ""
        before = "*" if option.is_repeatable else others
        for flag in option.flags:
            yield _quoted(f"{before}{flag}{_value_of(option, flag)}")


def _value_of(option: commandline.Option, flag: str) -> str:
    told = f"[{_escaped(option.told)}]"
    if not option.placeholder:
        return told
    joint = "=" if flag.startswith("--") else "+"
    colon = "::" if option.is_value_optional else ":"
    return f"{joint}{told}{colon}{option.placeholder}:{_action(option)}"


def _operands(command: commandline.Command) -> Iterator[str]:
    for operand in command.operands:
        place = "*:" if operand.is_repeatable else "1::"
        yield _quoted(f"{place}{operand.placeholder}:{_action(operand)}")


def _action(value: commandline.Option | commandline.Operand) -> str:
    if value.words:
        return f"({' '.join(value.words)})"
    # A space: there is a value, and nobody knows it but the user.
    return _ACTIONS.get(value.placeholder, " ")


def _escaped(text: str, *, colons: bool = False) -> str:
    for special in ("\\", "[", "]", *([":"] if colons else [])):
        text = text.replace(special, f"\\{special}")
    return text


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
