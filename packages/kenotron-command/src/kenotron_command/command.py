"""``kenotron WORD ...``: find the word, and start the program that it belongs to."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from kenotron_command.completion import SHELLS, completion
from kenotron_command.frame import BAD_INPUT, OK, fail
from kenotron_command.word import Word, installed_words

HELP = ("-h", "--help")


def run() -> None:
    """Run the command line and end this process."""
    sys.exit(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status where the word's program returns."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        known = installed_words()
        if not words or words[0] in (*HELP, "help"):
            return _help(words[1:], known)
        if words[0] == "--version":
            print(f"kenotron-command {version('kenotron-command')}")
            return OK
        if words[0] == "completion":
            return _completion(words[1:], known)
        if words[0] not in known:
            return _unknown(words[0], known)
    except ValueError as error:
        return fail(str(error), BAD_INPUT)
    return _start(known[words[0]], words[1:])


def _start(word: Word, rest: list[str]) -> int:
    """Start a word's program, which reads ``sys.argv``."""
    sys.argv = ["kenotron", *word.before, *rest]
    asked = any(each in HELP for each in rest)
    try:
        status = word.load(word.run)()
    finally:
        if asked:
            print(f"\nexample:\n  {word.example}", flush=True)
    return status or OK


def _help(rest: list[str], known: Mapping[str, Word]) -> int:
    """Print all words, or the help of one."""
    if rest:
        if rest[0] not in known:
            return _unknown(rest[0], known)
        return _start(known[rest[0]], ["--help"])
    width = max([len("completion"), *map(len, known)])
    rows = {name: word.summary for name, word in known.items()}
    rows["completion"] = f"print what completes these commands in a shell ({', '.join(SHELLS)})"
    print("usage: kenotron COMMAND ...\n\ncommands, each with its own --help:")
    for name in sorted(rows):
        print(f"  {name:{width}}  {rows[name]}")
    if not known:
        print("  no program is installed that adds commands: pip install ./apps/train")
    return OK


def _completion(rest: list[str], known: Mapping[str, Word]) -> int:
    """Print the script of a shell."""
    if len(rest) != 1 or rest[0] not in SHELLS:
        text = f"completion {' '.join(rest)}: name one shell of {', '.join(SHELLS)}"
        return fail(text, BAD_INPUT)
    parsers = {name: word.flags() for name, word in known.items()}
    print(completion(rest[0], parsers, {name: word.summary for name, word in known.items()}))
    return OK


def _unknown(word: str, known: Mapping[str, Word]) -> int:
    near = difflib.get_close_matches(word, known, n=1)
    listed = ", ".join(known) or "none: no program is installed that adds commands"
    advice = f"; did you mean {near[0]}?" if near else ""
    return fail(f"there is no command {word!r}{advice} (commands: {listed})", BAD_INPUT)
