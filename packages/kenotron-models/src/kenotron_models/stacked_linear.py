"""A linear layer for each expert: one stack of matrices, cut over the ranks of ep.

Rows arrive grouped by expert. The product is one grouped kernel where torch has it for the device
and dtype, else a loop over experts with the same result.

Shapes: E experts, n ranks of ep, R rows, I input and O output features.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kenotron_dist import Role, Roles, WeightQueue
from kenotron_dist.placement import Fused, Placements, Shard
from kenotron_dist.separate_uses import separate_uses
from kenotron_models.build import Build
from kenotron_models.stacked_by_source import product_by_source
from kenotron_tp import product


class StackedLinear(nn.Module):
    """``y = x W_e^T`` for the rows of each expert e; ``weight`` (E/n, O, I) of this rank's experts.

    With ``bias`` there is a ``bias`` (E/n, O), which is added.

    Args:
        experts: E, experts of the layer.
        inputs: I.
        outputs: O.
        build: how and where; ``build.ep`` cuts the experts.
        role: role of the weight.
        bias: whether each expert has a bias.
        transposed: whether the weight is (E/n, I, O).
        fused: sizes of the matrices whose outputs are concatenated to O.

    Raises:
        ValueError: ep does not divide E.
    """

    defers_weight_grad = True

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        build: Build,
        role: Role = "hidden",
        *,
        bias: bool = False,
        transposed: bool = False,
        fused: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        axis = build.ep
        if experts % axis.size:
            raise ValueError(
                f"cannot split {experts} experts over {axis.size} {axis.name} ranks: choose an "
                "expert-parallel size that divides num_experts"
            )
        self.weight_queue: WeightQueue | None = None
        self.by_source = self.separates_uses = build.by_source
        self.transposed = transposed
        sizes = (inputs, outputs) if transposed else (outputs, inputs)
        whole = torch.empty(experts, *sizes, **build.storage)
        nn.init.uniform_(whole, -(inputs**-0.5), inputs**-0.5)  # as nn.Linear; nothing on meta
        self.weight = nn.Parameter(whole.chunk(axis.size)[axis.rank].clone())  # (E/n, O, I)
        stacked = Shard(axis.name, 0)
        self.placements: Placements = {"weight": (stacked, Fused(1, fused)) if fused else stacked}
        self.roles: Roles = {"weight": role}
        self.bias: nn.Parameter | None = None
        if bias:
            zeros = torch.zeros(experts // axis.size, outputs, **build.storage)
            self.bias = nn.Parameter(zeros)  # (E/n, O)
            self.placements["bias"] = Shard(axis.name, 0)
            self.roles["bias"] = "bias"

    def forward(self, x: Tensor, counts: Tensor, part: int = 0, parts: int = 1) -> Tensor:
        """x (R, I), grouped by this rank's experts -> (R, O); ``counts`` (E/n,) of rows, int64.

        With ``Build.by_source`` they are grouped by rank of ep first, and counts are (n, E/n).
        ``part``: number of the virtual shard of a chunk whose tokens they are, among the ``parts``
        that a rank has of them in a backward pass.
        """
        of_part = {"part": part, "parts": parts}
        if self.by_source:
            weights = separate_uses(self.weight, len(counts), **of_part)
            y = product_by_source(x, counts, weights, transposed=self.transposed)
        else:
            y = stacked_linear(x, self.weight, counts, self.transposed, self.weight_queue)
        if self.bias is None:
            return y
        bias = self.bias
        if self.by_source:
            bias = torch.cat(separate_uses(bias, len(counts), **of_part))
        return y + bias[expert_of_rows(y, counts.flatten())]

    def extra_repr(self) -> str:
        """Local sizes."""
        experts, outputs, inputs = by_output(self.weight, self.transposed).shape
        return f"experts={experts}, in_features={inputs}, out_features={outputs}"


def stacked_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    transposed: bool = False,
    queue: WeightQueue | None = None,
) -> Tensor:
    """Return x W_e^T for the rows of each expert, (R, O).

    Args:
        x: (R, I), grouped by expert.
        weight: (E, O, I), or (E, I, O) where ``transposed``; a parameter where there is a queue.
        counts: rows of each expert (E,), int64.
        transposed: as it is stored.
        queue: for the product of the weight's gradient; None: it is made in the backward.
    """
    return _StackedProduct.apply(x, weight, counts, transposed, queue)


class _StackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        transposed: bool,
        queue: WeightQueue | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.queue, ctx.parameter = counts, queue, weight
        ctx.transposed = transposed
        return stacked_product(x, by_output(weight, ctx.transposed), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (dy,), (x, weight), counts = grads, ctx.saved_tensors, ctx.counts
        by_input, dx = by_output(weight, not ctx.transposed), None
        if ctx.needs_input_grad[0]:
            dx = stacked_product(dy, by_input, counts)
        dw = None
        if ctx.needs_input_grad[1]:
            pair = (x, dy) if ctx.transposed else (dy, x)
            product = partial(outer_products, *pair, counts)
            if ctx.queue is None:
                dw = product()
            else:
                ctx.queue.push(ctx.parameter, product)
        return dx, dw, None, None, None


def by_output(weight: Tensor, transposed: bool) -> Tensor:
    """Return a weight, of which ``transposed`` says how it is stored, as (E, O, I)."""
    return weight.transpose(1, 2) if transposed else weight


def expert_of_rows(y: Tensor, counts: Tensor) -> Tensor:
    """Number of the expert of each row of y (R, O), int64 (R,)."""
    experts = torch.arange(len(counts), device=y.device)
    return experts.repeat_interleave(counts, output_size=len(y))  # without, the device is read


def stacked_product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return x_e W_e^T for the rows of each expert.

    Args:
        x: (R, I), grouped by expert.
        weight: (E, O, I).
        counts: rows of each expert (E,), int64; their sum is R.
    """
    if x.is_meta:
        return x.new_empty(len(x), weight.shape[1])
    if _has_grouped_kernel(x, weight.shape[1]):
        return torch._grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=_ends(counts))
    out, sizes = x.new_empty(len(x), weight.shape[1]), counts.tolist()
    for rows, target, matrix in zip(x.split(sizes), out.split(sizes), weight, strict=True):
        if len(rows):
            product(rows, matrix.t(), out=target)
    return out


