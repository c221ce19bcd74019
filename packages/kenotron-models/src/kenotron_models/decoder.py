"""A decoder language model as an ordered list of named layers.

Every layer takes one activation and the micro-batch's context, and returns one activation: the
list can be cut anywhere, and no layer knows where.

Shapes: B batch, S sequence, T = B * S flattened tokens, D hidden, V vocabulary; ``/t`` is divided
by tp size. Between layers tokens are (T, D), or (T/t, D) under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kenotron_dist import Axis, Shard, Tie
from kenotron_models.attention import Attention
from kenotron_models.context import Context
from kenotron_models.mlp import GatedMLP
from kenotron_models.norm import RMSNorm
from kenotron_models.spec import Architecture
from kenotron_tp import (
    ColumnParallelLinear,
    TPMode,
    VocabParallelEmbedding,
    vocabulary_chunk,
)


class Embedding(VocabParallelEmbedding):
    """Tokens (T,) int64 -> (T, D)."""

    def forward(
        self,
        ids: Tensor,
        context: Context | None = None,
        *,
        sequence_parallel: bool | None = None,
    ) -> Tensor:
        """(T,) -> (T, D), (T/t, D) under sequence parallelism."""
        return super().forward(ids, sequence_parallel=sequence_parallel)


class DecoderLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``: (T, D) -> (T, D).

    ``recompute``: only x is kept for backward, which computes the rest again.
    """

    def __init__(
        self,
        config: Architecture,
        axis: Axis,
        *,
        mode: TPMode = TPMode(),
        layer: int = 0,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        spec = config.decoder

        def norm() -> RMSNorm:
            return RMSNorm(
                spec.hidden_size,
                spec.norm_eps,
                axis,
                sequence_parallel=mode.sequence_parallel,
                device=device,
                dtype=dtype,
            )

        self.recompute = recompute
        self.attention_norm = norm()
        self.attention = Attention(spec, axis, layer=layer, mode=mode, device=device, dtype=dtype)
        self.mlp_norm = norm()
        self.mlp = GatedMLP(
            spec.hidden_size,
            spec.intermediate_size,
            axis,
            mode=mode,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(T, D) -> (T, D)."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(
                self._layer, x, context, use_reentrant=False, preserve_rng_state=False
            )
        return self._layer(x, context)

    def _layer(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.mlp(self.mlp_norm(x), context.tokens)


class FinalNorm(RMSNorm):
    """The norm before the head: (T, D) -> (T, D)."""

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """(T, D) -> (T, D)."""
        return super().forward(x)


class Head(ColumnParallelLinear):
    """(T, D) -> logits (T, V/t); columns beyond V are padding."""

    def forward(
        self,
        x: Tensor,
        context: Context | None = None,
        *,
        tokens: int | None = None,
        sequence_parallel: bool | None = None,
    ) -> Tensor:
        """(T, D) -> (T, V/t); the context tells T where it is not said."""
        if tokens is None and context is not None:
            tokens = context.tokens
        return super().forward(x, tokens=tokens, sequence_parallel=sequence_parallel)


class LayerStack(nn.Module):
    """Some consecutive layers of a model, under their global names.

    ``LayerStack([("layers.3", layer)])`` has parameters ``layers.3...``: the same names on every
    pipeline stage and on one process.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._order = [layer for _, layer in layers]
        for path, layer in layers:
            parent: nn.Module = self
            *folders, last = path.split(".")
            for folder in folders:
                if folder not in parent._modules:
                    parent.add_module(folder, nn.Module())
                parent = parent.get_submodule(folder)
            parent.add_module(last, layer)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """All layers in order: tokens (T,) -> logits (T, V/t) for a whole model."""
        for layer in self._order:
            x = layer(x, context)
        return x


def build_decoder(
    config: Architecture,
    axis: Axis,
    *,
    mode: TPMode = TPMode(),
    recompute: bool = False,
    vocab_divisible_by: int = 1,
    device: torch.device | str | None = "meta",
    dtype: torch.dtype | None = None,
) -> list[tuple[str, nn.Module]]:
    """All layers of a Llama decoder by name, in order: embedding, layers.i, norm, head.

    Arguments: sizes; the tp axis; how cut layers communicate over it; whether decoder layers
    compute their activations again in backward instead of keeping them; vocabulary rows per rank
    are a multiple of ``vocab_divisible_by``; device and dtype of the parameters (on meta they take
    no memory: keep your own layers, ``to_empty`` and initialise them).

    Raises ValueError when heads or widths do not divide by the axis.
    """
    spec = config.decoder
    width, vocab = spec.hidden_size, spec.vocab_size
    embedding = Embedding(
        vocab,
        width,
        axis,
        **mode.embedding,
        divisible_by=vocab_divisible_by,
        device=device,
        dtype=dtype,
    )
    layers: list[tuple[str, nn.Module]] = [("embedding", embedding)]
    for i in range(spec.num_hidden_layers):
        layer = DecoderLayer(
            spec, axis, layer=i, mode=mode, recompute=recompute, device=device, dtype=dtype
        )
        layers.append((f"layers.{i}", layer))
    norm = FinalNorm(
        width,
        spec.norm_eps,
        axis,
        sequence_parallel=mode.sequence_parallel,
        device=device,
        dtype=dtype,
    )
    head = Head(
        width,
        vocab,
        axis,
        **mode.column,
        chunks=(vocabulary_chunk(vocab, axis.size, vocab_divisible_by),),
        device=device,
        dtype=dtype,
    )
    if spec.tie_word_embeddings:
        _tie(embedding, head)
    return [*layers, ("norm", norm), ("head", head)]


def _tie(embedding: Embedding, head: Head) -> None:
    """Declare both matrices to be logical tensor ``embedding.weight``."""
    for layer in (embedding, head):
        cut = layer.placements["weight"]
        assert isinstance(cut, Shard)  # as the layers of kenotron_tp declare it
        layer.placements["weight"] = (cut, Tie("embedding.weight"))
