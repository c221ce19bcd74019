"""Layers that a plan of names cuts: what each style makes of a linear layer or an embedding.

Shapes: I input features, O output features; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import Axis
from kenotron_dist.autograd import gather_from, scatter_to
from kenotron_dist.placement import Chunk, Shard
from kenotron_tp.embedding import VocabParallelEmbedding, vocabulary_chunk
from kenotron_tp.fused_pieces import FUSED_STYLES
from kenotron_tp.linear import ColumnParallelLinear, RowParallelLinear
from kenotron_tp.planned_conv1d import cut_conv1d, is_conv1d
from kenotron_tp.planned_modules import own_columns, own_rows

Style = str | Sequence[Chunk]
"""Result for a module: a name, or the pieces of a column layer's output features."""
OTHER_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
"""Older names of styles."""
COLUMNS = ("colwise", "packed_colwise")
"""Styles of a linear layer of which each rank computes other features."""
ROWS = ("rowwise", "rowwise_split_input")
EMBEDDINGS = ("embedding_rowwise", "embedding_colwise")
PACKED_ROWS = "packed_rowwise"
SUMS = ("moe_tp_experts", "all_reduce")
"""Styles of a module whose parameters are cut and whose output is summed."""
SHARE = "moe_identity_expert"
LATENT = "mla_kv_a_proj"
BIASED = "own_heads_of_bias"
STAYS = "replicate"
LOCAL = "local_params"
SUMMED = "replicated_with_grad_allreduce"
DIVIDED = "divide"
STYLES = (
    *COLUMNS, *FUSED_STYLES, "colwise_gather_output", *ROWS, PACKED_ROWS, *EMBEDDINGS, *SUMS, SHARE,
    LATENT, BIASED, SUMMED, STAYS, LOCAL, DIVIDED,
)  # fmt: skip
"""All styles that have a name."""
_EXPERTS = "it places whole experts on ranks: use moe_tp_experts, which cuts each expert"
REFUSED = {
    "sequence_parallel": "the tokens of a module that is there stay whole: leave it out",
    "grouped_gemm": _EXPERTS,
    "ep_dispatch_experts": _EXPERTS,
}
"""Styles that transformers has and that cannot be done here, and why."""


class GatheredColumnLinear(ColumnParallelLinear):
    """A column layer whose output features are gathered: (..., I) -> (..., O), whole.

    The last ranks hold padding where the ranks do not divide O. An all-gather in forward and an
    all-reduce in backward.
    """

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Compute (..., O) on every rank."""
        whole = gather_from(super().forward(x, **options), self.axis, -1)
        shard = self.placements["weight"]
        shard = shard[0] if isinstance(shard, tuple) else shard  # of a tied weight
        assert isinstance(shard, Shard) and shard.chunks  # as the column layer declares it
        return whole[..., : shard.chunks[0].size]


class SplitRowLinear(RowParallelLinear):
    """A row layer whose input is whole on every rank: (..., I) -> (..., O).

    Each rank takes its own features. An all-reduce in forward and an all-gather in backward.
    """

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Compute (..., O) on every rank."""
        return super().forward(scatter_to(x, self.axis, -1), **options)


def style_named(style: Style) -> Style:
    """Return the style under the name that is used here."""
    if isinstance(style, str):
        return OTHER_NAMES.get(style, style)
    return tuple(style) if isinstance(style, Sequence) else style


def cut_dim(layer: nn.Module, style: Style) -> int:
    """Return the dimension of a layer's weight that a style cuts."""
    if isinstance(layer, nn.Embedding):
        return int(style == "embedding_colwise")
    return int((style in ROWS) != is_conv1d(layer))


def gives_cut_features(style: Style) -> bool:
    """Return whether a linear layer of this style returns this rank's own features only."""
    return style in COLUMNS or not isinstance(style, str)


