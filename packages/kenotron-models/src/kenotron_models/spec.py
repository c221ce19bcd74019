"""Description of a decoder: an embedding, blocks, a norm and a head.

The config of a family (Llama, Qwen2, StarCoder2...) has the names that its users know and says in
its property ``decoder`` what they mean here; layers and counts read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kenotron_models.block import BlockSpec
from kenotron_models.norm import NormSpec
from kenotron_models.part import Sparse

MOST_LAYERS = 10_000
"""Blocks of the deepest model that is built."""


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder. The config that makes one has checked its sizes."""

    hidden_size: int
    """D, width of the residual stream, in features."""
    vocab_size: int
    """V, token numbers that exist, without padding."""
    max_position_embeddings: int
    """Longest text the model is meant for, in tokens."""
    blocks: tuple[BlockSpec, ...]
    """All blocks, in order."""
    norm: NormSpec = NormSpec()
    """Kind of the norm after the last block."""
    tie_word_embeddings: bool = False
    """True: the head is the embedding's own matrix."""
    learned_positions: bool = False
    """Positions have learned embeddings, added to the tokens'."""
    embedding_dropout: float = 0.0
    """Share of embedded features that is dropped in training."""
    embedding_scale: float | None = None
    """Factor of embedded tokens, rounded to the table's number format; None: 1."""
    logit_scale: float = 1.0
    """Factor of the input of the head, and so of the logits (Granite)."""
    logit_cap: float | None = None
    """Logits l become cap * tanh(l / cap); None: they stay."""
    z_loss: float = 0.0
    """Weight of the squared log of the softmax's sum in the loss (PaLM, arXiv 2204.02311)."""
    mtp_weight: float = 0.0
    """Weight of the loss of a module that predicts the token after the next (``mtp``); 0: there is
    no such module."""
    stage_starts: tuple[int, ...] = ()
    """Blocks (from 0) that begin a further stage of a training's pipeline; none: costs decide."""
    residual_in_fp32: bool = False
    """The residual stream is fp32, also where parameters and what layers compute are narrower."""
    bos_token_id: int | None = None
    """Token number of the beginning of a text; no layer reads it."""
    eos_token_id: int | None = None
    """Token number of the end of a text; no layer reads it."""

    @property
    def decoder(self) -> DecoderSpec:
        """Itself: a spec stands wherever a family's config does."""
        return self

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def mtp_blocks(self) -> tuple[BlockSpec, ...]:
        """The block of the module that predicts the token after the next, if there is one."""
        return self.blocks[-1:] if self.mtp_weight else ()

    @property
    def trained_blocks(self) -> tuple[BlockSpec, ...]:
        """All blocks that are trained: those of the model, then that of the module."""
        return (*self.blocks, *self.mtp_blocks)

    @property
    def routes(self) -> bool:
        """True where the tokens of any block use only some of its matrices: they are routed."""
        return any(isinstance(part, Sparse) for block in self.blocks for part in block.parts)

    @property
    def separate_documents(self) -> bool:
        """True where a token of any block attends to its own document only."""
        return any(getattr(block.mixer, "separate_documents", False) for block in self.blocks)

    @property
    def window(self) -> int | None:
        """The widest window of any block, in tokens; None: no block has one."""
        found = [getattr(block.mixer, "window", None) for block in self.blocks]
        return max((size for size in found if size is not None), default=None)


class Architecture(Protocol):
    """The config of a family of decoders, or a spec."""

    @property
    def decoder(self) -> DecoderSpec:
        """Description of the decoder."""
        ...
