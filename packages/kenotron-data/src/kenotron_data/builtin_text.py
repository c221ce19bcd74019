"""The embedded corpus, or one of its domains, as a piece to tokenise."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kenotron_data.builtin import DEFAULT_LIMIT, builtin_documents
from kenotron_data.builtin_domains import BUILTIN_DOMAINS, VERSION
from kenotron_data.text_pieces import Row


@dataclass(frozen=True, kw_only=True)
class BuiltinText:
    """The embedded corpus as a piece to tokenise: a row is a module, or a document of a domain.

    Args:
        rows: the first documents that are read; None: all.
        domain: a name of `BUILTIN_DOMAINS`; None: the sources of all modules.
    """

    rows: int | None = None
    domain: str | None = None

    @property
    def size(self) -> int:
        """Bytes of the corpus, roughly."""
        return DEFAULT_LIMIT

    def __iter__(self) -> Iterator[Row]:
        """Yield the documents in order."""
        for place, text in enumerate(self._documents()):
            yield place, (text,)

    def describe(self, place: int) -> str:
        """Name the document by its number."""
        if self.domain is not None:
            return f"document {place} of {self.domain} of the standard library"
        return f"module {place} of the standard library"

    def identity(self) -> str:
        """Name the release of Python."""
        domain = "" if self.domain is None else f":{self.domain}:{VERSION}"
        return f"standard library of {sys.version}:{DEFAULT_LIMIT}:{self.rows}{domain}"

    def cut(self, size: int) -> "Sequence[BuiltinText]":
        """Return the corpus: it is not cut."""
        return [self]

    def count(self) -> int:
        """Return the number of documents."""
        return len(self._documents())

    def first(self, rows: int) -> "BuiltinText":
        """Return the corpus of the first documents."""
        return replace(self, rows=rows if self.rows is None else min(rows, self.rows))

    def _documents(self) -> list[str]:
        found = builtin_documents if self.domain is None else BUILTIN_DOMAINS[self.domain]
        return found()[: self.rows]
