"""Layers of transformers that are compiled compute what they compute without, in few programs."""

from __future__ import annotations

from functools import partial

import any_model
import pytest
import torch
from tiny_transformers import VOCAB, tiny_json
from torch._dynamo import reset
from torch._dynamo.utils import counters

from kenotron_dist import Mesh
from kenotron_models import Context, LayerStack, compile_layers, generate
from kenotron_models.families import TransformersConfig

pytest.importorskip("transformers")
CASES = {
    ("llama", None): 1,  # both layers are one program, without a break
    ("gemma2", None): 1,
    ("mixtral", None): 4,  # experts are in no program
    ("llama", "kenotron"): 4,  # nor is attention that is computed here
}
"""Programs of two layers, forward."""


def step(stack: LayerStack, number: int) -> list[torch.Tensor]:
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(number))
    stack.zero_grad()
    logits = stack(ids.flatten(), Context(torch.arange(7).expand(2, -1)))
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in stack.parameters() if p.grad is not None)]


@pytest.mark.filterwarnings("ignore")  # of transformers, and of dynamo on inputs' .grad
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_layers_compute_the_same_in_few_programs(case, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    reset()
    counters.clear()
    kind, attention = case
    config = TransformersConfig(config_json=tiny_json(kind), attn_implementation=attention)
    whole, mesh = any_model.whole_model(kind), Mesh.connect()
    plain, compiled = (any_model.part_of(whole, config.decoder, mesh) for _ in range(2))
    compile_layers(compiled)
    for number in range(3):
        for got, want in zip(step(compiled, number), step(plain, number), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    programs = counters["stats"]["unique_graphs"]
    assert programs == CASES[case]
    assert (sum(counters["graph_break"].values()) == 0) == (programs == 1)
    texts = [
        [*generate(each, [[5, 6]], mesh, window=9, vocab_size=VOCAB, max_new_tokens=4)]
        for each in (plain, compiled)
    ]  # each pass reads another length
    assert texts[0] == texts[1]
    assert counters["stats"]["unique_graphs"] == programs
    assert [*compiled.state_dict()] == [*plain.state_dict()]
    reset()
