"""Multi-token prediction: a module that predicts the token after the next (DeepSeek-V3).

The module's result is appended to the tokens of the main stream, so that the final norm and the
head, which both share, and the pipeline between them see one activation.

Shapes: B rows of S tokens, T = B * S, D hidden; T/t under sequence parallelism.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import Roles
from kenotron_dist.placement import Partial, Placements
from kenotron_models.block import Block
from kenotron_models.block_in_shards import BlockInShards
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.embedding import Embedding
from kenotron_models.recompute import Recompute
from kenotron_models.spec import DecoderSpec
from kenotron_models.virtual_chunks import in_chunks, join_chunks, split_chunks
from kenotron_tp import matmul

MTP = "mtp.0"
"""Name of the module in a model."""


class Projection(nn.Module):
    """(T, 2D) -> (T, D); ``weight`` (D, 2D) is whole on every tp rank."""

    def __init__(self, width: int, build: Build) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 2 * width, **build.storage))
        nn.init.uniform_(self.weight, -((2 * width) ** -0.5), (2 * width) ** -0.5)
        self.roles: Roles = {"weight": "hidden"}
        self.placements: Placements = {}
        if build.sequence_parallel:  # each rank has the gradient of its own tokens
            self.placements["weight"] = Partial(build.tp.name)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply (T, 2D) by the weight: (T, D)."""
        return matmul(x, self.weight)


class MultiTokenPrediction(nn.Module):
    """``h' = block(projection([norm(h); norm(embedding(next token))]))``, appended to h.

    DeepSeek-V3, arXiv 2412.19437, section 2.2, with one module. The embedding is the model's own:
    its leaf here is tied to that of the first layer. It adds neither learned positions nor dropout.

    Args:
        spec: the model; the module's block is of the kind of its last one.
        build: how and where.
        recompute: what the block computes again in the backward.
        vocab_divisible_by: vocabulary rows per rank are a multiple of this.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        build: Build,
        *,
        recompute: Recompute = "none",
        vocab_divisible_by: int = 1,
    ) -> None:
        super().__init__()
        width, depth = spec.hidden_size, spec.num_hidden_layers
        tokens_alone = replace(spec, learned_positions=False, embedding_dropout=0.0)
        build = replace(build, cuts_between=False)  # the last block of the model gave all tokens
        kind = Block if build.shards == 1 else BlockInShards
        self.embedding = Embedding(tokens_alone, build, divisible_by=vocab_divisible_by)
        self.hidden_norm = spec.norm.build(width, build)
        self.embedding_norm = spec.norm.build(width, build)
        self.projection = Projection(width, build)
        self.block = kind(spec.blocks[-1], width, build, layer=depth, recompute=recompute)

    @property
    def cuts_sequence(self) -> bool:
        """True where it is right on rows that are cut over ranks."""
        return self.block.cuts_sequence

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the block; arguments are those of ``torch.compile``."""
        self.block.compile(*args, **kwargs)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(T, D) -> (2T, D): x, then what predicts the token after the next of each token.

        Without ``Context.next_tokens_BS`` nothing is predicted, and the result is x. Of virtual
        chunks each has both, one chunk after the other.
        """
        if context.next_tokens_BS is None:
            return x
        if context.chunks:
            return self._in_chunks(x, context.next_tokens_BS.flatten(), context)
        following = self.embedding(context.next_tokens_BS.flatten())
        both = torch.cat([self.hidden_norm(x), self.embedding_norm(following)], -1)  # (T, 2D)
        return torch.cat([x, self.block(self.projection(both).to(x.dtype), context)])

    def _in_chunks(self, x: Tensor, ids: Tensor, context: Context) -> Tensor:
        """x (T, D) and following tokens (T,) -> (2T, D): of each chunk first x, then the result."""
        following = in_chunks(self.embedding, ids, context, _alone)
        norms = self.hidden_norm(x, context), self.embedding_norm(following, context)
        projected = in_chunks(self.projection, torch.cat(norms, -1), context, _alone).to(x.dtype)
        both = (split_chunks(each, context.chunks) for each in (x, self.block(projected, context)))
        return join_chunks([torch.cat(pair) for pair in zip(*both, strict=True)])


def _alone(layer: nn.Module, x: Tensor, context: Context) -> Tensor:
    """Return what a layer makes of x, of any shape, that reads no context."""
    return layer.forward(x)


def mtp_work(spec: DecoderSpec) -> list[float]:
    """Return the multiply-adds a token of the module without its head, if there is one."""
    if not spec.mtp_weight:
        return []
    parts = sum(part.cost(spec.hidden_size) for part in spec.blocks[-1].parts)
    return [float(parts + 2 * spec.hidden_size**2)]
