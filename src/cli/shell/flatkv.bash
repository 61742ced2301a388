# bash completion for flatkv. Commands, options and choices are read from the program's --help, so they are always up to date.

# Prints the --help text of the subcommand if there is one, otherwise that of the command.
_flatkv_help() { # program command word
    local help inner
    help=$("$1" "$2" --help 2>/dev/null)
    if inner=$("$1" "$2" "$3" --help 2>/dev/null) && [ "${inner%%[!a-z]*}" = usage ]; then help=$inner; fi
    printf '%s\n' "$help"
}

_flatkv() {
    local program=${COMP_WORDS[0]} command=${COMP_WORDS[1]} current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    local words help choices
    COMPREPLY=()
    if [ "$COMP_CWORD" = 1 ]; then
        words="$("$program" --help 2>/dev/null | sed -n 's/^  \([a-z]\{1,\}\) .*/\1/p') --help --version"
        # shellcheck disable=SC2207 # the words contain only letters
        COMPREPLY=($(compgen -W "$words" -- "$current"))
        return
    fi
    help=$(_flatkv_help "$program" "$command" "${COMP_WORDS[2]}")
    case $before in
    --codecs) choices="sealed calibrated 16/16 8/8 8/4 4/4 tq4 tq3 tq2" ;;
    -*) choices=$(sed -n "s/^  .*$before \([^ ]*|[^ ]*\).*/\1/p" <<<"$help" | tr '|' ' ') ;;
    esac
    case $before in
    -m | --model) words=$("$program" models --names 2>/dev/null) ;;
    *) words=$choices ;;
    esac
    [ "$command $COMP_CWORD" = "pull 2" ] && words=$("$program" models --names 2>/dev/null)
    if [ -z "$words" ] && [ "$COMP_CWORD" = 2 ]; then
        words=$("$program" "$command" --help 2>/dev/null | sed -n "s/^[a-z: ]*flatkv $command \([a-z]\{1,\}\) .*/\1/p")
    fi
    case $current in
    -*) words="$(sed -n 's/^  \(-[a-zA-Z], \)\{0,1\}\(--[a-z-]*\).*/\2/p' <<<"$help") --help" ;;
    esac
    # shellcheck disable=SC2207
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [ -n "$choices" ] || [ "${current#-}" != "$current" ] || COMPREPLY+=($(compgen -f -- "$current"))
}

complete -o filenames -F _flatkv flatkv
