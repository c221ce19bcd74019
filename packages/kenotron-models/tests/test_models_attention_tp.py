"""Attention with all its variations over tp: logits and every gradient are one process's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import positions
from torch import Tensor

from kenotron_dist import Mesh, local_boxes, parameter_layouts, spawn, sum_gradients
from kenotron_dist.init import initialize
from kenotron_dist.rng import counter_key
from kenotron_models import (
    AttentionSpec,
    BlockSpec,
    Build,
    Context,
    DecoderSpec,
    LayerStack,
    MLPSpec,
    NormSpec,
    Rope,
    RopeScaling,
    build_decoder,
    standard_init,
)
from kenotron_tp import TPMode, vocab_parallel_cross_entropy

YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
MIXER = AttentionSpec(
    heads=8, kv_heads=2, head_dim=8, qk_norm=NormSpec(), qkv_bias=True, out_bias=True, scale=0.3,
    window=6, separate_documents=True, rope=Rope(scaling=YARN), dropout=0.25,
)  # fmt: skip


def decoder(mixer: AttentionSpec) -> DecoderSpec:
    """Three blocks; the second sees all and has no positions."""
    mixers = (mixer, replace(mixer, window=None, rope=None), mixer)
    mlp = MLPSpec(features=16)
    return DecoderSpec(
        hidden_size=24, vocab_size=32, max_position_embeddings=64,
        blocks=tuple(BlockSpec(mixer=each, feed_forward=mlp) for each in mixers),
    )  # fmt: skip


SPECS = {
    "all": decoder(MIXER),
    "blocked": decoder(replace(MIXER, backend="blocked", dropout=0.0)),
    "mqa": decoder(replace(MIXER, kv_heads=1, backend="sdpa", dropout=0.0)),
}
MODES = {"plain": TPMode(), "sequence": TPMode(sequence_parallel=True, overlap=True)}
Parts = dict[str, list[tuple[tuple[slice, ...], Tensor]]]


def gradients(mesh: Mesh, name: str, mode: str) -> tuple[float, dict[str, Tensor], Parts]:
    """Loss; shapes by name; this rank's parts of all gradients, complete."""
    spec = SPECS[name]
    stack = LayerStack(build_decoder(spec, Build(mesh["tp"], MODES[mode])))
    layouts = parameter_layouts(stack, mesh.sizes)
    stack.to_empty(device="cpu")
    initialize(stack, layouts, mesh.view, seed=1, initializer=standard_init(spec, 0.4))
    places = positions(15)
    context = Context(places, torch.tensor([5, 17, 3]), counter_key(0, 7))
    tokens = torch.arange(45) * 7 % 32
    logits = stack(tokens, context)
    loss = vocab_parallel_cross_entropy(logits, tokens.roll(-1), mesh["tp"], vocab_size=32).mean()
    loss.backward()
    sum_gradients(stack, mesh)
    wholes: dict[str, Tensor] = {}
    parts: Parts = {}
    for path, parameter in stack.named_parameters():
        assert parameter.grad is not None, path
        wholes[path] = torch.full(layouts[path].shape, torch.nan)
        whole = torch.arange(wholes[path].numel()).view(wholes[path].shape)
        parts[path] = [
            (box.of_global(whole), box.of_local(parameter.grad))
            for box in local_boxes(layouts[path], mesh.view(layouts[path]))
        ]
    return loss.item(), wholes, parts


def complete(ranks: list[tuple[float, dict[str, Tensor], Parts]]) -> dict[str, Tensor]:
    """All gradients whole; what several ranks hold must be equal on them."""
    wholes = ranks[0][1]
    for _, _, parts in ranks:
        for path, pieces in parts.items():
            flat = wholes[path].view(-1)
            for numbers, values in pieces:
                known = flat[numbers]
                assert ((known == values) | known.isnan()).all(), path
                flat[numbers] = values
    return wholes


@pytest.fixture(scope="module", params=list(SPECS))
def one(request: pytest.FixtureRequest) -> tuple[str, float, dict[str, Tensor]]:
    ranks = spawn(gradients, request.param, "plain")
    return request.param, ranks[0][0], complete(ranks)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("tp", [2, 4])
def test_every_gradient_is_that_of_one_process(
    one: tuple[str, float, dict[str, Tensor]], tp: int, mode: str
) -> None:
    name, loss, want = one
    ranks = spawn(gradients, name, mode, tp=tp)
    assert all(rank[0] == pytest.approx(loss, rel=1e-5) for rank in ranks)
    got = complete(ranks)
    assert {"layers.0.attention.q_norm.weight", "layers.2.attention.k_norm.weight"} <= set(want)
    assert set(got) == set(want)
    for path, tensor in want.items():
        deviation = (got[path] - tensor).abs().max() / tensor.abs().max()
        assert deviation < 2e-5, path
