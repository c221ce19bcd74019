"""Sizes of a narrow copy of a model, of the same structure: what a config is made small by."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.rope_scaling import RopeScaling

SHORTEST = 32
"""Tokens that a limit beyond the whole sample has at least."""
WIDEST = 4.0
"""Most that the feed-forward is wider than the residual stream."""
SHORTEST_ORIGINAL = 16
"""Tokens of the first training of a stretched model: there are waves that stay, and that grow."""


@dataclass(frozen=True, kw_only=True)
class SmallSizes:
    """Sizes that a config takes for its own in ``small``; relations that code looks at stay."""

    layers: int
    """Blocks."""
    period: int
    """Every n-th block has no positions, where any has none."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Most features of a head."""
    vocab_size: int
    """Token numbers."""
    tp: int
    """Ranks that the feed-forward is cut over."""
    sequence: int
    """Tokens of a sample before."""
    small_sequence: int
    """Tokens of a sample after."""
    ep: int = 1
    """Ranks that share the experts."""

    def length(self, tokens: int) -> int:
        """Return a number of tokens in proportion to the samples."""
        return max(1, tokens * self.small_sequence // self.sequence)

    def reach(self, tokens: int) -> int:
        """Return a window or a limit: one beyond the whole sample stays beyond it."""
        if tokens < self.sequence:
            return self.length(tokens)
        return max(self.small_sequence, SHORTEST)

    def window(self, tokens: int | None) -> int | None:
        """Return a window as ``reach`` does; none stays none."""
        return None if tokens is None else self.reach(tokens)

    def inner(self, features: int, width: int, small_width: int) -> int:
        """Return the width of a feed-forward, in proportion to that of the residual stream."""
        ratio = min(features / width, WIDEST)
        return self.tp * max(1, round(ratio * small_width / self.tp))

    def some_layers(self, layers: Collection[int], depth: int) -> tuple[int, ...]:
        """Return blocks that are unlike the others, in proportion: some stay, and not all.

        Args:
            layers: their numbers from 0.
            depth: number of blocks before.
        """
        inside = sorted({i for i in layers if i < depth})
        if len(inside) == depth:
            return tuple(range(self.layers))
        moved = sorted({i * self.layers // depth for i in inside})
        return tuple(moved[: self.layers - 1] if self.layers > 1 else moved)

    def scaling(self, scaling: RopeScaling | None) -> RopeScaling | None:
        """Return stretching around the shorter length: some waves stay, some grow."""
        if scaling is None:
            return None
        original = max(self.length(scaling.original_max_position_embeddings), SHORTEST_ORIGINAL)
        original = min(original, scaling.original_max_position_embeddings)
        values: dict[str, Any] = {"original_max_position_embeddings": original}
        if scaling.rope_type == "yarn":  # bounds are turns over that length, of which there are few
            values["beta_fast"] = max(min(scaling.beta_fast, original / 8), 1.5 * scaling.beta_slow)
        return replace(scaling, **values)
