"""The list of layers: names, placements, first values, counts, and continuing a text."""

from __future__ import annotations

import json

import pytest
import torch

from kenotron_dist import Axis, Mesh, spawn
from kenotron_dist.init import Constant, Initializer, Normal, initialize
from kenotron_dist.placement import TensorLayout, named_parameters, parameter_layouts
from kenotron_models import (
    Build,
    Context,
    LayerStack,
    build_decoder,
    forward_flops,
    layer_costs,
    parameter_count,
    standard_init,
    training_flops,
)
from kenotron_models.families import LlamaConfig, TransformersConfig
from kenotron_tp import TPMode

TINY = LlamaConfig(
    hidden_size=16,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_hidden_layers=2,
    vocab_size=256,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)


def build(mesh: Mesh, config: LlamaConfig, mode: TPMode = TPMode()) -> LayerStack:
    stack = LayerStack(build_decoder(config, Build(mesh["tp"], mode)))
    layouts = parameter_layouts(stack, mesh.sizes)
    stack.to_empty(device="cpu")
    initialize(stack, layouts, mesh.view, seed=1, initializer=standard_init(config, 0.4))
    return stack


def test_counts_equal_the_published_ones_of_the_tiny_llama() -> None:
    assert parameter_count(TINY) == 12_368
    assert training_flops(TINY, 2, 256) == pytest.approx(88.08e6, rel=1e-4)
    assert training_flops(TINY, 2, 256) == 3 * forward_flops(TINY, 2, 256)


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_counts_the_parameters_that_exist(tied: bool) -> None:
    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=20,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_hidden_layers=3,
        vocab_size=51,
        tie_word_embeddings=tied,
    )
    stack = LayerStack(build_decoder(config, Build(Axis.solo("tp"))))
    layouts = parameter_layouts(stack, {"tp": 1})
    shapes = {layout.name: layout.shape for layout in layouts.values()}
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameter_count(config)
    assert len(layer_costs(config)) == len(stack) == 6


def test_names_are_global_and_everything_begins_on_meta() -> None:
    layers = build_decoder(TINY, Build(Axis.solo("tp")))
    assert [name for name, _ in layers] == ["embedding", "layers.0", "layers.1", "norm", "head"]
    part = named_parameters(LayerStack(layers[2:4]))
    assert set(part) == {
        "layers.1.attention_norm.weight",
        "layers.1.attention.qkv.weight",
        "layers.1.attention.out.weight",
        "layers.1.mlp_norm.weight",
        "layers.1.mlp.gate_up.weight",
        "layers.1.mlp.down.weight",
        "norm.weight",
    }
    assert all(p.is_meta for p in part.values())


def test_first_values() -> None:
    axis = Axis("tp", 0, (0,))
    layouts = parameter_layouts(LayerStack(build_decoder(TINY, Build(axis))), {"tp": 1})
    standard = standard_init(TINY, 0.02)

    def rule(name: str) -> Initializer:
        return standard(layouts[name])

    assert rule("layers.0.mlp_norm.weight") == rule("norm.weight") == Constant(1.0)
    assert rule("layers.1.attention.out.weight") == rule("layers.0.mlp.down.weight")
    assert rule("layers.0.mlp.down.weight") == Normal(0.02 / 2)
    assert rule("embedding.weight") == rule("layers.0.attention.qkv.weight") == Normal(0.02)


def test_the_head_is_the_embedding_when_tied() -> None:
    [same] = spawn(tied_storage)
    assert same


def tied_storage(mesh: Mesh) -> bool:
    own = named_parameters(build(mesh, TINY))
    a, b = own["embedding.weight"], own["head.weight"]
    return a is not b and a.data_ptr() == b.data_ptr()


def logits(mesh: Mesh, mode: TPMode) -> list[list[float]]:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=8, num_key_value_heads=2,
        num_hidden_layers=2, vocab_size=29,
    )  # fmt: skip
    stack = build(mesh, config, mode)
    tokens = torch.arange(3 * 7) % 29  # no number of ranks divides them
    out = stack(tokens, Context(torch.arange(7).expand(3, 7)))
    return out.tolist()


@pytest.mark.smoke
@pytest.mark.parametrize(
    "mode",
    [
        TPMode(),
        TPMode(overlap=True),
        TPMode(sequence_parallel=True),
        TPMode(sequence_parallel=True, overlap=True, regather=True),
    ],
)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_logits_over_tp_are_those_of_one_process(tp: int, mode: TPMode) -> None:
    [want] = spawn(logits, TPMode())
    ranks = spawn(logits, mode, tp=tp)
    got = torch.cat([torch.tensor(rank) for rank in ranks], -1)[:, :29]
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=1e-5)


def test_a_model_of_transformers_without_first_values_is_told_where_they_are():
    keys = {"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    rule = standard_init(TransformersConfig(config_json=json.dumps(keys)), 0.02, "NONE")
    with pytest.raises(ValueError, match=r"mixer.D'.* with model.init_method: \{path: FOLDER\}"):
        rule(TensorLayout("layers.0.block.mixer.D", (16,)))
