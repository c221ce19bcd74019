"""A word of the command, as a program adds it, and all that are installed."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

GROUP = "kenotron.words"
"""Group of entry points: ``train = "kenotron_train.words:TRAIN"``."""


@dataclass(frozen=True)
class Word:
    """A word of the command: ``kenotron train``.

    The module that holds it imports nothing heavy: it is read whenever words are listed.
    """

    summary: str
    """What it does, in a line."""
    example: str
    """Arguments of a call that works, shown below its help."""
    run: str
    """``module:function``, called as the program's own start: it reads ``sys.argv``."""
    parser: str
    """``module:function``, which returns the ``argparse.ArgumentParser`` of the word."""
    before: tuple[str, ...] = ()
    """Arguments that come before those that were given."""

    def load(self, what: str) -> Callable[..., Any]:
        """Import a function that is named as ``module:function``."""
        module, _, name = what.partition(":")
        return getattr(importlib.import_module(module), name)

    def flags(self) -> argparse.ArgumentParser:
        """Import and return the parser of the word alone, where it is a subcommand of a program."""
        parser = self.load(self.parser)()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and self.before:
                return action.choices.get(self.before[0], parser)
        return parser


def installed_words() -> dict[str, Word]:
    """Import the words of all programs that are installed, by name, in alphabetical order.

    Raises:
        ValueError: two programs have the same word; names both.
    """
    found: dict[str, Word] = {}
    owners: dict[str, str] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        if owners.setdefault(entry.name, entry.value) != entry.value:
            raise ValueError(
                f"the word {entry.name} is that of {owners[entry.name]} and of {entry.value}: "
                "uninstall one of the two programs"
            )
        found[entry.name] = entry.load()
    return found


def called(program: str, words: Sequence[str] = (), *, name: str = "kenotron") -> str:
    """Return what a program is called in its help and its errors.

    Args:
        program: its name where it was started neither by this command nor as ``name``.
        words: a subcommand, which is a word of this command as well; or flags.
        name: name of its own script, and after the hyphen its word here; by default its words are
            its subcommands.

    Returns:
        ``kenotron verify``, ``kenotron-train verify`` or ``python apps/train verify``.
    """
    own = Path(sys.argv[0]).name
    if own == "kenotron" != name:
        is_word = bool(words) and not words[0].startswith("-")
        return " ".join([own, *([] if is_word else [name.removeprefix("kenotron-")]), *words])
    return " ".join([own if own == name else program, *words])
