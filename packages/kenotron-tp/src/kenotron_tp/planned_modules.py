"""Modules that keep their class and code, and compute one rank's share of their result.

A class here stands in front of the module's own class: its `forward` calls the module's between two
collectives. Parameters keep their names.

Shapes: V rows of a table, D its columns, R features of a key that all heads share; ``/t`` is
divided by tp size. Of attention: B rows, H heads, S tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from kenotron_dist import Axis
from kenotron_dist.autograd import copy_to, gather_from, reduce_from
from kenotron_dist.placement import Placements, Shard
from kenotron_tp.cut import cut_parameter
from kenotron_tp.embedding import check_embedding, vocabulary_chunk
from kenotron_tp.fused_pieces import own_count

HEAD_BIASES = {"alibi", "position_bias"}
"""Arguments of attention with a bias for each head."""
HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads")
"""Attributes of attention with its number of heads."""


class CutModule(nn.Module):
    """A module of which each rank computes a share."""

    axis: Axis
    placements: Placements


class SummedOutput(CutModule):
    """Experts whose hidden features are cut: the sum of all ranks' outputs is the output.

    Inputs are whole. An all-reduce in forward, and one for the gradient of each input in backward.
    """

    def forward(self, *args: Any, **options: Any) -> Any:
        """Compute the whole output on every rank."""
        args, options = tree_map(self._enter, (args, options))
        return tree_map(self._leave, super().forward(*args, **options))

    def _enter(self, x: Any) -> Any:
        learns = isinstance(x, Tensor) and x.is_floating_point()
        return copy_to(x, self.axis) if learns else x

    def _leave(self, x: Any) -> Any:
        return reduce_from(x, self.axis) if isinstance(x, Tensor) else x


class SharedInput(CutModule):
    """A module without parameters next to experts that are cut: 1/t of its input enters it."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's share; x is of any shape."""
        return super().forward(x / self.axis.size)


class SharedKey(CutModule):
    """Projection to a latent and to R features of a key that the heads of all ranks read.

    The latent's gradient is whole: column layers follow. That of the key is all-reduced.
    """

    key_features: int

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., latent + R)."""
        y = super().forward(x)
        latent, key = y.split([y.shape[-1] - self.key_features, self.key_features], -1)
        return torch.cat([latent, copy_to(key, self.axis)], -1)


class OwnRows(CutModule):
    """An embedding of another class than torch's, cut over its rows: (...) -> (..., D).

    What its class does to a row it does on the rank that has it. An all-reduce in forward.
    """

    whole_rows: int
    weight: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids (...) from 0 to V - 1."""
        rows = self.weight.shape[0]
        first = self.axis.rank * rows
        own = ids - first
        foreign = (own < 0) | (own >= min(rows, self.whole_rows - first))
        x = super().forward(own.masked_fill(foreign, 0))
        return reduce_from(x.masked_fill(foreign.unsqueeze(-1), 0.0), self.axis)


class OwnHeadsOfBias(CutModule):
    """Attention whose heads are cut: it gets the biases of its own heads (ALiBi).

    They come as ``alibi`` (B H, 1, S) or (B, H, 1, S), as ``position_bias`` (H, S, S), or in an
    ``attention_mask`` (B, H, S, S), for the H heads of all ranks.
    """

    def forward(self, *args: Any, **options: Any) -> Any:
        """Compute with the biases of this rank's heads."""
        own = own_count(self, HEADS)
        assert own is not None  # a plan without them is refused
        heads, first = own * self.axis.size, own * self.axis.rank
        for name in {*HEAD_BIASES, "attention_mask"} & options.keys():
            whole = options[name]
            if whole is None or (name == "attention_mask" and tuple(whole.shape[1:-2]) != (heads,)):
                continue
            of_heads = whole if whole.ndim == 4 else whole.unflatten(0, (-1, heads))
            found = of_heads.narrow(1, first, own)
            options[name] = found if whole.ndim == 4 else found.flatten(0, 1)
        return super().forward(*args, **options)


class OwnColumns(CutModule):
    """An embedding cut over its columns: (...) -> (..., D); an all-gather in forward."""

    whole_columns: int

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids (...) from 0 to V - 1."""
        return gather_from(super().forward(ids), self.axis, -1)[..., : self.whole_columns]


def become(module: nn.Module, front: type[CutModule], axis: Axis, **attributes: Any) -> nn.Module:
    """Put a class in front of a module's own; on one rank leave it as it is."""
    if axis.size == 1:
        return module
    own = type(module)
    module.__class__ = type(f"{front.__name__}{own.__name__}", (front, own), {})
    for name, value in {"axis": axis, **attributes}.items():
        setattr(module, name, value)
    return module


def sum_output(module: nn.Module, axis: Axis) -> nn.Module:
    """Make a module return the sum of all ranks' outputs; see `SummedOutput`."""
    return become(module, SummedOutput, axis)


def share_input(module: nn.Module, axis: Axis) -> nn.Module:
    """Give a module 1/t of its input; see `SharedInput`."""
    return become(module, SharedInput, axis)


def own_heads_of_bias(attention: nn.Module, axis: Axis) -> nn.Module:
    """Give attention the biases of its own heads; see `OwnHeadsOfBias`."""
    return become(attention, OwnHeadsOfBias, axis)


def share_key(module: nn.Module, axis: Axis, features: int) -> nn.Module:
    """Sum the gradient of a layer's last output features; see `SharedKey`."""
    return become(module, SharedKey, axis, key_features=features)


def own_rows(embedding: nn.Embedding, axis: Axis) -> nn.Module:
    """Cut an embedding of any class over its rows, which may be padded; see `OwnRows`."""
    check_embedding(embedding)
    rows = embedding.num_embeddings
    _cut_table(embedding, Shard(axis.name, 0, (vocabulary_chunk(rows, axis.size),)), axis)
    if embedding.padding_idx is not None:
        held = embedding.weight.shape[0]
        own = embedding.padding_idx - axis.rank * held
        embedding.padding_idx = own if 0 <= own < held else None
    return become(embedding, OwnRows, axis, whole_rows=rows)


def own_columns(embedding: nn.Embedding, axis: Axis) -> nn.Module:
    """Cut an embedding of any class over its columns, which may be padded; see `OwnColumns`."""
    check_embedding(embedding)
    columns = embedding.embedding_dim
    _cut_table(embedding, Shard(axis.name, 1, (vocabulary_chunk(columns, axis.size),)), axis)
    return become(embedding, OwnColumns, axis, whole_columns=columns)


def _cut_table(embedding: nn.Embedding, shard: Shard, axis: Axis) -> None:
    whole = embedding.weight
    embedding.weight = cut_parameter(whole.detach().clone(), "weight", shard, axis)
    embedding.weight.requires_grad = whole.requires_grad
    for name, value in (("placements", {"weight": shard}), ("roles", {"weight": "embedding"})):
        setattr(embedding, name, value)
