"""Weights that were trained with multipliers are scaled, and compute the same without them."""

from dataclasses import replace

import pytest
import torch

from kenotron_dist import Axis, Mesh
from kenotron_dist.init import Normal, initialize
from kenotron_dist.placement import materialize, named_parameters, parameter_layouts
from kenotron_models import Build, Context, LayerStack, Multipliers, build_decoder, folds
from kenotron_models.families import (
    DeepseekV3Config,
    Gemma2Config,
    LlamaConfig,
    OLMo2Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoEConfig,
    Starcoder2Config,
)

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 16,
}  # fmt: skip
LATENT = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"} | {
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
GIVEN = Multipliers(embedding=3.0, logits=0.3, attention=(0.5, 0.7), residual=0.6)


def stack_of(spec):
    stack = LayerStack(build_decoder(spec, Build(Axis.solo("tp"), dtype=torch.float64)))
    layouts = parameter_layouts(stack, {"tp": 1, "ep": 1})
    materialize(stack, "cpu")
    view = Mesh.connect().view
    initialize(stack, layouts, view, seed=5, initializer=lambda _: Normal(0.5))
    return stack, layouts


def logits(stack):
    places = torch.arange(8).expand(2, 8)
    with torch.no_grad():
        return stack((places.flatten() * 7) % 60, Context(places))


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        Qwen2Config(**SIZES, attention_bias=True),
        Qwen3Config(**SIZES),
        Starcoder2Config(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
        Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=8),
        OLMo2Config(**SIZES),
        DeepseekV3Config(**LATENT, q_lora_rank=24),
        DeepseekV3Config(**LATENT, q_lora_rank=None),
        Qwen3MoEConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    ],
    ids=lambda config: type(config).__name__,
)
def test_folded_weights_give_the_same_logits(config):
    spec = config.decoder
    with_them, layouts = stack_of(GIVEN.applied(spec))
    wanted = logits(with_them)
    plain, _ = stack_of(spec)
    assert not torch.allclose(logits(plain), wanted, rtol=1e-2)
    changes, done = folds(spec, GIVEN), set()
    for path, parameter in named_parameters(plain).items():
        name = layouts[path].name
        if name in changes and name not in done:
            parameter.data = changes[name](parameter.data)
            done.add(name)
        elif name in done:  # tied
            parameter.data = dict(named_parameters(plain))[name].data
    assert done == changes.keys()
    torch.testing.assert_close(logits(plain), wanted, rtol=1e-6, atol=1e-6)


def test_nothing_is_folded_without_multipliers():
    assert folds(LlamaConfig(**SIZES).decoder, Multipliers()) == {}


def test_queries_are_the_first_rows_wherever_a_block_begins():
    fold, rows = folds(LlamaConfig(**SIZES).decoder, GIVEN)["layers.0.attention.qkv.weight"], 32
    whole = torch.ones(64, 3)
    assert fold(whole)[:, 0].tolist() == [0.5] * rows + [1.0] * 32
    assert fold(whole[30:], first_row=30)[:, 0].tolist() == [0.5] * 2 + [1.0] * 32
    assert fold(whole[40:], first_row=40)[:, 0].tolist() == [1.0] * 24
    assert bool((whole == 1).all())


def test_parts_without_a_weight_to_scale_say_so():
    gated = replace(LlamaConfig(**SIZES).decoder.blocks[0].mixer, gate=True)
    spec = LlamaConfig(**SIZES).decoder
    spec = replace(spec, blocks=tuple(replace(block, mixer=gated) for block in spec.blocks))
    words = r"layers.0.attention has no queries that could take a multiplier of 0.5"
    with pytest.raises(ValueError, match=words):
        folds(spec, GIVEN)
