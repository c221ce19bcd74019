"""Layers of transformers measured on device meta: what real ones keep, start and send."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from kenotron_dist import Axis, Mesh
from kenotron_dist.diagnosis import record
from kenotron_dist.testing import on_ranks
from kenotron_models import Build, Context, build_decoder, layer_costs
from kenotron_models.block_costs import (
    Kernels,
    MetaMicroBatch,
    block_flops,
    block_kernels,
    kept_bytes,
    sent_bytes,
    transformers_blocks,
)
from kenotron_models.block_memory import bytes_alive
from kenotron_models.families import LlamaConfig, TransformersConfig

pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "vocab_size": 29, "max_position_embeddings": 64, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS},
    "gemma3_text": {"model_type": "gemma3_text", **WINDOWS},
    "olmo3": {"model_type": "olmo3", **WINDOWS},
}
KINDS = {"gemma3_text": [0, 1, 0, 1], "olmo3": [0, 1, 0, 1]}
ROWS, SEQUENCE = 2, 24
ALONE = Axis.solo("tp")


def spec_of(name: str, attention: str | None = None, **more: Any) -> Any:
    values = SIZES | FAMILIES[name] | more
    return TransformersConfig(config_json=json.dumps(values), attn_implementation=attention).decoder


def real_layer(spec: Any, dtype: torch.dtype, axis: Axis = ALONE) -> Any:
    """The first layer on the CPU, an input, and a context in which shared masks are made."""
    entries = dict(build_decoder(spec, Build(axis, device="cpu", dtype=dtype)))
    layer: Any = entries["layers.0"]
    layer.to_empty(device="cpu")
    for each in layer.parameters():
        torch.nn.init.normal_(each, std=0.02)
    layer.fill_buffers(torch.device("cpu"))
    x = torch.randn(ROWS * SEQUENCE, spec.hidden_size, dtype=dtype, requires_grad=True)
    context = Context(torch.arange(SEQUENCE).expand(ROWS, SEQUENCE))
    layer.skeleton.calls(x.view(ROWS, SEQUENCE, -1).detach(), context)
    return layer, x, context


@pytest.mark.parametrize("attention", ["sdpa", "kenotron"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_on_meta_keeps_and_starts_what_it_does_on_a_cpu(name: str, attention: str) -> None:
    spec = spec_of(name, attention)
    given = transformers_blocks(spec)[0], spec.hidden_size
    mask = SEQUENCE**2 * 8 * ("layer_types" in FAMILIES[name])  # of a CPU's kernel, not counted
    places = 16 * ("moe" in name)
    for dtype in (torch.float32, torch.bfloat16):
        layer, x, context = real_layer(spec, dtype)
        batch = MetaMicroBatch(ROWS, SEQUENCE, dtype=dtype)
        kept = kept_bytes(*given, batch)
        assert kept <= bytes_alive(layer, x, context) <= kept + mask + places
        with Kernels() as forward:
            y = layer(x, context)
        with Kernels() as backward:
            torch.autograd.backward(y, torch.empty_like(y))
        for meta, cpu in zip(block_kernels(*given, batch), (forward, backward), strict=True):
            assert abs(cpu.nbytes - meta.nbytes) <= 2 * mask
            assert abs(cpu.kernels - meta.kernels) <= 5


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_one_kind_are_equal(name: str) -> None:
    assert [block.number for block in transformers_blocks(spec_of(name))] == KINDS.get(
        name, [0] * 4
    )


def test_a_llama_keeps_and_computes_again_at_most_its_input_and_shares_over_tp() -> None:
    spec = spec_of("llama")
    block = transformers_blocks(spec)[0]
    given = block, 64, MetaMicroBatch(ROWS, SEQUENCE)
    full = block, 64, MetaMicroBatch(ROWS, SEQUENCE, recompute="full")
    cut = block, 64, MetaMicroBatch(ROWS, SEQUENCE, tp=2)
    assert kept_bytes(*full) == ROWS * SEQUENCE * 64 * 4
    whole, half = kept_bytes(*given), kept_bytes(*cut)
    assert 0.5 * whole < half < 0.8 * whole
    (forward, backward), (_, again) = block_kernels(*given), block_kernels(*full)
    assert again.nbytes - backward.nbytes == pytest.approx(forward.nbytes, rel=0.1)
    assert [each.calls for each in block_kernels(*cut)] == [
        {"tp": 2},
        {"tp": 5},
    ]  # q, k, v, gate and up each


def test_operations_are_those_of_our_own_family() -> None:
    ours, theirs = LlamaConfig(**SIZES).decoder, spec_of("llama")
    for causal in (False, True):
        own = block_flops(ours.blocks[0], 64, ROWS, SEQUENCE, causal=causal)
        found = block_flops(transformers_blocks(theirs)[0], 64, ROWS, SEQUENCE, causal=causal)
        assert found[0] == own[0] and found[1] == pytest.approx(own[1], rel=1 / SEQUENCE)
    assert layer_costs(theirs)[1] == pytest.approx(block_flops(
        transformers_blocks(theirs)[0], 64, 1, 1)[0] / 2)  # fmt: skip


def sent_really(mesh: Mesh, name: str) -> dict[str, int]:
    """Bytes that a rank sends for a micro-batch of a layer."""
    spec = spec_of(name)
    layer, x, context = real_layer(spec, torch.float32, mesh["tp"])
    with record(mesh) as recorder:
        layer(x, context).sum().backward()
    return recorder.bytes_per_axis()


def test_a_layer_sends_what_it_sends_really() -> None:
    spec = spec_of("llama")
    given = transformers_blocks(spec)[0], 64, MetaMicroBatch(ROWS, SEQUENCE, tp=2)
    for real in on_ranks(sent_really, "llama", tp=2):
        assert sent_bytes(*given, backend="gloo") == real


def test_a_mask_that_is_too_large_is_refused_and_kenotrons_attention_has_none() -> None:
    block = transformers_blocks(spec_of("llama", "sdpa"))[0]
    with pytest.raises(ValueError, match="masks of 131,072 tokens are too large to be made here"):
        kept_bytes(block, 64, MetaMicroBatch(1, 1 << 17))
    own = transformers_blocks(spec_of("llama", "kenotron"))[0]
    many, few = (kept_bytes(own, 64, MetaMicroBatch(1, 1 << n)) for n in (17, 10))
    assert many == (1 << 17) * few >> 10


def test_a_model_in_one_piece_has_no_blocks() -> None:
    gpt = {"model_type": "openai-gpt", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 29}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    spec = TransformersConfig(config_json=json.dumps(gpt | none)).decoder
    assert transformers_blocks(spec) == ()


def test_nothing_can_be_read_of_what_layers_put_into_a_mapping_for_others():
    sizes = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "global_head_dim": 16}
    values = SIZES | {"model_type": "gemma4_text", "sliding_window": 5, **sizes}
    spec = TransformersConfig(config_json=json.dumps(values)).decoder
    layer: Any = dict(build_decoder(spec, Build(ALONE, dtype=torch.float32)))["layers.0"]
    layer.skeleton.fill_buffers(torch.device("cpu"))
    context = Context(torch.arange(SEQUENCE).expand(ROWS, -1))
    first, second, *_ = layer.skeleton.calls(torch.zeros(ROWS, SEQUENCE, 64), context)
    mapping = first.options["shared_kv_states"]
    assert mapping is not second.options["shared_kv_states"]
    mapping["keys"] = torch.zeros(1)
    assert not mapping
    with pytest.raises(LookupError, match="a layer reads 'keys' of another one: such a model"):
        mapping["keys"]
