"""The module that predicts the token after the next: its tensors, counts and first values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kenotron_dist import Axis
from kenotron_dist.init import Normal
from kenotron_models import (
    Build,
    Context,
    LayerStack,
    build_decoder,
    forward_flops,
    layer_costs,
    parameter_count,
    standard_init,
)
from kenotron_models.families import LlamaConfig
from kenotron_models.shapes import decoder_layouts

LLAMA = LlamaConfig(
    vocab_size=19, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=6,
).decoder  # fmt: skip
SPEC = replace(LLAMA, mtp_weight=0.3)


@pytest.mark.parametrize("tied", [True, False])
def test_counts_are_those_of_its_tensors(tied: bool) -> None:
    spec = replace(SPEC, tie_word_embeddings=tied)
    layouts = decoder_layouts(spec)
    sizes = {each.name: math.prod(each.shape) for each in layouts.values()}
    assert parameter_count(spec) == sum(sizes.values())
    assert layouts["mtp.0.embedding.weight"].name == "embedding.weight"
    assert len(layer_costs(spec)) == len(build_decoder(spec, Build(Axis.solo("tp"))))
    block, head, projection = 8 * (8 + 8 + 8) + 3 * 8 * 12, 19 * 8, 2 * 8 * 8
    more = forward_flops(spec, 1, 1) - forward_flops(replace(spec, mtp_weight=0.0), 1, 1)
    assert more == 2 * (block + head + projection) + 4 * 8  # and two products with one key


def test_first_values_follow_the_layer_after_the_last() -> None:
    layouts = decoder_layouts(SPEC)
    rule = standard_init(SPEC, 0.3, "LAYER_INDEX")
    written = rule(layouts["mtp.0.block.mlp.down.weight"])
    assert written == Normal(0.3 / math.sqrt(6))
    assert rule(layouts["mtp.0.projection.weight"]) == Normal(0.3)


def test_without_next_tokens_the_decoder_is_the_same() -> None:
    torch.manual_seed(0)
    build = Build(Axis.solo("tp"), device="cpu")
    stack = LayerStack(build_decoder(SPEC, build)).requires_grad_(False)
    plain = LayerStack(build_decoder(LLAMA, build)).requires_grad_(False)
    plain.load_state_dict(
        {name: p for name, p in stack.state_dict().items() if not name.startswith("mtp.")}
    )
    tokens, context = torch.arange(6), Context(torch.arange(6)[None])
    assert torch.equal(stack(tokens, context), plain(tokens, context))
    following = replace(context, next_tokens_BS=tokens.roll(-1)[None])
    both = stack(tokens, following)
    assert both.shape == (12, 19) and torch.equal(both[:6], plain(tokens, context))


def test_learned_positions_are_in_the_main_stream_alone() -> None:
    layouts = decoder_layouts(replace(SPEC, learned_positions=True))
    assert "embedding.positions" in layouts and "mtp.0.embedding.positions" not in layouts
