"""Inputs of attention's tests, and what is seen by the words of the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from kenotron_models import Context
from kenotron_models.attention_mask import AttentionMask

# Three documents and padding; a document that begins in the middle of a text; one text.
PLACES = [
    [*range(4), *range(3), *range(5), 0, 0, 7],
    [*range(90, 97), *range(8)],
    [*range(15)],
]


def positions(sequence: int) -> Tensor:
    """(3, S): the rows above, gone on with texts."""
    rows = [[*row, *range(sequence)][:sequence] for row in PLACES]
    return torch.tensor(rows)


def seen(positions_BS: Tensor, window: int | None, documents: bool) -> Tensor:
    """(B, S, S) by the definition, pair by pair."""
    batch, sequence = positions_BS.shape
    mask = torch.zeros(batch, sequence, sequence, dtype=torch.bool)
    for b, row in enumerate(positions_BS.tolist()):
        for i in range(sequence):
            for j in range(i, -1, -1):
                if window is not None and j <= i - window:
                    break
                mask[b, i, j] = True
                if documents and (j == 0 or row[j] != row[j - 1] + 1):
                    break
    return mask


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention head by head in fp64, with gradients."""
    ratio = q.shape[2] // k.shape[2]
    heads = []
    for head in range(q.shape[2]):
        scores = scale * q[:, :, head].double() @ k[:, :, head // ratio].double().mT
        shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        heads.append(shares @ v[:, :, head // ratio].double())
    return torch.stack(heads, 2)


def inputs(
    batch: int, sequence: int, heads: int, kv_heads: int, width: int = 8, seed: int = 0
) -> list[Tensor]:
    """q, k, v of those sizes, fp32."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, sequence, count, width, generator=generator)
        for count in (heads, kv_heads, kv_heads)
    ]


def sight_of(
    positions_BS: Tensor, window: int | None = None, documents: bool = False
) -> AttentionMask:
    """What is seen of these positions."""
    return AttentionMask(Context(positions_BS), window, documents)


def with_gradients(function, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output, then the gradients of a sum that weighs every element otherwise; in fp64."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    out = function(*leaves)
    weights = torch.arange(out.numel()).view(out.shape).sin().to(out.dtype)
    grads = torch.autograd.grad((out * weights).sum(), leaves)
    return [out.detach().double(), *(grad.double() for grad in grads)]


def deviation(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest value, or over 1 where all are smaller."""
    return float((got - want).abs().max() / want.abs().max().clamp(min=1))
