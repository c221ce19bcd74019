"""The gated delta rule (Yang et al., arXiv 2412.06464), in chunks of tokens.

For each head ``S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T`` and ``y_t = S_t^T q_t``:
what is stored under a key is replaced by a share ``b_t``, after all has decayed by ``a_t``. Within
a chunk these products of (1 - b k k^T) are one triangular system (the WY form); only the states at
the ends of chunks follow one another. Memory is linear in S, and all is fp32.

Shapes: R rows, L tokens of a row, n chunks of Q tokens, H heads, K features of a key, V of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Q: longer chunks have more work within, shorter ones more states that follow one another."""


class Delta(NamedTuple):
    """Inputs that a head reads of each token."""

    q: Tensor
    """(R, L, H, K), normed and scaled."""
    k: Tensor
    """(R, L, H, K), of length at most 1."""
    v: Tensor
    """(R, L, H, V)."""
    log_decay: Tensor
    """log a (R, L, H), at most 0."""
    share: Tensor
    """b (R, L, H), from 0 to 1; 0 together with a log decay of 0 changes no state."""
    goes_on: Tensor | None = None
    """True where a token follows the one before it (R, L), bool; where it does not, the state
    begins at 0. None: all do."""


class _ChunkTerms(NamedTuple):
    """Rows in chunks, heads first: what no state is needed for."""

    q: Tensor
    """Queries times the decay since the state before the chunk (R, H, n, Q, K)."""
    scores: Tensor
    """Weight of the earlier tokens' changes in what each token reads (R, H, n, Q, Q)."""
    keys: Tensor
    """Keys times the decay until the end of the chunk (R, H, n, Q, K)."""
    changes: Tensor
    """Value that each token writes if the state before is 0 (R, H, n, Q, V)."""
    read: Tensor
    """Keys under which the state before is read and taken out of that (R, H, n, Q, K)."""
    kept: Tensor
    """Share of the state before that is left at the end (R, H, n, 1, 1)."""


def delta_rule(
    x: Delta, first: Tensor | None = None, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Compute outputs and last states of rows.

    Args:
        x: queries, keys, values, decays and shares.
        first: the state before each row (R, H, K, V), fp32; None: 0.
        chunk: Q.

    Returns:
        Outputs (R, L, H, V) in the dtype of v, and the states after the last tokens (R, H, K, V).
    """
    parts = _chunks(x, chunk)
    state = _blank(x) if first is None else first
    entering, changes = [], []
    for keys, fresh, read, kept in zip(*(_each(part) for part in parts[2:]), strict=True):
        change = fresh - read @ state
        entering.append(state)
        changes.append(change)
        state = kept * state + keys.transpose(-1, -2) @ change
    y = parts.q @ torch.stack(entering, 2) + parts.scores @ torch.stack(changes, 2)
    tokens = y.flatten(2, 3)[:, :, : x.q.shape[1]].transpose(1, 2)
    return tokens.to(x.v.dtype), state


def state_map(x: Delta, *, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Return what rows make of the state S before them: ``A S + B``.

    Args:
        x: as for ``delta_rule``; queries are not read.
        chunk: Q.

    Returns:
        A (R, H, K, K) and B (R, H, K, V), fp32.
    """
    parts, last = _chunks(x, chunk), _blank(x)
    unit = torch.eye(x.k.shape[-1], dtype=last.dtype, device=last.device)
    matrix = unit.expand(*last.shape[:2], -1, -1)
    for keys, fresh, read, kept in zip(*(_each(part) for part in parts[2:]), strict=True):
        written = keys.transpose(-1, -2)
        step = kept * unit - written @ read
        matrix, last = step @ matrix, step @ last + written @ fresh
    return matrix, last


def _blank(x: Delta) -> Tensor:
    rows, _, heads, features = x.k.shape
    wide = torch.promote_types(x.k.dtype, torch.float32)
    return x.v.new_zeros(rows, heads, features, x.v.shape[-1], dtype=wide)


def _each(part: Tensor) -> tuple[Tensor, ...]:
    return part.unbind(2)


def _chunks(x: Delta, chunk: int) -> _ChunkTerms:
    """Solve each chunk's triangular system; tokens that fill the last chunk change no state."""
    wide = torch.promote_types(x.k.dtype, torch.float32)
    size = min(chunk, x.k.shape[1])
    q, k, v = (_cut(part.to(wide), size) for part in x[:3])  # (R, H, n, Q, .)
    decay, share = (_cut(part.to(wide)[..., None], size)[..., 0] for part in x[3:5])  # (R, H, n, Q)
    both = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()
    if x.goes_on is None:
        passed = decay.cumsum(-1)
        since_begin, until_end, kept = passed, passed[..., -1:] - passed, passed[..., -1:]
    else:
        document = _documents(x.goes_on, size)  # (R, 1, n, Q)
        before = F.pad(document[..., -1].flatten(2), (1, -1))[..., None]  # of the state before
        both = both & (document[..., :, None] == document[..., None, :])
        passed = (both.to(wide) @ decay[..., None])[..., 0]  # since the document's first token
        since_begin = passed.masked_fill(document != before, -torch.inf)
        until_end = passed[..., -1:] - passed
        until_end = until_end.masked_fill(document != document[..., -1:], -torch.inf)
        kept = passed[..., -1:].masked_fill(document[..., -1:] != before, -torch.inf)
    between = (passed[..., :, None] - passed[..., None, :]).masked_fill(~both, -torch.inf).exp()
    system = share[..., None] * (k @ k.transpose(-1, -2)) * between
    wanted = torch.cat([v, k * since_begin.exp()[..., None]], -1) * share[..., None]
    # Its diagonal counts as 1 and what is above as 0.
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    changes, read = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores = (q @ k.transpose(-1, -2)) * between
    starts, ends = since_begin.exp()[..., None], until_end.exp()[..., None]
    return _ChunkTerms(q * starts, scores, k * ends, changes, read, kept.exp()[..., None])


def _cut(x: Tensor, size: int) -> Tensor:
    """(R, L, H, F) -> (R, H, n, Q, F), zeros after the last token."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return x.transpose(1, 2).unflatten(2, (-1, size))


def _documents(goes_on: Tensor, size: int) -> Tensor:
    """Numbers of documents (R, 1, n, Q); 0: that of the state before the row."""
    numbers = (~goes_on).cumsum(1)
    last = numbers[:, -1:].expand(-1, -numbers.shape[1] % size)
    return torch.cat([numbers, last], 1).unflatten(1, (-1, size))[:, None]
