"""Layers as text: a letter for each, as Nemotron-H has it, and ``|`` between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from kenotron_models.hf_rope import FULL, LINEAR

LETTERS: Mapping[str, str] = {
    "M": LINEAR,
    "*": FULL,
    "-": "mlp",
    "E": "moe",
}
"""Letter of a kind of layer -> Hugging Face's word for it in ``layers_block_type``."""
_OLD_WORDS = {"mamba": "M", "attention": "*"}


CUT = "|"
"""Separator of pipeline stages in a pattern."""


def split_pattern(pattern: str) -> tuple[str, tuple[int, ...]]:
    """Return the letters alone, and the layers (from 0) that begin a further stage."""
    parts = pattern.split(CUT)
    return "".join(parts), tuple(accumulate(len(part) for part in parts[:-1]))


def pattern_problems(name: str, pattern: str, letters: str) -> list[str]:
    """Name what is no pattern.

    Args:
        name: key of the pattern.
        pattern: a letter for each layer, with ``|`` between stages.
        letters: those that are known.
    """
    if not pattern.strip(CUT):
        return [f"{name}: {pattern!r} was given; it must have a letter of {letters!r} a layer"]
    found = [
        f"{name}: {letter!r} was given at place {place} of {pattern!r}; letters are {letters!r}"
        for place, letter in enumerate(pattern, 1)
        if letter not in letters + CUT
    ]
    around = f"{CUT}{pattern}{CUT}"
    empty = around.find(CUT * 2)
    if empty >= 0:
        found.append(
            f"{name}: {CUT!r} was given at place {max(empty, 1)} of {pattern!r}; there must be a "
            f"layer on each side of it: leave it out"
        )
    return found


def pattern_of(kinds: Sequence[str], name: str) -> str:
    """Return the pattern of Hugging Face's list of layers.

    Args:
        kinds: words for the layers.
        name: key of the list.

    Raises:
        ValueError: a word is none of theirs.
    """
    known = {word: letter for letter, word in LETTERS.items()} | _OLD_WORDS
    for place, kind in enumerate(kinds):
        if kind not in known:
            raise ValueError(
                f"{name}: {kind!r} was given for layer {place}; it must be one of "
                f"{', '.join(LETTERS.values())}"
            )
    return "".join(known[kind] for kind in kinds)


def small_pattern(pattern: str, layers: int) -> str:
    """Return a pattern of about so many layers that has each letter of this one, without cuts."""
    letters = split_pattern(pattern)[0]
    kinds = list(dict.fromkeys(letters))
    more = (letters * layers)[: max(layers - len(kinds), 0)]
    return "".join(kinds) + more
