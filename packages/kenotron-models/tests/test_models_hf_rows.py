"""Rows of Hugging Face's tensors where neighbours of ours are halves of theirs."""

from __future__ import annotations

from dataclasses import replace

from kenotron_models import DecoderSpec
from kenotron_models.families import LlamaConfig, Phi3Config
from kenotron_models.hf import hf_tensors
from kenotron_models.hf_tensors import LLAMA_NAMES, tensors_of
from kenotron_models.layers import AttentionSpec, BlockSpec, MLPSpec, Rope

OURS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 64,
}  # fmt: skip


def test_neighbours_here_are_halves_there():
    config = LlamaConfig(**OURS, rope_interleaved=True)
    whole = hf_tensors(config)["layers.0.attention.qkv.weight"]
    places = {(name, row): start[0] for name, row, start, _ in whole.runs()}
    q, k, v = (f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv")
    assert [places[q, row] for row in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert [places[k, row] for row in range(8, 16)] == [40, 42, 44, 46, 41, 43, 45, 47]
    assert places[v, 0] == 48


def test_gates_keep_their_rows_and_queries_are_paired_within_a_head():
    mixer = AttentionSpec(
        heads=2, kv_heads=1, head_dim=4, gate=True, rope=Rope(share=0.5, interleaved=True)
    )
    spec = DecoderSpec(
        hidden_size=8,
        vocab_size=9,
        max_position_embeddings=8,
        blocks=(BlockSpec(mixer=mixer, feed_forward=MLPSpec(features=4)),),
    )
    for share, pairs in ((0.5, [0, 1, 2, 3]), (1.0, [0, 2, 1, 3])):
        turned = replace(mixer, rope=Rope(share=share, interleaved=True))
        block = replace(spec.blocks[0], mixer=turned)
        whole = tensors_of(replace(spec, blocks=(block,)), LLAMA_NAMES)
        runs = [*whole["layers.0.attention.qkv.weight"].runs()]
        places = {(name.split(".")[-2], row): start[0] for name, row, start, _ in runs}
        queries = [places["q_proj", row] for row in range(16)]  # of a head: 4 of it, 4 of its gate
        assert queries == [*pairs, 4, 5, 6, 7, *(8 + i for i in pairs), 12, 13, 14, 15]
        assert [places["k_proj", row] for row in range(4)] == [16 + i for i in pairs]
        assert places["v_proj", 0] == 20


def test_a_tensor_that_is_fused_there_pairs_rows_of_queries_and_keys_alone():
    config = Phi3Config(**OURS, rope_interleaved=True)
    whole = hf_tensors(config)["layers.0.attention.qkv.weight"]
    assert whole.sources() == {"model.layers.0.self_attn.qkv_proj.weight": (64, 32)}
    places = {row: start[0] for _, row, start, count in whole.runs() if count == 1}
    assert [places[row] for row in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert [places[row] for row in range(40, 64)] == [
        40,
        42,
        44,
        46,
        41,
        43,
        45,
        47,
        *range(48, 64),
    ]
