"""Scripts that complete the words and flags of the command in bash, zsh and fish."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

SHELLS = ("bash", "zsh", "fish")
_BASH = """\
# kenotron: source this file, for instance from ~/.bashrc
_kenotron() {{
    local word="${{COMP_WORDS[1]}}" current="${{COMP_WORDS[COMP_CWORD]}}"
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{words}" -- "$current"))
        return
    fi
    case "$word" in
{cases}
    esac
}}
complete -o default -F _kenotron kenotron"""
_BASH_CASE = """\
        {name}) COMPREPLY=($(compgen -W "{flags}" -- "$current")) ;;"""


def completion(shell: str, parsers: Mapping[str, Any], summaries: Mapping[str, str]) -> str:
    """Return the script for a shell.

    Args:
        shell: one of ``SHELLS``.
        parsers: the ``argparse.ArgumentParser`` of each word.
        summaries: a line about each word.
    """
    flags = {name: sorted(set(flags_of(parser))) for name, parser in parsers.items()}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](flags, summaries)


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the flags of a parser and of its subcommands, and the names of these."""
    for action in parser._actions:
        yield from (each for each in action.option_strings if each.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield name
                yield from flags_of(inner)


def _bash(flags: Mapping[str, list[str]], summaries: Mapping[str, str]) -> str:
    cases = [_BASH_CASE.format(name=name, flags=" ".join(each)) for name, each in flags.items()]
    return _BASH.format(words=" ".join(flags), cases="\n".join(cases))


def _zsh(flags: Mapping[str, list[str]], summaries: Mapping[str, str]) -> str:
    words = " ".join(f"'{name}:{_quoted(summaries[name])}'" for name in flags)
    cases = "\n".join(f"    {name}) compadd -- {' '.join(each)} ;;" for name, each in flags.items())
    return (
        "#compdef kenotron\n# source this file after compinit\n"
        "_kenotron() {\n  local -a known\n  if ((CURRENT == 2)); then\n"
        f"    known=({words})\n    _describe word known\n    return\n  fi\n"
        f"  case $words[2] in\n{cases}\n  esac\n  _files\n}}\ncompdef _kenotron kenotron"
    )


def _fish(flags: Mapping[str, list[str]], summaries: Mapping[str, str]) -> str:
    lines = ["# kenotron: put this file into ~/.config/fish/completions as kenotron.fish"]
    for name, each in flags.items():
        lines.append(
            f"complete -c kenotron -n __fish_use_subcommand -f -a {name} "
            f"-d '{_quoted(summaries[name])}'"
        )
        inside = f"complete -c kenotron -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{inside} -l {flag[2:]}" for flag in each if flag.startswith("--")]
        lines += [f"{inside} -a {word}" for word in each if not word.startswith("--")]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Text between single quotes of a shell."""
    return text.replace("'", "'\\''")
