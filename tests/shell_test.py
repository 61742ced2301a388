#!/usr/bin/env python3
"""Checks that the man page and the bash and zsh completions contain every command and option of --help.

usage: shell_test.py PROGRAM MAN_PAGE COMPLETION_FOLDER
"""
import os
import re
import shutil
import subprocess
import sys

PROGRAM, PAGE, SHELL = (os.path.abspath(path) for path in sys.argv[1:4])

BASH = """
source "$SHELL_FILES/flatkv.bash"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_flatkv
printf '%s\\n' "${COMPREPLY[@]}"
"""
# Stubs of the zsh completion functions that the script calls; they print the candidates.
ZSH = """
_describe() { print -rl -- ${${(P)2}%%:*} }
_files() { print -rl -- *(N) }
words=("$@"); CURRENT=$#
offer() { source "$SHELL_FILES/_flatkv" }
offer
"""


def output(*command, folder=None):
    environment = dict(os.environ, SHELL_FILES=SHELL)
    return subprocess.run(command, check=True, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE).stdout.decode()


def offered(shell, *words):
    text = {"bash": BASH, "zsh": ZSH}[shell]
    flags = ["--norc"] if shell == "bash" else ["-f"]
    return set(output(shell, *flags, "-c", text, shell, PROGRAM, *words, folder=SHELL).split("\n")) - {""}


def commands():
    """Yields every command, and every subcommand with its own --help."""
    for name in re.findall(r"^  ([a-z]+) ", output(PROGRAM, "--help"), re.MULTILINE):
        yield (name,)
        for inner in re.findall(rf"flatkv {name} ([a-z]+) --help", output(PROGRAM, name, "--help")):
            yield name, inner


def options_of(text):
    return set(re.findall(r"^ +(?:-\w, )?(--[a-z][a-z-]*)", text, re.MULTILINE))


def check(what, expected, got):
    assert expected and expected <= got, f"{what}: {sorted(expected - got)} missing from {sorted(got)}"


def check_page():
    with open(PAGE, encoding="utf-8") as file:
        text = file.read()
    sections = dict(re.findall(r"^\.SS flatkv ([a-z ]+)\n(.*?)(?=^\.S[SH])", text, re.MULTILINE | re.DOTALL))
    for command in commands():
        options = options_of(output(PROGRAM, *command, "--help"))
        section = sections[" ".join(command)].replace("\\-", "-")
        found = set(re.findall(r"^\.B (?:-\w, )?(--[a-z-]+)", section, re.MULTILINE))
        assert options == found, (command, options ^ found)
    assert re.search(r"^\.SH GLOSSARY\n(?:\.TP\n\.B .*\n.+\n){10}", text, re.MULTILINE), "the man page has no glossary"


def check_completion(shell):
    every = list(commands())
    check(shell, {command[0] for command in every}, offered(shell, ""))
    check(shell, {"niah"}, offered(shell, "n") if shell == "bash" else offered(shell, ""))
    for command in every:
        options = options_of(output(PROGRAM, *command, "--help"))
        if options:
            check(f"{shell}: {command}", options, offered(shell, *command, "-"))
        if len(command) == 2:
            check(f"{shell}: {command[0]}", {command[1]}, offered(shell, command[0], ""))
    check(shell, {"cpu", "mlx"}, offered(shell, "run", "--device", ""))
    check(shell, {"needle", "smollm2"}, offered(shell, "run", "-m", ""))
    codecs = offered(shell, "run", "--codecs", "")
    check(shell, {"sealed", "8/4", "16/16"}, codecs)
    for codec in codecs:  # the program accepts every candidate, and no candidate is a file name
        output(PROGRAM, "plan", "--layers", "2", "--heads", "8/2/128", "-c", "256", "--codecs", codec)
    check(shell, {"verify", "show"}, offered(shell, "pages", ""))
    check(shell, {"man_page"}, offered(shell, "pages", "verify", ""))  # completes file names


def main():
    check_page()
    check_completion("bash")
    if shutil.which("zsh"):
        check_completion("zsh")
    else:
        print("zsh is not installed: its completion was not tested")
    print(f"{len(list(commands()))} commands are in the man page and in the completions")


if __name__ == "__main__":
    main()
