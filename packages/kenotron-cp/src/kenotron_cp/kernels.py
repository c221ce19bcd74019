"""Attention of one block of queries over one block of keys, forward and backward.

A kernel never sees more than a block, so its memory does not grow with the sequence.

B rows, H query heads, Q queries, K keys, D features of a query or key, V of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kenotron_cp.partial import PartialAttention, finite
from kenotron_cp.scoring import Scoring


class Tile(NamedTuple):
    """Properties of a pair of blocks that a kernel needs besides its tensors."""

    scoring: Scoring
    causal: bool = False
    """The keys are the queries' own block: key k is seen by queries from k on. No mask then."""
    mask: Tensor | None = None
    """True where a query sees a key, (1 or B, 1, Q, K); None: everywhere."""
    kept: Tensor | None = None
    """Dropout: factor of each probability, 0 or 1 / (1 - p), (B, H, Q, K); None: no dropout."""


class Forward(Protocol):
    """q (B, H, Q, D), k (B, H, K, D), v (B, H, K, V) -> ``PartialAttention`` in fp32 or fp64."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, /) -> PartialAttention:
        """Attend."""
        ...


class Backward(Protocol):
    """Gradients of q, k and v.

    ``out`` (B, H, Q, V) and ``lse`` (B, H, Q) are those of all keys, and ``lse`` is finite.
    """

    def __call__(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate."""
        ...


@dataclass(frozen=True)
class Kernel:
    """A pair of functions. One that is written elsewhere is injected as such a value."""

    name: str
    forward: Forward
    backward: Backward
    dtype: Callable[[torch.dtype], torch.dtype]
    """The dtype in which it takes tensors, of that of the inputs."""
    supports: frozenset[str] = frozenset({"scale"})
    """Fields of ``Scoring`` that it applies, ``dropout`` by ``Tile.kept``. ``attend`` refuses the
    others, except ``sinks``, which it adds to the result of any kernel."""


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which partial results are added: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _mask(tile: Tile, queries: int, device: torch.device) -> Tensor | None:
    if tile.causal:
        return torch.ones(queries, queries, dtype=torch.bool, device=device).tril_()
    return tile.mask


def _scores(q: Tensor, k: Tensor, tile: Tile) -> tuple[Tensor, Tensor | None]:
    """Scores, and the derivative of capped ones."""
    scores, slope = (q @ k.mT).mul_(tile.scoring.scale), None
    if (cap := tile.scoring.cap) is not None:
        bent = scores.div_(cap).tanh_()
        slope, scores = 1 - bent.square(), bent * cap
    mask = _mask(tile, q.shape[-2], q.device)
    return scores if mask is None else scores.masked_fill_(~mask, -torch.inf), slope


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> PartialAttention:
    scores, _ = _scores(q, k, tile)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(finite(lse)[..., None]).exp_()
    if tile.kept is not None:
        weights.mul_(tile.kept)
    return PartialAttention(weights @ v, lse)


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    scores, slope = _scores(q, k, tile)
    weights = scores.sub_(lse[..., None]).exp_()
    dropped, dweights = weights, grad @ v.mT
    if tile.kept is not None:
        dropped, dweights = weights * tile.kept, dweights.mul_(tile.kept)
    dv = dropped.mT @ grad
    delta = (grad * out).sum(-1, keepdim=True)
    dscores = dweights.sub_(delta).mul_(weights).mul_(tile.scoring.scale)
    if slope is not None:
        dscores.mul_(slope)
    return dscores @ k, dscores.mT @ q, dv


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """0 where a query sees a key, -inf elsewhere."""
    if mask is None:
        return None
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _blind(part: PartialAttention, mask: Tensor | None) -> PartialAttention:
    """Queries that see no key: torch's kernels return values of their own for them."""
    if mask is None:
        return part
    blind = ~mask.any(-1)
    out = part.out.masked_fill(blind[..., None], 0)
    return PartialAttention(out, part.lse.masked_fill(blind, -torch.inf))


