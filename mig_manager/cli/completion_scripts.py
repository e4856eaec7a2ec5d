"""Shell scripts that complete command lines of mig-manager; see ``toolkit.completer``."""

_BASH = """\
# bash completion for mig-manager; made by 'mig-manager completion bash'.

_mig_manager() {
    local line directive=:4 current=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
        :*) directive=$line ;;
        *) COMPREPLY+=("${line%%$'\\t'*}") ;;
        esac
    done < <("${COMP_WORDS[0]}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    [[ $current != = ]] || current=
    case $directive in
    :0) mapfile -t COMPREPLY < <(compgen -A file -- "$current") ;;
    :16) mapfile -t COMPREPLY < <(compgen -A directory -- "$current") ;;
    *) return ;;
    esac
    compopt -o filenames 2>/dev/null
}

complete -F _mig_manager mig-manager
"""
_ZSH = """\
#compdef mig-manager
# zsh completion for mig-manager; made by 'mig-manager completion zsh'.
# To be found by compinit as _mig-manager, or evaluated after it.

_mig_manager() {
    local line directive=:4
    local -a candidates
    for line in ${(f)"$(${(Q)words[1]} __complete "${(@Q)words[2,CURRENT]}" 2>/dev/null)"}; do
        case $line in
        :*) directive=$line ;;
        *) candidates+=("${${line//:/\\\\:}/$'\\t'/:}") ;;
        esac
    done
    case $directive in
    :0 | :16) [[ $PREFIX != --*=* ]] || compset -P '*=' ;|
    :0) _files ;;
    :16) _files -/ ;;
    *) _describe -t values value candidates -U ;;
    esac
}

if [[ $funcstack[1] == _mig-manager ]]; then
    _mig_manager "$@"
else
    compdef _mig_manager mig-manager
fi
"""
_FISH = """\
# fish completion for mig-manager; made by 'mig-manager completion fish'.

function __mig_manager
    set --local words (commandline --tokenize --cut-at-cursor --current-process)
    set --local current (commandline --cut-at-cursor --current-token)
    set --local candidates ($words[1] __complete $words[2..] "$current" 2>/dev/null)
    switch "$candidates[-1]"
        case :0
            __fish_complete_path $current
        case :16
            __fish_complete_directories $current
        case '*'
            string match --invert -- ':*' $candidates
    end
end

complete --command mig-manager --no-files --arguments '(__mig_manager)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
