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

from kenotron_dist import declare_roles
from kenotron_dist.placement import Shard, Tie
from kenotron_models.block import Block
from kenotron_models.block_in_shards import BlockInShards
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.embedding import Embedding
from kenotron_models.mtp import MTP, MultiTokenPrediction
from kenotron_models.recompute import Recompute
from kenotron_models.spec import Architecture
from kenotron_models.transformers_layers import TransformersLayer, transformers_layers
from kenotron_models.transformers_spec import TransformersSpec
from kenotron_tp import ColumnParallelLinear, capped_logits, vocabulary_chunk


class Head(ColumnParallelLinear):
    """(T, D) -> logits (T, V/t); columns beyond V are padding."""

    narrows = False
    """True: tokens of a wider residual stream are cast to the dtype of the weight first."""
    scale = 1.0
    """Factor of x, and so of the logits."""
    cap: float | None = None
    """Logits l become cap * tanh(l / cap); None: they stay."""

    def forward(
        self,
        x: Tensor,
        context: Context | None = None,
        *,
        tokens: int | None = None,
        sequence_parallel: bool | None = None,
    ) -> Tensor:
        """(T, D) -> (T, V/t), or the context's ``outputs`` of it; T is inferred if not given.

        A context with ``to_loss`` gets x itself, scaled: the cross entropy makes logits of it.
        """
        if self.narrows:
            x = x.to(self.weight.dtype)
        if self.scale != 1:
            x = x * self.scale
        if context is not None and context.to_loss:
            return x
        if tokens is None and context is not None:
            tokens = context.tokens
        outputs = None if context is None else context.outputs
        cut = self.sequence_parallel if sequence_parallel is None else sequence_parallel
        if outputs is not None and not cut:
            return capped_logits(super().forward(x[outputs], sequence_parallel=False), self.cap)
        logits = super().forward(x, tokens=tokens, sequence_parallel=sequence_parallel)
        return capped_logits(logits if outputs is None else logits[outputs], self.cap)

    def leaves_weight_to_loss(self, x: Tensor, context: Context | None = None, **_: object) -> bool:
        """Return True where ``forward`` of x (T, D) leaves its product to the loss.

        ZeRO-3 asks for it, see ``kenotron_optim.SlicedOptimizer.overlap_forward``.
        """
        return context is not None and context.to_loss


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

    def fill_buffers(self, device: torch.device) -> None:
        """Give buffers of layers of transformers, which need memory first, their values."""
        for layer in self._order:
            if isinstance(layer, TransformersLayer):
                layer.fill_buffers(device)


def build_decoder(
    config: Architecture,
    build: Build,
    *,
    recompute: Recompute | Sequence[Recompute] = "none",
    vocab_divisible_by: int = 1,
) -> list[tuple[str, nn.Module]]:
    """Make all layers of a decoder by name, in order: embedding, layers.i, mtp.0, norm, head.

    ``mtp.0`` is there with ``DecoderSpec.mtp_weight``.
    Those of a model of transformers: see ``transformers_layers``.

    Args:
        config: what it is made of.
        build: the tp axis, how cut layers communicate over it, device and dtype.
        recompute: what decoder layers compute again in the backward, all or one by one. ``mtp.0``
            does what a further one says, else what the last one says.
        vocab_divisible_by: vocabulary rows per rank are a multiple of this.

    Raises:
        ValueError: heads or widths do not divide by the axis, or ``recompute`` does not name one
            thing a layer.
    """
    spec = config.decoder
    depth, vocab = spec.num_hidden_layers, spec.vocab_size
    again = [recompute] * depth if isinstance(recompute, str) else list(recompute)
    if len(again) not in (depth, depth + len(spec.mtp_blocks)):
        raise ValueError(f"recompute names {len(again)} layers, but the model has {depth}")
    if isinstance(spec, TransformersSpec):
        return transformers_layers(spec, build, again)
    divisible = vocab_divisible_by * build.own_shards
    embedding = Embedding(spec, build, divisible_by=divisible)
    layers: list[tuple[str, nn.Module]] = [("embedding", embedding)]
    for i, (block, what) in enumerate(zip(spec.blocks, again[:depth], strict=True)):
        own = (block, spec.hidden_size, build)
        if build.shards == 1:
            layer = Block(*own, layer=i, recompute=what)
        else:
            layer = BlockInShards(*own, layer=i, recompute=what, last=i + 1 == depth)
        layers.append((f"layers.{i}", layer))
    chunk = vocabulary_chunk(vocab, build.tp.size, divisible)
    norm = spec.norm.build(spec.hidden_size, build)
    head = Head(
        spec.hidden_size, vocab, build.tp, chunks=(chunk,), **build.mode.column, **build.storage
    )
    head.narrows = spec.residual_in_fp32
    head.scale, head.cap = spec.logit_scale, spec.logit_cap
    declare_roles(head, weight="output")
    tied: list[Embedding | Head] = [head] if spec.tie_word_embeddings else []
    if spec.mtp_weight:
        module = MultiTokenPrediction(
            spec, build, recompute=again[-1], vocab_divisible_by=divisible
        )
        layers.append((MTP, module))
        tied.append(module.embedding)
    if tied:
        _tie(embedding, *tied)
    return [*layers, ("norm", norm), ("head", head)]


def _tie(*owners: Embedding | Head) -> None:
    """Declare their matrices to be logical tensor ``embedding.weight``."""
    for layer in owners:
        cut = layer.placements["weight"]
        assert isinstance(cut, Shard)  # as the layers of kenotron_tp declare it
        layer.placements["weight"] = (cut, Tie("embedding.weight"))
