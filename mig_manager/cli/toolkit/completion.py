"""Completion of command lines in bash, zsh and fish.

The scripts are made of the declarations of the options. What only a file knows, the layouts, they
ask the program for at the moment they are needed.
"""

from collections.abc import Iterator, Mapping

from mig_manager import errors
from mig_manager.catalogue import hardware
from mig_manager.cli.toolkit import help_pages, parser
from mig_manager.core import options


def answer(parsed: Mapping[str, object], environ: Mapping[str, str]) -> str:
    """Return the script, or the layouts that a script asks for.

    Raises:
        ConfigError: The document cannot be read.
        UsageError: No shell is named, or one without a script.
    """
    if not parsed.get("layouts"):
        shell = parsed.get("shell")
        if shell in _SCRIPTS:
            return _SCRIPTS[shell]()
        reason = f"no completion for {shell!r}" if shell else "name a shell"
        raise errors.UsageError(f"{reason}; there is one for {', '.join(_SCRIPTS)}")
    from mig_manager.adapters.host import files, process  # noqa: PLC0415 - only for layouts
    from mig_manager.cli.commands import settings as command_settings  # noqa: PLC0415 - only for layouts
    from mig_manager.core.layout import config  # noqa: PLC0415 - only for layouts

    name = command_settings.command_settings(parsed, environ).config_file
    # Standard input is the user's, who is still typing.
    source = files.ConfigFile(process.packaged_config() if name in (None, "-") else name)
    found = config.parse(source.read(), source=source.name).layouts
    return "".join(f"{each}\n" for each in found if parser.SAFE_WORD.fullmatch(each))


_OFFERS: Mapping[str, tuple[str, str, str]] = {
    options.FILE: ("file", "_files", "--require-parameter --force-files"),
    options.FOLDER: (
        "directory",
        "_files -/",
        "--exclusive --arguments '(__fish_complete_directories)'",
    ),
    options.LAYOUT: (
        "layouts",
        "_mig_manager_layouts",
        "--exclusive --arguments '(__mig_manager_layouts)'",
    ),
    options.PRODUCT: (
        "products",
        "_mig_manager_products",
        "--exclusive --arguments '$__mig_manager_products'",
    ),
    options.SPEC: ("spec", "_mig_manager_spec", "--exclusive --arguments '(__mig_manager_spec)'"),
}
"""What bash, zsh and fish offer for a value, by its metavar."""
_WORDS = ("words:{}", "({})", "--exclusive --arguments '{}'")  # for a value out of some words
_NOTHING = ("nothing", " ", "--exclusive")  # for a value that only the user knows
_IN_BASH, _IN_ZSH, _IN_FISH = range(3)


def _offer(option: options.Option, shell: int) -> str:
    if option.words:
        return _WORDS[shell].format(" ".join(option.words))
    return _OFFERS.get(option.metavar, _NOTHING)[shell]


# -- bash: version 4, without a library of completions -------------------------------------------

_BASH = """\
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
    # As typed, with a tilde that the shell has not yet expanded.
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

_mig_manager_products() {
    local lead=$1 value
    # Products in any case become what the help writes.
    while IFS= read -r value; do
        [[ ${lead,,}${value,,} != "${current,,}"* ]] || COMPREPLY+=("$lead$value")
    done <<<"${_mig_manager_products// /$'\\n'}"
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
    case $command in
@CASES@
    esac
    if [[ $want == operand:* && $current == -* ]]; then
        want="words:$flags"
    fi
    case ${want#operand:} in
    layouts) _mig_manager_offer "" < <(_mig_manager_layouts) ;;
    products) _mig_manager_products "" ;;
    spec)
        [[ $current =~ ^(.*\\+)?([0-9]+[xX])? ]]
        _mig_manager_products "${BASH_REMATCH[0]}"
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


def _bash() -> str:
    cases: list[str] = []
    for command in ("", *parser.COMMANDS):
        found, operands = parser.flagged(command), parser.operands_of(command)
        operand = f"words:{' '.join(parser.COMMANDS)}"
        if command:
            operand = _offer(operands[0], _IN_BASH) if operands else "nothing"
        cases += [
            f"    {command or _shell_quoted('')})",
            f"        flags='{' '.join(flag for option in found for flag in option.flags)}'",
            f"        want='operand:{operand}'",
        ]
        flags: dict[str, list[str]] = {}
        for option in found:
            if option.metavar and not option.is_value_optional:
                flags.setdefault(_offer(option, _IN_BASH), []).extend(option.flags)
        if flags:
            wants = (
                f"        {' | '.join(each)}) want='{want}' ;;" for want, each in flags.items()
            )
            cases += ["        case $previous in", *wants, "        esac"]
        cases.append("        ;;")
    products = f"_mig_manager_products='{' '.join(hardware.product_names())}'"
    return f"{products}\n\n" + _BASH.replace("@CASES@", "\n".join(cases))


def _shell_quoted(text: str) -> str:
    """Quote for bash and zsh; their quotes end before an apostrophe and begin again after it."""
    return "'" + text.replace("'", "'\\''") + "'"


# -- zsh: its own system of completions ----------------------------------------------------------

_ZSH = """\
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
    # As typed, with a tilde that the shell has not yet expanded.
    [[ $file != "~/"* ]] || file=$HOME/${file#"~/"}
    found=(${(f)"$(_call_program layouts ${(q)program} completion --layouts \\
        ${file:+-f ${(qq)${(Q)file}}} 2>/dev/null)"})
    compadd -a found
}

_mig_manager_products() {
    # Products in any case become what the help writes.
    compadd -M 'm:{a-zA-Z}={A-Za-z}' -a mig_manager_products
}

_mig_manager_spec() {
    # What may stand before a product: others and a plus, and how many of it there are.
    compset -P '*+'
    compset -P '[0-9]##[xX]'
    _mig_manager_products
}

_mig_manager() {
    local program=$words[1] curcontext=$curcontext state line
    typeset -A opt_args
    setopt localoptions extendedglob
    local -a mig_manager_products=(@PRODUCTS@)
    local -a mig_manager_commands=(
@COMMANDS@
    )
    _arguments -C \\
@PROGRAM@
        '1:command:->command' '*::argument:->argument'
    case $state in
    command) _describe -t commands command mig_manager_commands ;;
    argument)
        case $words[1] in