@torch.no_grad()  # a deferred product runs outside of the backward
def outer_products(dy: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """Return dy_e^T x_e of each expert, (E, O, I): the gradient of its matrix; 0 without rows.

    Args:
        dy: (R, O), grouped by expert.
        x: (R, I), likewise.
        counts: rows of each expert.
    """
    if x.is_meta:
        return x.new_empty(len(counts), dy.shape[1], x.shape[1])
    if _has_grouped_kernel(x, dy.shape[1]):
        return torch._grouped_mm(dy.contiguous().t(), x.contiguous(), offs=_ends(counts))
    out, sizes = x.new_empty(len(counts), dy.shape[1], x.shape[1]), counts.tolist()
    for ys, xs, target in zip(dy.split(sizes), x.split(sizes), out, strict=True):
        product(ys.t(), xs, out=target)
    return out


def _has_grouped_kernel(x: Tensor, others: int) -> bool:
    """Return True where one kernel multiplies all groups: torch's own is for bfloat16 on CUDA.

    It wants rows of 16 bytes: 8 divides the features of x (R, I), R above 0, and ``others``.
    """
    fits = len(x) > 0 and x.shape[1] % 8 == 0 and others % 8 == 0
    return x.is_cuda and x.dtype == torch.bfloat16 and fits and hasattr(torch, "_grouped_mm")


def _ends(counts: Tensor) -> Tensor:
    """Return the end of each expert's rows, int32."""
    return counts.cumsum(0, dtype=torch.int32)
