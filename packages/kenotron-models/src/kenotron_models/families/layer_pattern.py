"""Layers as text: a letter for each, as Nemotron-H writes its patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LETTERS: Mapping[str, str] = {
    "M": "linear_attention",
    "*": "full_attention",
    "-": "mlp",
    "E": "moe",
}
"""Letter of a kind of layer -> Hugging Face's word for it in ``layers_block_type``."""
_OLD_WORDS = {"mamba": "M", "attention": "*"}


def pattern_problems(name: str, pattern: str, letters: str) -> list[str]:
    """Name what is no pattern.

    Args:
        name: key of the pattern.
        pattern: a letter for each layer.
        letters: those that are known.
    """
    if not pattern:
        return [f"{name}: '' was given; it must have a letter of {letters!r} for each layer"]
    return [
        f"{name}: {letter!r} was given at place {place} of {pattern!r}; letters are {letters!r}"
        for place, letter in enumerate(pattern, 1)
        if letter not in letters
    ]


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
    """Return a pattern of about so many layers that has each letter of this one, in order."""
    kinds = list(dict.fromkeys(pattern))
    more = (pattern * layers)[: max(layers - len(kinds), 0)]
    return "".join(kinds) + more