def cut_layer(layer: nn.Module, style: Style, axis: Axis, overlap: bool) -> nn.Module:
    """Return this rank's part of a linear layer or an embedding; its values are copied.

    ``style`` fits the layer: see ``layer_problem``.
    """
    if isinstance(layer, nn.Embedding):
        if style == "embedding_colwise":
            return own_columns(layer, axis)
        if type(layer) is not nn.Embedding:
            return own_rows(layer, axis)
        return VocabParallelEmbedding.from_embedding(layer, axis)
    if is_conv1d(layer):
        return cut_conv1d(layer, axis, None if style == "rowwise" else _pieces(layer, style))
    assert isinstance(layer, nn.Linear)
    if style == "rowwise":
        return RowParallelLinear.from_linear(layer, axis)
    if style == "rowwise_split_input":
        return SplitRowLinear.from_linear(layer, axis)
    if style == "colwise_gather_output":
        chunks = (vocabulary_chunk(layer.out_features, axis.size),)
        return GatheredColumnLinear.from_linear(layer, axis, overlap=overlap, chunks=chunks)
    pieces = _pieces(layer, style)
    return ColumnParallelLinear.from_linear(layer, axis, overlap=overlap, chunks=pieces)


def _pieces(layer: nn.Module, style: Style) -> Sequence[Chunk]:
    """The pieces of the output features, each cut by itself."""
    if not isinstance(style, str):
        return style
    features = features_of(layer)[1]
    return (Chunk(features // 2),) * 2 if style == "packed_colwise" else (Chunk(features),)


def features_of(layer: nn.Module) -> tuple[int, int]:
    """Return I and O of a linear layer, or of a ``Conv1D``."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    features, out = layer.get_parameter("weight").shape
    return features, out


def is_linear(layer: nn.Module) -> bool:
    """Return True for what can be cut as a linear layer."""
    return is_conv1d(layer) or (isinstance(layer, nn.Linear) and _acts_as_linear(layer))


def _acts_as_linear(layer: nn.Linear) -> bool:
    """Return True where a class derived from ``nn.Linear`` computes what that does.

    Its ``forward`` is run on small values, in a module that has a weight and a bias alone.
    """
    if type(layer) is nn.Linear:
        return True
    small, torch_linear = (kind.__new__(kind) for kind in (type(layer), nn.Linear))
    draw = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(s, generator=draw, device="cpu") for s in ((3, 2), (3,), (4, 2)))
    for each in (small, torch_linear):
        nn.Module.__init__(each)
        each.in_features, each.out_features = 2, 3
        each.weight = nn.Parameter(weight)
        each.register_parameter("bias", None if layer.bias is None else nn.Parameter(bias))
    try:
        with torch.no_grad():
            return torch.allclose(small(x), torch_linear(x))
    except Exception:  # of any kind: its code reads more than a linear layer has
        return False


def layer_problem(layer: nn.Module, style: Style, axis: Axis) -> str | None:
    """Say why a layer cannot be cut in this style; None: it can."""
    kind = type(layer).__name__
    embeds = isinstance(layer, nn.Embedding)
    if not embeds and not is_linear(layer):
        return f"it is a {kind}: only embeddings and what computes as nn.Linear can be cut"
    if is_conv1d(layer) and style in ("rowwise_split_input", "colwise_gather_output"):
        return f"it is a {kind}: of styles with their own exchange it has none"
    if style not in ("rowwise", *EMBEDDINGS) if embeds else style in EMBEDDINGS:
        return f"it is a {kind}: give embedding_rowwise to embeddings, and to them only"
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        return "it has hooks, which would be lost: add them after parallelize"
    known = {name for name, _ in layer.named_parameters()} - {"weight", "bias"}
    if more := known if embeds else {*layer._parameters, *layer._buffers} - {"weight", "bias"}:
        return f"it has tensors that no {kind} has ({', '.join(sorted(more))})"
    return None if isinstance(layer, nn.Embedding) else _size_problem(layer, style, axis.size)


def _size_problem(layer: nn.Module, style: Style, ranks: int) -> str | None:
    features, out = features_of(layer)
    sizes = {"in_features": features} if style in ROWS else {}
    if style == "colwise":
        sizes["out_features"] = out
    elif style == "packed_colwise":
        sizes["half of out_features"] = out // 2
        if out % 2:
            return f"out_features {out} cannot be two pieces of the same size"
    for name, size in sizes.items():
        if size % ranks:
            return f"{name} {size} cannot be cut over {ranks} ranks: choose a tp that divides it"
    if isinstance(style, str):
        return None
    if sum(chunk.size for chunk in style) != out:
        given = " + ".join(str(chunk.size) for chunk in style)
        return f"its Chunks are {given}, and out_features is {out}"
    for chunk in style:
        if chunk.parts is None and not chunk.pad and chunk.size % ranks:
            return (
                f"a piece of {chunk.size} output features cannot be cut over {ranks} ranks: choose "
                "a tp that divides it"
            )
    return None
