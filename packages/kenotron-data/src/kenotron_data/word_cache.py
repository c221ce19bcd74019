"""Byte-level BPE by looking words up: the ids of a word are computed once, not at each place.

Most of a tokenizer's time goes into finding words and their merges. Where its words are those of a
regular expression that `re` has too, they are found by `re` and looked up here, with equal ids. A
document for which that is not certain is encoded by the tokenizer itself.
"""

import array
import itertools
import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_OTHER = re.compile(r"\[\^((?:\\[srn])*)\\p\{L\}\\p\{N\}\]")
_MOST_WORDS = 1 << 18
_LONGEST_WORD = 64
_COMPARED = 64
"""Documents that are encoded both ways at first."""
_LONGEST_REST = 1024
_PROBES = ("{}", "a{}", "{}a", "1{}", "{}1", " {}", "{} ", ".{}", "{}.", "{}{}", "\n{}", "{}\n")
_PROBES += ("_{}", "{}_", "'{}", "'l{}", "'r{}", "'v{}", " {}{}a", "{}1111", "  {}", "{}  a")
_KINDS = "a1.' \n_"


def word_cache(backend: Any) -> "WordCache | None":
    """Make a cache for a `tokenizers.Tokenizer`; None where its words are not known to be `re`'s.

    That they are is tried on all strings of up to four characters of several kinds.
    """
    described = json.loads(backend.to_str())
    model, normalizer = described["model"], described["normalizer"]
    pattern = _pattern(described["pre_tokenizer"])
    if model.get("type") != "BPE" or model.get("dropout") or pattern is None:
        return None
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    tries = ("".join(kinds) for n in range(1, 5) for kinds in itertools.product(_KINDS, repeat=n))
    if not all(_same_words(backend, pattern, text) for text in tries):
        return None
    added = [token["content"] for token in described["added_tokens"]]
    return WordCache(backend, pattern, added, composes=normalizer is not None)


class WordCache:
    """The ids of words that have come before.

    Args:
        backend: `tokenizers.Tokenizer`.
        pattern: finds the words.
        added: tokens that are found before words are.
        composes: whether the text is normalised to NFC first.
    """

    def __init__(
        self, backend: Any, pattern: re.Pattern[str], added: Sequence[str], composes: bool
    ) -> None:
        self._backend, self._pattern, self._composes = backend, pattern, composes
        self._words = _Words(backend.model)
        found = "|".join(map(re.escape, sorted(filter(None, added))))
        self._added = re.compile(found) if found else None
        self._safe: dict[str, bool] = {}
        self._unsafe_ascii = [c for c in map(chr, range(128)) if not self._is_safe(c)]
        self._to_compare, self._pause, self._resting = _COMPARED, 8, 0

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        """Let another process fill a cache of its own."""
        return word_cache, (self._backend,)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32] | None]:
        """Return the ids of each text; None for one that the tokenizer shall encode itself."""
        if self._resting:
            self._resting -= 1
            return [None] * len(texts)
        before, words = self._words.misses, self._words.__getitem__
        found: list[NDArray[np.uint32] | None] = []
        characters = 1
        for text in texts:
            if not self._covers(text):
                found.append(None)
                continue
            characters += len(text)
            ids = b"".join(map(words, self._pattern.findall(text)))
            found.append(np.frombuffer(ids, dtype=np.uint32))
        if self._to_compare:
            self._compare(texts, found)
        if 8 * (self._words.misses - before) > characters:  # as in text without spaces
            self._resting, self._pause = self._pause, min(2 * self._pause, _LONGEST_REST)
        return found

    def _covers(self, text: str) -> bool:
        """Say whether `re` finds the tokenizer's words in a text."""
        if text.isascii():
            covered = not any(c in text for c in self._unsafe_ascii)
        else:
            covered = all(map(self._is_safe, set(text)))
        return covered and not (self._added and self._added.search(text))

    def _is_safe(self, character: str) -> bool:
        """Say whether a character is of one kind to `re` and to the tokenizer."""
        known = self._safe.get(character)
        if known is None:
            tries = (probe.replace("{}", character) for probe in _PROBES)
            known = not (self._composes and _may_compose(self._backend, character)) and all(
                _same_words(self._backend, self._pattern, text) for text in tries
            )
            self._safe[character] = known
        return known

    def _compare(self, texts: Sequence[str], found: list[NDArray[np.uint32] | None]) -> None:
        """Encode the first documents both ways; a difference ends the use of the cache."""
        for place, ids in enumerate(found):
            if ids is None or not self._to_compare:
                continue
            self._to_compare -= 1
            exact = self._backend.encode(texts[place], add_special_tokens=False).ids
            if ids.tolist() != exact:
                found[:] = [None] * len(found)
                self._resting = 1 << 62
                return


class _Words(dict[str, bytes]):
    """The ids of words, as the bytes of uint32; `misses` counts characters that were not there."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model, self.misses = model, 0
        self._letters = _byte_letters()

    def __missing__(self, word: str) -> bytes:
        self.misses += len(word)
        written = "".join([self._letters[byte] for byte in word.encode("utf-8")])
        ids = array.array("I", [token.id for token in self._model.tokenize(written)]).tobytes()
        if len(word) <= _LONGEST_WORD:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids


def _pattern(described: Any) -> re.Pattern[str] | None:
    """Return the expression of a pre-tokenizer for `re`; None where it is of another kind."""
    if not described:
        return None
    steps = described["pretokenizers"] if described["type"] == "Sequence" else [described]
    last = steps[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return _translated(_GPT2) if last["use_regex"] else None
    if len(steps) != 2 or last["use_regex"] or steps[0]["type"] != "Split":
        return None
    split = steps[0]
    if split["behavior"] != "Isolated" or split["invert"] or "Regex" not in split["pattern"]:
        return None
    return _translated(split["pattern"]["Regex"])


def _translated(pattern: str) -> re.Pattern[str] | None:
    """Write `\\p{L}` and `\\p{N}` for `re`: letters and digits, but for characters found unsafe."""
    pattern = _OTHER.sub(r"(?:[^\1\\w]|_)", pattern)
    pattern = pattern.replace(r"\p{L}", r"[^\W\d_]").replace(r"\p{N}", r"\d")
    try:
        return None if r"\p" in pattern or re.search(r"\((?!\?)", pattern) else re.compile(pattern)
    except re.error:
        return None


def _same_words(backend: Any, pattern: re.Pattern[str], text: str) -> bool:
    """Say whether `re` cuts a text where the tokenizer does."""
    theirs = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    return theirs == [found.span() for found in pattern.finditer(text)]


def _may_compose(backend: Any, character: str) -> bool:
    """Say whether NFC changes a character, alone or after another one."""
    kind = unicodedata.category(character)
    return (
        kind == "Cn"
        or kind.startswith("M")
        or "\u1100" <= character <= "\u11ff"
        or backend.normalizer.normalize_str(character) != character
    )


def _byte_letters() -> list[str]:
    """Return the letter that byte-level tokenizers write for each byte."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]
