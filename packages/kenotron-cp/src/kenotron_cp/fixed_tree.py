"""Combine values in a fixed binary tree, whatever the order in which they arrive.

Node (level, index) of the tree covers the strips from ``index << level`` on, ``1 << level`` of
them. Two neighbours are combined as soon as both are there, so few values are held at a time where
neighbours arrive one after the other, as they do in a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class FixedTree(Generic[T]):
    """Combines what arrives for a set of strips.

    Args:
        strips: the strips for which something arrives; the others are left out of the tree.
        top: level and index of the node whose value is wanted.
        combine: makes one value of two neighbours, the left one first; may overwrite them.
        hold: makes of a value one that may be held for long; None: every value may be.
    """

    def __init__(
        self,
        strips: Iterable[int],
        top: tuple[int, int],
        combine: Callable[[T, T], T],
        hold: Callable[[T], T] | None = None,
    ) -> None:
        self._strips, self._top, self._combine = frozenset(strips), top, combine
        self._hold = hold
        self._waiting: dict[tuple[int, int], T] = {}
        self._result: T | None = None

    def add(self, level: int, index: int, value: T) -> None:
        """Take the value of a node, and combine it as far up as its neighbours are there."""
        while (level, index) != self._top:
            sibling = index ^ 1
            if any(strip >> level == sibling for strip in self._strips):
                if (level, sibling) not in self._waiting:
                    self._waiting[level, index] = self._held(value)
                    return
                other = self._waiting.pop((level, sibling))
                pair = (value, other) if index < sibling else (other, value)
                value = self._combine(*pair)
            level, index = level + 1, index >> 1
        self._result = self._held(value)

    def _held(self, value: T) -> T:
        return value if self._hold is None else self._hold(value)

    def take(self) -> T | None:
        """Return the value of the top, which is forgotten; None if there were no strips.

        Raises RuntimeError when values are missing.
        """
        found, self._result = self._result, None
        if (found is None and self._strips) or self._waiting:
            raise RuntimeError(f"values of strips {sorted(self._strips)} have not all arrived")
        return found


def level_of(count: int) -> int:
    """Level of the lowest node that covers ``count`` strips."""
    return (count - 1).bit_length()