@CASES@
        esac
        ;;
    esac
}

if [[ $funcstack[1] == _mig-manager ]]; then
    _mig_manager "$@"
else
    compdef _mig_manager mig-manager
fi
"""


def _zsh() -> str:
    summaries = (
        _shell_quoted(f"{name}:{_zsh_escaped(help_pages.text(name).summary, colons=True)}")
        for name in parser.COMMANDS
    )
    cases = (
        f"        {name})\n            _arguments -s \\\n                "
        + " \\\n                ".join(_zsh_specs(name))
        + "\n            ;;"
        for name in parser.COMMANDS
    )
    return (
        _ZSH.replace("@PRODUCTS@", " ".join(hardware.product_names()))
        .replace("@COMMANDS@", "\n".join(f"        {each}" for each in summaries))
        .replace("@PROGRAM@", "\n".join(f"        {spec} \\" for spec in _zsh_specs("")))
        .replace("@CASES@", "\n".join(cases))
    )


def _zsh_specs(command: str) -> Iterator[str]:
    for option in parser.flagged(command):
        others = f"({' '.join(option.flags)})" if len(option.flags) > 1 else ""
        before = "*" if option.is_repeatable else others
        help_text = f"[{_zsh_escaped(option.help)}]"
        colon = "::" if option.is_value_optional else ":"
        value = f"{colon}{option.metavar}:{_offer(option, _IN_ZSH)}"
        for flag in option.flags:
            joint = "=" if flag.startswith("--") else "+"
            after = f"{joint}{help_text}{value}" if option.metavar else help_text
            yield _shell_quoted(f"{before}{flag}{after}")
    for operand in parser.operands_of(command):
        position = "*:" if operand.is_repeatable else "1::"
        yield _shell_quoted(f"{position}{operand.metavar}:{_offer(operand, _IN_ZSH)}")


def _zsh_escaped(text: str, *, colons: bool = False) -> str:
    for special in ("\\", "[", "]", *([":"] if colons else [])):
        text = text.replace(special, f"\\{special}")
    return text


# -- fish ----------------------------------------------------------------------------------------

_FISH = """\
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

function __mig_manager_layouts --description 'The layouts of the document on the command line'
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
    # As typed, with a tilde that the shell has not yet expanded.
    set file (string replace --regex '^~/' "$HOME/" -- $file)
    $words[1] completion --layouts $file 2>/dev/null
end

function __mig_manager_spec --description 'Simulated GPUs, such as 8xPRODUCT+2xPRODUCT'
    set --local begun (commandline --current-token)
    set --local lead (string match --regex -- '^(?:.*\\+)?(?:[0-9]+[xX])?' $begun)
    printf "$lead%s\\n" $__mig_manager_products
end

complete --command mig-manager --no-files
"""


def _fish() -> str:
    names = " ".join(hardware.product_names())
    lines = [f"{_FISH}set --global __mig_manager_products {names}", *_fish_options("")]
    lines += [
        f"{_fish_start('')} --arguments {name} "
        f"--description {_fish_quoted(help_pages.text(name).summary)}"
        for name in parser.COMMANDS
    ]
    lines += [line for name in parser.COMMANDS for line in _fish_options(name)]
    return "\n".join(lines) + "\n"


def _fish_start(command: str) -> str:
    condition = _fish_quoted(f'__mig_manager_is "{command}"')
    return f"complete --command mig-manager --condition {condition}"


def _fish_options(command: str) -> Iterator[str]:
    for option in parser.flagged(command):
        names = " ".join(
            f"--{'long' if flag[1] == '-' else 'short'}-option {flag.lstrip('-')}"
            for flag in option.flags
        )
        has_value = option.metavar and not option.is_value_optional
        value = _offer(option, _IN_FISH) if has_value else ""
        parts = (_fish_start(command), names, value, "--description", _fish_quoted(option.help))
        yield " ".join(filter(None, parts))
    for operand in parser.operands_of(command):
        if operand.words or operand.metavar in _OFFERS:
            offer = _offer(operand, _IN_FISH).removeprefix("--exclusive ")
            yield f"{_fish_start(command)} {offer}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
