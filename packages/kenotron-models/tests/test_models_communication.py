"""Bytes that a block sends: on device meta what real ranks send, and what formulas say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kenotron_cp import Cut, Layout
from kenotron_dist import Mesh
from kenotron_dist.diagnosis import record
from kenotron_dist.testing import on_ranks
from kenotron_ep import ExchangeSize, exchange_traffic
from kenotron_models import Build, Context, Recompute, SequenceCut
from kenotron_models.block_costs import MetaMicroBatch, sent_bytes
from kenotron_models.families import (
    DeepseekV3Config,
    LlamaConfig,
    Mamba2ModelConfig,
    MambaModelConfig,
    MixtralConfig,
)
from kenotron_models.layers import Block, BlockSpec
from kenotron_tp import TPMode

ROWS, SEQUENCE, WIDTH = 2, 24, 64
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 96, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 29, "max_position_embeddings": 64,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "latent": DeepseekV3Config(**SIZES, **LATENT),
    "mamba": MambaModelConfig(d_model=WIDTH, num_hidden_layers=2, vocab_size=29),
    "mamba2": Mamba2ModelConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        vocab_size=29,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        state_size=8,
        chunk_size=4,
    ),
}
MODES = {
    "whole": TPMode(),
    "sequence": TPMode(sequence_parallel=True),
    "sequence, regather": TPMode(sequence_parallel=True, regather=True),
    "sequence, overlap": TPMode(sequence_parallel=True, overlap=True),
}
AGAIN: tuple[Recompute, ...] = ("none", "selective", "full", "mixer", "feed_forward")


def really_sent(
    mesh: Mesh, block: BlockSpec, mode: TPMode, again: Recompute, cut: bool = False
) -> dict[str, int]:
    """Bytes that leave this rank in forward and backward."""
    build = Build(mesh["tp"], mode, device="cpu", ep=mesh["ep"])
    layer = Block(block, WIDTH, build, recompute=again)
    places = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE)
    options = {}
    if cut:
        options["cut"] = SequenceCut(mesh["cp"], places)
        places = places[:, options["cut"].places_S.clamp(max=SEQUENCE - 1)]  # the end is padding
    tokens = places.numel() // (mesh["tp"].size if mode.sequence_parallel else 1)
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    with record(mesh) as recorder:
        layer(x, Context(places, torch.arange(ROWS), dropout_key=7, **options)).sum().backward()
    return recorder.bytes_per_axis()


def compared(mesh: Mesh, name: str, mode: TPMode) -> list[tuple[str, dict, dict]]:
    """What is sent on meta and by this rank, for all that may be computed again."""
    block, tp = FAMILIES[name].decoder.blocks[0], mesh["tp"].size
    batch = MetaMicroBatch(ROWS, SEQUENCE, mode=mode)
    return [
        (
            again,
            sent_bytes(block, WIDTH, replace(batch, recompute=again, tp=tp), backend="gloo"),
            really_sent(mesh, block, mode, again),
        )
        for again in AGAIN
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_on_meta_a_block_sends_what_it_sends_between_ranks(name: str, mode: str) -> None:
    for rank in on_ranks(compared, name, MODES[mode], tp=2):
        for again, meta, real in rank:
            assert meta == real, again
            assert meta["tp"] > 0


def test_by_hand_it_is_two_sums_of_all_tokens_forward_and_back() -> None:
    block, tokens = FAMILIES["llama"].decoder.blocks[0], ROWS * SEQUENCE
    whole = tokens * WIDTH * 2
    for tp in (2, 4):
        for mode in (TPMode(), TPMode(sequence_parallel=True)):
            batch = MetaMicroBatch(ROWS, SEQUENCE, mode=mode, dtype=torch.bfloat16, tp=tp)
            found = sent_bytes(block, WIDTH, batch)
            assert found == {"tp": 4 * 2 * (tp - 1) * whole // tp}
    assert sent_bytes(block, WIDTH, MetaMicroBatch(ROWS, SEQUENCE)) == {}


@pytest.mark.parametrize("ep", [2, 4])
def test_experts_send_what_the_formula_of_an_even_load_says(ep: int) -> None:
    config = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=8)
    block, top_k = config.decoder.blocks[0], config.num_experts_per_tok
    found = sent_bytes(block, WIDTH, MetaMicroBatch(ROWS, SEQUENCE, ep=ep))
    size = ExchangeSize(ROWS * SEQUENCE, top_k, WIDTH, 8, torch.float32)
    traffic = exchange_traffic(size, ep)
    counts = (ep - 1) * (8 // ep + 1) * 8  # rows for each expert, and the number of tokens
    assert found == {"ep": traffic.forward + traffic.backward + counts}


def on_cut_rows(mesh: Mesh, name: str) -> list[tuple[dict, dict]]:
    block = FAMILIES[name].decoder.blocks[0]
    cut = Cut(SEQUENCE, mesh["cp"].size, Layout())
    batch = MetaMicroBatch(ROWS, cut.local)
    return [
        (
            sent_bytes(block, WIDTH, replace(batch, recompute=again), cut=cut),
            really_sent(mesh, block, TPMode(), again, True),
        )
        for again in AGAIN
    ]


@pytest.mark.parametrize("name", ["llama", "mamba", "mamba2"])
def test_a_mixer_of_cut_rows_sends_what_is_predicted(name: str) -> None:
    for meta, real in on_ranks(on_cut_rows, name, cp=2)[0]:
        assert meta["cp"] == real["cp"] > 0
