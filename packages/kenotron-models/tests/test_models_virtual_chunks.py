"""Chunks of a rank's tokens: their order, and what cannot be computed in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from kenotron_cp import Cut, Layout
from kenotron_dist import Axis
from kenotron_models import Context, DecoderSpec, SequenceCut, whole_row_part
from kenotron_models.families import DeepseekV3Config, LlamaConfig, MambaModelConfig
from kenotron_models.layers import AttentionSpec
from kenotron_models.virtual_chunks import (
    by_chunk,
    chunk_order,
    contexts_of_chunks,
    in_order,
    split_chunks,
)

SEQUENCE, VIRTUAL = 37, 4


class OtherSpec(AttentionSpec):
    """A mixer of one's own."""


Order = Literal["zigzag", "contiguous"]


def of_rank(rank: int, ranks: int, order: Order) -> Context:
    layout = Layout(order, strips=Cut(SEQUENCE, VIRTUAL, Layout(order)).strips)
    cut = SequenceCut(
        Axis("cp", rank, tuple(range(ranks))), torch.arange(SEQUENCE)[None], layout=layout,
        virtual=VIRTUAL,
    )  # fmt: skip
    return Context(cut.places_S[None], cut=cut, chunks=VIRTUAL // ranks)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_have_the_chunks_of_virtual_ranks_in_turn(ranks: int, order: Order) -> None:
    alone = contexts_of_chunks(of_rank(0, 1, order))
    found = [c for r in range(ranks) for c in contexts_of_chunks(of_rank(r, ranks, order))]
    want = [each.positions_BS.tolist() for each in alone]
    assert [each.positions_BS.tolist() for each in found] == want
    assert all(each.chunks == 0 and each.cut is None for each in found)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_attention_reads_tokens_as_a_rank_has_them(ranks: int, order: Order) -> None:
    for rank in range(ranks):
        context = of_rank(rank, ranks, order)
        how, cut = chunk_order(context), context.cut
        assert cut is not None
        parts = split_chunks(cut.places_S.double(), how.count)
        parts = tuple(part[None, :, None].requires_grad_() for part in parts)
        whole = in_order(parts, how)
        assert torch.equal(whole[0, :, 0].long(), Cut(SEQUENCE, ranks, cut.layout).positions(rank))
        again = by_chunk(whole, how)
        for part, back in zip(parts, again, strict=True):
            left_out = (part >= SEQUENCE) & (ranks == 1)
            assert torch.equal(back, part.masked_fill(left_out, 0))
        torch.stack(again).sum().backward()
        assert all(part.grad is not None and part.grad.amax() == 1 for part in parts)


def test_what_is_not_computed_in_chunks_is_named() -> None:
    spec: DecoderSpec = LlamaConfig().decoder
    assert whole_row_part(spec) == whole_row_part(DeepseekV3Config().decoder) == ""
    assert whole_row_part(MambaModelConfig().decoder) == ""
    other = replace(spec.blocks[0], feed_forward=spec.blocks[0].mixer)
    assert "feed-forward of kind" in whole_row_part(replace(spec, blocks=(other,)))
    block = replace(spec.blocks[0], mixer=OtherSpec(heads=2, kv_heads=2, head_dim=8))
    assert "a mixer of kind attention (OtherSpec)" == whole_row_part(replace(spec, blocks=(block,)))
    mixer = spec.blocks[0].mixer
    assert isinstance(mixer, AttentionSpec)
    block = replace(spec.blocks[0], mixer=replace(mixer, head_dim=6))
    assert "heads of 6 features" in whole_row_part(replace(spec, blocks=(block,)))
