"""Bytes that a block keeps for its backward: on device meta what a real block keeps on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from toy_family import ToyConfig

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_models import Build, Context, Recompute
from kenotron_models.block_costs import MetaMicroBatch, kept_bytes
from kenotron_models.block_memory import bytes_alive
from kenotron_models.families import (
    LlamaConfig,
    MambaModelConfig,
    MistralConfig,
    MixtralConfig,
    OLMoEConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)
from kenotron_models.layers import Block, BlockSpec
from kenotron_tp import TPMode

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2,
    "vocab_size": 29, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window_size=5),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2, attention_bias=True),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "starcoder2": Starcoder2Config(**SIZES, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0),
    "starcoder2, dropout": Starcoder2Config(**SIZES),
    "olmoe": OLMoEConfig(**SIZES, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
    "mamba": MambaModelConfig(
        d_model=64, num_hidden_layers=2, vocab_size=29, residual_in_fp32=True
    ),
    "toy": ToyConfig(),
}
ROWS, SEQUENCE = 2, 24
AGAIN: tuple[Recompute, ...] = ("none", "selective", "full")
MODES = {
    "whole": TPMode(),
    "sequence": TPMode(sequence_parallel=True),
    "sequence, regather": TPMode(sequence_parallel=True, regather=True),
    "sequence, overlap": TPMode(sequence_parallel=True, overlap=True),
}


def real_bytes(
    mesh: Mesh,
    block: BlockSpec,
    width: int,
    mode: TPMode,
    dtype: torch.dtype,
    recompute: Recompute,
    residual: torch.dtype | None = None,
) -> int:
    """What is alive after a forward of a block that computes on this rank."""
    build = Build(mesh["tp"], mode, ep=mesh["ep"], device="cpu", dtype=dtype)
    layer = Block(block, width, build, recompute=recompute)
    places = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE)
    tokens = ROWS * SEQUENCE // (mesh["tp"].size if mode.sequence_parallel else 1)
    x = torch.randn(tokens, width, dtype=residual or dtype, requires_grad=True)
    again, wait = (2, 0.3) if mesh.world.size > 1 else (1, 0.0)  # threads of collectives
    contexts = [Context(places, torch.arange(ROWS), dropout_key=7) for _ in range(again)]
    return min(bytes_alive(layer, x, context, wait=wait) for context in contexts)


def compared(mesh: Mesh, name: str, mode: TPMode) -> list[tuple[str, int, int]]:
    """What is kept on meta and on the CPU, for all that may be computed again."""
    spec = FAMILIES[name].decoder
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for again in AGAIN:
            given = spec.blocks[0], spec.hidden_size
            wide = torch.float32 if spec.residual_in_fp32 else None
            options = {"mode": mode, "dtype": dtype, "residual": wide, "recompute": again}
            batch = MetaMicroBatch(
                ROWS, SEQUENCE, tp=mesh["tp"].size, ep=mesh["ep"].size, **options
            )
            meta = kept_bytes(*given, batch)
            real = real_bytes(mesh, *given, mode, dtype, again, wide)
            found.append((f"{dtype} {again}", meta, real))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_on_meta_a_block_keeps_what_it_keeps_on_a_cpu(name: str) -> None:
    for what, meta, real in compared(Mesh.connect(), name, TPMode()):
        # For a window torch's attention on a CPU keeps a mask (S, S), and an exchange of experts
        # up to four places of each of a token's two choices: neither is counted.
        relative = 0.03 if name == "mistral" else 1e-3
        places = 4 * 8 * 2 * ROWS * SEQUENCE if name in ("mixtral", "olmoe") else 0
        assert meta == pytest.approx(real, rel=relative, abs=places), what


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "mamba", "toy"])
@pytest.mark.by_turns(4)
def test_so_it_is_on_two_tensor_parallel_ranks(name: str, mode: str) -> None:
    for rank in on_ranks(compared, name, MODES[mode], tp=2):
        for what, meta, real in rank:
            assert meta == pytest.approx(real, rel=1e-3), what


@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_so_it_is_on_average_on_two_ranks_of_experts(name: str) -> None:
    """On meta experts have an even load; rows that one rank has more, the other one has less."""
    for first, second in zip(*on_ranks(compared, name, TPMode(), dp=2, ep=2), strict=True):
        what, meta, real = first
        assert meta == second[1]
        assert meta == pytest.approx((real + second[2]) / 2, rel=0.03), what


def llama_bytes(**options: Any) -> int:
    spec = FAMILIES["llama"].decoder
    batch = MetaMicroBatch(ROWS, SEQUENCE, **options)
    return kept_bytes(spec.blocks[0], spec.hidden_size, batch)


def test_the_whole_recomputation_keeps_the_input_alone() -> None:
    assert llama_bytes(recompute="full") == ROWS * SEQUENCE * 64 * 4
    cut = TPMode(sequence_parallel=True)
    assert llama_bytes(recompute="full", tp=2, mode=cut) == ROWS * SEQUENCE * 64 * 4 // 2


def test_a_residual_stream_of_fp32_is_counted_as_such() -> None:
    spec = FAMILIES["mamba"].decoder
    given = spec.blocks[0], spec.hidden_size
    for wide, size in ((torch.float32, 4), (None, 2)):
        options = {"dtype": torch.bfloat16, "residual": wide, "recompute": "full"}
        assert (
            kept_bytes(*given, MetaMicroBatch(ROWS, SEQUENCE, **options))
            == ROWS * SEQUENCE * 64 * size
        )


def test_attention_kernels_that_are_not_here_keep_what_torchs_does() -> None:
    spec = FAMILIES["llama"].decoder
    block = spec.blocks[0]
    for backend in ("flash_attn", "varlen", "blocked"):
        other = replace(block, mixer=replace(block.mixer, backend=backend))
        assert kept_bytes(other, spec.hidden_size, MetaMicroBatch(ROWS, SEQUENCE)) == llama_bytes()
    plain = replace(block, mixer=replace(block.mixer, backend="plain"))
    assert kept_bytes(plain, spec.hidden_size, MetaMicroBatch(ROWS, SEQUENCE)) > llama_bytes()


@pytest.mark.parametrize("tp", [1, 2])
def test_with_fused_norms_it_is_what_is_counted_by_hand(tp: int) -> None:
    heads, kv_heads, features, width, inner = 4, 2, 16, 64, 96
    cut = (heads + 2 * kv_heads) * features  # queries, keys and values, of which values are read
    cut += (heads + kv_heads) * features + heads * features  # turned queries and keys; the output
    cut += 4 * inner  # gate and up, the gate's activation, the product
    whole = 4 * width  # the input and its norm, the same of the feed-forward
    numbers = 4 * heads // tp + 2 * 4  # in fp32: of each query and head, and of each norm
    want = ROWS * SEQUENCE * (2 * (cut // tp + whole) + numbers)
    assert llama_bytes(dtype=torch.bfloat16, fused_norms=True, tp=tp) == want
    assert llama_bytes(dtype=torch.bfloat16, tp=tp) > want


@pytest.mark.parametrize("tp", [1, 2])
def test_selective_recomputation_keeps_products_and_attention_alone(tp: int) -> None:
    heads, kv_heads, features, width, inner = 4, 2, 16, 64, 96
    cut = (heads + 2 * kv_heads) * features + heads * features + 2 * inner
    whole = 2 * width  # the input, and that of the feed-forward
    want = ROWS * SEQUENCE * (2 * (cut // tp + whole) + 4 * heads // tp)
    for fused in (True, False):
        options = {"recompute": "selective", "tp": tp, "fused_norms": fused}
        assert llama_bytes(dtype=torch.bfloat16, **options) == want
