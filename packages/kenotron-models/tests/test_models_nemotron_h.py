"""Nemotron-H: layers as text, keys both ways, what cannot be said, and a small copy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kenotron_dist import Axis
from kenotron_models import Build, Context, DecoderSpec, Recompute, build_decoder, cut_sizes
from kenotron_models.families import NemotronHConfig
from kenotron_models.families.nemotron_h import LEAST_STEP
from kenotron_models.hf import config_from_hf, config_to_hf, exported_tensors
from kenotron_models.layers import (
    AttentionSpec,
    BlockSpec,
    ExpertsSpec,
    Mamba2Spec,
    MLPSpec,
    Rope,
    RouterSpec,
)
from kenotron_models.small import SmallSizes

SMALL = NemotronHConfig(
    layers="ME*-M", hidden_size=32, vocab_size=61, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, intermediate_size=48, mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=8,
    n_groups=2, n_routed_experts=4, moe_intermediate_size=16,
    moe_shared_expert_intermediate_size=24,
)  # fmt: skip


def test_each_letter_is_a_layer_of_one_part() -> None:
    kinds = [type(block.parts[0]) for block in SMALL.decoder.blocks]
    assert kinds == [Mamba2Spec, ExpertsSpec, AttentionSpec, MLPSpec, Mamba2Spec]
    assert all(len(block.parts) == 1 for block in SMALL.decoder.blocks)
    attention = SMALL.decoder.blocks[2].mixer
    assert isinstance(attention, AttentionSpec) and attention.rope is None
    limited = replace(SMALL, expert_capacity_factor=1.0, router_jitter_noise=0.1)
    experts = limited.decoder.blocks[1].feed_forward
    assert isinstance(experts, ExpertsSpec)
    assert (experts.capacity_factor, experts.router.jitter) == (1.0, 0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": "M?E"}, r"layers: '\?' was given at place 2 of 'M\?E'; letters are 'M\*-E'"),
        ({"layers": ""}, "layers: '' was given; it must have a letter of"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 was given; it must divide num_attent"),
        ({"n_groups": 3}, r"n_groups: 3 was given; it must divide mamba_num_heads \(4\)"),
        ({"n_group": 3}, r"n_group: 3 was given; it must divide n_routed_experts \(4\)"),
        ({"topk_group": 2}, r"topk_group: 2 was given; it must not be above n_group \(1\)"),
        (
            {"n_group": 2, "num_experts_per_tok": 3},
            r"num_experts_per_tok: 3 was given; topk_group \(1\) groups have 2 experts",
        ),
        ({"n_shared_experts": 2}, "n_shared_experts: 2 was given; it must be 1"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok: 5 was given; it must not be above"),
        ({"head_dim": 0}, "head_dim: 0 was given"),
        ({"time_step_min": 0.0}, "time_step_min: 0.0 was given; it must be above 0 and at most"),
        (
            {"time_step_limit": (1.0, 0.5)},
            r"time_step_limit: \[1.0, 0.5\] was given; it must be tw",
        ),
        ({"routed_scaling_factor": math.inf}, "routed_scaling_factor: inf was given; it must be a"),
        ({"router_aux_loss_coef": -1.0}, "router_aux_loss_coef: -1.0 was given; it must be finite"),
    ],
)
def test_a_wrong_value_is_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_stream_in_fp32_adds_what_bf16_layers_compute(recompute: Recompute) -> None:
    """Each block reads its norm in bf16; what it adds is not rounded to bf16 again."""
    spec = replace(SMALL, residual_in_fp32=True).decoder
    build = Build(Axis.solo("tp"), device="cpu", dtype=torch.bfloat16)
    layers = build_decoder(spec, build, recompute=recompute)
    torch.manual_seed(3)
    for _, layer in layers:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    context, x = Context(torch.arange(8).expand(2, 8)), torch.arange(16) * 5 % 61
    for name, layer in layers[:-2]:
        before, x = x, layer(x, context)
        assert x.dtype == torch.float32
        if name == "layers.2":  # attention
            own = layer.get_submodule("attention")(
                F.rms_norm(before, (32,), eps=1e-5).mul(layer.attention_norm.weight).bfloat16(),
                context,
            )
            assert torch.equal(x, before + own) and own.dtype == torch.bfloat16
            assert not torch.equal(x, x.bfloat16().float())
    for _, layer in layers[-2:]:
        x = layer(x, context)
    assert x.dtype == torch.bfloat16
    x.float().square().mean().backward()
    assert all(p.grad is not None for name, p in layers[3][1].named_parameters())


def test_a_small_copy_has_every_letter() -> None:
    sizes = SmallSizes(
        layers=6, period=1, heads=4, kv_heads=2, head_dim=8, vocab_size=61, tp=2, sequence=64,
        small_sequence=16, ep=2,
    )  # fmt: skip
    small = NemotronHConfig(layers="MMME*-MME").small(sizes)
    assert small.layers == "ME*-MM" and small.n_routed_experts % 2 == 0
    assert cut_sizes(small) == {
        "num_attention_heads": 4, "mamba_num_heads": 4, "intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 16,
    }  # fmt: skip
    assert cut_sizes(replace(SMALL, layers="M")) == {"mamba_num_heads": 4}


def test_old_and_unknown_words_for_layers() -> None:
    values = {"model_type": "nemotron_h", "hidden_size": 32, "vocab_size": 61}
    read = config_from_hf
    assert read({**values, "hybrid_override_pattern": "M-"}).decoder.num_hidden_layers == 2
    old = read({**values, "layers_block_type": ["mamba", "attention", "mlp", "moe"]})
    assert isinstance(old, NemotronHConfig) and old.layers == "M*-E"
    with pytest.raises(ValueError, match="layers_block_type: 'rnn' was given for layer 1; it must"):
        read({**values, "layers_block_type": ["mamba", "rnn"]})


def decoder(part: BlockSpec) -> DecoderSpec:
    return replace(SMALL.decoder, blocks=(part,))


def test_what_their_config_cannot_say_is_named() -> None:
    write = NemotronHConfig.write_hf
    attention = AttentionSpec(heads=4, kv_heads=4, head_dim=8, rope=Rope())
    mlp = MLPSpec(features=16)
    experts = ExpertsSpec(router=RouterSpec(experts=4, top_k=2), features=8)
    cases = [
        (BlockSpec(mixer=attention, feed_forward=mlp), "in each layer one of Mamba-2, attention"),
        (
            BlockSpec(mixer=attention, feed_forward=None),
            "neither positions nor a window, biases or",
        ),
        (BlockSpec(mixer=None, feed_forward=mlp), "has no gate, no biases and relu2"),
        (BlockSpec(mixer=None, feed_forward=experts), "have no gate, relu2 and a shared expert"),
    ]
    for block, message in cases:
        with pytest.raises(ValueError, match=message):
            write(decoder(block))


def test_transformers_bounds_steps_from_below_and_ties_no_head() -> None:
    for limits, least in (((0.0, math.inf), LEAST_STEP), ((0.01, math.inf), 0.01)):
        config = replace(SMALL, time_step_limit=limits, tie_word_embeddings=True)
        values = config_to_hf(config)
        assert (values["time_step_min"], values["tie_word_embeddings"]) == (least, False)
        mixer = config_from_hf(values).decoder.blocks[0].mixer
        assert isinstance(mixer, Mamba2Spec) and mixer.step_limits == limits
        embedding = exported_tensors(config, values)["embedding.weight"]
        assert [part.name for part in embedding.parts] == [
            "backbone.embeddings.weight", "lm_head.weight",
        ]  # fmt: skip
    with pytest.raises(ValueError, match="time_step_limit: steps of a nemotron_h of Hugging Face"):
        config_to_hf(replace(SMALL, time_step_limit=(0.0, 1.0)))
