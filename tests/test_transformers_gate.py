"""The output gate of attention against Hugging Face's Qwen3-Next, its attention alone."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextAttention,
    Qwen3NextRotaryEmbedding,
)

from kenotron_dist import Axis
from kenotron_models import Build, Context
from kenotron_models.layers import AttentionSpec, NormSpec, Rope

THEIRS = Qwen3NextConfig(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.25,
    },
    attn_implementation="eager",
)
OURS = AttentionSpec(
    heads=4,
    kv_heads=2,
    head_dim=16,
    gate=True,
    qk_norm=NormSpec(kind="offset_rms_norm", eps=THEIRS.rms_norm_eps),
    rope=Rope(theta=5000.0, share=0.25),
)


@pytest.mark.parametrize("sequence", [1, 9])
def test_outputs_and_gradients_are_theirs(sequence: int) -> None:
    torch.manual_seed(0)
    theirs = Qwen3NextAttention(THEIRS, 0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = OURS.build(32, Build(Axis.solo("tp"), device="cpu"))
    names = ("q_proj", "k_proj", "v_proj")
    with torch.no_grad():
        ours.qkv.weight.copy_(torch.cat([theirs.get_submodule(n).weight for n in names]))
        ours.out.weight.copy_(theirs.o_proj.weight)
        ours.q_norm.weight.copy_(theirs.q_norm.weight)
        ours.k_norm.weight.copy_(theirs.k_norm.weight)
    x, places = torch.randn(2, sequence, 32), torch.arange(sequence).expand(2, sequence)
    mask = torch.full((sequence, sequence), -torch.inf).triu(1)[None, None]
    angles = Qwen3NextRotaryEmbedding(THEIRS)(x, places)
    want = theirs(x, position_embeddings=angles, attention_mask=mask)[0]
    got = ours(x.flatten(0, 1), Context(places)).view_as(want)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    weights = torch.arange(want.numel()).sin().view_as(want)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    joined = torch.cat([theirs.get_submodule(name).weight.grad for name in names])
    pairs = {
        "qkv": (ours.qkv.weight.grad, joined),
        "out": (ours.out.weight.grad, theirs.o_proj.weight.grad),
        "q_norm": (ours.q_norm.weight.grad, theirs.q_norm.weight.grad),
        "k_norm": (ours.k_norm.weight.grad, theirs.k_norm.weight.grad),
    }
    for name, (found, wanted) in pairs.items():
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=name)
