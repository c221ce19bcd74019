"""Four domains made from what a running Python has, for examples of mixtures: no download.

They are the same for every run of one Python release, not between releases.
"""

import inspect
import re
import unicodedata
from collections.abc import Callable, Mapping
from types import MappingProxyType

from kenotron_data.builtin import builtin_documents

VERSION = 1
"""Number of the rules below, part of the key under which tokens are kept."""
LINES = 50
"""Lines of a document of names or sums."""
SUMS = 30_000
"""Lines of sums."""
CHARACTERS = 1 << 16
"""Characters whose names are read: the first plane of Unicode."""
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
"""A string in three quotation marks."""
COMMENT = re.compile(r"^\s*#.*\n", re.MULTILINE)
"""A line that is a comment."""
BY_RULE = ("CJK UNIFIED", "HANGUL SYLLABLE")
"""Beginnings of names that a rule gives, tens of thousands of them."""


def prose_documents() -> list[str]:
    """Docstrings of the standard library, a document for each module that has any."""
    found = []
    for source in builtin_documents():
        texts = [inspect.cleandoc(each) for each in DOCSTRING.findall(source)]
        if text := "\n\n".join(filter(None, texts)):
            found.append(text + "\n")
    return found


def code_documents() -> list[str]:
    """Sources of the standard library without docstrings and lines of comments."""
    bare = (COMMENT.sub("", DOCSTRING.sub("", source)) for source in builtin_documents())
    return [text for text in bare if text.strip()]


def name_documents() -> list[str]:
    """Names of Unicode characters, one a line with its number."""
    named = ((place, unicodedata.name(chr(place), "")) for place in range(CHARACTERS))
    kept = [(place, name) for place, name in named if name and not name.startswith(BY_RULE)]
    return _of_lines([f"{place:04X} {name}\n" for place, name in kept])


def sum_documents() -> list[str]:
    """Sums of two numbers below 1,000, one a line."""
    pairs = ((i * (7919 * i + 1) % 997, i * (5 * i + 31) % 991) for i in range(SUMS))
    return _of_lines([f"{a} + {b} = {a + b}\n" for a, b in pairs])


BUILTIN_DOMAINS: Mapping[str, Callable[[], list[str]]] = MappingProxyType(
    {
        "prose": prose_documents,
        "code": code_documents,
        "names": name_documents,
        "sums": sum_documents,
    }
)
"""Documents of each domain by its name; a config calls one `python-stdlib/prose`, for instance."""


def _of_lines(lines: list[str]) -> list[str]:
    return ["".join(lines[start : start + LINES]) for start in range(0, len(lines), LINES)]
