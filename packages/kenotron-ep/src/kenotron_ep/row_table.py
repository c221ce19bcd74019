"""Sums of rows in a fixed order: selections and additions, nothing atomic.

T tokens, C columns of a table, N rows, S rows with a weight, D features.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 1 << 17
"""Elements that are processed at a time on a CPU, so that temporary tensors stay in its cache."""


class RowTable(NamedTuple):
    """Rows of a buffer that belong to each token, in the order in which they are added."""

    rows_TC: Tensor
    """int64; the number of rows of the buffer stands for no row."""
    gaps: bool
    """True where some place has no row."""


def choice_table(choices_S: Tensor, tokens: int, top_k: int) -> RowTable:
    """Return the row of each choice (T, K), from the choice ``t * K + k`` of each row."""
    rows = choices_S.shape[0]
    table = choices_S.new_full((tokens * top_k,), rows)
    table[choices_S] = torch.arange(rows, device=choices_S.device)
    return RowTable(table.view(tokens, top_k), rows < tokens * top_k)


def owner_table(rows_N: Tensor, owners_N: Tensor, owners: int, absent: int) -> RowTable:
    """Return the rows of each owner.

    Args:
        rows_N: int64 (N,), rows of a buffer. Those of one owner keep this order.
        owners_N: int64 (N,), owner of each.
        owners: number of owners, the rows of the table.
        absent: what stands for no row: the number of rows of the buffer.

    Returns:
        A table (owners, C) with as many columns as the owner with the most rows needs. Reading that
        number synchronises a device; on meta owners have equally many rows.
    """
    found, order = torch.sort(owners_N, stable=True)
    column = torch.arange(found.shape[0], device=found.device) - torch.searchsorted(found, found)
    if found.is_meta:
        columns = -(-found.shape[0] // owners) if owners else 0
    else:
        columns = int(column.max()) + 1 if found.numel() else 0
    table = rows_N.new_full((owners * columns,), absent)
    table[found * columns + column] = rows_N[order]
    return RowTable(table.view(owners, columns), found.shape[0] < owners * columns)


def add_rows(rows_ND: Tensor, table: RowTable, weights_TC: Tensor | None = None) -> Tensor:
    """Return the sum of each token's rows, in the order of the table's columns.

    Args:
        rows_ND: (N, D), any floating dtype.
        table: rows of each token.
        weights_TC: factor of each row, (T, C); None: 1.

    Returns:
        (T, D) in the dtype of the rows. Products and sums are in fp32 (in fp64 where the rows or
        the weights are) and rounded once.
    """
    dtype = widest(rows_ND) if weights_TC is None else widest(rows_ND, weights_TC)
    rows = with_zero_row(rows_ND) if table.gaps else rows_ND
    tokens, columns = table.rows_TC.shape
    if columns == 0:
        return rows.new_zeros(tokens, rows.shape[1])
    factors = None if weights_TC is None else weights_TC.to(dtype)
    out = rows.new_empty(tokens, rows.shape[1])

    def part(block: slice, column: int) -> Tensor:
        chosen = rows.index_select(0, table.rows_TC[block, column])
        return chosen if factors is None else chosen * factors[block, column, None]

    for block in _blocks(out):
        total = part(block, 0).to(dtype)
        for column in range(1, columns - 1):
            total.add_(part(block, column))
        if columns == 1:
            out[block] = total
        else:  # the last addition rounds
            torch.add(total, part(block, columns - 1), out=out[block])
    return out


def weighted_rows(x_TD: Tensor, tokens_S: Tensor, weights_S: Tensor) -> Tensor:
    """Return ``weights_S * x_TD[tokens_S]`` (S, D), computed as ``add_rows`` does."""
    factors = weights_S.to(widest(x_TD, weights_S))
    out = x_TD.new_empty(tokens_S.shape[0], x_TD.shape[1])
    for block in _blocks(out):
        chosen = x_TD.index_select(0, tokens_S[block])
        torch.mul(chosen, factors[block, None], out=out[block])
    return out


def dot_rows(x_TD: Tensor, tokens_S: Tensor, rows_SD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dot products of ``x_TD[tokens_S]`` and ``rows_SD`` (S,), in ``dtype``."""
    out = x_TD.new_empty(tokens_S.shape[0], dtype=dtype)
    for block in _blocks(rows_SD):
        chosen = x_TD.index_select(0, tokens_S[block]).to(dtype)
        out[block] = (chosen * rows_SD[block]).sum(-1)
    return out


def with_zero_row(rows_ND: Tensor) -> Tensor:
    """Append the row that stands for no row: (N, D) to (N + 1, D)."""
    return torch.cat([rows_ND, rows_ND.new_zeros(1, rows_ND.shape[1])])


def widest(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which tensors of any shape are added: fp32, or fp64 where one is."""
    return reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def _blocks(x_ND: Tensor) -> Iterator[slice]:
    """Yield ranges of rows: one block where there is no cache to fit."""
    rows, features = x_ND.shape
    step = max(1, _BLOCK // max(1, features)) if x_ND.device.type == "cpu" else max(1, rows)
    for begin in range(0, rows, step):
        yield slice(begin, begin + step)
