"""The script for bash; it needs bash 4 and no library of completions."""

from collections.abc import Iterable, Iterator, Sequence

from mig_manager.cli import commandline, placeholders

_BEFORE = """\
# bash completion for mig-manager; made by 'mig-manager completion bash'.

_mig_manager_layouts() {
    local file='' position
    for ((position = 1; position < COMP_CWORD; position++)); do
        case ${COMP_WORDS[position]} in
        -f | --config-file)
            file=${COMP_WORDS[position + 1]}
            # Bash splits --config-file=FILE into three words.
            [[ $file != = ]] || file=${COMP_WORDS[position + 2]}
            ;;
        esac
    done
    # As typed, with a tilde that the shell has not yet seen.
    case $file in
    \\~/*) file=$HOME/${file:2} ;;
    esac
    "${COMP_WORDS[0]}" completion --layouts ${file:+-f "$file"} 2>/dev/null
}

_mig_manager_offer() {
    local lead=$1 value
    while IFS= read -r value; do
        [[ $lead$value != "$current"* ]] || COMPREPLY+=("$lead$value")
    done
}

_mig_manager_files() {
    local value
    while IFS= read -r value; do
        COMPREPLY+=("$value")
    done < <(compgen "-A" "$1" -- "$current")
    compopt -o filenames 2>/dev/null
}

_mig_manager() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
    local command='' flags='' want='' position
    COMPREPLY=()
    if [[ $current == = ]]; then
        current=
    elif [[ $previous == = ]]; then
        previous=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    for ((position = 1; position < COMP_CWORD; position++)); do
        if [[ ${COMP_WORDS[position]} != -* ]]; then
            command=${COMP_WORDS[position]}
            break
        fi
    done
"""
_AFTER = """\
    if [[ $want == operand:* && $current == -* ]]; then
        want="words:$flags"
    fi
    case ${want#operand:} in
    layouts) _mig_manager_offer "" < <(_mig_manager_layouts) ;;
    products) _mig_manager_offer "" <<<"${_mig_manager_products// /$'\\n'}" ;;
    spec)
        [[ $current =~ ^(.*\\+)?([0-9]+x)? ]]
        _mig_manager_offer "${BASH_REMATCH[0]}" <<<"${_mig_manager_products// /$'\\n'}"
        ;;
    file | directory) _mig_manager_files "${want#operand:}" ;;
    words:*)
        want=${want#operand:} want=${want#words:}
        _mig_manager_offer "" <<<"${want// /$'\\n'}"
        ;;
    esac
}

complete -F _mig_manager mig-manager
"""
_WANTS = {
    placeholders.FILE: "file",
    placeholders.FOLDER: "directory",
    placeholders.LAYOUT: "layouts",
    placeholders.PRODUCT: "products",
    placeholders.SPEC: "spec",
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
    names = " ".join(command.name for command in commands)
    lines = [
        f"_mig_manager_products='{' '.join(products)}'",
        "",
        _BEFORE + "    case $command in",
        "    '')",
        f"        flags='{_flags(program)}'",
        f"        want='operand:words:{names}'",
        "        ;;",
        *(line for command in commands for line in _case(command)),
        "    esac",
        _AFTER,
    ]
    return "\n".join(lines)


def _case(command: commandline.Command) -> Iterator[str]:
    yield f"    {command.name})"
    yield f"        flags='{_flags(command)}'"
    yield f"        want='operand:{_operand(command)}'"
    wants: dict[str, list[str]] = {}
    for option in command.options:
        if option.placeholder and not option.is_value_optional:
            wants.setdefault(_want(option), []).extend(option.flags)
    if wants:
        yield "        case $previous in"
        for want, flags in wants.items():
            yield f"        {' | '.join(flags)}) want='{want}' ;;"
        yield "        esac"
    yield "        ;;"


def _flags(command: commandline.Command) -> str:
    return " ".join(flag for option in command.options for flag in option.flags)


def _operand(command: commandline.Command) -> str:
    return _want(command.operands[0]) if command.operands else "nothing"


def _want(value: commandline.Option | commandline.Operand) -> str:
    if value.words:
        return f"words:{' '.join(value.words)}"
    return _WANTS.get(value.placeholder, "nothing")
