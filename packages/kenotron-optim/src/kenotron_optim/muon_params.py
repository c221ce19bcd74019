"""Parts of a model's tensors that are matrices for Muon (Jordan et al., 2024).

Shapes: E experts, O output and I input features.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kenotron_dist import MATRICES
from kenotron_dist.placement import Chunk, Fused, TensorLayout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class MatrixPart:
    """A matrix within a logical tensor."""

    name: str
    """Logical name of the tensor."""
    start: Shape
    """Its first index in the tensor, per dimension."""
    shape: Shape
    """Its elements along each dimension of the tensor."""

    @property
    def rows(self) -> int:
        """O."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """I."""
        return self.shape[-1]


def matrix_parts(
    layouts: Mapping[str, TensorLayout], exclude: Sequence[str] = (), *, per_head: bool = False
) -> dict[str, list[MatrixPart]]:
    """Return the matrices inside the model by logical name, without the excluded tensors.

    These are the tensors (O, I), and the stacks of experts (E, O, I), whose role is one of
    ``kenotron_dist.MATRICES``: no tables and no output layer. Each chunk of a placement, such as q,
    k and v, and each size of a ``Fused`` one is a matrix, and so is each expert.

    Args:
        layouts: of the whole model. Pure: the result is the same on every rank and layout.
        exclude: regular expressions for whole names that stay with the other optimizer.
        per_head: whether each of the ``parts`` of a chunk (a head) is a matrix.

    Raises:
        ValueError: no name matches a pattern, or no matrix is left.
    """
    tensors = {layout.name: layout for layout in layouts.values()}
    for pattern in exclude:
        if not any(re.fullmatch(pattern, name) for name in tensors):
            raise ValueError(
                f"no parameter is named by {pattern!r}, which shall be left to AdamW "
                "(adamw_named_params): a pattern must match a whole name"
            )
    found = {
        name: list(_parts(layout, per_head))
        for name, layout in sorted(tensors.items())
        if layout.role in MATRICES
        and (len(layout.shape) == 2 or _is_stack(layout))
        and not any(re.fullmatch(pattern, name) for pattern in exclude)
    }
    if not found:
        raise ValueError("no matrix is left for Muon: take AdamW, or exclude less")
    return found


def _is_stack(layout: TensorLayout) -> bool:
    """Return True for experts: they are on their grid, or dimension 0 is declared to be of them."""
    declared = any(isinstance(p, Fused) and p.dim == 0 for p in layout.placement)
    return len(layout.shape) == 3 and (layout.grid == "expert" or declared)


def _parts(layout: TensorLayout, per_head: bool) -> Iterator[MatrixPart]:
    pieces = [[layout.shape[dim]] for dim in range(len(layout.shape))]
    if _is_stack(layout):
        pieces[0] = [1] * layout.shape[0]
    for placement in layout.placement:
        if isinstance(placement, Fused):
            pieces[placement.dim] = list(placement.sizes)
    for shard in layout.shards:
        if shard.chunks is not None:
            each = (_sizes(chunk, per_head) for chunk in shard.chunks)
            pieces[shard.dim] = list(itertools.chain(*each))
    ranges = [zip(itertools.accumulate([0, *sizes]), sizes, strict=False) for sizes in pieces]
    for part in itertools.product(*ranges):
        yield MatrixPart(layout.name, tuple(at for at, _ in part), tuple(n for _, n in part))


def _sizes(chunk: Chunk, per_head: bool) -> list[int]:
    if not per_head or chunk.parts is None:
        return [chunk.size]
    return [chunk.size // chunk.parts] * chunk.parts
