"""Texts that two models are compared on: they reach windows, stretched positions and documents.

B rows of S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kenotron_models.spec import DecoderSpec
from kenotron_models.transformers_spec import TransformersSpec

ROWS, LENGTH = 2, 512
"""Rows and tokens of the ordinary text."""
SHORT = 64
"""Most tokens of the text whose gradient is compared."""
MOST = 10**12
"""Parameters times tokens that a window may cost: wider ones are not reached."""
FARTHEST = 1 << 15
"""Last position of a stretched context that is tried: further angles are rounded in fp32."""
DOCUMENTS = (1, 6, 37)
"""Lengths of the first documents of a row with several; the last one fills it."""


@dataclass(frozen=True)
class Probe:
    """One text, and what is compared on it."""

    name: str
    tokens: Tensor
    """(B, S) int64."""
    positions: Tensor
    """(B, S) int64."""
    lengths: tuple[int, ...] = ()
    """Tokens of each document, which sees itself only; none: rows are whole texts."""
    gradient: bool = False
    """The gradient of the embedding is compared, not only the logits."""


def probes_of(spec: DecoderSpec, parameters: int) -> list[Probe]:
    """Return the texts for a model; the same every time.

    Args:
        spec: the model.
        parameters: how many it has.
    """
    reach = spec.max_position_embeddings
    window = (spec.window or 0) + 16
    wide = LENGTH < window and window * parameters <= MOST
    rows, length = (1, min(window, reach)) if wide else (ROWS, min(LENGTH, reach))
    found = [_text("a text", spec, rows, length)]
    short = _text("a text", spec, 1, min(SHORT, reach))
    found.append(replace(short, name="the gradient of a text", gradient=True))
    if (first := _stretched_from(spec)) is not None:
        half = max(short.tokens.shape[1] // 2, 1)
        positions = short.positions + (first - half) * (short.positions >= half)
        found.append(replace(short, name="positions of a stretched context", positions=positions))
    if not isinstance(spec, TransformersSpec):
        found.append(_documents(spec, min(2 * SHORT, reach)))
    return found


def with_documents(spec: DecoderSpec) -> DecoderSpec:
    """Return the same model, in which every token sees its own document only."""
    blocks = []
    for block in spec.blocks:
        mixer: Any = block.mixer
        if hasattr(mixer, "separate_documents"):
            mixer = replace(mixer, separate_documents=True)
        blocks.append(replace(block, mixer=mixer))
    return replace(spec, blocks=tuple(blocks))


def _text(name: str, spec: DecoderSpec, rows: int, length: int) -> Probe:
    places = torch.arange(rows * length)
    tokens = (places * 7919 + places * places * 31) % spec.vocab_size
    positions = torch.arange(length).expand(rows, length)
    return Probe(name, tokens.view(rows, length), positions)


def _stretched_from(spec: DecoderSpec) -> int | None:
    """A position beyond the first context of rotary positions that are stretched; None: none are.

    All such positions have other angles than those of an unstretched model.
    """
    if isinstance(spec, TransformersSpec):
        return None
    ropes = [getattr(block.mixer, "rope", None) for block in spec.blocks]
    scalings = [rope.scaling for rope in ropes if rope is not None and rope.scaling is not None]
    if not scalings:
        return None
    first = max(each.original_max_position_embeddings or 0 for each in scalings)
    return min(2 * (first or spec.max_position_embeddings), FARTHEST)


def _documents(spec: DecoderSpec, length: int) -> Probe:
    whole = _text("several documents", spec, 1, length)
    lengths = _fitted(DOCUMENTS, length)
    positions = torch.cat([torch.arange(each) for each in lengths])[None]
    return replace(whole, positions=positions, lengths=lengths)


def _fitted(lengths: Sequence[int], whole: int) -> tuple[int, ...]:
    """Return the lengths that fit, and what is left."""
    kept: list[int] = []
    for each in lengths:
        if sum(kept) + each < whole:
            kept.append(each)
    return (*kept, whole - sum(kept))
