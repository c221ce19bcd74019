"""Compiled layers: what they compute, and how many programs that takes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo import reset
from torch._dynamo.utils import counters

from kenotron_dist import Axis
from kenotron_models import Build, Context, LayerStack, build_decoder
from kenotron_models.families import LlamaConfig, Qwen2Config, Starcoder2Config

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
DROPOUT = {"attn_pdrop": 0.2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "grouped_query": True}
CONFIGS = {
    "plain": partial(LlamaConfig, **SIZES),
    "nope": partial(Qwen2Config, **SIZES, num_key_value_heads=2, no_rope_layer=2),
    "dropout": partial(Starcoder2Config, **SIZES, **DROPOUT, num_kv_heads=2),
}


def stack_of(kind: str, layers: int, recompute: str) -> LayerStack:
    config = CONFIGS[kind](num_hidden_layers=layers)
    torch.manual_seed(0)
    stack = LayerStack(
        build_decoder(config, Build(Axis.solo("tp"), device="cpu"), recompute=recompute)
    )
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return stack


def step(stack: LayerStack, number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(SIZES["vocab_size"], (2, 8), generator=generator)
    samples = torch.tensor([4, 5]) + 2 * number
    places = torch.arange(8).expand(2, 8)
    context = Context(places, samples_B=samples, dropout_key=1000 + number)
    logits = stack(tokens.flatten(), context)
    logits.square().mean().backward()
    found = [logits.detach(), *(p.grad.clone() for p in stack.parameters())]
    stack.zero_grad()
    return found


@pytest.fixture(autouse=True)
def no_programs():
    reset()
    counters.clear()
    yield
    reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at inputs' .grad
@pytest.mark.parametrize(
    ("kind", "recompute"),
    [("plain", "none"), ("plain", "selective"), ("nope", "full"), ("dropout", "full")],
)
def test_programs_are_as_many_for_ten_layers_as_for_two(kind: str, recompute: str) -> None:
    programs = {}
    for layers in (2, 10):
        reset()
        counters.clear()
        plain, compiled = (stack_of(kind, layers, recompute) for _ in range(2))
        for layer in list(compiled)[1:-1]:
            layer.compile(backend="aot_eager", dynamic=False)
        for number in range(12):  # more than the compiler makes programs of one function
            for got, want in zip(step(compiled, number), step(plain, number), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
            if number == 0:
                programs[layers] = [counters["stats"]["unique_graphs"]]
        programs[layers].append(counters["stats"]["unique_graphs"])
    assert programs[10] == programs[2]
    assert programs[2][0] == programs[2][1] > 0