def _flash_cpu_forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> PartialAttention:
    width, features = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (_widened(x, features) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, tile.causal, attn_mask=_bias(tile.mask, q.dtype), scale=tile.scoring.scale
    )
    return _blind(PartialAttention(out[..., :width].contiguous(), lse.contiguous()), tile.mask)


def _flash_cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    depth, width = q.shape[-1], v.shape[-1]
    grad, q, k, v, out = (_widened(x, max(depth, width)) for x in (grad, q, k, v, out))
    bias = _bias(tile.mask, q.dtype)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, tile.causal, attn_mask=bias, scale=tile.scoring.scale
    )
    return dq[..., :depth], dk[..., :depth], dv[..., :width]


def _widened(x: Tensor, features: int) -> Tensor:
    """Append zeros to the features: torch's kernel wants as many of keys as of values."""
    return x if x.shape[-1] == features else pad(x, (0, features - x.shape[-1]))


_LSE_ROWS, _BIAS_ROWS = 32, 16
_UNIT = 16  # bytes that CUTLASS reads at a time


def _efficient_bias(tile: Tile, q: Tensor, keys: int) -> Tensor | None:
    """The bias as CUTLASS reads it: expanded over rows and heads, its rows aligned in memory."""
    bias = _bias(tile.mask, q.dtype)
    if bias is None:
        return None
    aligned = pad(bias, (0, -keys % _BIAS_ROWS))[..., :keys]
    return aligned.expand(q.shape[0], q.shape[1], q.shape[2], keys)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> PartialAttention:
    bias = _efficient_bias(tile, q, k.shape[-2])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, tile.causal, scale=tile.scoring.scale
    )
    part = PartialAttention(out.to(lse.dtype), lse[..., : q.shape[-2]].contiguous())
    return _blind(part, tile.mask)


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # CUTLASS takes no strides of it
    lse = pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=torch.inf)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    bias = _efficient_bias(tile, q, k.shape[-2])
    saved, needed = (bias, out, lse, unused, unused), [True, True, True, False]
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, *saved, 0.0, needed, tile.causal, scale=tile.scoring.scale
    )
    return dq, dk, dv


def _shapes_forward(q: Tensor, _k: Tensor, v: Tensor, _tile: Tile) -> PartialAttention:
    return PartialAttention(q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1]))


def _shapes_backward(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _lse: Tensor, _tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


PLAIN = Kernel(
    "plain", _plain_forward, _plain_backward, accumulated, frozenset({"scale", "cap", "dropout"})
)
"""Products and a softmax, in fp32 (fp64 for fp64); on any device. The reference of the others."""
SHAPES = Kernel("shapes", _shapes_forward, _shapes_backward, accumulated, PLAIN.supports)
"""For meta tensors, which have nothing to compute: a dozen operations there take 2 ms in Python."""
FLASH_CPU = Kernel("flash_cpu", _flash_cpu_forward, _flash_cpu_backward, accumulated)
"""torch's flash attention on CPUs, in fp32 (fp64 for fp64): its half-precision one is slower."""
EFFICIENT = Kernel("efficient", _efficient_forward, _efficient_backward, lambda dtype: dtype)
"""torch's memory-efficient attention on CUDA, in the dtype of the inputs."""


def default_kernel(device: str, dtype: torch.dtype, depth: int, width: int) -> Kernel:
    """Return torch's kernel for a device type, or ``PLAIN`` where it has none that fits.

    CUTLASS takes fp32, bf16 and fp16, and rows of features in units of 16 bytes.

    Args:
        device: ``cpu``, ``cuda``, ``meta`` or another.
        dtype: of the inputs.
        depth: features of a query or key.
        width: features of a value.
    """
    if device == "cpu":
        return FLASH_CPU
    if device == "meta":
        return SHAPES
    aligned = all(size * dtype.itemsize % _UNIT == 0 for size in (depth, width))
    fits = dtype in (torch.float32, torch.bfloat16, torch.float16) and aligned
    return EFFICIENT if device == "cuda" and fits else PLAIN
